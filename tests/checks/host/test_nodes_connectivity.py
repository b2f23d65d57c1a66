from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.declare import Value
from seatrial.checks.host.nodes_connectivity import CHECK, compare_versions, read_versions
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Verdict
from seatrial.util.resolver import RESOLVE_TIMEOUT_S
from tests.bench.cluster import ONE, THREE, TWO, Scenario, run
from tests.checks.host import nodes_driver
from tests.discover import trees

Runs = dict[str, list[Measurement]]
NAME = CHECK.name


def routable(**options: Any) -> Scenario:
    """Return a scenario whose nodes have a routable address on an interface with MTU and speed."""
    return Scenario(NAME, **{**options, "faults": ("known_local_address", "mtu_9000", *options.get("faults", ()))})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    out = tmp_path_factory.mktemp("connectivity")
    for rank in range(3):
        trees.node(out / f"root{rank}")
    trees.write(out / "root2", {"proc/sys/kernel/osrelease": "6.8.0-31-generic\n"})
    different_roots = str(out / "root{rank}")
    scenarios = {
        "healthy": routable(),
        "two_ranks_a_node": routable(nodes=TWO),
        "one_node": routable(nodes=ONE),
        "unknown_name": routable(faults=("unknown_name",)),
        "unknown_name_and_address": Scenario(NAME, faults=("unknown_name",)),
        "pods": routable(faults=("in_pods", "cluster_dns")),
        "unknown_pod": routable(faults=("in_pods", "cluster_dns", "unknown_name")),
        "loopback_name": routable(faults=("loopback_name",)),
        "resolver_hangs": routable(faults=("resolver_hangs", "short_resolve_timeout")),
        "closed_port": routable(faults=("closed_port",)),
        "wrong_token": routable(faults=("wrong_token",)),
        "no_answer": routable(faults=("no_answer",)),
        "no_port": routable(faults=("no_port",)),
        "skewed_clock": routable(faults=("skewed_clock",)),
        "skewed_clock_and_closed_port": routable(
            nodes=("node0", "node1", "node1"), faults=("clock_1000_s_behind", "closed_port_on_first")
        ),
        "mtu_1500_on_one": routable(faults=("mtu_1500_on_one",)),
        "other_nccl_variables": routable(faults=("other_nccl_variables",)),
        "other_kernel": routable(root=different_roots),
        "other_kernel_of_two": routable(nodes=TWO, root=different_roots),
    }
    return run(out, nodes_driver.__name__, scenarios)


def verdicts(measurements: list[Measurement]) -> list[Verdict]:
    return judge_check(CHECK, measurements, {}, "t")


def not_passed(measurements: list[Measurement]) -> dict[str, Outcome]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    return {
        verdict.metric: verdict.outcome for verdict in verdicts(measurements) if verdict.outcome is not Outcome.PASS
    }


def fact(measurements: list[Measurement], name: str) -> Any:
    return measurements[0].facts[name]


def evidence(measurements: list[Measurement], name: str) -> Any:
    (evidence,) = (metric.evidence for metric in measurements[0].metrics if metric.name == name)
    return evidence


def values(measurements: list[Measurement], name: str) -> dict[str, float]:
    return {metric.subject: metric.value for metric in measurements[0].metrics if metric.name == name}


def offset(measurements: list[Measurement], node: str) -> float:
    (text,) = (each.evidence for each in measurements[0].metrics if (each.name, each.subject) == ("clock_skew", node))
    return float(str(text).split()[0])


@pytest.mark.parametrize("scenario", ["healthy", "two_ranks_a_node"])
def test_healthy_nodes(runs: Runs, scenario: str) -> None:
    assert not_passed(runs[scenario]) == {}
    assert {verdict.metric for verdict in verdicts(runs[scenario])} == {rule.metric for rule in CHECK.rules}
    assert max(measurement.seconds for measurement in runs[scenario]) < RESOLVE_TIMEOUT_S, "no step ran into a timeout"


def test_rank_0_reports_all_declared_metrics(runs: Runs) -> None:
    first_rank, *others = runs["healthy"]
    assert {metric.name: metric.unit for metric in first_rank.metrics} == CHECK.units
    assert [(other.metrics, other.facts) for other in others] == [((), {}), ((), {})]


