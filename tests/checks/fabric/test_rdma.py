"""Rules, tools and usable ports of fabric.rdma; real programs: test_ports_real_group.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.check import Context
from seatrial.checks.fabric import rdma
from seatrial.checks.fabric._compute_ports import NodePorts
from seatrial.checks.fabric._rdma_runs import RdmaOptions
from seatrial.checks.fabric.rdma import (
    CHECK,
    NodeTools,
    compare_nodes,
    gpu_memory_options,
    read_tools,
    usable_ports,
)
from seatrial.model import Fact, NotApplicable, Outcome
from tests.checks.fabric.port_details import down, eight, port, roce
from tests.checks.fabric.verdicts import outcomes, verdicts
from tests.discover import trees
from tests.fakes import perftest

GOOD = {
    "rate_share node0/mlx5_0": 98.0,
    "bw_vs_peers node0/mlx5_0": 1.0,
    "write_latency node0/mlx5_0": 1.3,
    "latency_vs_peers node0/mlx5_0": 1.0,
    "path_share node0->node1": 1.0,
    "failed_paths node0->node1": 0,
    "paths_not_measured node0->node1": 0,
    "nodes_not_measured": 0,
    "perftest_versions": 1,
}
FACTS = {"ports_used": {"node0": ["mlx5_0"]}, "architecture": "x86_64"}
TOOLS = NodeTools("6.06")


@pytest.mark.parametrize(
    ("metric", "value", "outcome"),
    [
        ("rate_share node0/mlx5_0", 94.0, Outcome.WARN),
        ("bw_vs_peers node0/mlx5_0", 0.89, Outcome.FAIL),
        ("write_latency node0/mlx5_0", 5.1, Outcome.WARN),
        ("latency_vs_peers node0/mlx5_0", 1.6, Outcome.WARN),
        ("path_share node0->node1", 0.89, Outcome.WARN),
        ("failed_paths node0->node1", 1, Outcome.FAIL),
        ("paths_not_measured node0->node1", 1, Outcome.ERROR),
        ("nodes_not_measured", 1, Outcome.ERROR),
        ("perftest_versions", 2, Outcome.WARN),
    ],
)
def test_each_rule(metric: str, value: float, outcome: Outcome) -> None:
    judged = outcomes(CHECK, GOOD, **FACTS)
    assert set(judged.values()) == {Outcome.PASS}
    assert outcomes(CHECK, {**GOOD, metric: value}, **FACTS) == {**judged, metric.partition(" ")[0]: outcome}


@pytest.mark.parametrize(("us", "outcome"), [(8.9, Outcome.PASS), (9.1, Outcome.WARN)])
def test_latency_of_nodes_with_grace_cpus(us: float, outcome: Outcome) -> None:
    values = {**GOOD, "write_latency node0/mlx5_0": us}
    assert outcomes(CHECK, values, **{**FACTS, "architecture": "aarch64"})["write_latency"] is outcome


def test_limits_of_the_rate_have_sources() -> None:
    fail, warn = (rule for rule in CHECK.rules if rule.metric == "rate_share")
    limits = [(str(limit), limit.outcome) for rule in (fail, warn) for limit in rule.limits]
    assert limits == [(">= 90 %", Outcome.FAIL), (">= 95 %", Outcome.WARN)]
    assert all("https://github.com" in rule.meaning for rule in (fail, warn))


def test_a_port_that_was_not_measured_is_an_error() -> None:
    facts: dict[str, Any] = {**FACTS, "ports_used": {"node0": ["mlx5_0", "mlx5_1"]}}
    assert outcomes(CHECK, GOOD, **facts)["rate_share"] is Outcome.ERROR


def test_with_too_few_nodes_only_the_missing_ones_are_judged() -> None:
    given = compare_nodes(
        {"node0": TOOLS, "node1": NodeTools(problem="not installed: ib_write_lat", is_missing=True)},
        {"node1": "not installed"},
        ["node0"],
    )
    architecture = Fact(name="architecture", value="aarch64")
    by_metric = {verdict.metric: verdict for verdict in verdicts(CHECK, [*given, architecture])}
    missing = by_metric.pop("nodes_not_measured")
    assert (missing.outcome, "node1" in missing.evidence) == (Outcome.ERROR, True)
    assert by_metric.keys() == {rule.metric for rule in CHECK.rules} - {"nodes_not_measured"}
    assert {verdict.outcome for verdict in by_metric.values()} == {Outcome.SKIP}
    assert all("1 of 2 nodes" in verdict.detail for verdict in by_metric.values())


def context(root: Path) -> Context:
    return Context(
        node="node0",
        rank=0,
        world_size=2,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=root,
        run_dir=root,
        root=root,
    )


@pytest.mark.parametrize(
    ("behaviour", "peermem", "options", "reason"),
    [
        ({}, True, (), "not built for CUDA"),
        ({"cuda": True}, True, ("--use_cuda",), ""),
        ({"cuda": True}, False, (), "nvidia_peermem is not loaded"),
        ({"cuda": True, "dmabuf": True}, False, ("--use_cuda", "--use_cuda_dmabuf"), ""),
    ],
)
def test_gpu_memory_needs_a_build_for_cuda_and_peermem_or_dmabuf(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: dict[str, Any],
    peermem: bool,
    options: tuple[str, ...],
    reason: str,
) -> None:
    trees.hca(tmp_path, "mlx5_0", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    if peermem:
        trees.write(tmp_path, {"sys/module/nvidia_peermem/refcnt": "0\n"})
    monkeypatch.setenv("PATH", str(perftest.install(tmp_path / "bin", devices=(), **behaviour)))
    tools = read_tools(context(tmp_path))
    assert (tools.problem, tools.version, tools.cuda_options) == ("", "6.06", options)
    assert reason in tools.no_gpu_memory


def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(perftest.install(tmp_path, ("ib_write_bw",), devices=())))
    assert read_tools(context(tmp_path)) == NodeTools(problem="not installed: ib_write_lat", is_missing=True)


def test_a_tool_that_does_not_start_or_end_is_a_problem_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = perftest.install(tmp_path, devices=())
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    library = "error while loading shared libraries: libmlx5.so.1: cannot open shared object file"
    (folder / "ib_write_bw").write_text(f"#!/bin/sh\necho '{library}' >&2\nexit 127\n")
    assert "libmlx5.so.1" in read_tools(context(tmp_path)).problem
    (folder / "ib_write_bw").write_text("#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(rdma, "TOOL_TIMEOUT_S", 0.2)
    assert "did not end" in read_tools(context(tmp_path)).problem


def test_gpu_memory_is_used_on_all_nodes_or_on_none() -> None:
    peermem, dmabuf = NodeTools("6.06", ("--use_cuda",)), NodeTools("6.06", ("--use_cuda", "--use_cuda_dmabuf"))
    without = NodeTools("6.06", (), "perftest is not built for CUDA")
    options = RdmaOptions()
    chosen = partial(gpu_memory_options, on_gpu=True)
    assert chosen({"a": peermem, "b": dmabuf}, ["a", "b"], options) == (dmabuf.cuda_options, "")
    assert chosen({"a": peermem, "b": without}, ["a", "b"], options) == ((), f"b: {without.no_gpu_memory}")
    assert chosen({"a": peermem}, ["a"], RdmaOptions(gpu_memory=False))[0] == ()
    assert chosen({"a": peermem}, ["a"], options, on_gpu=False)[0] == ()


def test_usable_ports_keep_their_rail_and_nodes_without_one_have_a_reason() -> None:
    nodes = {
        "node0": NodePorts(eight(mlx5_0=down("mlx5_0"))),
        "node1": NodePorts(eight()),
        "node2": NodePorts(tuple(port(f"mlx5_{index}", verbs_accessible=False) for index in range(8))),
        "node3": NodePorts(()),
        "node4": NodePorts(eight()),
        "node5": NodePorts(eight()),
    }
    broken = {
        "node4": NodeTools(problem="not installed: ib_write_lat", is_missing=True),
        "node5": NodeTools(problem="did not end"),
    }
    tools = {**dict.fromkeys(nodes, TOOLS), **broken}
    ports, unusable = usable_ports(nodes, tools)
    assert [each and each.name for each in ports["node0"]] == [None, *(f"mlx5_{index}" for index in range(1, 8))]
    assert unusable.keys() == {"node2", "node3", "node4", "node5"}
    assert "uverbs" in unusable["node2"]
    assert unusable["node4"] == "not installed: ib_write_lat"


@pytest.mark.parametrize(
    ("ports", "tools", "reason"),
    [
        (eight(), NodeTools(problem="not installed", is_missing=True), "not installed on any node"),
        (tuple(down(f"mlx5_{index}") for index in range(8)), TOOLS, "is DOWN"),
        ((roce("mlx5_0", gids=()),), TOOLS, "no usable RoCE v2 GID"),
        ((port("rdmap0s6", link_layer="Unspecified"),), TOOLS, "EFA"),
        ((), TOOLS, "no RDMA port"),
    ],
)
def test_the_check_does_not_apply(ports: Any, tools: NodeTools, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        usable_ports({"node0": NodePorts(ports), "node1": NodePorts(ports)}, {"node0": tools, "node1": tools})
