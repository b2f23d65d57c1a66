"""The command ``preprocess`` and the cache of prepared data that it shares with trainings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from seatrial.model import UsageError
from seatrial.train import blocks, data, data_cache, disk, text, train_config
from seatrial.train.hf import hub
from seatrial.train.preprocess import preprocess
from seatrial.train.train_config import TrainConfig
from tests.processes import Program, call, until

WITHOUT_TORCH = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name.split(".")[0] == "torch" else find_spec(name, *args)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number} of this file"}) + "\n" for number in range(50)))
    return path


def arguments(rows: Path, cache: Path) -> list[str]:
    values = (f"data.path={rows}", f"data.cache={cache}", "model.name=qwen2-tiny")
    return ["tiny/throughput", *(word for value in values for word in ("--set", value))]


def settings(rows: Path, *overrides: str) -> TrainConfig:
    return train_config.load("tiny/throughput", ["model.name=qwen2-tiny", f"data.path={rows}", *overrides])


def prepare(config: TrainConfig, folder: Path) -> data.Blocks:
    return data.prepare(config, folder, True, lambda value: [value])


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_training_uses_the_prepared_rows_and_names_the_reason_of_a_miss(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(data_cache.VARIABLE, str(tmp_path / "cache"))
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
    monkeypatch.setenv(data_cache.VARIABLE, str(tmp_path / "cache"))
    other = prepare(settings(moved, "seq_len=16"), tmp_path / "out")
    assert other.tokens.shape[1] == 17 != used.tokens.shape[1]
    err = capfd.readouterr().err
    assert f"miss in {tmp_path}/cache: {Path(first['folder']).name} differs in seq_len (64 there, 16 here); writ" in err
    moved.write_text(moved.read_text().replace("row 7 ", "row 8 "))
    prepare(settings(moved), tmp_path / "out")
    assert "differs in data (content); writing" in capfd.readouterr().err
    assert names(tmp_path / "cache") == [Path(first["folder"]).name]  # a training does not write there
    assert len(names(tmp_path / "out")) == 2


def test_a_killed_preprocess_leaves_nothing_that_is_used_and_two_at_once_are_safe(rows: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    slow = "import time\nfrom seatrial.train import blocks\nblocks.write_json = lambda *_: time.sleep(600)"
    killed = Program("preprocess", *arguments(rows, cache), first=slow)
    until(lambda: list(cache.glob("*.incomplete-*/blocks.npy")))  # the tokens are written, the folder is not renamed
    killed.process.kill()
    assert killed.finish()[0] == -9
    (partial,) = names(cache)
    both = [Program("preprocess", *arguments(rows, cache)) for _ in range(2)]
    results = [program.finish() for program in both]
    assert [code for code, _, _ in results] == [0, 0], results
    (folder,) = set(names(cache)) - {partial}
    assert ".incomplete-" not in folder
    assert all(out.endswith(f"{cache / folder}\n") for _, out, _ in results)
    expected, _ = blocks._tokenize_rows(settings(rows))
    assert (prepare(settings(rows, f"data.cache={cache}"), cache).tokens == expected).all()


def test_a_full_disk_is_named_and_leaves_nothing(rows: Path, tmp_path: Path) -> None:
    first = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))"  # simulates a full disk
    code, _, err = Program("preprocess", *arguments(rows, tmp_path / "cache"), first=first).finish()
    assert code == 3
    assert "File too large. On " in err
    assert disk.REMEDY in err
    assert names(tmp_path / "cache") == []


def test_stack_native_needs_no_torch(rows: Path, tmp_path: Path) -> None:
    program = Program("preprocess", *arguments(rows, tmp_path / "cache"), "--json", first=WITHOUT_TORCH)
    code, out, err = program.finish()
    assert code == 0, err
    assert Path(json.loads(out)["folder"], "blocks.npy").is_file()


@pytest.mark.training
def test_stack_hf_needs_no_torch_and_the_training_uses_its_tokens(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, cache = "tiny/function-calling-qwen2-7b", f"data.cache={tmp_path}/cache"
    code, out, err = Program("preprocess", config, "--set", cache, "--json", first=WITHOUT_TORCH).finish()
    assert code == 0, err
    assert "7 of 200 rows are not used: duplicate (7)" in err
    from seatrial.train.hf import data as hf_data

    prepared = hf_data.prepare(train_config.load(config, [cache]), tmp_path / "out")
    assert f"prepared data: hit, {json.loads(out)['folder']}\n" in capfd.readouterr().err
    assert len(prepared.blocks) == prepared.report["blocks"] > 0
    assert not (tmp_path / "out").exists()


def test_a_file_that_changes_while_it_is_read_is_an_error(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = text.read_rows

    def read_and_append(path: Path, samples: int | None) -> list[str]:
        found = read(path, samples)
        with rows.open("a") as file:
            file.write('{"text": "one more"}\n')
        return found

    monkeypatch.setattr(text, "read_rows", read_and_append)
    with pytest.raises(UsageError, match=r"rows\.jsonl changed while it was read; nothing was written"):
        preprocess(settings(rows, f"data.cache={tmp_path}/cache"))
    assert names(tmp_path / "cache") == []


def test_settings_that_cannot_be_prepared(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(*overrides: str) -> str:
        with pytest.raises(UsageError) as raised:
            preprocess(settings(rows, *overrides))
        return str(raised.value)

    cache = f"data.cache={tmp_path}/cache"
    assert error().startswith("no folder for the tokens: --set data.cache=DIR, or export SEATRIAL_DATA_CACHE=DIR")
    assert error("data.cache=/proc/none").startswith("data.cache: /proc/none is not writable")
    assert error(cache, f"data.path={tmp_path}/none.jsonl").endswith("none.jsonl: No such file or directory")
    assert "cannot read the tokenizer" in error(cache, f"data.tokenizer={tmp_path}/none.json")
    assert names(tmp_path / "cache") == []
    monkeypatch.setenv("HF_HOME", "/proc/none")
    with pytest.raises(UsageError, match="HF_HOME: /proc/none is not writable"):
        hub.require_writable_cache()
    assert preprocess(train_config.load("tiny/throughput")) is None
    code, _, err = call("preprocess", "throughputt")
    assert (code, "did you mean throughput" in err) == (2, True)


def test_a_damaged_key_does_not_hide_other_reasons(rows: Path, tmp_path: Path) -> None:
    config: Any = settings(rows, f"data.cache={tmp_path}")
    (tmp_path / "blocks-0").mkdir()
    (tmp_path / "blocks-0" / data_cache.KEY_FILE).write_text("[")
    assert "has no data of this kind" in blocks.prepare(config, tmp_path).message
