"""The committed records of trials, by name such as ``2026-11-23-2xh200/acceptance``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The newest record of each shape and trial, then all others, which are gzipped
FOLDERS = {ROOT / "docs" / "results": ".trial.json", ROOT / "tests" / "fixtures" / "records": ".trial.json.gz"}


@cache
def record_paths() -> dict[str, Path]:
    """Return the name and file of each record, in the order of the names."""
    return dict(
        sorted(
            (path.relative_to(folder).as_posix().removesuffix(suffix), path)
            for folder, suffix in FOLDERS.items()
            for path in folder.rglob(f"*{suffix}")
        )
    )


def record_path(name: str) -> Path:
    """Return the file of a record. Raises KeyError if there is none of this name."""
    return record_paths()[name]
