from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train.function_calling import generate
from seatrial.train.function_calling.preprocess import SPLITS, HeldOutFractions, preprocess, read_rows, read_split

ROWS = list(generate.rows(300, seed=0))
SHARES = HeldOutFractions(conversations=0.2, functions=0.2)


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    bad = [{}, {"system": "SYSTEM: x", "chat": "USER: cut"}, ROWS[0]]
    report = preprocess([*ROWS, *bad], tmp_path / "data", "generated", SHARES)
    assert report["rows"] == len(ROWS) + len(bad) == sum(report["kept"].values()) + sum(report["rejected"].values())
    assert report["rejected"]["no_row"] == report["rejected"]["truncated"] == 1
    assert report["rejected"]["duplicate"] >= 1
    assert report["examples"]["no_row"][0].startswith("row 300:")
    assert report == json.loads((tmp_path / "data" / "report.json").read_text())
    assert {split: len(read_split(tmp_path / "data", split)) for split in SPLITS} == report["kept"]
    assert all(report["kept"].values())


def test_unseen_functions_are_nowhere_in_training(tmp_path: Path) -> None:
    preprocess(ROWS, tmp_path / "data", "generated", SHARES)
    train, seen, unseen = (read_split(tmp_path / "data", split) for split in SPLITS)
    assert train
    assert unseen
    known = {name for one in train for name in one.parameter_schemas}
    assert all(not set(one.parameter_schemas) <= known for one in unseen)
    texts = [json.dumps(one.record()) for one in [*train, *seen, *unseen]]
    assert max(Counter(texts).values()) == 1


def test_splits_do_not_depend_on_the_order_of_rows_or_the_spelling_of_names(tmp_path: Path) -> None:
    preprocess(ROWS, tmp_path / "one", "generated", SHARES)
    preprocess(ROWS[::-1], tmp_path / "two", "generated", SHARES)
    renamed = [{key: text.replace("get_weather", "getWeather") for key, text in row.items()} for row in ROWS]
    preprocess(renamed, tmp_path / "three", "generated", SHARES)
    held_out = []
    for name in ("one", "two", "three"):
        unseen = read_split(tmp_path / name, "unseen")
        held_out.append(sorted(json.dumps(one.record(), sort_keys=True).replace("getW", "get_w") for one in unseen))
    assert held_out[0] == held_out[1] == held_out[2]


def test_a_folder_that_is_there_is_left_alone_and_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "data"
    with pytest.raises(UsageError, match=r"no row of 1 can be trained on.*no_row"):
        preprocess([{}], out, "rows.jsonl")
    assert not out.exists()
    preprocess(ROWS[:50], out, "generated")
    before = (out / "train.jsonl").read_bytes()
    with pytest.raises(UsageError, match="there already"):
        preprocess(ROWS, out, "generated")
    assert (out / "train.jsonl").read_bytes() == before


def test_rows_are_read_from_every_format_and_broken_ones_are_counted(tmp_path: Path) -> None:
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
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        list(read_rows(tmp_path / name))
