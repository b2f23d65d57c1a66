"""A file of a checkpoint changes on disk after it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODULE = "seatrial.train.checkpoint"


def change(checkpoint: Any) -> None:
    """Flip one bit in a file of each checkpoint when its save has ended."""
    save = checkpoint.Checkpointer.save

    def save_and_damage(self: Any, out: Path, step: int, built: Any, optimizer: Any) -> None:
        save(self, out, step, built, optimizer)
        folder = checkpoint.step_folder(out, step)
        file = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    checkpoint.Checkpointer.save = save_and_damage
