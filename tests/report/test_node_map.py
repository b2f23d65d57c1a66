"""The map of nodes by switch and rack, and the switches of slow paths."""

from __future__ import annotations

from dataclasses import replace

from seatrial.model import Outcome
from seatrial.report import html_page
from seatrial.report.node_map import node_groups
from seatrial.report.parts import parts
from tests.report import samples


def test_nodes_are_grouped_by_switch_and_rack() -> None:
    groups = node_groups(samples.four_nodes())
    assert {group.name: [node.name for node in group.nodes] for group in groups} == {
        "switch leaf1, rack A": ["n1", "n2"],
        "switch leaf2, rack B": ["n3", "n4"],
    }
    assert [group.name for group in node_groups(samples.rejected())] == [""]


def test_parts_on_a_slow_path_have_their_switches() -> None:
    identities = {part.name: part.identity for part in parts(samples.four_nodes())}
    assert identities["n1->n3"] == "leaf1 – spine – leaf2 (crosses spine)"
    assert identities["n2/gpu5"].endswith("rail 5: leaf1-rail5")
    assert not any("leaf" in part.identity for part in parts(samples.rejected()))


def test_a_node_outside_the_topology_is_shown_as_such() -> None:
    trial = samples.four_nodes()
    jobs = tuple(
        job.model_copy(update={"topology": job.topology.model_copy(update={"switches": {}, "racks": {"n1": "A"}})})
        for job in trial.jobs
        if job.topology
    )
    names = [group.name for group in node_groups(trial.model_copy(update={"jobs": jobs}))]
    assert names == ["rack A", "not in the topology"]


def test_html_has_both() -> None:
    page = html_page.render(samples.four_nodes())
    assert "<h3>switch leaf1, rack A</h3>" in page
    assert "crosses spine" in page


def test_the_map_shows_the_worst_outcome_of_nodes_and_devices() -> None:
    (group,) = node_groups(samples.large_cluster())
    nodes = {node.name: node for node in group.nodes}
    assert len(nodes) == 64
    assert list(nodes)[:2] == ["node01", "node02"]
    devices = nodes["node17"].devices
    assert (len(devices), devices["5"], devices["4"]) == (8, Outcome.FAIL, Outcome.PASS)
    assert nodes["node41"].outcome is Outcome.WARN
    assert nodes["node51"].devices["7"] is Outcome.ERROR


def test_the_map_of_many_nodes_shows_the_bad_ones() -> None:
    trial = samples.large_cluster()
    renamed = [replace(v, subject=f"x{v.subject}") for v in trial.verdicts if v.subject.startswith("node0")]
    (group,) = node_groups(trial.model_copy(update={"verdicts": (*trial.verdicts, *renamed)}))
    assert "node17" in {node.name for node in group.nodes}
    assert "xnode01" not in {node.name for node in group.nodes}
    assert group.rest == f"{64 + 9 - len(group.nodes)} nodes without a problem"
