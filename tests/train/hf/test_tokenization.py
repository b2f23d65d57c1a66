from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.model import UsageError
from seatrial.train.function_calling import template
from seatrial.train.hf import tokenization
from tests.train.hf import runs

TEXT = ["the ship sails at dawn, and the crew is ready", "naïve 船"]


@pytest.fixture
def tokenizer() -> Any:
    return tokenization.train(TEXT, 300)


def test_unreadable_tokenizer_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"x"')
    with pytest.raises(UsageError, match=rf"cannot read the tokenizer {tmp_path}/tokenizer.json: EOF"):
        tokenization.load(str(tmp_path / "tokenizer.json"))


def test_vocabulary_limits(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="at least 259"):
        tokenization.train(["a"], 258)
    with pytest.raises(UsageError, match="at most 270 tokens"):
        tokenization.prepare(tokenizer, 270, chat=True)


def test_trained_tokenizer_round_trips_text_and_has_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) <= 300
    assert tokenizer.eos_token == template.END_OF_TURN
    assert tokenizer.decode(tokenizer(other := "Qué? \t\n" + TEXT[1])["input_ids"]) == other
    for token in template.SPECIAL_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1


def test_saved_tokenizer_loads_from_folder_and_file(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = tokenization.load(str(name))
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded.eos_token == template.END_OF_TURN


def test_tokenizer_without_end_token_is_rejected(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"a": 0})).save(str(path))
    with pytest.raises(UsageError, match="no end-of-text token"):
        tokenization.load(str(path))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], None),
        (["model.weights=/weights"], "/weights"),
        (["data.tokenizer=/tokenizer", "model.weights=/weights"], "/tokenizer"),
    ],
)
def test_configured_tokenizer_precedes_that_of_the_weights(overrides: list[str], expected: str | None) -> None:
    assert tokenization.tokenizer_name(runs.config("sft-smollm-135m", *overrides)) == expected


def test_only_chat_gets_the_template(tokenizer: Any) -> None:
    assert tokenization.prepare(tokenizer, 300, chat=False).chat_template is None
    assert tokenization.prepare(tokenizer, 300, chat=True).chat_template == template.chat_template()


def test_chat_needs_the_special_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0, "</s>": 1})).save(str(tmp_path / "tokenizer.json"))
    plain = tokenization.load(str(tmp_path / "tokenizer.json"))
    assert tokenization.prepare(plain, 300, chat=False) is plain
    with pytest.raises(UsageError, match=r"the tokenizer lacks .*<\|im_start\|>, <\|im_end\|>"):
        tokenization.prepare(plain, 300, chat=True)


def test_tokenizer_with_unset_end_token_is_rejected(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="end-of-text token None"):
        tokenization.prepare(tokenizer, 300, chat=False)
