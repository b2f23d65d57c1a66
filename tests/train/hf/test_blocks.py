"""Packing and the key of prepared rows of stack hf. Their content: tests/train/hf/test_data.py."""

from __future__ import annotations

import json
from pathlib import Path

from seatrial.train.hf import blocks
from tests.train.hf import runs


def test_packing_keeps_samples_whole_and_does_not_train_first_tokens() -> None:
    samples = [([number] * length, [True] * length) for number, length in enumerate([3, 3, 5, 2], start=1)]
    packed = list(blocks._pack(samples, 7))
    assert [ids for ids, _ in packed] == [[1, 1, 1, 2, 2, 2], [3, 3, 3, 3, 3, 4, 4]]
    assert packed[0][1] == [False, True, True, False, True, True]


def test_the_key_has_the_content_of_data_and_tokenizer(tmp_path: Path) -> None:
    def key(*overrides: str) -> str:
        config = runs.config("sft-smollm-135m", *overrides)
        return json.dumps(blocks._key(config, config.data.tokenizer))

    path, tokenizer = tmp_path / "rows.jsonl", tmp_path / "tokenizer"
    path.write_text("{}")
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("a")
    options = (f"data.path={path}", f"data.tokenizer={tokenizer}")
    before = key(*options)
    (tokenizer / "model.safetensors").write_text("weights do not determine tokens")
    assert key(*options) == before == key(*options, "max_steps=20", "seed=3")
    (tokenizer / "tokenizer.json").write_text("b")
    changed = key(*options)
    path.write_text("{} ")
    assert len({before, changed, key(*options), key(*options, "data.packing=true"), key("seed=3"), key()}) == 6
    assert "hub:OWNER/NAME" in key("data.path=hub:OWNER/NAME")
