from __future__ import annotations

from typing import Any

import pytest

from seatrial.model import Outcome
from seatrial.model.rule import BOUND, OPPOSITE, PEERS, REFERENCE, Condition, Limit, Threshold


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
    ("text", "op", "value", "unit", "base"),
    [
        ("== 0 errors", "==", 0, "errors", ""),
        ("<= 1e-5 ratio", "<=", 1e-5, "ratio", ""),
        (">= 1GiB", ">=", 2**30, "B", ""),
        ("yes", "==", 1, "bool", ""),
        ("no", "==", 0, "bool", ""),
        (">= 0.90 reference", ">=", 0.9, "", REFERENCE),
        (">= 0.85 peers", ">=", 0.85, "", PEERS),
        (">= 0.05 bound", ">=", 0.05, "", BOUND),
        (">= 0.95 opposite", ">=", 0.95, "", OPPOSITE),
        ("> 0.75 h2d_single / gpus", ">", 0.75, "", "h2d_single / gpus"),
    ],
)
@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.WARN, Outcome.ERROR])
def test_text_of_a_limit(text: str, op: str, value: float, unit: str, base: str, outcome: Any) -> None:
    limit = Limit.of(text, outcome)
    assert (limit.op, limit.value, limit.unit, limit.base, limit.outcome) == (op, value, unit, base, outcome)
    assert limit.single_metric == ("h2d_single" if "/" in base else "")


@pytest.mark.parametrize("text", ["", "about 5", "0.90 reference", "recorded"])
def test_text_that_is_no_limit(text: str) -> None:
    with pytest.raises(ValueError, match="not a threshold"):
        Limit.of(text, Outcome.FAIL)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {}),
        ("device == cuda", {"facts": {"device": "cuda"}}),
        ("data == run directory", {"facts": {"data": "run directory"}}),
        ("nodes >= 16", {"min_nodes": 16}),
        ("nodes < 16", {"max_nodes": 15}),
        ("sizes is the default", {"default_options": ("sizes",)}),
        (
            "device == cuda and load == bf16 and nodes >= 2 and nodes < 16 and sizes is the default",
            {
                "facts": {"device": "cuda", "load": "bf16"},
                "min_nodes": 2,
                "max_nodes": 15,
                "default_options": ("sizes",),
            },
        ),
    ],
)
def test_condition_round_trip(text: str, fields: dict[str, Any]) -> None:
    condition = Condition.of(text)
    assert condition == Condition(**fields)
    assert str(condition) == text
    assert Condition.of(str(condition)) == condition


@pytest.mark.parametrize("text", ["device is cuda", "nodes > 2", "device == cuda and ", "nodes >= many", "device ="])
def test_text_that_is_no_condition(text: str) -> None:
    with pytest.raises(ValueError, match="is no condition"):
        Condition.of(text)


@pytest.mark.parametrize(("nodes", "included"), [(1, False), (2, True), (15, True), (16, False), (None, True)])
def test_condition_includes_numbers_of_nodes(nodes: int | None, included: bool) -> None:
    assert Condition.of("nodes >= 2 and nodes < 16").includes(nodes) is included
