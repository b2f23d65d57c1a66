from __future__ import annotations

import json
import math
from pathlib import Path
from typing import BinaryIO

import pytest

from seatrial.train.files import write_json, write_whole


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")

    def full_disk(file: BinaryIO) -> None:
        file.write(b"half of the new")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, full_disk)
    assert path.read_bytes() == b"old"


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text("old")
    write_json(path, {"accuracy": 97.5})
    assert json.loads(path.read_text()) == {"accuracy": 97.5}
    assert list(tmp_path.iterdir()) == [path]


def test_json_knows_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "metrics.json", {"loss": math.nan})
    assert not list(tmp_path.iterdir())
