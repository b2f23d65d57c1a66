from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seatrial.model import UsageError
from seatrial.train.hf import data, rows
from tests.train.hf import runs


def prepared(tmp_path: Path, *overrides: str, name: str = "sft-smollm-135m") -> data.PreparedData:
    return data.prepare(runs.config(name, *overrides), tmp_path)


def test_blocks_hold_what_the_rows_say_and_padding_takes_no_part(tmp_path: Path) -> None:
    found = prepared(tmp_path, "data.samples=8")
    assert (found.report["data"], found.report["rows"], found.report["blocks"]) == ("generated", 8, 8)
    row = next(rows.generate("no_robots", 1, seed=0))
    block = found.blocks[0]
    text = found.tokenizer.decode(block["input_ids"])
    answer = found.tokenizer.decode(block["labels"][block["labels"] != data.IGNORED_LABEL])
    assert text.startswith(f"<|im_start|>user\n{row['prompt']}<|im_end|>")
    assert answer == row["messages"][-1]["content"] + "<|im_end|>"
    padding = block["input_ids"][block["input_ids"].cumsum(0) == block["input_ids"].sum()][1:]
    assert not padding.any()


def test_packing_keeps_samples_whole_and_does_not_train_across_their_borders() -> None:
    samples = [([number] * length, [True] * length) for number, length in enumerate([3, 3, 5, 2], start=1)]
    packed = list(data._packed(samples, 7))
    assert [ids for ids, _ in packed] == [[1, 1, 1, 2, 2, 2], [3, 3, 3, 3, 3, 4, 4]]
    assert packed[0][1] == [False, True, True, False, True, True]


def test_blocks_are_made_once_and_anew_for_another_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(tmp_path, "data.samples=8").folder
    monkeypatch.setattr(data, "_fill", lambda *_: pytest.fail("made again"))
    assert prepared(tmp_path, "data.samples=8", "max_steps=20").folder == first
    with pytest.raises(pytest.fail.Exception, match="made again"):
        prepared(tmp_path, "data.samples=9")
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # nothing is left of the failure


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
def test_rows_of_a_file_are_used_or_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], layout: str, good: dict[str, Any], bad: list[dict[str, Any]]
) -> None:
    long = json.loads(json.dumps(good).replace("Hello", "word " * 500).replace('"2"', json.dumps("word " * 500)))
    path = tmp_path / "rows.jsonl"
    lines = "\n".join(map(json.dumps, [good, good, long, *bad])).encode()
    half = json.dumps(good).replace('"content": "', '"content": "\\ud800').replace('"Add"', '"\\ud800"').encode()
    path.write_bytes(b"\n".join([lines, half, b"caf\xe9", b"\0" * 9, b'{"cut']))
    report = prepared(tmp_path, f"data.path={path}", f"data.layout={layout}").report
    assert (report["data"], report["rows"], report["samples"]) == ("path", 10, 2)
    assert report["rejected"]["longer than seq_len"] == 1
    assert report["rejected"]["no JSON object in UTF-8"] == 5  # an empty one is no other
    assert sum(report["rejected"].values()) == 8
    said = capfd.readouterr().err
    assert said.startswith("8 of 10 rows are not used: ")
    assert "longer than seq_len (1), no JSON object" in said


def test_a_list_of_rows_that_is_nested_beyond_reading_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"cannot read the rows in \S+rows\.json: maximum recursion depth"):
        prepared(tmp_path, f"data.path={path}")


def test_a_file_without_rows_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    with pytest.raises(UsageError, match=r"rows\.jsonl: no row can be trained on at seq_len 96; there are none"):
        prepared(tmp_path, f"data.path={path}")


def test_no_row_that_can_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"data: no row can be trained on at seq_len 8; rejected: \{'longer than seq_len': 4\}"
    ):
        prepared(tmp_path, "data.samples=4", "seq_len=8")
    assert not list((tmp_path / "data").iterdir())


def test_walks_have_a_known_floor(tmp_path: Path) -> None:
    found = prepared(tmp_path, "data.layout=markov_chain", "data.samples=5", "model.name=smollm-tiny")
    assert found.report["floor"] == pytest.approx(1.2997, abs=1e-4)
    assert found.tokenizer is None
    block = found.blocks[4]
    assert np.array_equal(block["input_ids"], block["labels"])
