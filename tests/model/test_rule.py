from __future__ import annotations

import pytest

from seatrial.model.rule import Threshold


@pytest.mark.parametrize("text", ["> 350 GB/s", ">= 0.95", "== 0 elements", "< 180 s", "<= 1073741825 B", "> -3.25"])
def test_a_limit_reads_back_as_itself(text: str) -> None:
    limit = Threshold.parse(text)
    assert str(limit) == text
    assert Threshold.parse(str(limit)) == limit


def test_a_limit_in_bytes_is_kept_in_bytes() -> None:
    assert Threshold.parse(">= 1GiB") == Threshold(op=">=", value=2**30, unit="B")


@pytest.mark.parametrize("text", ["350", "=> 3", "> fast", "", "> 1e999"])
def test_a_limit_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a threshold|finite"):
        Threshold.parse(text)


@pytest.mark.parametrize(
    ("text", "good", "bad"), [("> 5", 5.1, 5), (">= 5", 5, 4.9), ("< 5", 4.9, 5), ("<= 5", 5, 5.1), ("== 5", 5, 4)]
)
def test_limits_hold_on_the_right_side(text: str, good: float, bad: float) -> None:
    assert Threshold.parse(text).is_met_by(good)
    assert not Threshold.parse(text).is_met_by(bad)