def test_round_trips_of_all_ordered_pairs(runs: Runs) -> None:
    round_trips = fact(runs["healthy"], "rtt_us")
    assert {(source, target) for source, by_target in round_trips.items() for target in by_target} == {
        (source, target) for source in THREE for target in THREE if source != target
    }
    assert all(1 < us < 100_000 for by_target in round_trips.values() for us in by_target.values())
    assert set(values(runs["healthy"], "rtt")) == set(THREE)
    assert set(fact(runs["two_ranks_a_node"], "rtt_us")) == {"node0", "node1"}


def test_one_node_is_skipped(runs: Runs) -> None:
    assert {verdict.outcome for verdict in verdicts(runs["one_node"])} == {Outcome.SKIP}


def test_unresolved_name_on_one_node(runs: Runs) -> None:
    assert not_passed(runs["unknown_name"]) == {"names_unresolved": Outcome.FAIL}
    assert evidence(runs["unknown_name"], "names_unresolved")["unresolved"] == {
        "node2": "Name or service not known (on node1)"
    }


def test_pods_resolve_the_names_of_pods(runs: Runs) -> None:
    """Cluster DNS has no names of nodes; the subjects remain the nodes."""
    assert not_passed(runs["pods"]) == {}
    assert set(values(runs["pods"], "rtt")) == set(THREE)
    assert not_passed(runs["unknown_pod"]) == {"names_unresolved": Outcome.FAIL}
    assert evidence(runs["unknown_pod"], "names_unresolved")["unresolved"] == {
        "job-2.job": "Name or service not known (on node1)"
    }
    assert fact(runs["unknown_pod"], "fault_places")["names_unresolved"] == {"node1": ["job-2.job"]}


def test_no_name_and_no_address(runs: Runs) -> None:
    measurements = runs["unknown_name_and_address"]
    assert not_passed(measurements) == {
        "names_unresolved": Outcome.FAIL,
        "pairs_unreachable": Outcome.FAIL,
        "interfaces_unreadable": Outcome.WARN,
    }
    assert evidence(measurements, "interfaces_unreadable") == list(THREE)
    assert list(evidence(measurements, "pairs_unreachable")["unreachable"]) == ["node1->node2"]


def test_loopback_name_is_unresolved(runs: Runs) -> None:
    assert not_passed(runs["loopback_name"]) == {"names_unresolved": Outcome.FAIL}
    ((name, reason),) = evidence(runs["loopback_name"], "names_unresolved")["unresolved"].items()
    assert name == "node1"
    assert "127.0.1.1" in reason
    assert "(on node0, on node1, on node2)" in reason


def test_resolver_timeout(runs: Runs) -> None:
    assert values(runs["resolver_hangs"], "names_unresolved") == {"cluster": 3}
    assert "0.2 s" in str(evidence(runs["resolver_hangs"], "names_unresolved")["unresolved"])
    assert values(runs["resolver_hangs"], "pairs_unreachable") == {"cluster": 0}


@pytest.mark.parametrize("scenario", ["closed_port", "wrong_token", "no_answer"])
def test_unreachable_node(runs: Runs, scenario: str) -> None:
    assert not_passed(runs[scenario]) == {"pairs_unreachable": Outcome.FAIL}
    unreachable = evidence(runs[scenario], "pairs_unreachable")["unreachable"]
    assert set(unreachable) == {"node0->node2", "node1->node2"}
    assert all(unreachable.values())
    assert set(values(runs[scenario], "clock_skew")) == {"node1", "node2"}  # node2 can connect to the first node


def test_failed_listen_is_an_error_on_all_ranks(runs: Runs) -> None:
    errors = {measurement.error for measurement in runs["no_port"]}
    assert errors == {"ParticipantError: Address already in use (node1)"}


def test_clock_skew(runs: Runs) -> None:
    assert not_passed(runs["skewed_clock"]) == {"clock_skew": Outcome.WARN}
    skew = values(runs["skewed_clock"], "clock_skew")
    assert skew["node1"] == pytest.approx(nodes_driver.SKEW_S, abs=0.5)
    assert skew["node2"] < 0.05
    assert offset(runs["skewed_clock"], "node1") == pytest.approx(nodes_driver.SKEW_S, abs=0.5)


@pytest.mark.parametrize("lost", ["node1", "node2"])
def test_a_node_without_a_clock_skew_is_an_error(runs: Runs, lost: str) -> None:
    first, *others = runs["healthy"]
    kept = tuple(each for each in first.metrics if (each.name, each.subject) != ("clock_skew", lost))
    assert not_passed([first.model_copy(update={"metrics": kept}), *others]) == {"clock_skew": Outcome.ERROR}


