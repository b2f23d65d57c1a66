from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.host.nodes_connectivity import CHECK, compare_versions, read_versions
from seatrial.judge.rules import judge_check
from seatrial.model import Fact, Measurement, Metric, Outcome, Verdict
from tests.bench.cluster import ONE, THREE, TWO, Scenario, run
from tests.checks.host import nodes_driver
from tests.discover import trees

Runs = dict[str, list[Measurement]]
NAME = CHECK.name


def known(**how: Any) -> Scenario:
    """Nodes that know their own address, on an interface that says what it is."""
    return Scenario(NAME, **{**how, "faults": ("knows_itself", "jumbo_frames", *how.get("faults", ()))})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    out = tmp_path_factory.mktemp("connectivity")
    for rank in range(3):
        trees.node(out / f"root{rank}")
    trees.write(out / "root2", {"proc/sys/kernel/osrelease": "6.8.0-31-generic\n"})
    uneven = str(out / "root{rank}")
    scenarios = {
        "healthy": known(),
        "two_ranks_a_node": known(nodes=TWO),
        "one_node": known(nodes=ONE),
        "unknown_name": known(faults=("unknown_name",)),
        "unknown_and_unknowable": Scenario(NAME, faults=("unknown_name",)),
        "loopback_name": known(faults=("loopback_name",)),
        "silent_names": known(faults=("silent_names", "brief_patience")),
        "closed_port": known(faults=("closed_port",)),
        "impostor": known(faults=("impostor",)),
        "mute": known(faults=("mute",)),
        "no_port": known(faults=("no_port",)),
        "skewed_clock": known(faults=("skewed_clock",)),
        "skewed_and_deaf": known(nodes=("node0", "node1", "node1"), faults=("lost_clock", "first_is_deaf")),
        "small_frames_on_one": known(faults=("small_frames_on_one",)),
        "told_otherwise": known(faults=("told_otherwise",)),
        "other_kernel": known(root=uneven),
        "other_kernel_of_two": known(nodes=TWO, root=uneven),
    }
    return run(out, nodes_driver.__name__, scenarios)


def verdicts(measurements: list[Measurement]) -> list[Verdict]:
    return judge_check(CHECK, measurements, {}, "t")


def broken(measurements: list[Measurement]) -> dict[str, Outcome]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    return {found.metric: found.outcome for found in verdicts(measurements) if found.outcome is not Outcome.PASS}


def fact(measurements: list[Measurement], name: str) -> Any:
    return measurements[0].facts[name]


def values(measurements: list[Measurement], name: str) -> dict[str, float]:
    return {metric.subject: metric.value for metric in measurements[0].metrics if metric.name == name}


def offset(measurements: list[Measurement], node: str) -> float:
    return float(fact(measurements, "clocks")[node].split()[0])


@pytest.mark.parametrize("scenario", ["healthy", "two_ranks_a_node"])
def test_healthy_nodes_pass_every_rule(runs: Runs, scenario: str) -> None:
    assert broken(runs[scenario]) == {}
    assert {found.metric for found in verdicts(runs[scenario])} == {rule.metric for rule in CHECK.rules}
    assert max(measurement.seconds for measurement in runs[scenario]) < 8  # without waiting for anything in vain


def test_one_rank_speaks_and_every_metric_is_declared(runs: Runs) -> None:
    lead, *others = runs["healthy"]
    assert {metric.name: metric.unit for metric in lead.metrics} == CHECK.metrics
    assert [(other.metrics, other.facts) for other in others] == [((), {}), ((), {})]


def test_round_trips_are_those_of_all_ordered_pairs(runs: Runs) -> None:
    round_trips = fact(runs["healthy"], "rtt_us")
    assert {(source, target) for source, those in round_trips.items() for target in those} == {
        (source, target) for source in THREE for target in THREE if source != target
    }
    assert all(1 < us < 100_000 for those in round_trips.values() for us in those.values())
    assert set(values(runs["healthy"], "rtt")) == set(THREE)
    assert set(fact(runs["two_ranks_a_node"], "rtt_us")) == {"node0", "node1"}


def test_one_node_is_no_cluster(runs: Runs) -> None:
    assert {found.outcome for found in verdicts(runs["one_node"])} == {Outcome.SKIP}


def test_a_name_that_one_node_does_not_know_is_named_and_the_network_is_not_blamed(runs: Runs) -> None:
    assert broken(runs["unknown_name"]) == {"names_unresolved": Outcome.FAIL}
    assert fact(runs["unknown_name"], "unresolved") == {"node2": "Name or service not known (on node1)"}


def test_without_a_name_and_an_address_there_is_no_way(runs: Runs) -> None:
    found = runs["unknown_and_unknowable"]
    assert broken(found) == {
        "names_unresolved": Outcome.FAIL,
        "pairs_unreachable": Outcome.FAIL,
        "interfaces_unreadable": Outcome.WARN,
    }
    assert fact(found, "interfaces_unreadable") == list(THREE)
    assert list(fact(found, "unreachable")) == ["node1->node2"]
    assert "does not resolve" in fact(found, "unreachable")["node1->node2"]


def test_a_name_that_leads_to_loopback_counts_as_unresolved_everywhere(runs: Runs) -> None:
    assert broken(runs["loopback_name"]) == {"names_unresolved": Outcome.FAIL}
    ((name, why),) = fact(runs["loopback_name"], "unresolved").items()
    assert name == "node1"
    assert why == "resolves to 127.0.1.1, which no other node can reach (on node0, on node1, on node2)"


def test_a_name_service_that_is_silent_is_given_up(runs: Runs) -> None:
    assert values(runs["silent_names"], "names_unresolved") == {"cluster": 3}
    assert "not resolved within 0.2 s" in str(fact(runs["silent_names"], "unresolved"))
    assert values(runs["silent_names"], "pairs_unreachable") == {"cluster": 0}


