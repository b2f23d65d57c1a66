from __future__ import annotations

import pytest

from seatrial.config.strict_yaml import MAX_LEVELS, parse_yaml
from seatrial.model import UsageError


def test_plain_yaml_is_parsed() -> None:
    assert parse_yaml("a: {b: [1, 2.5, true, null, text]}", "mine.yaml") == {"a": {"b": [1, 2.5, True, None, "text"]}}


@pytest.mark.parametrize(
    ("text", "position", "hint"),
    [
        ("checks:\n\thost.inventory:\n", "line 2, column 1", "indent with spaces"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1", "duplicate key 'a', also in line 1"),
        ("a: \x01", "character 4", "not allowed"),
        ("a: [1,\nb: 2\n", "line 3, column 1", "line 1"),
    ],
)
def test_error_names_the_line_once(text: str, position: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_yaml(text, "mine.yaml")
    assert f": {position}" in str(error.value)
    assert hint in str(error.value)
    assert "<unicode string>" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2", "'a'"),
        ("1: a", "key '1' is not a string"),
        ("on: a", "key 'on' is not a string"),
        ("<<: {a: 1}", "merge key '<<'"),
        ("? [a]\n: 1", "a list or mapping"),
        ("a: &x 1\nb: *x", "anchors and aliases"),
        ("a: *x", "anchors and aliases"),
        ("[" * (MAX_LEVELS + 1) + "]" * (MAX_LEVELS + 1), f"deeper than {MAX_LEVELS} levels"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: 2026-13-45", "month must be in 1..12"),
        ("a: [1", "expected"),
    ],
)
def test_unsafe_yaml_is_refused_with_its_source(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=r"^mine.yaml: not valid YAML: ") as error:
        parse_yaml(text, "mine.yaml")
    assert problem in str(error.value)
