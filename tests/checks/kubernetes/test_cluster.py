"""Comparison of nodes with each other."""

from __future__ import annotations

import pytest

from seatrial.checks.kubernetes._cluster import missing_names, nodes_differing


@pytest.mark.parametrize(
    ("values", "different"),
    [
        ("a", {}),
        ("aa", {}),
        ("ab", {0: "b", 1: "a"}),
        ("aab", {2: "a"}),
        ("abc", {}),  # no value of most others
        ("aaab", {3: "a"}),
        ("aabb", {0: "b", 1: "b", 2: "a", 3: "a"}),
        ("aaaabbc", {4: "a", 5: "a", 6: "a"}),
    ],
)
def test_nodes_differing(values: str, different: dict[int, str]) -> None:
    assert nodes_differing({str(index): value for index, value in enumerate(values)}) == {
        str(key): different[key] for key in different
    }


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["xy"], {}),
        (["xy", "x"], {1: ["y"]}),
        (["x", "y"], {0: ["y"], 1: ["x"]}),
        (["xy", "xy", ""], {2: ["x", "y"]}),
        (["x", "", ""], {}),
    ],
)
def test_missing_names(names: list[str], missing: dict[int, list[str]]) -> None:
    result = missing_names({str(index): set(text) for index, text in enumerate(names)})
    assert result == {str(key): missing[key] for key in missing}
