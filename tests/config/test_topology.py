"""Topologies: a file of racks, switches and rails, and Slurm's formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.config import topology
from seatrial.model import Topology, UsageError
from tests.paths import FIXTURES

FOLDER = FIXTURES / "topology"
OWN = """
switches:
  leaf1: {nodes: "n[1-4]", rails: "leaf1-rail[0-7]"}
  leaf2: {nodes: "n[5-8]"}
  spine: {switches: "leaf[1-2]"}
racks: {A: "n[1-2]", B: "n[3-8]"}
"""


def read(tmp_path: Path, text: str, name: str = "topology.yaml") -> Topology:
    path = tmp_path / name
    path.write_text(text)
    return topology.read_file(str(path))


def test_own_format(tmp_path: Path) -> None:
    read_topology = read(tmp_path, OWN)
    assert read_topology.switches_above("n1") == ("leaf1", "spine")
    assert (read_topology.leaf("n5"), read_topology.rack("n3")) == ("leaf2", "B")
    assert (read_topology.rail_switch("n2", 5), read_topology.rail_switch("n5", 5)) == ("leaf1-rail5", "")
    assert read_topology.nodes == {f"n{number}" for number in range(1, 9)}


def test_path_between_nodes(tmp_path: Path) -> None:
    read_topology = read(tmp_path, OWN)
    assert read_topology.path("n1", "n2") == ("leaf1",)
    assert read_topology.path("n1", "n5") == ("leaf1", "spine", "leaf2")
    assert read_topology.path("n1.cluster.local", "n5") == ("leaf1", "spine", "leaf2")  # a host name with its domain
    assert read_topology.path("n1", "unknown") == ()


def test_racks_without_switches_are_groups(tmp_path: Path) -> None:
    read_topology = read(tmp_path, 'racks: {A: "n[1-2]", B: n3}')
    assert [read_topology.leaf(node) for node in ("n1", "n3")] == ["A", "B"]
    assert read_topology.path("n1", "n3") == ()


@pytest.mark.parametrize("name", ["show-tree.txt", "tree.conf"])
def test_tree_of_slurm(name: str) -> None:
    """scontrol lists the nodes below the spine at the spine, too."""
    parsed = topology.parse_conf((FOLDER / name).read_text(), name)
    assert parsed.switches == {f"node{number}": (f"leaf{number // 2}", "spine") for number in range(4)}


def test_blocks_of_slurm() -> None:
    parsed = topology.parse_conf((FOLDER / "show-block.txt").read_text(), "scontrol")
    assert parsed.switches == topology.read_file(str(FOLDER / "block.yaml")).switches
    assert (len(parsed.nodes), parsed.leaf("node0018"), parsed.leaf("node0019")) == (36, "block01", "block02")


def test_aggregated_blocks_are_above_their_blocks() -> None:
    parsed = topology.parse_conf((FOLDER / "show-aggregated.txt").read_text(), "scontrol")
    assert parsed.path("10.140.71.103", "10.140.79.152") == ("gb300_b0", "gb300_b[0-1]", "gb300_b1")


def test_examples_of_the_manual_pages(tmp_path: Path) -> None:
    assert topology.read_file(str(FOLDER / "manual.conf")).path("dev0", "dev17") == ("s0", "s3", "s2")
    default = (FOLDER / "manual.yaml").read_text()
    assert read(tmp_path, default).nodes == {f"node0{number}" for number in range(1, 5)}
    assert len(read(tmp_path, default.replace("True", "False", 1).replace("tree:", "x:")).nodes) == 16


def test_a_switch_may_have_two_switches_above(tmp_path: Path) -> None:
    text = (
        "SwitchName=l0 Nodes=a\nSwitchName=l1 Nodes=b\nSwitchName=s0 Switches=l[0-1]\nSwitchName=s1 Switches=l[0-1]\n"
    )
    assert read(tmp_path, text, "topology.conf").path("a", "b") == ("l0", "s0", "l1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("switches: {a: {nodes: n1}, b: {nodes: 'n[1-2]'}}", "node n1 is on two leaf switches, a and b"),
        ("switches: {a: {nodes: n1, switches: b}, b: {switches: a}}", "the switches form a cycle: a → b → a"),
        ("switches: {a: {nodes: n1, switches: a}}", "the switches form a cycle: a → a"),
        ("switches: {a: {nodes: n1, switches: b}}", "switch a is above b, which is no switch"),
        ("racks: {A: n1, B: n1}", "node n1 is in two racks, A and B"),
        ("{switches: {a: {nodes: n1}}, racks: {A: 'n[1-2]'}}", "no switch for n2, which a rack contains"),
        ("switches: {a: {nodes: 'n[1-'}}", "is not a list of hosts"),
        ("switches: {a: {node: n1}}", "node"),
        ("switches: {a: {}}", "no node"),
        ("{}", "no node"),
        ("- {topology: t, flat: true}", "no topology with the key tree or block"),
        ("- {topology: t, tree: {switches: [{nodes: n1}]}}", "expected a list of entries with the key switch"),
        ("- {topology: t, tree: [1]}", "expected a list of entries with the key switch"),
        ("[", "not valid YAML"),
    ],
)
def test_invalid_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read(tmp_path, text)
    assert "topology.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "two switches are named a"),
        ("SwitchName=a Nodes=n1\nNodes=n2", "line 2: 'Nodes=n2'"),
        ("RingName=r Nodes=n[1-8]", "line 1: 'RingName=r"),
        ("# nothing", "no node"),
        ("hello", "line 1: 'hello'"),
    ],
)
def test_invalid_conf(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text, "topology.conf")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match="cannot read the topology /nowhere: No such file"):
        topology.read_file("/nowhere")
