"""What was sampled beside a trial's jobs: gathered into a file a job, joined to its checks, summed up in its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from seatrial.model import Job, Measurement
from seatrial.model.telemetry import Telemetry
from seatrial.telemetry import files
from seatrial.telemetry.aggregate import TelemetryAggregator

MOST_COMPLAINTS = 8


def summarize_run(
    run_dir: Path, jobs: Sequence[Job], measurements: Sequence[Measurement], phases: Mapping[str, str]
) -> Telemetry | None:
    """Gather what the samplers of a run have left, and sum it up; ``phases``: of each check. None: no job had one.

    What is missing or damaged is told in ``complaints``, an unwritable disk too: telemetry costs no trial its record.
    """
    watched = [job for job in jobs if job.telemetry_hz]
    if not watched:
        return None
    folders = sorted(path for path in (run_dir / "jobs").glob("*") if path.is_dir())
    complaints = []
    for folder in folders:
        try:
            damage = files.merge_samples(folder)
        except OSError as error:
            damage = f"{folder.name}: its telemetry could not be gathered: {error.strerror or error}"
        complaints += [damage] if damage else []
    paths = [path for folder in folders if (path := folder / files.TELEMETRY_FILE).is_file()]
    checks = {name: phases[name] for job in watched for name in job.checks if name in phases}
    joined = TelemetryAggregator(checks, measurements, min(job.telemetry_hz for job in watched))
    for path in paths:
        for device in files.read_devices(path):
            joined.add(device)
    silences = joined.sampling_gaps()
    silences += _sampler_errors(run_dir) if silences else ()
    complaints += silences[:MOST_COMPLAINTS]
    if len(silences) > MOST_COMPLAINTS:
        complaints.append(f"and {len(silences) - MOST_COMPLAINTS} more")
    names = tuple(str(path.relative_to(run_dir)) for path in paths)
    return joined.summary().model_copy(update={"files": names, "complaints": tuple(complaints)})


def _sampler_errors(run_dir: Path) -> Iterator[str]:
    """The last line of each sampler that said anything."""
    for log in sorted(run_dir.glob("jobs/*/attempt*/rank*.samples.err")):
        if lines := log.read_text(encoding="utf-8", errors="replace").strip().splitlines():
            yield f"{log.relative_to(run_dir)}: {lines[-1][:300]}"
