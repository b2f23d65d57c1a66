"""Blocks of tokens of a file, written for stack native. Their content: tests/train/test_data.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train import text
from seatrial.train.command import preprocess
from tests.train.prepared import names, settings, write_rows


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_an_error(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = text.read_rows

    def read_and_append(path: Path, samples: int | None) -> list[str]:
        texts = read(path, samples)
        with rows.open("a") as file:
            file.write('{"text": "one more"}\n')
        return texts

    monkeypatch.setattr(text, "read_rows", read_and_append)
    with pytest.raises(UsageError, match=r"rows\.jsonl changed while it was read; nothing was written"):
        preprocess(settings(rows, f"data.cache={tmp_path}/cache"))
    assert names(tmp_path / "cache") == []
