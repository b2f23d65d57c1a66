"""The command ``preprocess`` and the cache of prepared data that it shares with trainings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train import blocks, disk, train_config
from seatrial.train.command import preprocess
from seatrial.train.hf import hub
from tests.processes import Program, call, until
from tests.train.prepared import names, prepare, settings, write_rows

WITHOUT_TORCH = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name.split(".")[0] == "torch" else find_spec(name, *args)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path)


def arguments(rows: Path, cache: Path) -> list[str]:
    values = (f"data.path={rows}", f"data.cache={cache}", "model.name=qwen2-tiny")
    return ["tiny/throughput", *(word for value in values for word in ("--set", value))]


def test_a_killed_preprocess_leaves_nothing_that_is_used_and_two_at_once_are_safe(rows: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    slow = "import time\nfrom seatrial.train import blocks\nblocks.write_json = lambda *_: time.sleep(600)"
    killed = Program("train", "preprocess", *arguments(rows, cache), first=slow)
    until(lambda: list(cache.glob("*.incomplete-*/blocks.npy")))  # the tokens are written, the folder is not renamed
    killed.process.kill()
    assert killed.finish()[0] == -9
    (partial,) = names(cache)
    both = [Program("train", "preprocess", *arguments(rows, cache)) for _ in range(2)]
    results = [program.finish() for program in both]
    assert [code for code, _, _ in results] == [0, 0], results
    (folder,) = set(names(cache)) - {partial}
    assert ".incomplete-" not in folder
    assert all(out.endswith(f"{cache / folder}\n") for _, out, _ in results)
    expected, _ = blocks._tokenize_rows(settings(rows))
    assert (prepare(settings(rows, f"data.cache={cache}"), cache).tokens == expected).all()


def test_a_full_disk_is_named_and_leaves_nothing(rows: Path, tmp_path: Path) -> None:
    first = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))"  # simulates a full disk
    code, _, err = Program("train", "preprocess", *arguments(rows, tmp_path / "cache"), first=first).finish()
    assert code == 3
    assert "File too large. On " in err
    assert disk.REMEDY in err
    assert names(tmp_path / "cache") == []


def test_stack_native_needs_no_torch(rows: Path, tmp_path: Path) -> None:
    program = Program("train", "preprocess", *arguments(rows, tmp_path / "cache"), "--json", first=WITHOUT_TORCH)
    code, out, err = program.finish()
    assert code == 0, err
    assert Path(json.loads(out)["folder"], "blocks.npy").is_file()


@pytest.mark.training
def test_stack_hf_needs_no_torch_and_the_training_uses_its_tokens(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, cache = "tiny/function-calling-qwen2-7b", f"data.cache={tmp_path}/cache"
    code, out, err = Program("train", "preprocess", config, "--set", cache, "--json", first=WITHOUT_TORCH).finish()
    assert code == 0, err
    assert "7 of 200 rows are not used: duplicate (7)" in err
    from seatrial.train.hf import data as hf_data

    prepared = hf_data.prepare(train_config.load(config, [cache]), tmp_path / "out")
    assert f"prepared data: hit, {json.loads(out)['folder']}\n" in capfd.readouterr().err
    assert len(prepared.blocks) == prepared.report["blocks"] > 0
    assert not (tmp_path / "out").exists()


def test_settings_that_cannot_be_prepared(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(*overrides: str) -> str:
        with pytest.raises(UsageError) as raised:
            preprocess(settings(rows, *overrides))
        return str(raised.value)

    cache = f"data.cache={tmp_path}/cache"
    assert error().startswith("no directory for the tokens: --set data.cache=DIR, or export SEATRIAL_DATA_CACHE=DIR")
    assert error("data.cache=/proc/none").startswith("data.cache: /proc/none is not writable")
    assert error(cache, f"data.path={tmp_path}/none.jsonl").endswith("none.jsonl: No such file or directory")
    assert "cannot read the tokenizer" in error(cache, f"data.tokenizer={tmp_path}/none.json")
    assert names(tmp_path / "cache") == []
    monkeypatch.setenv("HF_HOME", "/proc/none")
    with pytest.raises(UsageError, match="HF_HOME: /proc/none is not writable"):
        hub.require_writable_cache()
    assert preprocess(train_config.load("tiny/throughput")) is None
    code, _, err = call("train", "preprocess", "throughputt")
    assert (code, "did you mean throughput" in err) == (2, True)
