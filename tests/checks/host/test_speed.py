from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from seatrial.bench import host_speed
from seatrial.checks.check import Context
from seatrial.checks.host.speed import CHECK
from seatrial.discover import cpu_memory, filesystem
from seatrial.judge.rules import judge_check
from seatrial.model import Absent, Measurement, Metric, Outcome, Reason, Verdict, Why
from seatrial.worker import measure

MODEL = "Intel(R) Xeon(R) Platinum 8480C; CPUs: 112; NUMA nodes: 2"
GOOD = {"hash_single": 1.2e6, "hash_all": 6e7, "memory_copy": 480.0, "disk_write": 2.8, "disk_read": 5.1}


def node(name: str, values: Mapping[str, float], model: str = MODEL, no_disk: str = "") -> Measurement:
    """A node with these values in place of the good ones; ``no_disk``: why its disk was not measured."""
    absent = tuple(
        Absent(metric=metric, why=Why.DOES_NOT_APPLY, reason=no_disk)
        for metric in ("disk_write", "disk_read")
        if no_disk
    )
    metrics = tuple(
        Metric(name=metric, value=value, unit=CHECK.units[metric], subject=name)
        for metric, value in {**GOOD, **values}.items()
        if metric not in {each.metric for each in absent}
    )
    facts = {"host": model, "cpu_known": "yes"}
    return Measurement(check=CHECK.name, subject=name, rank=0, metrics=metrics, absent=absent, facts=facts)


def judge(*nodes: Measurement) -> dict[tuple[str, str], Verdict]:
    return {(verdict.subject, verdict.metric): verdict for verdict in judge_check(CHECK, nodes, {}, "test")}


def warnings(*nodes: Measurement) -> set[tuple[str, str]]:
    verdicts = judge(*nodes)
    assert {verdict.outcome for verdict in verdicts.values()} <= {Outcome.PASS, Outcome.WARN, Outcome.SKIP}
    return {key for key, verdict in verdicts.items() if verdict.outcome is Outcome.WARN}


def good_nodes(count: int, model: str = MODEL) -> list[Measurement]:
    """Nodes that differ by 1 %."""
    return [
        node(f"n{index}", {name: value * (1 + 0.01 * (index % 3 - 1)) for name, value in GOOD.items()}, model)
        for index in range(count)
    ]


@pytest.mark.parametrize("count", [3, 4, 32])
def test_similar_nodes_pass(count: int) -> None:
    verdicts = judge(*good_nodes(count))
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.PASS}
    assert len(verdicts) == 5 * count


@pytest.mark.parametrize(
    ("metric", "share"),
    [("hash_single", 0.85), ("hash_all", 0.8), ("memory_copy", 0.875), ("disk_write", 0.5), ("disk_read", 0.5)],
)
def test_a_slow_node_is_a_warning(metric: str, share: float) -> None:
    slow = node("slow", {metric: GOOD[metric] * share})
    assert warnings(*good_nodes(7), slow) == {("slow", metric)}


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_nodes_are_recorded(count: int) -> None:
    nodes = [*good_nodes(count - 1), node("slow", {"memory_copy": 1.0})]
    assert {verdict.reasons for verdict in judge(*nodes).values()} == {(Reason.TOO_FEW_PEERS,)}


def test_nodes_of_another_model_are_not_compared() -> None:
    others = [node(f"m{index}", {"hash_single": 9e5}, "AMD EPYC 9654; CPUs: 192; NUMA nodes: 2") for index in range(3)]
    assert warnings(*good_nodes(3), *others) == set()
    alone = judge(*good_nodes(3), node("slow", {"hash_single": 1.0}, "AMD EPYC 9654; CPUs: 96; NUMA nodes: 2"))
    assert alone["slow", "hash_single"].reasons == (Reason.TOO_FEW_PEERS,)


def test_a_node_without_local_disk() -> None:
    verdicts = judge(*good_nodes(3), node("n3", {}, no_disk="the run directory is on nfs4, not local"))
    assert verdicts["n3", "disk_write"].outcome is Outcome.SKIP
    assert "nfs4" in verdicts["n3", "disk_write"].detail
    assert verdicts["n3", "memory_copy"].outcome is Outcome.PASS


def test_a_missing_model_is_an_error() -> None:
    verdicts = judge(*good_nodes(3), node("n3", {}, model=""))
    assert verdicts["n3", "hash_all"].outcome is Outcome.ERROR


def test_an_unreadable_model_is_skipped() -> None:
    measurement = node("n3", {})
    unreadable = {**measurement.facts, "cpu_known": "no"}
    verdicts = judge(*good_nodes(3), measurement.model_copy(update={"facts": unreadable}))
    assert verdicts["n3", "hash_all"].outcome is Outcome.SKIP


