"""The checks of Slurm against a real one, healthy and broken. Nothing they submit stays in its queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.discover import slurm
from seatrial.model import Measurement, Outcome
from tests.fakes.slurm import judge, not_passed, run_check
from tests.processes import until
from tests.rig.cluster import Cluster

pytest_plugins = ["tests.rig.fixtures"]
pytestmark = pytest.mark.cluster

MakeCluster = Callable[..., Cluster]
SOON = "MessageTimeout=2"  # for those that wait for a controller that does not answer
# What the rig is not: it has neither cgroups nor a health check, and passes on the limits of the machine it runs on.
RIG = {
    "slurm.controller": {
        "proctrack_loses_processes",
        "task_binding_enabled",
        "health_check",
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
    """Start a cluster and make it the one that this process asks."""

    def start(nodes: int, **kind: Any) -> Cluster:
        cluster = make_cluster(nodes, **kind)
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        return cluster

    return start


def outcomes(name: str, folder: Path, nodes: int = 2, gpus: int | None = None, **options: Any) -> dict[str, Outcome]:
    """What does not pass, but for what the rig is not."""
    check = catalog()[name]
    found = not_passed(judge(check, run_check(check, folder, (nodes, gpus), **options)))
    return {metric: outcome for metric, outcome in found.items() if metric not in RIG[name]}


def error(name: str, folder: Path, **options: Any) -> str:
    return run_check(catalog()[name], folder, **options).error or ""


def queued(cluster: Cluster) -> str:
    return cluster.run(["squeue", "--all", "--noheader", "-o", "%j %T"]).stdout


def beside(cluster: Cluster, measure: str) -> subprocess.Popen[bytes]:
    """Measures in a process of its own, which can be killed, or goes on beside other tests."""
    code = "from pathlib import Path; from seatrial.checks import catalog; from tests.fakes.slurm import run; "
    return subprocess.Popen([sys.executable, "-c", code + measure], env={**os.environ, **cluster.env})


@dataclass(frozen=True)
class Measuring:
    """A measurement of ``slurm.jobs`` that is under way, and where it will lie."""

    cluster: Cluster
    process: subprocess.Popen[bytes]
    result: Path


@pytest.fixture(scope="module", autouse=True)
def limits(make_shared_cluster: MakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measuring]:
    """Started before all other tests of this module, and looked at after them: Slurm's limits are minutes."""
    cluster = make_shared_cluster(1, extra="JobAcctGatherParams=OverMemoryKill")
    folder = tmp_path_factory.mktemp("limits")
    measure = f"folder = Path({str(folder)!r}); found = run(catalog()['slurm.jobs'], folder, time_limit=True); "
    process = beside(cluster, measure + "(folder / 'result.json').write_text(found.model_dump_json())")
    yield Measuring(cluster, process, folder / "result.json")
    process.kill()
    process.wait()


@contextmanager
def stopped(cluster: Cluster) -> Iterator[None]:
    cluster.stop_controller()
    try:
        yield
    finally:
        cluster.start_controller()


def test_a_healthy_cluster(start: MakeCluster, tmp_path: Path) -> None:
    cluster = start(2, gpus_per_node=2)
    for name in RIG:
        assert outcomes(name, tmp_path, gpus=2) == {}, name
    until(lambda: queued(cluster) == "", 30)


