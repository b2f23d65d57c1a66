from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train.function_calling import generate, preprocess
from seatrial.train.function_calling.preprocess import SPLITS, read_rows, read_split

ROWS = list(generate.conversations(300, seed=0))


@pytest.fixture(autouse=True)
def large_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 rows, each split gets some."""
    monkeypatch.setattr(preprocess, "HELD_OUT_CONVERSATIONS", 0.2)
    monkeypatch.setattr(preprocess, "HELD_OUT_FUNCTIONS", 0.2)


def test_every_row_is_counted(tmp_path: Path) -> None:
    bad = [{}, {"system": "SYSTEM: x", "chat": "USER: cut"}, ROWS[0]]
    report = preprocess.preprocess([*ROWS, *bad], tmp_path / "data", "generated")
    assert report["rows"] == len(ROWS) + len(bad) == sum(report["kept"].values()) + sum(report["rejected"].values())
    assert report["rejected"]["fields_missing"] == report["rejected"]["truncated"] == 1
    assert report["rejected"]["duplicate"] >= 1
    assert report["examples"]["fields_missing"][0].startswith("row 300:")
    assert report == json.loads((tmp_path / "data" / "report.json").read_text())
    assert {split: len(read_split(tmp_path / "data", split)) for split in SPLITS} == report["kept"]
    assert all(report["kept"].values())


def test_unseen_functions_are_not_in_training(tmp_path: Path) -> None:
    preprocess.preprocess(ROWS, tmp_path / "data", "generated")
    train, seen, unseen = (read_split(tmp_path / "data", split) for split in SPLITS)
    assert train
    assert unseen
    trained_functions = {name for conversation in train for name in conversation.parameter_schemas}
    assert all(not set(conversation.parameter_schemas) <= trained_functions for conversation in unseen)
    texts = [json.dumps(conversation.record()) for conversation in [*train, *seen, *unseen]]
    assert max(Counter(texts).values()) == 1


def test_splits_do_not_depend_on_row_order_or_spelling(tmp_path: Path) -> None:
    preprocess.preprocess(ROWS, tmp_path / "rows", "generated")
    preprocess.preprocess(ROWS[::-1], tmp_path / "reversed", "generated")
    renamed = [{key: text.replace("get_weather", "getWeather") for key, text in row.items()} for row in ROWS]
    preprocess.preprocess(renamed, tmp_path / "renamed", "generated")
    held_out = []
    for name in ("rows", "reversed", "renamed"):
        unseen = read_split(tmp_path / name, "unseen")
        records = (json.dumps(conversation.record(), sort_keys=True) for conversation in unseen)
        held_out.append(sorted(record.replace("getW", "get_w") for record in records))
    assert held_out[0] == held_out[1] == held_out[2]


def test_existing_folder_is_kept_and_failure_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "data"
    with pytest.raises(UsageError, match=r"no row for training; rows: 1, .*rejected: 1 fields_missing"):
        preprocess.preprocess([{}], out, "rows.jsonl")
    assert not out.exists()
    preprocess.preprocess(ROWS[:50], out, "generated")
    before = (out / "train.jsonl").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        preprocess.preprocess(ROWS, out, "generated")
    assert (out / "train.jsonl").read_bytes() == before


def test_file_formats_and_invalid_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows.json").write_text(json.dumps([*ROWS[:3], 7]))
    cut = "\n".join([*map(json.dumps, ROWS[:3]), json.dumps(ROWS[3])[:100]])
    (tmp_path / "rows.jsonl").write_text(cut)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:3]), tmp_path / "rows.parquet")
    assert list(read_rows(tmp_path / "rows.json")) == [*ROWS[:3], {}]
    assert list(read_rows(tmp_path / "rows.jsonl")) == [*ROWS[:3], {}]
    assert list(read_rows(tmp_path / "rows.parquet")) == ROWS[:3]


@pytest.mark.parametrize(
    ("name", "text"), [("rows.csv", "a"), ("rows.json", "[{"), ("rows.json", "{}"), ("gone.json", None)]
)
def test_unreadable_file_is_named(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        list(read_rows(tmp_path / name))
