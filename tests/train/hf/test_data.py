from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seatrial.model import UsageError
from seatrial.train.blocks import IGNORE_INDEX
from seatrial.train.hf import blocks, data, rows
from tests.train.hf import runs


def prepare(tmp_path: Path, *overrides: str, name: str = "sft-smollm-135m") -> data.PreparedData:
    return data.prepare(runs.config(name, *overrides), tmp_path)


def test_blocks_have_the_rows_and_padding_is_not_trained(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, "data.samples=8")
    assert (prepared.report["data"], prepared.report["rows"], prepared.report["blocks"]) == ("generated", 8, 8)
    row = next(rows.generate_rows("no_robots", 1, seed=0))
    block = prepared.blocks[0]
    text = prepared.tokenizer.decode(block["input_ids"])
    answer = prepared.tokenizer.decode(block["labels"][block["labels"] != IGNORE_INDEX])
    assert text.startswith(f"<|im_start|>user\n{row['prompt']}<|im_end|>")
    assert answer == row["messages"][-1]["content"] + "<|im_end|>"
    padding = block["input_ids"][block["input_ids"].cumsum(0) == block["input_ids"].sum()][1:]
    assert not padding.any()


def test_blocks_are_written_once_per_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(tmp_path, "data.samples=8").folder
    monkeypatch.setattr(blocks, "_write_files", lambda *_: pytest.fail("written again"))
    assert prepare(tmp_path, "data.samples=8", "max_steps=20").folder == first
    with pytest.raises(pytest.fail.Exception, match="written again"):
        prepare(tmp_path, "data.samples=9")
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # the failure leaves no files


@pytest.mark.parametrize(
    ("layout", "good", "bad"),
    [
        (
            "no_robots",
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
            [
                {},
                {"messages": [{"role": "user", "content": "Hi"}]},
                {"messages": [{"role": "user"}, {"role": "assistant"}]},
            ],
        ),
        (
            "alpaca",
            {"instruction": "Add", "input": "1 1", "output": "2"},
            [{}, {"instruction": "Add", "output": ""}, {"instruction": "Add", "input": 3, "output": "2"}],
        ),
    ],
)
def test_rows_are_used_or_counted_by_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], layout: str, good: dict[str, Any], bad: list[dict[str, Any]]
) -> None:
    long = json.loads(json.dumps(good).replace("Hello", "word " * 500).replace('"2"', json.dumps("word " * 500)))
    path = tmp_path / "rows.jsonl"
    lines = "\n".join(map(json.dumps, [good, good, long, *bad])).encode()
    lone_surrogate = (
        json.dumps(good).replace('"content": "', '"content": "\\ud800').replace('"Add"', '"\\ud800"').encode()
    )
    path.write_bytes(b"\n".join([lines, lone_surrogate, b"caf\xe9", b"\0" * 9, b'{"cut']))
    report = prepare(tmp_path, f"data.path={path}", f"data.layout={layout}").report
    assert (report["data"], report["rows"], report["samples"]) == ("path", 10, 2)
    assert report["rejected"]["longer than seq_len"] == 1
    assert report["rejected"]["no JSON object in UTF-8"] == 5  # including an empty object
    assert sum(report["rejected"].values()) == 8
    stderr = capfd.readouterr().err
    assert stderr.startswith("8 of 10 rows are not used: ")
    assert "longer than seq_len (1), no JSON object" in stderr


def test_deeply_nested_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"rows\.json is not valid JSON: maximum recursion depth"):
        prepare(tmp_path, f"data.path={path}")


def test_empty_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    with pytest.raises(UsageError, match=r"rows\.jsonl: 0 usable rows at seq_len 96"):
        prepare(tmp_path, f"data.path={path}")


def test_no_usable_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data: 0 usable rows at seq_len 8; rejected: longer than seq_len \(4\)"):
        prepare(tmp_path, "data.samples=4", "seq_len=8")
    assert not list((tmp_path / "data").iterdir())


def test_markov_chain_has_an_entropy_bound(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, "data.layout=markov_chain", "data.samples=5", "model.name=smollm-tiny")
    assert prepared.report["entropy_bound"] == pytest.approx(1.2997, abs=1e-4)
    assert prepared.tokenizer is None
    block = prepared.blocks[4]
    assert np.array_equal(block["input_ids"], block["labels"])
