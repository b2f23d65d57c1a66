"""host.process: real processes with a mask, priority, limits and variables; GPU ranks with masks of a large node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import JsonValue

from seatrial.bench import rank
from seatrial.checks import catalog
from seatrial.checks.check import Context
from seatrial.checks.host.process import CHECK
from seatrial.diagnose.causes import Run, cause_findings
from seatrial.discover.environment_variables import variables
from seatrial.model import CLUSTER, Finding, Measurement, Outcome, Reason, SeatrialError, Verdict
from seatrial.worker import measure
from tests.discover import trees
from tests.fakes.slurm import judge, not_passed
from tests.paths import ROOT

CPU = min(os.sched_getaffinity(0))
GROUP = "sys/fs/cgroup/system.slice/slurmd.service"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node of 16 CPUs in two NUMA nodes."""
    trees.node(tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*variables(), "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def measured_by_process(root: Path, *command: str, **env: str) -> Measurement:
    argv = [*command, sys.executable, "-m", "tests.checks.host.process_driver", str(root), str(root.parent)]
    done = subprocess.run(argv, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, check=True)
    return Measurement.model_validate_json(done.stdout)


def on_gpu(measurement: Measurement) -> Measurement:
    """The measurement as of a rank with a GPU."""
    return measurement.model_copy(update={"facts": {**measurement.facts, "backend": "cuda"}})


def outcomes(measurement: Measurement) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge(CHECK, measurement)}


def values(measurement: Measurement) -> dict[str, float]:
    return {metric.name: metric.value for metric in measurement.metrics}


@contextmanager
def rank_on(cpu: int, **env: str) -> Iterator[None]:
    """A process beside those of this test, as another rank of the same torchrun; it may use one CPU."""
    with subprocess.Popen(["taskset", "-c", str(cpu), "sleep", "60"], env={**os.environ, **env}) as process:
        try:
            yield
        finally:
            process.kill()


