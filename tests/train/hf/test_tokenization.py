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


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"x"')
    with pytest.raises(UsageError, match=rf"cannot read the tokenizer {tmp_path}/tokenizer.json: EOF"):
        tokenization.load(str(tmp_path / "tokenizer.json"))


def test_a_vocabulary_that_holds_no_text_and_a_tokenizer_that_does_not_fit(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="take 259 tokens"):
        tokenization.train(["a"], 258)
    with pytest.raises(UsageError, match="the model takes 270 tokens"):
        tokenization.prepare(tokenizer, 270, chat=True)


def test_a_trained_tokenizer_gives_any_text_back_and_knows_the_marks(tokenizer: Any) -> None:
    assert len(tokenizer) <= 300
    assert tokenizer.eos_token == template.END_OF_TURN
    assert tokenizer.decode(tokenizer(other := "Qué? \t\n" + TEXT[1])["input_ids"]) == other
    for mark in template.SPECIAL_TOKENS:
        assert len(tokenizer(mark)["input_ids"]) == 1


def test_a_saved_tokenizer_is_loaded_from_its_folder_and_from_its_file(tokenizer: Any, tmp_path: Path) -> None:
    tokenization.save(tokenizer, tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = tokenization.load(str(name))
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded.eos_token == template.END_OF_TURN


def test_a_file_without_a_token_that_ends_a_text_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"a": 0})).save(str(path))
    with pytest.raises(UsageError, match="no token that ends a text is in it; name a folder"):
        tokenization.load(str(path))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], None),
        (["model.weights=/weights"], "/weights"),
        (["data.tokenizer=/tokenizer", "model.weights=/weights"], "/tokenizer"),
    ],
)
def test_the_tokenizer_that_is_named_precedes_the_one_beside_the_weights(
    overrides: list[str], expected: str | None
) -> None:
    assert tokenization.tokenizer_name(runs.config("sft-smollm-135m", *overrides)) == expected


def test_only_a_chat_gets_our_template(tokenizer: Any) -> None:
    assert tokenization.prepare(tokenizer, 300, chat=False).chat_template is None
    assert tokenization.prepare(tokenizer, 300, chat=True).chat_template == template.chat_template()


def test_a_chat_needs_the_marks_between_turns(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0, "</s>": 1})).save(str(tmp_path / "tokenizer.json"))
    plain = tokenization.load(str(tmp_path / "tokenizer.json"))
    assert tokenization.prepare(plain, 300, chat=False) is plain
    with pytest.raises(UsageError, match=r"the tokenizer lacks <\|im_start\|>, <\|im_end\|>, which separate the turns"):
        tokenization.prepare(plain, 300, chat=True)


def test_a_tokenizer_without_an_end_is_refused(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="ends a text with None; the model takes 300 tokens, and needs an end"):
        tokenization.prepare(tokenizer, 300, chat=False)
