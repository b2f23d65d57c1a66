"""The Slurm checks on a real test cluster, healthy and with faults. No probe job stays in the queue."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.checks.slurm import _probe_jobs, jobs
from seatrial.discover import slurm
from seatrial.model import Measurement, Outcome, Why
from tests.fakes.slurm import judge, not_passed, reasons, run_check
from tests.processes import until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

MakeCluster = Callable[..., Cluster]
SHORT_TIMEOUT = "MessageTimeout=2"  # for tests without controller
# Expected problems: the test cluster has no cgroups and no health check, and propagates the limits of its host.
EXPECTED_PROBLEMS = {
    "slurm.controller": {
        "proctrack_loses_processes",
        "task_binding_enabled",
        "health_check_configured",
        "memlock_limit_propagated",
    },
    "slurm.nodes": set(),
    "slurm.partitions": set(),
    "slurm.jobs": {"memory_limited"},
    "slurm.binding": {"devices_confined"},
    "slurm.isolation": set(),
}


@pytest.fixture
def start(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    """Starts a cluster and sets SLURM_CONF of this process to it."""

    def start(nodes: int, **kind: Any) -> Cluster:
        return used(make_cluster(nodes, **kind), monkeypatch)

    return start


def used(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Set SLURM_CONF of this process to the cluster, and poll its jobs more often."""
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    for module in (_probe_jobs, jobs):
        monkeypatch.setattr(module, "POLL_S", 0.2)
    return cluster


@pytest.fixture(scope="module")
def one_node(make_shared_cluster: MakeCluster) -> Cluster:
    return make_shared_cluster(1)