def test_large_clock_skew_measured_from_the_other_node(runs: Runs) -> None:
    measurements = runs["skewed_clock_and_closed_port"]
    assert [verdict.outcome for verdict in verdicts(measurements) if verdict.metric == "clock_skew"] == [
        Outcome.FAIL,
        Outcome.WARN,
    ]
    assert offset(measurements, "node1") == pytest.approx(-1000, abs=0.5)


def test_minority_version(runs: Runs) -> None:
    measurements = runs["other_kernel"]
    assert not_passed(measurements) == {"versions_differing": Outcome.WARN, "nodes_differing": Outcome.FAIL}
    assert fact(measurements, "nodes_differing") == {
        "node2": {"kernel": "6.8.0-31-generic, majority: 5.15.0-105-generic"}
    }
    assert fact(measurements, "versions")["OS"] == "Ubuntu 22.04.4 LTS"


def test_two_nodes_have_no_majority(runs: Runs) -> None:
    measurements = runs["other_kernel_of_two"]
    assert not_passed(measurements) == {"versions_differing": Outcome.WARN}
    both = {"kernel": {"5.15.0-105-generic": ["node0"], "6.8.0-31-generic": ["node1"]}}
    assert evidence(measurements, "versions_differing")["version_differences"] == both
    (warning,) = (verdict for verdict in verdicts(measurements) if verdict.outcome is Outcome.WARN)
    assert "node1" in warning.evidence


def test_network_facts(runs: Runs) -> None:
    networks = fact(runs["healthy"], "network")
    assert set(networks) == set(THREE)
    assert {network["rendezvous"].partition(":")[0] for network in networks.values()} == {"127.0.0.1"}
    assert {(network["MTU"], network["speed"]) for network in networks.values()} == {("9000 B", "25000 Mb/s")}
    assert all(re.fullmatch(r"eth0 \([0-9.]+\)", network["interface"]) for network in networks.values())


def test_other_mtu_on_one_node(runs: Runs) -> None:
    measurements = runs["mtu_1500_on_one"]
    assert not_passed(measurements) == {"network_differing": Outcome.WARN}
    assert evidence(measurements, "network_differing")["network_differing"] == {
        "MTU": {"9000 B": ["node0", "node2"], "1500 B": ["node1"]}
    }


def test_other_nccl_variable_on_one_node(runs: Runs) -> None:
    measurements = runs["other_nccl_variables"]
    assert not_passed(measurements) == {"network_differing": Outcome.WARN}
    assert evidence(measurements, "network_differing")["network_differing"] == {
        "NCCL_NET": {"not set": ["node0", "node1"], "Socket": ["node2"]}
    }
    (warning,) = (verdict for verdict in verdicts(measurements) if verdict.outcome is Outcome.WARN)
    assert "NCCL_NET" in warning.evidence


def test_missing_component_is_a_difference() -> None:
    nodes: dict[str, dict[str, str | None]] = {name: {"driver": None if name == "c" else "570.1"} for name in "abcd"}
    values = {answer.name: answer.evidence for answer in compare_versions(nodes) if isinstance(answer, Value)}
    assert values["versions_differing"] == {
        "version_differences": {"driver": {"570.1": ["a", "b", "d"], "none": ["c"]}}
    }
    assert values["nodes_differing"] == {"nodes_differing": {"c": {"driver": "none, majority: 570.1"}}}


def test_half_is_not_a_majority() -> None:
    nodes: dict[str, dict[str, str | None]] = {name: {"torch": "2.1" if name in "ab" else "2.2"} for name in "abcd"}
    values = {answer.name: answer.value for answer in compare_versions(nodes) if isinstance(answer, Value)}
    assert values == {"versions_differing": 1, "nodes_differing": 0}


def test_read_versions(tmp_path: Path) -> None:
    trees.node(tmp_path)
    versions = read_versions(tmp_path, nccl="2.27.3")
    assert (versions["OS"], versions["kernel"]) == ("Ubuntu 22.04.4 LTS", "5.15.0-105-generic")
    assert versions["torch"]
    assert versions["NCCL in use"] == "2.27.3"
    assert versions["driver"] is None
