"""Telemetry of a run: merges the samplers' files of each job, joins samples with checks, and summarises them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from seatrial.model import Job, Measurement
from seatrial.model.telemetry import Telemetry
from seatrial.telemetry import files
from seatrial.telemetry.aggregate import TelemetryAggregator
from seatrial.util.input_files import read_bytes
from seatrial.util.text import error_text

MAX_GAP_MESSAGES = 8  # messages about missing samples in the warnings of a record


def summarize_run(
    run_dir: Path, jobs: Sequence[Job], measurements: Sequence[Measurement], phase_by_check: Mapping[str, str]
) -> Telemetry | None:
    """Merge the samplers' files of a run and return their summary; None if no job had telemetry.

    ``phase_by_check``: the checks to include, with their phases. Missing or damaged data and an unwritable disk are
    warnings in the summary, not errors.
    """
    sampled_jobs = [job for job in jobs if job.telemetry_hz]
    if not sampled_jobs:
        return None
    folders = sorted(path for path in (run_dir / "jobs").glob("*") if path.is_dir())
    messages = []
    for folder in folders:
        try:
            if message := files.merge_samples(folder):
                messages.append(message)
        except (OSError, ValueError) as error:
            messages.append(f"{folder.name}: telemetry samples could not be merged: {error_text(error)}")
    paths = [path for folder in folders if (path := folder / files.TELEMETRY_FILE).is_file()]
    sampled_checks = [name for job in sampled_jobs for name in job.checks if name in phase_by_check]
    sampled_phases = {name: phase_by_check[name] for name in sampled_checks}
    aggregator = TelemetryAggregator(sampled_phases, measurements, min(job.telemetry_hz for job in sampled_jobs))
    for path in paths:
        try:
            for device in files.read_devices(path):
                aggregator.add(device)
        except (OSError, ValueError) as error:
            messages.append(f"{path}: not read to its end: {error_text(error)}")
    gap_messages = aggregator.sampling_gaps()
    if gap_messages:
        gap_messages += _sampler_errors(run_dir)
    messages += gap_messages[:MAX_GAP_MESSAGES]
    if len(gap_messages) > MAX_GAP_MESSAGES:
        messages.append(f"and {len(gap_messages) - MAX_GAP_MESSAGES} more messages about missing samples")
    file_names = tuple(str(path.relative_to(run_dir)) for path in paths)
    return aggregator.summary().model_copy(update={"files": file_names, "warnings": tuple(messages)})


def _sampler_errors(run_dir: Path) -> Iterator[str]:
    """Yield the last line that each sampler wrote to stderr."""
    for log in sorted(run_dir.glob("jobs/*/attempt*/rank*.samples.err")):
        if log.is_file() and (lines := read_bytes(log).decode("utf-8", errors="replace").strip().splitlines()):
            yield f"{log.relative_to(run_dir)}: {lines[-1][:300]}"