class TestFaults:
    def test_drained_and_dead_nodes(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(3, extra="SlurmdTimeout=4")
        cluster.drain("node0", "fan broken")
        cluster.kill_slurmd("node1")
        cluster.wait_for(["node1"], "down", "down*")
        found = {"in_service node0": Outcome.WARN, "up node1": Outcome.FAIL}
        assert outcomes("slurm.nodes", tmp_path, nodes=1) == found
        assert outcomes("slurm.nodes", tmp_path, nodes=2) == {**found, "nodes_missing": Outcome.FAIL}

    def test_a_controller_that_is_down(self, start: MakeCluster, tmp_path: Path) -> None:
        with stopped(start(1, extra=SOON)):
            assert outcomes("slurm.controller", tmp_path) == {
                "controllers_up": Outcome.FAIL,
                "login": Outcome.ERROR,
            }
            assert "the controller does not answer" in error("slurm.nodes", tmp_path)

    def test_munge_that_is_down(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(1)
        cluster.stop_munge()
        for name in RIG:
            assert "MUNGE authentication fails" in error(name, tmp_path)

    def test_another_configuration_than_the_controllers(
        self, start: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster = start(1)
        other = tmp_path / "slurm.conf"
        other.write_text((cluster.folder / "slurm.conf").read_text() + "SrunPortRange=60001-63000\n")
        monkeypatch.setenv("SLURM_CONF", str(other))
        assert outcomes("slurm.controller", tmp_path) == {"configuration_differs": Outcome.WARN}


class TestJobs:
    def test_environment_and_directory_that_do_not_arrive(
        self, start: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster = start(1)
        cluster.private_dir(tmp_path, "node0")
        (here := tmp_path / "here").mkdir()
        monkeypatch.chdir(here)
        for name in ("SBATCH_EXPORT", "SLURM_EXPORT_ENV"):
            monkeypatch.setenv(name, "NONE")
        assert outcomes("slurm.jobs", tmp_path) == {
            "sbatch_environment": Outcome.FAIL,
            "sbatch_directory": Outcome.WARN,
            "srun_environment": Outcome.FAIL,
            "srun_directory": Outcome.WARN,
        }

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"partition": "nosuch"}, "no such partition"),
            ({"extra": ["--constraint=h200"]}, "no node has that feature"),
            ({"extra": ["--gres=tpu:1"]}, "no such generic resource"),
        ],
    )
    def test_what_slurm_refuses(self, start: MakeCluster, tmp_path: Path, options: dict[str, Any], why: str) -> None:
        cluster = start(1)
        assert why in error("slurm.jobs", tmp_path, **options)
        assert queued(cluster) == ""

    def test_a_queue_that_does_not_move(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(1)
        cluster.drain("node0", "fan broken")
        assert "waited 3 s in vain: " in error("slurm.jobs", tmp_path, wait_s=3)
        until(lambda: queued(cluster) == "", 30)

    def test_inside_a_job_of_our_own(self, start: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the variables of a job that has long ended: srun would ask for a step of it."""
        start(1)
        for name, value in (("SLURM_JOB_ID", "4711"), ("SLURM_NTASKS", "8"), ("SLURM_MEM_PER_NODE", "4000")):
            monkeypatch.setenv(name, value)
        assert outcomes("slurm.jobs", tmp_path) == {}

    def test_when_we_are_killed_slurm_itself_removes_what_waits(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(1)
        cluster.drain("node0", "fan broken")
        killed = beside(cluster, f"run(catalog()['slurm.jobs'], Path({str(tmp_path)!r}))")
        until(lambda: "PENDING" in queued(cluster))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        (job,) = (line for line in cluster.run(["scontrol", "show", "jobs"]).stdout.split() if "Deadline=" in line)
        assert job != "Deadline=N/A"


def confined(start: MakeCluster, nodes: int = 1) -> tuple[Cluster, dict[str, Any]]:
    """A cluster that holds jobs to what they were given, and what the checks must know of its devices."""
    cluster = start(nodes, gpus_per_node=2, confined=True)
    return cluster, {"devices": f"{cluster.folder}/dev/gpu*"}


def prolog(folder: Path, script: str) -> str:
    """A line of slurm.conf that has this script run before each task."""
    (path := folder / "prolog.sh").write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return f"TaskProlog={path}"


OF_BOTH_TASKS = ("gpus_per_task node0/rank0", "gpus_per_task node0/rank1")
ONE_FOR_ALL = "echo export CUDA_VISIBLE_DEVICES=0"


class TestBinding:
    def test_of_tasks_that_are_confined(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start, nodes=2)
        measurement = run_check(catalog()["slurm.binding"], tmp_path, (2, 2), cpus_per_task=1, **devices)
        assert not_passed(judge(catalog()["slurm.binding"], measurement)) == {}
        judged = {
            "cpus_outside_allocation",
            "cpus_shared",
            "memory_confined",
            "gpus_per_task",
            "gpus_shared",
            "gpus_accessible",
        }
        assert judged < {metric.name for metric in measurement.metrics}
        assert {measurement.facts[name] for name in ("cpus_confined", "tasks_bound", "memory_limit")} == {"yes"}
        assert measurement.facts["gpu_isolation_tested"] == "yes"
        until(lambda: queued(cluster) == "", 30)

    def test_a_device_that_slurm_does_not_know(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start)
        cluster.run_on("node0", ["mknod", f"{cluster.folder}/dev/gpu7", "c", "1", "5"])
        found = outcomes("slurm.binding", tmp_path, nodes=1, gpus=2, cpus_per_task=1, **devices)
        assert found.keys() == {"gpus_accessible node0/rank0", "gpus_shared node0", *OF_BOTH_TASKS}
        assert set(found.values()) == {Outcome.FAIL}

    def test_more_memory_than_was_given(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start)
        with (cluster.folder / "cgroup.conf").open("a") as file:
            file.write("AllowedRAMSpace=200\n")
        cluster.kill_slurmd("node0")
        cluster.start_slurmd("node0")
        found = outcomes("slurm.binding", tmp_path, nodes=1, gpus=2, cpus_per_task=1, **devices)
        assert found == dict.fromkeys(("memory_confined node0/rank0", "memory_confined node0/rank1"), Outcome.FAIL)

    def test_one_gpu_for_all_tasks(self, start: MakeCluster, tmp_path: Path) -> None:
        start(1, gpus_per_node=2, extra=prolog(tmp_path, ONE_FOR_ALL))
        found = outcomes("slurm.binding", tmp_path, nodes=1, gpus=2)
        assert found == {"gpus_shared node0": Outcome.FAIL}

    def test_no_gpu_for_the_tasks(self, start: MakeCluster, tmp_path: Path) -> None:
        start(1, gpus_per_node=2, extra=prolog(tmp_path, "echo unset CUDA_VISIBLE_DEVICES"))
        assert outcomes("slurm.binding", tmp_path, nodes=1, gpus=2) == dict.fromkeys(OF_BOTH_TASKS, Outcome.FAIL)

    def test_without_gpus(self, start: MakeCluster, tmp_path: Path) -> None:
        start(1)
        measurement = run_check(catalog()["slurm.binding"], tmp_path)
        assert not_passed(judge(catalog()["slurm.binding"], measurement)) == {}
        assert measurement.facts["gpu_per_task"] == "no: no node has GPUs, or none were promised"
        assert {metric.subject for metric in measurement.metrics} == {"node0", "node0/rank0", "node0/rank1"}

    def test_more_nodes_than_there_are(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(1)
        assert "job 1 waited 3 s in vain: PartitionConfig" in error("slurm.binding", tmp_path, nodes=3, wait_s=3)
        until(lambda: queued(cluster) == "", 30)


class TestIsolation:
    def test_of_jobs_that_are_confined(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start)
        measurement = run_check(catalog()["slurm.isolation"], tmp_path, (1, 2), cpus=1, **devices)
        assert not_passed(judge(catalog()["slurm.isolation"], measurement)) == {}
        assert {metric.name for metric in measurement.metrics} == set(catalog()["slurm.isolation"].metrics)
        until(lambda: queued(cluster) == "", 30)

    def test_a_device_that_slurm_does_not_know(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster, devices = confined(start)
        cluster.run_on("node0", ["mknod", f"{cluster.folder}/dev/gpu7", "c", "1", "5"])
        found = outcomes("slurm.isolation", tmp_path, gpus=2, cpus=1, **devices)
        assert found == dict.fromkeys(("gpus_shared node0", "gpus_accessible_to_both node0"), Outcome.FAIL)

    def test_one_gpu_for_both_jobs(self, start: MakeCluster, tmp_path: Path) -> None:
        start(1, gpus_per_node=2, extra=prolog(tmp_path, ONE_FOR_ALL))
        assert outcomes("slurm.isolation", tmp_path, gpus=2) == {"gpus_shared node0": Outcome.FAIL}

    @pytest.mark.parametrize(
        ("extra", "why"),
        [
            ("SelectType=select/linear\nSelectTypeParameters=CR_Memory", "SelectType=select/linear"),
            ("PartitionName=whole Nodes=ALL OverSubscribe=EXCLUSIVE", "partition whole has OverSubscribe=EXCLUSIVE"),
        ],
    )
    def test_one_job_a_node(self, start: MakeCluster, tmp_path: Path, extra: str, why: str) -> None:
        cluster = start(1, extra=extra)
        partition = "whole" if "whole" in extra else "gpu"
        assert why in str(run_check(catalog()["slurm.isolation"], tmp_path, partition=partition).skipped)
        assert queued(cluster) == ""

    @pytest.mark.parametrize(("option", "value"), [("cpus", 5), ("extra", ["--exclusive"])])
    def test_no_room_for_the_second(self, start: MakeCluster, tmp_path: Path, option: str, value: Any) -> None:
        cluster = start(1)
        said = error("slurm.isolation", tmp_path, second_job_wait_s=4, **{option: value})
        assert "no second job came to run beside job 1 on node0: job 2 waited 4 s in vain: Resources" in said
        until(lambda: queued(cluster) == "", 30)

    def test_when_we_are_killed_a_time_limit_ends_both(self, start: MakeCluster, tmp_path: Path) -> None:
        cluster = start(1)
        killed = beside(cluster, f"run(catalog()['slurm.isolation'], Path({str(tmp_path)!r}), extra=['--hold'])")
        until(lambda: "PENDING" in queued(cluster))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        shown = cluster.run(["scontrol", "show", "jobs"]).stdout
        assert "TimeLimit=00:05:00" in shown
        assert "Deadline=N/A" not in shown


def test_gpus_that_are_not_there(start: MakeCluster) -> None:
    """In a job on the nodes, as a trial does it: the fake GPUs of one are there for Slurm alone."""
    cluster = start(2, gpus_per_node=2)
    code = (
        "from pathlib import Path; from seatrial.checks import catalog; from tests.fakes.slurm import bad, judge, run; "
    )
    code += "check = catalog()['slurm.gres']; found = run(check, Path('.')); "
    code += "print(found.facts['gres'], found.facts['seen'], bad(judge(check, found)))"
    told = cluster.run(["srun", "-N2", "--label", "--chdir", str(Path.cwd()), sys.executable, "-c", code]).stdout
    assert sorted(told.splitlines()) == [
        f"{node}: gpu:fake:2 0 GPUs by NVML {{'gpus_missing login': <Outcome.FAIL: 'FAIL'>}}" for node in (0, 1)
    ]


def test_what_becomes_of_a_job(start: MakeCluster) -> None:
    cluster = start(1)

    def submit(script: str, *words: str) -> str:
        return cluster.run(["sbatch", "--parsable", "-o", "/dev/null", *words, "--wrap", script]).stdout.strip()

    failing, waiting = submit("exit 3"), submit("true", "--hold")
    job = until(lambda: found if (found := slurm.job(failing)).ended else None)
    assert (job.state, job.exit_code, job.nodes) == ("FAILED", 3, "node0")
    held = slurm.job(waiting)
    assert (held.pending, held.reason, held.nodes) == (True, "JobHeldUser", "")
    assert not slurm.job(4711).has_state


def test_limits_are_enforced(limits: Measuring) -> None:
    assert limits.process.wait(180) == 0
    measurement = Measurement.model_validate_json(limits.result.read_text())
    assert not_passed(judge(catalog()["slurm.jobs"], measurement)) == {}
    assert measurement.facts["memory_limit"] == "OverMemoryKill"
    assert {"memory_limit_enforced", "time_limit_enforced"} < {metric.name for metric in measurement.metrics}
    assert queued(limits.cluster) == ""
