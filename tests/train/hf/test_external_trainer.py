"""Inputs for an external trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from seatrial.model import UsageError
from seatrial.train.hf import external_trainer
from seatrial.train.oumi import MODEL_FOLDER, ROWS_FILE
from tests.paths import FIXTURES
from tests.train.hf import runs

WORD = "perhydrocyclopenta"


def write_inputs(folder: Path, *overrides: str) -> Tokenizer:
    folder.mkdir()
    external_trainer.write_inputs(runs.config("sft-smollm-135m", *overrides), folder)
    return Tokenizer.from_file(str(folder / MODEL_FOLDER / "tokenizer.json"))


def test_tokenizer_is_trained_on_the_rows_of_the_file(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": f"What is {WORD}?"}, {"role": "assistant", "content": f"{WORD} it is"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps({'messages': turns})}\n" * 8 + f"{json.dumps({'messages': 'galley keel'})}\n" * 8)
    tokenizer = write_inputs(tmp_path / "real", f"data.path={rows}", "data.samples=8")
    assert tokenizer.encode(f" {WORD}").tokens == [f"Ġ{WORD}"]
    written = (tmp_path / "real" / ROWS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in written] == [{"messages": turns}] * 8
    assert len(tokenizer.encode(" galley").tokens) > 1  # not in the first data.samples rows


def test_tokenizer_is_trained_on_generated_rows(tmp_path: Path) -> None:
    tokenizer = write_inputs(tmp_path / "made")
    assert tokenizer.encode(" galley").tokens == ["Ġgalley"]
    assert len((tmp_path / "made" / ROWS_FILE).read_text().splitlines()) == 200


def test_rows_are_converted_or_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "given.jsonl"
    path.write_text((FIXTURES / "no_robots" / "train.jsonl").read_text() + '{"prompt": "Hello"}\n')
    weights = "model.weights=hub:HuggingFaceTB/SmolLM-135M"
    rejected = external_trainer.write_inputs(runs.config("sft-smollm-135m", f"data.path={path}", weights), tmp_path)
    assert rejected == {"no messages": 1}
    written = [json.loads(line) for line in (tmp_path / ROWS_FILE).read_text().splitlines()]
    assert [list(row) for row in written] == [["messages"]] * 5
    assert not (tmp_path / MODEL_FOLDER).exists()


def test_file_without_usable_rows_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "given.jsonl"
    path.write_text('{"prompt": "Hello"}\n')
    with pytest.raises(UsageError, match=r"layout no_robots; rejected: 1 \(no messages\)"):
        write_inputs(tmp_path / "none", f"data.path={path}")


def test_unreadable_rows_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl"):
        write_inputs(tmp_path / "none", f"data.path={tmp_path}/none.jsonl")
