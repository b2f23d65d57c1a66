from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train import text
from tests.train.test_data import ROWS, write


def test_row_layouts(tmp_path: Path) -> None:
    rows = text.read_rows(write(tmp_path / "rows.jsonl", ROWS), None)
    assert rows[1] == "### Instruction:\nName a port.\n\n### Response:\nRotterdam"
    assert rows[2] == "### Instruction:\nTranslate.\n\n### Input:\nahoj\n\n### Response:\nahoy"
    assert rows[3] == "### User:\nWho?\n\n### Assistant:\nMe."
    assert len(text.read_rows(tmp_path / "rows.jsonl", 2)) == 2


def test_a_json_list_equals_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS[1:3]))
    assert text.read_rows(path, None) == text.read_rows(write(tmp_path / "rows.jsonl", ROWS[1:3]), None)
    for broken, message in (
        ('[{"text": "cut', "is not valid JSON"),
        ('{"text": "one"}', "expected a JSON list"),
        ('["no row"]', "row 1: expected text"),
        ("[" * 100_000, "is not valid JSON"),
    ):
        path.write_text(broken)
        with pytest.raises(UsageError, match=message):
            text.read_rows(path, None)


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(ROWS[1:3]), tmp_path / "rows.parquet")
    assert text.read_rows(tmp_path / "rows.parquet", None) == text.read_rows(
        write(tmp_path / "rows.jsonl", ROWS[1:3]), None
    )
    cut = (tmp_path / "rows.parquet").read_bytes()[:-20]
    (tmp_path / "rows.parquet").write_bytes(cut)
    with pytest.raises(UsageError, match="is not a valid parquet file"):
        text.read_rows(tmp_path / "rows.parquet", None)


def test_other_file_suffixes_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\na\n")
    with pytest.raises(UsageError, match=r"rows\.csv: expected a \.json, \.jsonl or \.parquet file"):
        text.read_rows(path, None)


def test_rows_after_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\nno JSON\n')
    assert text.read_rows(path, 2) == ["a", "b"]
    with pytest.raises(UsageError, match=r"rows\.jsonl, row 4 is not valid JSON"):
        text.read_rows(path, 3)


def test_a_trained_tokenizer_is_lossless_and_ends_each_row() -> None:
    rows = ["The ship sails at dawn.", "naïve 船 \t\n", ""]
    encoder = text.train_tokenizer(rows[:1], 300, [text.END_TOKEN])
    assert encoder.get_vocab_size() <= 300
    end = encoder.token_to_id(text.END_TOKEN)
    encoded = text.encode(encoder, rows)
    assert [row[-1] for row in encoded] == [end] * 3
    assert [encoder.decode(row[:-1]) for row in encoded] == rows
    assert all(end not in row[:-1] for row in encoded)


def test_a_vocabulary_needs_all_bytes_and_an_end_token() -> None:
    with pytest.raises(UsageError, match="vocab_size 256: expected at least 257"):
        text.train_tokenizer(["a"], 256, [text.END_TOKEN])
    assert text.train_tokenizer(["a"], 257, [text.END_TOKEN]).get_vocab_size() == 257


def test_a_tokenizer_without_end_token_is_rejected() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    with pytest.raises(UsageError, match=r"<\|end\|>, </s>, "):
        text.encode(Tokenizer(WordLevel({"a": 0})), ["a"])
    assert text.encode(Tokenizer(WordLevel({"a": 0, "<|im_end|>": 1, "</s>": 2})), ["a"]) == [[0, 2]]