def measured(tmp_path: Path) -> Measurement:
    context = Context(
        node="n0",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=tmp_path,
        run_dir=tmp_path,
    )
    return measure(CHECK, context, {"seconds": 0.02, "disk_size": "4MiB"})


def reasons(measurement: Measurement) -> dict[str, str]:
    assert {absent.why for absent in measurement.absent} <= {Why.DOES_NOT_APPLY}
    return {absent.metric: absent.reason for absent in measurement.absent}


def values(measurement: Measurement) -> Mapping[str, float]:
    return {metric.name: metric.value for metric in measurement.metrics}


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "filesystem_type", lambda _path: "ext4")
    monkeypatch.setattr(host_speed, "disk_speed", lambda _path, size, _limit_s: host_speed.DiskSpeed(1.5, 2.5, size))
    measurement = measured(tmp_path)
    assert measurement.error is None
    assert set(values(measurement)) == set(CHECK.units)
    assert min(values(measurement).values()) > 0
    assert {verdict.outcome for verdict in judge(measurement).values()} == {Outcome.SKIP}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "tmpfs", "fuse.weka", None])
def test_no_file_is_written_to_a_shared_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    monkeypatch.setattr(filesystem, "filesystem_type", lambda _path: kind)
    monkeypatch.delattr(host_speed, "disk_speed")
    measurement = measured(tmp_path)
    assert measurement.error is None
    assert set(values(measurement)) == {"hash_single", "hash_all", "memory_copy"}
    assert set(reasons(measurement)) == {"disk_write", "disk_read"}
    assert (kind or "unknown") in reasons(measurement)["disk_read"]


@pytest.mark.parametrize(("code", "error"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_errors_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: bool) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError(code, "error")

    monkeypatch.setattr(filesystem, "filesystem_type", lambda _path: "xfs")
    monkeypatch.setattr(host_speed, "disk_speed", fail)
    measurement = measured(tmp_path)
    assert (measurement.error is not None) is error
    assert error or "O_DIRECT" in reasons(measurement)["disk_write"]


def test_a_full_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "filesystem_type", lambda _path: "xfs")
    monkeypatch.setattr(filesystem, "usage", lambda _root, path: filesystem.Usage(2**40, 2**22, True, path))
    measurement = measured(tmp_path)
    assert "disk_write" not in values(measurement)
    assert "free space" in reasons(measurement)["disk_write"]


def test_a_quota_limits_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = cpu_memory.read_cpu().model_copy(update={"quota_cores": 0.5})
    monkeypatch.setattr(cpu_memory, "read_cpu", lambda _root: cpu)
    assert "; CPUs: 1; " in str(measured(tmp_path).facts["host"])


def test_memory_limit_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []

    def copy_rates(cpus_by_group: list[list[int]], _seconds: float, block: int) -> list[float]:
        blocks.append(block * 2 * sum(map(len, cpus_by_group)))
        return [1.0] * len(cpus_by_group)

    limited = cpu_memory.read_memory().model_copy(update={"available_bytes": 2**40, "limit_bytes": 2**24})
    monkeypatch.setattr(cpu_memory, "read_memory", lambda _root: limited)
    monkeypatch.setattr(host_speed, "copy_rates", copy_rates)
    measured(tmp_path)
    assert 0 < blocks[0] <= 2**21


def test_cpus_are_grouped_by_numa_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[list[list[int]]] = []

    def copy_rates(cpus_by_group: list[list[int]], _seconds: float, _block: int) -> list[float]:
        groups.append(cpus_by_group)
        return [1.0] * len(cpus_by_group)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 2, 6, 9})
    numa = [
        cpu_memory.NumaNode(name=name, cpus=cpus, memory_bytes=None)
        for name, cpus in (("node0", "0-3,8-11"), ("node1", "4-7,12-15"), ("node2", ""))
    ]
    cpu = cpu_memory.read_cpu().model_copy(update={"numa": tuple(numa), "quota_cores": None})
    monkeypatch.setattr(cpu_memory, "read_cpu", lambda _root: cpu)
    monkeypatch.setattr(host_speed, "hash_rate", lambda _cpus, _seconds: 1.0)
    monkeypatch.setattr(host_speed, "copy_rates", copy_rates)
    measurement = measured(tmp_path)
    assert groups == [[[1, 2, 9], [6]]]
    (memory_copy,) = (metric for metric in measurement.metrics if metric.name == "memory_copy")
    assert memory_copy.evidence == {"by_numa_node": {"node0": 1.0, "node1": 1.0}}
    assert str(measurement.facts["host"]).endswith("; CPUs: 4; NUMA nodes: 2")