@pytest.fixture
def sound(one_node: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster of all tests that leave it as it was: a new one takes two seconds to start its first batch job."""
    yield used(one_node, monkeypatch)
    until(lambda: queued(one_node) == "", 30)


def problems(name: str, folder: Path, nodes: int = 2, gpus: int | None = None, **options: Any) -> dict[str, Outcome]:
    """Return outcomes other than PASS and SKIP, without the expected problems of the test cluster."""
    check = catalog()[name]
    problems = not_passed(judge(check, run_check(check, folder, (nodes, gpus), **options)))
    return {metric: outcome for metric, outcome in problems.items() if metric not in EXPECTED_PROBLEMS[name]}


def error(name: str, folder: Path, **options: Any) -> str:
    return run_check(catalog()[name], folder, **options).error or ""


def queued(cluster: Cluster) -> str:
    return cluster.run(["squeue", "--all", "--noheader", "-o", "%j %T"]).stdout


def start_process(cluster: Cluster, measure: str) -> subprocess.Popen[bytes]:
    """Starts a measurement in a separate process."""
    code = "from pathlib import Path; from seatrial.checks import catalog; from tests.fakes.slurm import run_check; "
    return subprocess.Popen([sys.executable, "-c", code + measure], env={**os.environ, **cluster.env})


@dataclass(frozen=True)
class RunningMeasurement:
    """A running measurement of ``slurm.jobs``, and the file of its result."""

    cluster: Cluster
    process: subprocess.Popen[bytes]
    result: Path


@pytest.fixture(scope="module", autouse=True)
def limits(make_shared_cluster: MakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMeasurement]:
    """Starts before and ends after all other tests of this module, as Slurm's limits take minutes."""
    cluster = make_shared_cluster(1, extra="JobAcctGatherParams=OverMemoryKill")
    folder = tmp_path_factory.mktemp("limits")
    measure = (
        f"folder = Path({str(folder)!r}); measurement = run_check(catalog()['slurm.jobs'], folder, time_limit=True); "
    )
    process = start_process(cluster, measure + "(folder / 'result.json').write_text(measurement.model_dump_json())")
    yield RunningMeasurement(cluster, process, folder / "result.json")
    process.kill()
    process.wait()


def occupy(cluster: Cluster) -> str:
    """Start a job that has node0 for a minute, so that others wait; return its id."""
    done = cluster.run(["sbatch", "--parsable", "--exclusive", "--nodelist=node0", "--wrap", "sleep 60"])
    until(lambda: "RUNNING" in queued(cluster))
    return done.stdout.strip()


def deadlines(cluster: Cluster) -> list[str]:
    """Return the deadlines of the job of ``occupy`` and of one probe job."""
    found = re.findall(r"Deadline=(\S+)", cluster.run(["scontrol", "show", "jobs"]).stdout)
    assert len(found) == 2
    return found


@contextmanager
def without_controller(cluster: Cluster) -> Iterator[None]:
    cluster.stop_controller()
    try:
        yield
    finally:
        cluster.start_controller()


def test_a_healthy_cluster(start: MakeCluster, tmp_path: Path) -> None:
    cluster = start(2, gpus_per_node=2)
    for name in EXPECTED_PROBLEMS:
        assert problems(name, tmp_path, gpus=2) == {}, name
    until(lambda: queued(cluster) == "", 30)


class TestFaults:
    def test_drained_and_down_nodes(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(3, extra="SlurmdTimeout=4")
        cluster.drain("node0", "fan broken")
        cluster.kill_slurmd("node1")
        cluster.wait_for(["node1"], "down", "down*")
        outcomes = {"in_service node0": Outcome.WARN, "up node1": Outcome.WARN}
        assert problems("slurm.nodes", tmp_path, nodes=1) == outcomes
        assert problems("slurm.nodes", tmp_path, nodes=2) == {**outcomes, "nodes_missing": Outcome.FAIL}

    def test_controller_down(self, start: MakeCluster, tmp_path: Path) -> None:
        with without_controller(start(1, extra=SHORT_TIMEOUT)):
            assert problems("slurm.controller", tmp_path) == {
                "controllers_up": Outcome.FAIL,
                "login": Outcome.ERROR,
            }
            assert "the controller does not answer" in error("slurm.nodes", tmp_path)

    def test_munge_down(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(1)
        cluster.stop_munge()
        with ThreadPoolExecutor() as pool:  # Slurm's commands try again for two seconds
            for message in pool.map(lambda name: error(name, tmp_path), EXPECTED_PROBLEMS):
                assert "MUNGE authentication fails" in message

    def test_configuration_differs_from_the_controller(
        self, sound: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = tmp_path / "slurm.conf"
        other.write_text((sound.folder / "slurm.conf").read_text() + "SrunPortRange=60001-63000\n")
        monkeypatch.setenv("SLURM_CONF", str(other))
        assert problems("slurm.controller", tmp_path) == {"configuration_differs": Outcome.WARN}


class TestJobs:
    def test_environment_and_directory_not_propagated(
        self, sound: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sound.private_dir(tmp_path, "node0")
        (here := tmp_path / "here").mkdir()
        monkeypatch.chdir(here)
        for name in ("SBATCH_EXPORT", "SLURM_EXPORT_ENV"):
            monkeypatch.setenv(name, "NONE")
        assert problems("slurm.jobs", tmp_path) == {
            "sbatch_environment": Outcome.FAIL,
            "sbatch_directory": Outcome.WARN,
            "srun_environment": Outcome.FAIL,
            "srun_directory": Outcome.WARN,
        }

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"partition": "nosuch"}, "no such partition"),
            ({"extra": ["--constraint=h200"]}, "no node has that feature"),
            ({"extra": ["--gres=tpu:1"]}, "no such generic resource"),
        ],
    )
    def test_rejected_options(self, sound: Cluster, tmp_path: Path, options: dict[str, Any], reason: str) -> None:
        assert reason in error("slurm.jobs", tmp_path, **options)
        assert queued(sound) == ""

    def test_job_stays_pending(self, sound: Cluster, tmp_path: Path) -> None:
        job_id = occupy(sound)
        assert "still pending after 3 s: Resources" in error("slurm.jobs", tmp_path, wait_s=3)
        sound.run(["scancel", job_id])

    def test_job_that_never_starts(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(1)
        cluster.drain("node0", "fan broken")
        assert "node0 is IDLE+DRAIN: fan broken; waiting will not help" in error("slurm.jobs", tmp_path)
        until(lambda: queued(cluster) == "", 30)

    def test_variables_of_an_enclosing_job_are_ignored(
        self, sound: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With these variables of an ended job, srun would request a step in it."""
        for name, value in (("SLURM_JOB_ID", "4711"), ("SLURM_NTASKS", "8"), ("SLURM_MEM_PER_NODE", "4000")):
            monkeypatch.setenv(name, value)
        assert problems("slurm.jobs", tmp_path) == {}

    def test_deadline_removes_the_job_of_a_killed_check(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(1)
        occupy(cluster)
        killed = start_process(cluster, f"run_check(catalog()['slurm.jobs'], Path({str(tmp_path)!r}))")
        until(lambda: "PENDING" in queued(cluster))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert deadlines(cluster).count("N/A") == 1, "of the job that has the node"


def confined(start: MakeCluster, nodes: int = 1) -> tuple[Cluster, dict[str, Any]]:
    """Return a cluster with cgroup limits, and the option for its device files."""
    cluster = start(nodes, gpus_per_node=2, confined=True)
    return cluster, {"devices": f"{cluster.folder}/dev/gpu*"}


def prolog(folder: Path, script: str) -> str:
    """Return the slurm.conf line that runs ``script`` before each task."""
    (path := folder / "prolog.sh").write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return f"TaskProlog={path}"


BOTH_TASKS = ("gpus_per_task node0/rank0", "gpus_per_task node0/rank1")
FIRST_GPU_FOR_ALL = "echo export CUDA_VISIBLE_DEVICES=0"


class TestBinding:
    def test_confined_tasks(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start, nodes=2)
        measurement = run_check(catalog()["slurm.binding"], tmp_path, (2, 2), cpus_per_task=1, **devices)
        assert not_passed(judge(catalog()["slurm.binding"], measurement)) == {}
        measured = {
            "cpus_outside_allocation",
            "cpus_shared",
            "memory_confined",
            "gpus_per_task",
            "gpus_shared",
            "gpus_accessible",
        }
        assert measured < {metric.name for metric in measurement.metrics}
        until(lambda: queued(cluster) == "", 30)

    def test_device_outside_of_slurm(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start)
        cluster.run_on("node0", ["mknod", f"{cluster.folder}/dev/gpu7", "c", "1", "5"])
        outcomes = problems("slurm.binding", tmp_path, nodes=1, gpus=2, cpus_per_task=1, **devices)
        assert outcomes.keys() == {"gpus_accessible node0/rank0", "gpus_shared node0", *BOTH_TASKS}
        assert set(outcomes.values()) == {Outcome.FAIL}

    def test_memory_limit_above_the_allocation(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start)
        with (cluster.folder / "cgroup.conf").open("a") as file:
            file.write("AllowedRAMSpace=200\n")
        cluster.kill_slurmd("node0")
        cluster.start_slurmd("node0")
        outcomes = problems("slurm.binding", tmp_path, nodes=1, gpus=2, cpus_per_task=1, **devices)
        assert outcomes == dict.fromkeys(("memory_confined node0/rank0", "memory_confined node0/rank1"), Outcome.FAIL)

    def test_same_gpu_for_all_tasks(self, start: MakeCluster, tmp_path: Path) -> None:
        start(1, gpus_per_node=2, extra=prolog(tmp_path, FIRST_GPU_FOR_ALL))
        outcomes = problems("slurm.binding", tmp_path, nodes=1, gpus=2)
        assert outcomes == {"gpus_shared node0": Outcome.FAIL}

    def test_tasks_without_gpu(self, start: MakeCluster, tmp_path: Path) -> None:
        start(1, gpus_per_node=2, extra=prolog(tmp_path, "echo unset CUDA_VISIBLE_DEVICES"))
        assert problems("slurm.binding", tmp_path, nodes=1, gpus=2) == dict.fromkeys(BOTH_TASKS, Outcome.FAIL)

    def test_cluster_without_gpus(self, sound: Cluster, tmp_path: Path) -> None:
        measurement = run_check(catalog()["slurm.binding"], tmp_path)
        assert not_passed(judge(catalog()["slurm.binding"], measurement)) == {}
        not_applicable = reasons(measurement, Why.DOES_NOT_APPLY)
        assert not_applicable["gpus_per_task"] == "Slurm has no GPUs, or --gpus-per-node is 0"
        assert {metric.subject for metric in measurement.metrics} == {"node0/rank0", "node0/rank1"}

    def test_more_nodes_than_available(self, sound: Cluster, tmp_path: Path) -> None:
        message = error("slurm.binding", tmp_path, nodes=3)
        assert re.search(r"job \d+ is PENDING: PartitionConfig; waiting will not help", message)


class TestIsolation:
    def test_confined_jobs(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start)
        measurement = run_check(catalog()["slurm.isolation"], tmp_path, (1, 2), cpus=1, **devices)
        assert not_passed(judge(catalog()["slurm.isolation"], measurement)) == {}
        assert {metric.name for metric in measurement.metrics} == set(catalog()["slurm.isolation"].units)
        until(lambda: queued(cluster) == "", 30)

    def test_device_outside_of_slurm(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start)
        cluster.run_on("node0", ["mknod", f"{cluster.folder}/dev/gpu7", "c", "1", "5"])
        outcomes = problems("slurm.isolation", tmp_path, gpus=2, cpus=1, **devices)
        assert outcomes == dict.fromkeys(("gpus_shared node0", "gpus_accessible_to_both node0"), Outcome.FAIL)

    def test_same_gpu_for_both_jobs(self, start: MakeCluster, tmp_path: Path) -> None:
        start(1, gpus_per_node=2, extra=prolog(tmp_path, FIRST_GPU_FOR_ALL))
        assert problems("slurm.isolation", tmp_path, gpus=2) == {"gpus_shared node0": Outcome.FAIL}

    @pytest.mark.parametrize(
        ("extra", "reason"),
        [
            ("SelectType=select/linear\nSelectTypeParameters=CR_Memory", "SelectType=select/linear"),
            ("PartitionName=whole Nodes=ALL OverSubscribe=EXCLUSIVE", "partition whole has OverSubscribe=EXCLUSIVE"),
        ],
    )
    def test_one_job_per_node(self, start: MakeCluster, tmp_path: Path, extra: str, reason: str) -> None:
        cluster = start(1, extra=extra)
        partition = "whole" if "whole" in extra else "gpu"
        measurement = run_check(catalog()["slurm.isolation"], tmp_path, partition=partition)
        assert reason in reasons(measurement, Why.DOES_NOT_APPLY)["cpus_shared"]
        assert queued(cluster) == ""

    @pytest.mark.parametrize(("option", "value"), [("cpus", 5), ("extra", ["--exclusive"])])
    def test_no_resources_for_the_second_job(self, sound: Cluster, tmp_path: Path, option: str, value: Any) -> None:
        message = error("slurm.isolation", tmp_path, second_job_wait_s=4, **{option: value})
        ids = re.search(r"no second job started on node0 with job (\d+): job (\d+) still pending after 4 s", message)
        assert ids, message
        assert int(ids[2]) == int(ids[1]) + 1
        assert ": Resources" in message

    def test_time_limit_ends_the_jobs_of_a_killed_check(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(1)
        occupy(cluster)
        killed = start_process(cluster, f"run_check(catalog()['slurm.isolation'], Path({str(tmp_path)!r}))")
        until(lambda: "PENDING" in queued(cluster))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        shown = cluster.run(["scontrol", "show", "jobs"]).stdout
        assert "TimeLimit=00:05:00" in shown
        assert deadlines(cluster).count("N/A") == 1, "of the job that has the node"


def test_gpus_missing_on_the_nodes(start: MakeCluster) -> None:
    """Run the check in a job on the nodes; the fake GPUs of the test cluster exist only in Slurm."""
    cluster = start(2, gpus_per_node=2)
    code = "from pathlib import Path; from seatrial.checks import catalog; "
    code += "from tests.fakes.slurm import judge, not_passed, run_check; "
    code += "check = catalog()['slurm.gres']; measurement = run_check(check, Path('.')); "
    code += "evidence = measurement.metrics[0].evidence; "
    code += "print(evidence['gres'], evidence['detected'], not_passed(judge(check, measurement)))"
    output = cluster.run(["srun", "-N2", "--label", "--chdir", str(Path.cwd()), sys.executable, "-c", code]).stdout
    assert sorted(output.splitlines()) == [
        f"{node}: gpu:fake:2 0 GPUs by NVML {{'gpus_missing login': <Outcome.FAIL: 'FAIL'>}}" for node in (0, 1)
    ]


def test_state_of_ended_and_held_jobs(sound: Cluster) -> None:
    def submit(script: str, *options: str) -> str:
        return sound.run(["sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap", script]).stdout.strip()

    failing, waiting = submit("exit 3"), submit("true", "--hold")
    job = until(lambda: ended if (ended := slurm.job(failing)).ended else None)
    assert (job.state, job.exit_code, job.nodes) == ("FAILED", 3, "node0")
    held_job = slurm.job(waiting)
    assert (held_job.pending, held_job.reason, held_job.nodes) == (True, "JobHeldUser", "")
    sound.run(["scancel", waiting])
    assert not slurm.job(4711).has_state


def test_limits_are_enforced(limits: RunningMeasurement) -> None:
    assert limits.process.wait(180) == 0
    measurement = Measurement.model_validate_json(limits.result.read_text())
    assert not_passed(judge(catalog()["slurm.jobs"], measurement)) == {}
    evidence: dict[str, Any] = {metric.name: metric.evidence for metric in measurement.metrics}
    assert evidence["memory_limit_enforced"]["memory_limit"] == "OverMemoryKill"
    assert "time_limit_enforced" in evidence
    assert queued(limits.cluster) == ""
