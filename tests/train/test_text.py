from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train import text
from tests.train.test_data import ROWS, write


def test_the_layouts_of_rows(tmp_path: Path) -> None:
    found = text.read_rows(write(tmp_path / "rows.jsonl", ROWS), None)
    assert found[1] == "### Instruction:\nName a port.\n\n### Response:\nRotterdam"
    assert found[2] == "### Instruction:\nTranslate.\n\n### Input:\nahoj\n\n### Response:\nahoy"
    assert found[3] == "### User:\nWho?\n\n### Assistant:\nMe."
    assert len(text.read_rows(tmp_path / "rows.jsonl", 2)) == 2


def test_a_json_list_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS[1:3]))
    assert text.read_rows(path, None) == text.read_rows(write(tmp_path / "rows.jsonl", ROWS[1:3]), None)
    for broken, words in (
        ('[{"text": "cut', "is no JSON"),
        ('{"text": "one"}', "expected a JSON list"),
        ('["no row"]', "row 1: expected text"),
        ("[" * 100_000, "is no JSON"),
    ):
        path.write_text(broken)
        with pytest.raises(UsageError, match=words):
            text.read_rows(path, None)


def test_parquet_says_the_same(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(ROWS[1:3]), tmp_path / "rows.parquet")
    assert text.read_rows(tmp_path / "rows.parquet", None) == text.read_rows(
        write(tmp_path / "rows.jsonl", ROWS[1:3]), None
    )
    cut = (tmp_path / "rows.parquet").read_bytes()[:-20]
    (tmp_path / "rows.parquet").write_bytes(cut)
    with pytest.raises(UsageError, match="no whole parquet file"):
        text.read_rows(tmp_path / "rows.parquet", None)


def test_a_file_of_another_suffix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\na\n")
    with pytest.raises(UsageError, match=r"rows\.csv: expected a \.json, \.jsonl or \.parquet file"):
        text.read_rows(path, None)


def test_rows_behind_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\nno JSON\n')
    assert text.read_rows(path, 2) == ["a", "b"]
    with pytest.raises(UsageError, match=r"rows\.jsonl, row 3 is no JSON"):
        text.read_rows(path, 3)


def test_a_trained_tokenizer_gives_any_text_back_and_ends_each_row() -> None:
    rows = ["The ship sails at dawn.", "naïve 船 \t\n", ""]
    encoder = text.load_tokenizer(None, rows[:1], 300)
    assert encoder.get_vocab_size() <= 300
    end = encoder.token_to_id(text.END_TOKEN)
    encoded = text.encode(encoder, rows)
    assert [row[-1] for row in encoded] == [end] * 3
    assert [encoder.decode(row[:-1]) for row in encoded] == rows
    assert all(end not in row[:-1] for row in encoded)


def test_a_vocabulary_needs_all_bytes_and_an_end() -> None:
    with pytest.raises(UsageError, match="a vocabulary of 256 is too small for text: 257 at least"):
        text.load_tokenizer(None, ["a"], 256)
    assert text.load_tokenizer(None, ["a"], 257).get_vocab_size() == 257


def test_a_tokenizer_that_knows_no_end_is_refused() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    with pytest.raises(UsageError, match=r"the tokenizer knows none of <\|end\|>, </s>, "):
        text.encode(Tokenizer(WordLevel({"a": 0})), ["a"])
    assert text.encode(Tokenizer(WordLevel({"a": 0, "<|im_end|>": 1, "</s>": 2})), ["a"]) == [[0, 2]]
