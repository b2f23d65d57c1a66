"""A finished run directory made of a committed record, and bundles with changed files."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.records import record_path

from seatrial import report
from seatrial.handover import archive
from seatrial.model import Measurement, Trial
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.util.journal import Journal
from tests.report.conftest import tool

ACCEPTED = "2026-11-29-1xh200/acceptance"
CHECK, METRIC = "device.memory", "copy"  # a verdict by a reference value of the SKU


def make_run(
    folder: Path, record: str = ACCEPTED, factor: float = 1.0, overrides: Sequence[tuple[str, str, Any]] = ()
) -> Path:
    """A run directory with journal and reports of a record. ``factor``: changes CHECK's METRIC before it is judged.

    ``overrides``: settings of the trial, see rejudge.
    """
    trial = load_trial(record_path(record))
    measurements = tuple(scaled(each, factor) for each in trial.measurements)
    folder.mkdir()
    digest = write_journal(folder, trial.model_copy(update={"measurements": measurements}))
    changed = {"measurements": measurements, "manifest": {"measurements.jsonl": digest}, "rewritten_from": ""}
    judged = rejudge(trial.model_copy(update=changed), overrides=overrides)
    if record == ACCEPTED and factor == 1 and not overrides:
        report.write_all(judged, folder)
    else:  # quicker; a bundle has the reports that are there
        (folder / "trial.json").write_text(report.render(judged, "json"))
    log = folder / "jobs" / "ranks" / "attempt1" / "launcher.out"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    return folder


def write_journal(folder: Path, trial: Trial) -> str:
    """Write the journal of a run, and return its SHA-256."""
    journal = Journal(folder / "measurements.jsonl")
    for each in (*trial.measurements, *trial.retries, *trial.localization):
        journal.append({"measurement": each.model_dump(mode="json")})
    for result in trial.results:
        journal.append({"result": result.model_dump(mode="json")})
    for session in trial.sessions:
        journal.append({"session": session.model_dump(mode="json")})
    return hashlib.sha256(journal.path.read_bytes()).hexdigest()


def scaled(measurement: Measurement, factor: float) -> Measurement:
    """The measurement with METRIC multiplied, if it is of CHECK."""
    if measurement.check != CHECK or factor == 1:
        return measurement
    metrics = tuple(
        replace(each, value=factor * each.value, samples=tuple(factor * sample for sample in each.samples))
        if each.name == METRIC
        else each
        for each in measurement.metrics
    )
    return measurement.model_copy(update={"metrics": metrics})


def contents(bundle: Path) -> dict[str, bytes]:
    """Name → content of the files of a bundle."""
    return archive.read(bundle)[1]


def repack(path: Path, files: Mapping[str, bytes], *, new_sums: bool = False) -> Path:
    """A bundle of these files. ``new_sums``: SHA256SUMS fits them, as a forger would write it."""
    files = dict(files)
    if new_sums:
        others = {name: content for name, content in files.items() if not name.startswith(archive.SUMS)}
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in others.items()}
        files[archive.SUMS] = archive.sums_text(digests).encode()
    archive.write(path, files.items())
    return path


def tampered_record(files: Mapping[str, bytes], factor: float) -> dict[str, bytes]:
    """The files with METRIC multiplied in the record, and verdicts that follow from it."""
    trial = Trial.model_validate_json(files["run/trial.json"])
    measurements = tuple(scaled(each, factor) for each in trial.measurements)
    judged = rejudge(trial.model_copy(update={"measurements": measurements}))
    return {**files, "run/trial.json": report.render(judged, "json").encode()}


def make_key(path: Path) -> Path:
    """A new SSH key without passphrase; its public key is PATH.pub."""
    subprocess.run([tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)], check=True)
    return path
