"""Another job rewrites the prepared data while a rank reads it: the rank reads an incomplete file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seatrial.drill.faults import call_after_import, is_faulty_rank


def install() -> None:
    """Replace the prepared data by its first half before the rank opens it."""
    if is_faulty_rank():
        call_after_import("seatrial.train.data", _change)


def _change(data: Any) -> None:
    prepared_folder = data.ranks.prepared_folder

    def folder_with_half(*arguments: Any) -> Path:
        folder: Path = prepared_folder(*arguments)
        complete = folder / data.BLOCKS_FILE
        half = complete.with_name("half.npy")
        content = complete.read_bytes()
        half.write_bytes(content[: len(content) // 2])
        half.replace(complete)  # a new file: ranks that have opened the old one keep it
        return folder

    data.ranks.prepared_folder = folder_with_half
