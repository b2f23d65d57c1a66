"""The cache of prepared data: hits, and the reasons of misses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train import blocks, data_cache
from seatrial.train.command import preprocess
from tests.train.prepared import names, prepare, settings, write_rows


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path)


def test_a_training_uses_the_prepared_rows_and_names_the_reason_of_a_miss(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(data_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    first, second = preprocess(settings(rows)), preprocess(settings(rows))
    assert first is not None
    assert second is not None
    assert (first["existed"], second["existed"], second["folder"]) == (False, True, first["folder"])
    moved = rows.rename(tmp_path / "moved.jsonl")  # the content counts, neither path nor modification time
    os.utime(moved, (1, 1))
    monkeypatch.setattr(blocks, "_tokenize_rows", lambda *_: pytest.fail("tokenized again"))
    used = prepare(settings(moved), tmp_path / "out")
    assert capfd.readouterr().err == f"prepared data: hit, {first['folder']}\n"
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    monkeypatch.setenv(data_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    other = prepare(settings(moved, "seq_len=16"), tmp_path / "out")
    assert other.tokens.shape[1] == 17 != used.tokens.shape[1]
    err = capfd.readouterr().err
    assert (
        f"miss in {tmp_path}/cache: {Path(first['folder']).name} differs in seq_len (64 in the cache, 16 needed); writ"
        in err
    )
    moved.write_text(moved.read_text().replace("row 7 ", "row 8 "))
    prepare(settings(moved), tmp_path / "out")
    assert "differs in data (content); writing" in capfd.readouterr().err
    assert names(tmp_path / "cache") == [Path(first["folder"]).name]  # a training does not write there
    assert len(names(tmp_path / "out")) == 2


def test_a_damaged_key_does_not_hide_other_reasons(rows: Path, tmp_path: Path) -> None:
    config = settings(rows, f"data.cache={tmp_path}")
    (tmp_path / "blocks-0").mkdir()
    (tmp_path / "blocks-0" / data_cache.KEY_FILE).write_text("[")
    assert "no prepared data of this kind" in blocks.prepare(config, tmp_path).message


def test_a_damaged_folder_is_named_and_not_used(rows: Path, tmp_path: Path) -> None:
    config = settings(rows, f"data.cache={tmp_path}/cache")
    result = preprocess(config)
    assert result
    folder = Path(result["folder"])
    tokens = (folder / blocks.BLOCKS_FILE).read_bytes()
    (folder / blocks.BLOCKS_FILE).write_bytes(tokens[:-1] + b"\x7f")  # the same size: only preprocess reads it
    assert prepare(config, tmp_path / "cache").tokens.size
    with pytest.raises(UsageError, match=f"{folder} is damaged: blocks.npy has SHA-256"):
        preprocess(config)
    (folder / blocks.BLOCKS_FILE).write_bytes(b"")  # after a crash of the machine
    for use in (preprocess, lambda _: prepare(config, tmp_path / "cache")):
        with pytest.raises(UsageError, match=f"{folder} is damaged: blocks.npy has size 0, written with {len(tokens)}"):
            use(config)
    (folder / data_cache.KEY_FILE).write_bytes(b"")
    with pytest.raises(UsageError, match=f"{folder} is damaged"):
        preprocess(config)
