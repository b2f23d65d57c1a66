"""Another job rewrites the prepared data while a rank reads it: the rank reads an incomplete file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODULE = "seatrial.train.data"


def change(data: Any) -> None:
    """Replace the prepared data by its first half before the rank opens it."""
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
