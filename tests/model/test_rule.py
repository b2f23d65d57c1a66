from __future__ import annotations

import pytest

from seatrial.model.rule import Rule, Threshold


@pytest.mark.parametrize("text", ["> 350 GB/s", ">= 0.95", "== 0 elements", "< 180 s", "<= 1073741825 B", "> -3.25"])
def test_threshold_round_trip(text: str) -> None:
    threshold = Threshold.parse(text)
    assert str(threshold) == text
    assert Threshold.parse(str(threshold)) == threshold


def test_threshold_in_binary_units_is_stored_in_bytes() -> None:
    assert Threshold.parse(">= 1GiB") == Threshold(op=">=", value=2**30, unit="B")


@pytest.mark.parametrize("text", ["350", "=> 3", "> fast", "", "> 1e999"])
def test_invalid_threshold_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a threshold|finite"):
        Threshold.parse(text)


@pytest.mark.parametrize(
    ("text", "good", "bad"), [("> 5", 5.1, 5), (">= 5", 5, 4.9), ("< 5", 4.9, 5), ("<= 5", 5, 5.1), ("== 5", 5, 4)]
)
def test_is_met_by_compares_with_the_operator(text: str, good: float, bad: float) -> None:
    assert Threshold.parse(text).is_met_by(good)
    assert not Threshold.parse(text).is_met_by(bad)


@pytest.mark.parametrize(
    ("limits", "text"), [({}, ""), ({"min_nodes": 16}, "at least 16 nodes"), ({"max_nodes": 15}, "1 to 15 nodes")]
)
def test_numbers_of_nodes_as_text(limits: dict[str, int], text: str) -> None:
    assert Rule(metric="x", meaning="m", fix="f", **limits).nodes_text == text