@pytest.mark.parametrize(
    ("scenario", "how"),
    [
        ("closed_port", "Connection refused"),
        ("impostor", "something else answers"),
        ("mute", "connected, then: hung up"),
    ],
)
def test_a_node_that_cannot_be_reached_is_named_with_how_it_failed(runs: Runs, scenario: str, how: str) -> None:
    assert broken(runs[scenario]) == {"pairs_unreachable": Outcome.FAIL}
    unreachable = fact(runs[scenario], "unreachable")
    assert set(unreachable) == {"node0->node2", "node1->node2"}
    assert all(how in text for text in unreachable.values())
    assert set(values(runs[scenario], "clock_skew")) == {"node1", "node2"}  # node2 can still see the first one


def test_a_node_that_cannot_listen_is_an_error_on_all_ranks_and_no_hang(runs: Runs) -> None:
    errors = {measurement.error for measurement in runs["no_port"]}
    assert errors == {"Trouble: Address already in use (node1)"}


def test_a_clock_that_is_off_is_measured_and_named(runs: Runs) -> None:
    assert broken(runs["skewed_clock"]) == {"clock_skew": Outcome.WARN}
    skew = values(runs["skewed_clock"], "clock_skew")
    assert skew["node1"] == pytest.approx(nodes_driver.SKEW_S, abs=0.5)
    assert skew["node2"] < 0.05
    assert offset(runs["skewed_clock"], "node1") == pytest.approx(nodes_driver.SKEW_S, abs=0.5)


def test_a_clock_too_far_off_for_credentials_fails_seen_from_the_other_side_too(runs: Runs) -> None:
    found = runs["skewed_and_deaf"]
    assert [verdict.outcome for verdict in verdicts(found) if verdict.metric == "clock_skew"] == [
        Outcome.FAIL,
        Outcome.WARN,
    ]
    assert offset(found, "node1") == pytest.approx(-1000, abs=0.5)


def test_the_odd_node_out_is_named_by_majority(runs: Runs) -> None:
    found = runs["other_kernel"]
    assert broken(found) == {"versions_differing": Outcome.WARN, "nodes_differing": Outcome.FAIL}
    odd = {"node2": {"kernel": "6.8.0-31-generic, most have 5.15.0-105-generic"}}
    assert fact(found, "nodes_differing") == odd
    assert fact(found, "versions")["OS"] == "Ubuntu 22.04.4 LTS"


def test_two_nodes_cannot_outvote_each_other(runs: Runs) -> None:
    found = runs["other_kernel_of_two"]
    assert broken(found) == {"versions_differing": Outcome.WARN}
    both = {"kernel": {"5.15.0-105-generic": ["node0"], "6.8.0-31-generic": ["node1"]}}
    assert fact(found, "differing") == both
    (warning,) = (verdict for verdict in verdicts(found) if verdict.outcome is Outcome.WARN)
    assert "node1" in warning.evidence


def test_how_each_node_talks_is_on_record(runs: Runs) -> None:
    network = fact(runs["healthy"], "network")
    assert set(network) == set(THREE)
    assert {said["rendezvous"].partition(":")[0] for said in network.values()} == {"127.0.0.1"}
    assert {(said["MTU"], said["speed"]) for said in network.values()} == {("9000 B", "25000 Mb/s")}
    assert all(re.fullmatch(r"eth0 \([0-9.]+\)", said["interface"]) for said in network.values())


def test_frames_of_another_size_on_one_node_are_told_and_an_unknown_speed_is_none(runs: Runs) -> None:
    found = runs["small_frames_on_one"]
    assert broken(found) == {"network_differing": Outcome.WARN}
    assert fact(found, "network_differing") == {"MTU": {"9000 B": ["node0", "node2"], "1500 B": ["node1"]}}


def test_a_node_that_was_told_another_transport_is_named(runs: Runs) -> None:
    found = runs["told_otherwise"]
    assert broken(found) == {"network_differing": Outcome.WARN}
    assert fact(found, "network_differing") == {"NCCL_NET": {"not set": ["node0", "node1"], "Socket": ["node2"]}}
    (warning,) = (verdict for verdict in verdicts(found) if verdict.outcome is Outcome.WARN)
    assert "NCCL_NET" in warning.evidence


def test_a_component_that_one_node_lacks_is_a_difference() -> None:
    nodes: dict[str, dict[str, str | None]] = {name: {"driver": None if name == "c" else "570.1"} for name in "abcd"}
    seen = {seen.name: seen.value for seen in compare_versions(nodes) if isinstance(seen, Fact)}
    assert seen["differing"] == {"driver": {"570.1": ["a", "b", "d"], "none": ["c"]}}
    assert seen["nodes_differing"] == {"c": {"driver": "none, most have 570.1"}}


def test_half_is_no_majority() -> None:
    nodes: dict[str, dict[str, str | None]] = {name: {"torch": "2.1" if name in "ab" else "2.2"} for name in "abcd"}
    numbers = {seen.name: seen.value for seen in compare_versions(nodes) if isinstance(seen, Metric)}
    assert numbers == {"versions_differing": 1, "nodes_differing": 0}


def test_versions_are_read_from_this_machine(tmp_path: Path) -> None:
    trees.node(tmp_path)
    found = read_versions(tmp_path, nccl="2.27.3")
    assert (found["OS"], found["kernel"]) == ("Ubuntu 22.04.4 LTS", "5.15.0-105-generic")
    assert found["torch"]
    assert found["NCCL in use"] == "2.27.3"
    assert found["driver"] is None
