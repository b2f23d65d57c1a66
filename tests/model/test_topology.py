"""Switches between nodes."""

from __future__ import annotations

import pytest

from seatrial.model import Topology
from seatrial.model.topology import switch_path

TREE = {"n1": ("l1", "s1", "core"), "n2": ("l1", "s1", "core"), "n3": ("l2", "s1", "core"), "n4": ("l3", "s2", "core")}


@pytest.mark.parametrize(
    ("a", "b", "path"),
    [
        ("n1", "n1", ("l1",)),
        ("n1", "n2", ("l1",)),
        ("n1", "n3", ("l1", "s1", "l2")),
        ("n1", "n4", ("l1", "s1", "core", "s2", "l3")),
        ("n4", "n3", ("l3", "s2", "core", "s1", "l2")),
        ("n1", "x", ()),
    ],
)
def test_path(a: str, b: str, path: tuple[str, ...]) -> None:
    assert Topology(source="t", switches=TREE).path(a, b) == path


def test_switches_without_a_common_one_have_no_path() -> None:
    assert switch_path(("l1",), ("l2",)) == ()


def test_unknown_nodes() -> None:
    topology = Topology(source="t", switches=TREE, racks={"n1": "A"})
    assert (topology.leaf("x"), topology.rack("n2"), topology.rail_switch("n1", 0)) == ("", "", "")
    assert not topology.knows("x")
    assert topology.knows("n1.cluster.local")
