"""Tests of paths that a user gave, with a UsageError where Path.is_dir and Path.exists would raise OSError."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from seatrial.model import UsageError


def is_folder(path: Path) -> bool:
    """Return whether the path is a folder. Raises UsageError if this is unknown, such as without permission."""
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def path_exists(path: Path) -> bool:
    """Return whether the path exists. Raises UsageError if this is unknown, such as without permission."""
    return _status(path) is not None


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte in the path
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