def test_bound_process_with_low_priority(root: Path) -> None:
    limits = ("prlimit", "--memlock=65536:65536", "chrt", "--batch", "0", "nice", "-n", "1", "taskset", "-c", str(CPU))
    measured = measured_by_process(root, *limits, CUDA_LAUNCH_BLOCKING="1", NCCL_IB_TIMEOUT="20", MY_TOKEN="secret")
    assert measured.error is None
    expected: dict[str, JsonValue] = {
        "allowed_cpus": str(CPU),
        "numa_nodes": {"node1" if CPU % 8 > 3 else "node0": str(CPU)},
        "memlock_bytes": 65536,
        "scheduling_policy": "SCHED_BATCH",
        "variables": {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_IB_TIMEOUT": "20"},
        "cpu_quota": None,
    }
    assert measured.facts.items() >= expected.items()
    assert values(measured)["allowed_cpus"] == 1
    assert values(measured)["nice"] >= 1
    warned = {"allowed_cpus", "nice", "background_scheduling", "slowed_by.CUDA_LAUNCH_BLOCKING"}
    assert {name.partition(" ")[0] for name in not_passed(judge(CHECK, on_gpu(measured)))} == warned
    assert set(not_passed(judge(CHECK, on_gpu(measured))).values()) == {Outcome.WARN}
    assert set(outcomes(measured).values()) == {Outcome.SKIP}, "without a GPU nothing is judged"


def test_a_cpu_that_two_ranks_share_is_half_a_cpu_for_each(root: Path) -> None:
    bound = ("taskset", "-c", str(CPU))
    with rank_on(CPU, LOCAL_RANK="1"), rank_on(CPU):  # the second is no rank
        shared = measured_by_process(root, *bound, LOCAL_RANK="0")
    assert values(shared)["allowed_cpus"] == 0.5
    assert shared.facts["ranks_on_node"] == 2


def gpu_rank(root: Path, cpus: set[int], near: set[int] | str, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """host.process of a rank on GPU 0 that may use ``cpus``; ``near``: CPUs near the GPU, or the error of NVML."""

    def numa_cpus(device: str) -> set[int]:
        assert device == "cuda:0"
        if isinstance(near, str):
            raise SeatrialError(near)
        return near

    monkeypatch.setattr(rank, "numa_cpus", numa_cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus if pid == 0 else pytest.fail(f"pid {pid}"))
    monkeypatch.setattr(os, "getpriority", lambda _which, _who: 0)
    context = Context(
        node="n0",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cuda:0",
        nvml_index=0,
        expected_gpus=8,
        artifacts_dir=root,
        run_dir=root,
    )
    return measure(CHECK, replace(context, root=root), {})


SOCKET_0 = {*range(4), *range(8, 12)}  # of the node of 16 CPUs


@pytest.mark.parametrize(
    ("cpus", "near", "expected"),
    [
        (set(range(16)), SOCKET_0, {}),
        ({0, 1, 8, 9}, SOCKET_0, {}),  # the share of one GPU of four
        ({3, 4, 11, 12}, SOCKET_0, {}),
        ({0, 8}, SOCKET_0, {"allowed_cpus n0/gpu0": Outcome.WARN}),
        ({4, 5, 12, 13}, SOCKET_0, {"cpus_near_gpu n0/gpu0": Outcome.WARN}),
        ({4}, set(), {"allowed_cpus n0/gpu0": Outcome.WARN}),
        ({4, 5, 12, 13}, "Not Supported", {}),
    ],
)
def test_masks_of_a_gpu_rank(
    cpus: set[int],
    near: set[int] | str,
    expected: dict[str, Outcome],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = gpu_rank(root, cpus, near, monkeypatch)
    assert not_passed(judge(CHECK, measured)) == expected
    assert ("cpus_near_gpu" in values(measured)) is (near == SOCKET_0)


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_share_of_a_gpu_in_a_slurm_job_is_good(gpus: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.write(root, {"sys/devices/system/cpu/online": "0-127\n"})
    for cpu in range(16, 128):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        trees.write(root, {f"{topology}/physical_package_id": "0\n", f"{topology}/thread_siblings_list": f"{cpu}\n"})
    monkeypatch.setattr("seatrial.checks.host.process._cpus_of_other_ranks", lambda: [set(range(128))] * (gpus - 1))
    measured = gpu_rank(root, set(range(16 if gpus == 1 else 127)), set(range(64)), monkeypatch)
    assert not_passed(judge(CHECK, measured)) == {}
    assert 15 < values(measured)["allowed_cpus"] <= 16


V1 = {"proc/self/cgroup": "4:cpu,cpuacct:/job\n", "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "cpus", "outcome"),
    [
        ({f"{GROUP}/cpu.max": "250000 100000\n"}, 2.5, Outcome.WARN),
        ({f"{GROUP}/cpu.max": "800000 100000\n"}, 8, Outcome.PASS),
        ({f"{GROUP}/cpu.max": "1600000 100000\n"}, None, Outcome.SKIP),  # all CPUs of the node
        ({f"{GROUP}/cpu.max": "max 100000\n"}, None, Outcome.SKIP),
        (V1 | {"sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n"}, 1, Outcome.WARN),
        (V1 | {"sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n"}, None, Outcome.SKIP),
        ({"proc/self/cgroup": "0::/not/mounted\n"}, None, Outcome.SKIP),
        ({f"{GROUP}/cpu.max": "some 100000\n"}, None, Outcome.ERROR),
    ],
)
def test_cpu_quota(
    files: dict[str, str], cpus: float | None, outcome: Outcome, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.write(root, files)
    measured = gpu_rank(root, set(range(16)), SOCKET_0, monkeypatch)
    assert values(measured).get("cpu_quota") == cpus
    assert outcomes(measured)["cpu_quota"] is outcome


def test_quota_is_shared_by_the_ranks_of_the_node(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.write(root, {f"{GROUP}/cpu.max": "800000 100000\n", f"{GROUP}/memory.max": "1073741824\n"})
    monkeypatch.setattr("seatrial.checks.host.process._cpus_of_other_ranks", lambda: [set(range(16))] * 3)
    measured = gpu_rank(root, set(range(16)), SOCKET_0, monkeypatch)
    assert values(measured)["cpu_quota"] == 2
    assert measured.facts["memory_limit_bytes"] == 2**30


def test_a_container_without_proc_and_sys_is_not_passed_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = gpu_rank(tmp_path, {0, 1, 2, 3}, SOCKET_0, monkeypatch)
    assert measured.error is None
    assert {name for name, outcome in outcomes(measured).items() if outcome is Outcome.ERROR} == {
        "allowed_cpus",
        "cpu_quota",
    }
    of_cpu = measured.model_copy(update={"facts": {**measured.facts, "backend": "cpu"}})
    assert set(outcomes(of_cpu).values()) == {Outcome.SKIP}


def findings(measured: Measurement, *others: Verdict, settings: dict[str, JsonValue] | None = None) -> list[Finding]:
    transport = Measurement(check="collectives.transport", subject="n0/gpu0", facts={"settings": settings or {}})
    return cause_findings(Run([*judge(CHECK, measured), *others], [measured, transport], catalog()))


def slow(check: str, metric: str, subject: str) -> Verdict:
    return Verdict(check, subject, Outcome.FAIL, metric, (Reason.THRESHOLD_VIOLATED,), value=1)


SLOW = (
    slow("collectives.all_reduce", "busbw.8GiB", CLUSTER),
    slow("transfer.host", "h2d_single", "n0/gpu0"),
    slow("train.ddp", "tokens_per_second_per_gpu", CLUSTER),
)


def test_the_mask_is_the_cause_not_a_variable_of_nccl(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = gpu_rank(root, {0}, SOCKET_0, monkeypatch)
    (finding,) = findings(measured, *SLOW, settings={"NCCL_NVLS_ENABLE": "0"})
    assert (finding.cause, finding.subject) == ("cpu_mask", "n0/gpu0")
    assert {key.check for key in finding.explains} == {"host.process", *(verdict.check for verdict in SLOW)}
    other_node = slow("transfer.host", "h2d_single", "n1/gpu0")
    assert other_node.check not in {key.check for key in findings(measured, other_node)[0].explains}


@pytest.mark.parametrize("others", [(), SLOW])
def test_launch_blocking_is_named_even_if_no_figure_suffers(
    others: tuple[Verdict, ...], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    measured = gpu_rank(root, set(range(16)), SOCKET_0, monkeypatch)
    (finding,) = findings(measured, *others)
    assert finding.title == "CUDA_LAUNCH_BLOCKING=1 is set"
    assert finding.cause == "environment_variable"
    assert {key.check for key in finding.explains} == {"host.process", *(verdict.check for verdict in others)}
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert findings(gpu_rank(root, set(range(16)), SOCKET_0, monkeypatch)) == []


@pytest.mark.parametrize("command", ["nice", "quota", "remote"])
def test_other_limits_are_causes_too(command: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command == "quota":
        trees.write(root, {f"{GROUP}/cpu.max": "100000 100000\n"})
    near = set(range(16)) - SOCKET_0 if command == "remote" else SOCKET_0
    measured = gpu_rank(root, SOCKET_0, near, monkeypatch)
    if command == "nice":
        niced = [replace(each, value=5.0) if each.name == "nice" else each for each in measured.metrics]
        measured = measured.model_copy(update={"metrics": tuple(niced)})
    (finding,) = findings(measured, *SLOW)
    assert finding.cause == {"nice": "low_priority", "quota": "cpu_quota", "remote": "remote_cpus"}[command]
    assert {key.check for key in finding.explains} >= {verdict.check for verdict in SLOW}
