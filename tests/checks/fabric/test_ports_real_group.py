"""fabric.ports and fabric.rdma in a real process group, with fakes of perftest that connect to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.judge.coverage import RecordedPlan, coverage_errors
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Verdict
from tests.bench.cluster import ONE, THREE, TWO, Scenario, run
from tests.checks.fabric import ports_driver
from tests.discover import trees
from tests.fakes import perftest
from tests.judge.test_coverage import job

pytestmark = pytest.mark.training

Runs = dict[str, list[Measurement]]
PORTS, RDMA = "fabric.ports", "fabric.rdma"
DEVICES = ("mlx5_0", "mlx5_1")


def rdma(nodes: tuple[str, ...] = THREE, *, faults: tuple[str, ...], root: str = "ib", **options: Any) -> Scenario:
    options = {"transfer_limit_s": 15, **options}
    return Scenario(RDMA, nodes=nodes, options=options, faults=("known_address", *faults), root=root)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ports")
    for rank in range(3):
        trees.eight_mlx5(out / f"eight{rank}")
    trees.write(out / "eight1", {"sys/class/infiniband/mlx5_4/ports/1/rate": "200 Gb/sec (2X NDR)\n"})
    trees.node(out / "empty")
    trees.hca(out / "one", "mlx5_0", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    for index, device in enumerate(DEVICES):
        trees.hca(out / "ib", device, "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
        trees.hca(out / "roce", device, "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)", netdev=f"ens{index}")
        trees.roce_gids(out / "roce", device, trees.ROCE_GIDS)
    trees.write(out / "roce", {"sys/devices/system/node/node1/cpulist": "0\n"})
    perftest.install(out / "tools", devices=DEVICES, log=str(out / "log"))
    bad_ports: list[dict[str, Any]] = [{}, {"value": {"mlx5_1": 200.0}}, {"fail": ["mlx5_0"]}]
    for rank, bad in enumerate(bad_ports):
        perftest.install(out / f"bad{rank}", devices=DEVICES, **bad)
    for rank in range(3):
        perftest.install(out / f"hang{rank}", devices=DEVICES, hang=["mlx5_0"] if rank == 2 else [])
    for rank, version in enumerate(("6.06", "6.06", "5.60")):
        perftest.install(out / f"old{rank}", devices=DEVICES, version=version)
    for rank in (0, 1):  # not on the third node
        perftest.install(out / f"tools{rank}", devices=DEVICES)
    return out


@pytest.fixture(scope="module")
def runs(out: Path) -> Runs:
    one, ib, roce = (str(out / name) for name in ("one", "ib", "roce"))
    scenarios = {
        "ports": Scenario(PORTS, nodes=THREE, root=str(out / "eight{rank}")),
        "ports_one_node": Scenario(PORTS, nodes=ONE, root=str(out / "eight0")),
        "no_ports": Scenario(PORTS, nodes=THREE, root=str(out / "empty")),
        "gid_index": Scenario(PORTS, nodes=THREE, root=str(out / "eight0"), faults=("bad_gid_index",)),
        "healthy": rdma(TWO, faults=("tools",), root=roce),
        "bad_ports": rdma(faults=("bad",), root=ib),
        "hang": rdma(TWO, faults=("hang",), root=one, transfer_limit_s=1),
        "old_version": rdma(TWO, faults=("old",), root=one),
        "missing_on_one": rdma(faults=("tools_by_rank",), root=one),
        "missing_on_all": rdma(faults=(), root=ib),
        "one_node": rdma(ONE, faults=("tools",), root=ib),
        "rdma_no_ports": rdma(faults=("tools",), root=str(out / "empty")),
    }
    return run(out, ports_driver.__name__, scenarios)


def verdicts(measurements: list[Measurement], *outcomes: Outcome) -> list[Verdict]:
    """The verdicts with one of ``outcomes``; by default all that are neither PASS nor SKIP."""
    assert [measurement.error for measurement in measurements] == [None] * 3
    judged = judge_check(catalog()[measurements[0].check], measurements, {}, "t")
    wanted = outcomes or tuple(set(Outcome) - {Outcome.PASS, Outcome.SKIP})
    return [verdict for verdict in judged if verdict.outcome in wanted]


def places(measurements: list[Measurement]) -> dict[tuple[str, str], Outcome]:
    return {(verdict.metric, verdict.subject): verdict.outcome for verdict in verdicts(measurements)}


def test_ports_of_three_ranks(runs: Runs) -> None:
    failed = [(verdict.metric, verdict.subject) for verdict in verdicts(runs["ports"], Outcome.FAIL)]
    assert failed == [
        ("rate_vs_nodes", "node0/mlx5_7"),  # no cable on any node
        ("rate_vs_nodes", "node1/mlx5_4"),
        ("rate_vs_nodes", "node1/mlx5_7"),
        ("rate_vs_nodes", "node2/mlx5_7"),
    ]
    assert [len(list(measurement.facts["ports"])) for measurement in runs["ports"]] == [9, 9, 9]  # type: ignore[arg-type]
    assert "node0/mlx5_8" in dict(runs["ports"][0].facts["not_compute_ports"])  # type: ignore[arg-type]
    (failed_on_one,) = verdicts(runs["ports_one_node"], Outcome.FAIL)
    assert (failed_on_one.metric, failed_on_one.subject) == ("rate_vs_node_ports", "node0/mlx5_7")


def test_ports_without_rdma_and_with_a_setting_that_is_no_number(runs: Runs) -> None:
    assert all("no RDMA port" in str(measurement.skipped) for measurement in runs["no_ports"])
    expected = "NCCL_IB_GID_INDEX=three: expected an integer (node1)"
    assert all(expected in str(measurement.error) for measurement in runs["gid_index"])


def test_healthy_rails_pass(runs: Runs) -> None:
    assert places(runs["healthy"]) == {}
    judged = verdicts(runs["healthy"], Outcome.PASS)
    shares = {verdict.subject: verdict.value for verdict in judged if verdict.metric == "rate_share"}
    assert shares.keys() == {f"node{node}/{device}" for node in range(2) for device in DEVICES}
    assert all(share == pytest.approx(98.085) for share in shares.values())
    assert {verdict.subject for verdict in judged if verdict.metric == "failed_paths"} == {"node0->node1"}


def test_commands(out: Path, runs: Runs) -> None:
    assert runs["healthy"]
    calls = [json.loads(line) for line in (out / "log").read_text().splitlines()]
    bandwidth = [call for call in calls if "-s" in call]
    latency = [call for call in calls if call[0] == "ib_write_lat"]
    assert (len(bandwidth), len(latency)) == (8, 4)  # one pair of nodes, 2 rails, 2 sides; bandwidth in both directions
    common = ["-d", bandwidth[0][2], "-i", "1", "-F", "-x", "3"]
    size = ["-s", "1048576", "-q", "4", "--report_gbits", "-n", "5960"]
    assert bandwidth[0][1 : 1 + len(common + size)] == common + size
    assert latency[0][3:10] == ["-i", "1", "-F", "-x", "3", "-n", "1000"]
    assert {tuple(call[-1]) for call in bandwidth} == {(0,)}  # the CPU of the NUMA node


def test_a_slow_port_and_one_whose_verbs_fail_are_located(runs: Runs) -> None:
    failed = {(verdict.metric, verdict.subject) for verdict in verdicts(runs["bad_ports"], Outcome.FAIL)}
    assert failed == {
        ("rate_share", "node1/mlx5_1"),
        ("bw_vs_peers", "node1/mlx5_1"),
        ("rate_share", "node2/mlx5_0"),
        ("bw_vs_peers", "node2/mlx5_0"),
        ("failed_paths", "node0->node2"),
        ("failed_paths", "node1->node2"),
    }
    evidence = {verdict.evidence for verdict in verdicts(runs["bad_ports"]) if verdict.metric == "failed_paths"}
    assert all("node2: Failed status 4: wr_id 0 syndrom 0x51" in text for text in evidence)


def test_perftest_that_hangs_is_an_error_that_names_the_nodes(runs: Runs) -> None:
    found = verdicts(runs["hang"], Outcome.ERROR)
    (paths,) = [verdict for verdict in found if verdict.metric == "paths_not_measured"]
    assert paths.subject == "node0->node1"
    assert "node0/mlx5_0->node1/mlx5_0" in paths.evidence
    assert "did not end within 1 s" in paths.evidence
    assert {verdict.metric for verdict in found} == {"paths_not_measured", "rate_share", "write_latency"}


def test_another_version_is_named(runs: Runs) -> None:
    outcomes = places(runs["old_version"])
    assert outcomes["perftest_versions", "cluster"] is Outcome.WARN
    evidence = {metric.name: metric.evidence for metric in runs["old_version"][0].metrics}
    assert evidence["perftest_versions"] == {"perftest_versions": {"node0": "6.06", "node1": "5.60"}}
    reasons = evidence["paths_not_measured"]["paths_not_measured"].values()  # type: ignore[index,union-attr,call-overload]
    assert len(reasons) == 3
    assert all("not compatible with versions older" in str(reason) for reason in reasons)


def test_a_node_without_perftest_is_an_error_that_names_it(runs: Runs) -> None:
    assert places(runs["missing_on_one"]) == {("nodes_not_measured", "cluster"): Outcome.ERROR}
    (verdict,) = verdicts(runs["missing_on_one"])
    assert "node2" in verdict.evidence
    assert "ib_write_bw" in verdict.evidence


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [("missing_on_all", "not installed on any node"), ("one_node", "one node"), ("rdma_no_ports", "no RDMA port")],
)
def test_the_check_is_skipped_where_it_cannot_apply(runs: Runs, scenario: str, reason: str) -> None:
    assert all(reason in str(measurement.skipped) for measurement in runs[scenario])


@pytest.mark.parametrize(("scenario", "name"), [("ports", PORTS), ("bad_ports", RDMA), ("no_ports", PORTS)])
def test_the_record_agrees_with_its_plan(runs: Runs, scenario: str, name: str) -> None:
    config = Config.model_validate({"name": "t", "launcher": "local", "cluster": {"nodes": 3}, "checks": {name: {}}})
    planned = job("ranks", 3, 1, name).model_copy(update={"expected_nodes": 3})
    plan = RecordedPlan(config, (planned,), {name: runs[scenario]})
    assert list(coverage_errors(catalog()[name], plan, runs[scenario])) == []
