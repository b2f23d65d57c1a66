"""Reports of a trial. They show verdicts and compute none."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from seatrial.model import SeatrialError, Trial, UsageError
from seatrial.util import files
from seatrial.util.gc_pause import gc_paused

# Format → the module of this package with its ``render``, imported at its first use; json is the record itself
FORMATS: Mapping[str, str] = {
    "html": "html_page",
    "junit": "junit",
    "prometheus": "prometheus",
    "json": "",
    "markdown": "markdown",
    "csv": "csv_table",
    "summary": "summary_json",
    "contract": "contract",
}

# File in the run directory → format. trial.json is first: all other files can be rendered from it.
FILES: Mapping[str, str] = {
    "trial.json": "json",
    "junit.xml": "junit",
    "metrics.prom": "prometheus",
    "figures.csv": "csv",
    "report.html": "html",
}


@gc_paused()
def render(trial: Trial, format: str, run_dir: Path | None = None, record: bytes = b"") -> str:
    """The trial as text in one of ``FORMATS``; commands name ``run_dir``, if it is known.

    ``record``: content of trial.json, of which the HTML page shows the SHA-256. Raises UsageError for any other name.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown report format {format!r}: expected {', '.join(FORMATS)}")
    if format == "json":  # as recorded
        return trial.as_stored().model_dump_json() + "\n"
    from seatrial.report.parts import with_real_values

    digest = [hashlib.sha256(record).hexdigest()] if format == "html" and record else []
    text: str = import_module(f"{__name__}.{FORMATS[format]}").render(with_real_values(trial, run_dir), *digest)
    return text


class NotWritten(SeatrialError):
    """Reports could not be rendered or written; the message names the files with the reasons."""


def render_all(trial: Trial, run_dir: Path | None = None) -> dict[str, str]:
    """File name → text for all ``FILES``. Raises NotWritten with every format that failed."""
    texts = {}
    failed, record = [], b""
    for name, format in FILES.items():
        try:
            texts[name] = render(trial, format, run_dir, record)
            record = record or texts[name].encode()  # trial.json is first
        except Exception as defect:  # a defect in one format must not prevent the others
            failed.append(f"{name} ({type(defect).__name__}: {defect})")
    if failed:
        raise NotWritten(f"could not render {', '.join(failed)}")
    return texts


def write_all(trial: Trial, run_dir: Path) -> list[Path]:
    """Write every file of ``FILES`` into ``run_dir``, all or none, and return their paths. Raises NotWritten."""
    staged, failed = [], []
    for name, text in render_all(trial, run_dir).items():
        try:
            path = run_dir / name
            staged.append((files.stage(path, text.encode()), path))
        except OSError as error:
            failed.append(f"{name} ({error.strerror or error})")
    if failed:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)
        raise NotWritten(f"could not write {', '.join(failed)} in {run_dir}")
    for temporary, path in staged:
        temporary.replace(path)
    return [path for _, path in staged]


def write_some(trial: Trial, run_dir: Path) -> list[Path]:
    """Write as many of ``FILES`` as possible, each completely or not at all, after ``write_all`` failed."""
    written = []
    for name, format in FILES.items():
        with contextlib.suppress(Exception):  # write_all has reported the error
            files.atomic_write(run_dir / name, render(trial, format, run_dir).encode())
            written.append(run_dir / name)
    return written


def set_aside(run_dir: Path) -> None:
    """Rename each of ``FILES`` from an earlier session to ``NAME.before``: they are outdated."""
    for path in (run_dir / name for name in FILES):
        if path.is_file():
            path.replace(path.with_name(f"{path.name}.before"))
