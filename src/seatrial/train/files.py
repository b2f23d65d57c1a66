"""Files that are whole or not there at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill ``path``. A crash or a full disk leaves ``path`` as it was, never half of the new one.

    Raises OSError when the folder cannot be written or the disk is full.
    """
    incomplete = path.with_name(f"{path.name}.incomplete")
    with incomplete.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    incomplete.replace(path)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write ``record`` as indented JSON. Raises ValueError on a number that JSON does not know (NaN)."""
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))
