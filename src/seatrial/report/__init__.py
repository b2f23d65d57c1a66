"""What a trial looks like to a person or a tool. Reports show verdicts, they never compute them.

Each format is one module with ``render(trial) -> str``, imported when it is first asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from seatrial.model import Trial, UsageError

Render = Callable[[Trial], str]


def _module(name: str) -> Render:
    def render_with_module(trial: Trial) -> str:
        text: str = import_module(f"{__name__}.{name}").render(trial)
        return text

    return render_with_module


def _json(trial: Trial) -> str:
    return trial.model_dump_json(indent=2) + "\n"


FORMATS: Mapping[str, Render] = {
    "html": _module("html"),
    "junit": _module("junit"),
    "prometheus": _module("prometheus"),
    "json": _json,
    "markdown": _module("markdown"),
}

# The source of truth comes first: whatever fails after it can be made again from it.
FILES: Mapping[str, str] = {
    "trial.json": "json",
    "junit.xml": "junit",
    "metrics.prom": "prometheus",
    "report.html": "html",
}


def render(trial: Trial, format: str) -> str:
    """The trial as text in one of ``FORMATS``. Raises UsageError for any other name."""
    if format not in FORMATS:
        raise UsageError(f"no report format {format!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[format](trial)


def write_all(trial: Trial, run_dir: Path) -> list[Path]:
    """Write every file of ``FILES`` into ``run_dir``, each whole or not at all, and return their paths.

    All are tried. Raises OSError at the end, naming those that could not be written and why.
    """
    written, failed = [], []
    for name, format in FILES.items():
        try:
            written.append(_write(run_dir / name, render(trial, format)))
        except OSError as error:
            failed.append(f"{name} ({error.strerror or error})")
    if failed:
        kept = ", ".join(path.name for path in written) or "nothing"
        raise OSError(f"could not write {', '.join(failed)} in {run_dir}; written: {kept}")
    return written


def _write(path: Path, text: str) -> Path:
    """Replace ``path`` in one step, so that a reader or a crash never meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
