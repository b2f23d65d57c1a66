from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.slurm.isolation import CHECK
from seatrial.model import Measurement, Outcome, Why
from seatrial.util.processes import CommandResult
from tests.checks.slurm.fake_cluster import FakeCluster, ProbeCheckRunner
from tests.fakes.slurm import PARTITIONS, judge, reasons, recorded, run_check, success
from tests.paths import FIXTURES

TASKS = (FIXTURES / "slurm-task/rig-confined.txt").read_text()
DETAILS = "JobId=1\n   NodeList=node0\n     Nodes=node0 CPU_IDs=0 Mem=1000 GRES=gpu:fake:1(IDX:0)\n"
GPU_METRICS = ("gpus_shared", "gpus_accessible_to_both")
OUTPUT = {
    rank: re.sub(f"^(?!{rank}: ).*\n", "", TASKS, flags=re.MULTILINE).replace(f"{rank}: ", "0: ") for rank in "01"
}


class Isolation(ProbeCheckRunner):
    """Two jobs on a node of the confined test cluster, each with one GPU and one CPU."""

    tasks = {"--jobid=1": OUTPUT["0"], "--jobid=2": OUTPUT["1"]}

    def task_output(self, argv: Sequence[str]) -> str:
        (job_option,) = (option for option in argv if option.startswith("--jobid="))
        return self.tasks[job_option]

    def change_second(self, pattern: str, replacement: str) -> None:
        text, count = re.subn(pattern, replacement, self.tasks["--jobid=2"], flags=re.MULTILINE)
        assert count
        self.tasks = {**self.tasks, "--jobid=2": text}

    def problems(self, gpus: int | None = 2) -> dict[str, Outcome]:
        return self.not_passed((1, gpus), cpus=1)

    def measured(self, gpus: int | None = 2, **options: Any) -> Measurement:
        return self.measure((1, gpus), **{"cpus": 1, **options})


@pytest.fixture
def isolation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Isolation:
    runner = Isolation(CHECK, FakeCluster(lambda argv: runner.task_output(argv), DETAILS), monkeypatch, tmp_path)
    return runner


def test_two_jobs_without_shared_resources(isolation: Isolation) -> None:
    assert isolation.problems() == {}
    measured = isolation.measured()
    assert {metric.name for metric in measured.metrics} == set(CHECK.units)
    assert measured.absent == ()


def test_submit_options_of_jobs_and_steps(isolation: Isolation) -> None:
    isolation.measured(account="ops")
    first, second = isolation.slurm.submitted
    assert {"--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gres=gpu:1", "--time=5", "--account=ops"} < set(first)
    assert set(second) - set(first) == {"--nodelist=node0"}
    assert {"--overlap", "--gres=gpu:1"} < set(isolation.slurm.steps[0])


def test_memory_is_requested_only_as_consumable_resource(isolation: Isolation) -> None:
    """Otherwise a node may have no configured memory, and reject any request."""
    isolation.measured()
    assert "--mem=1G" in isolation.slurm.submitted[0]
    isolation.slurm.settings["SelectTypeParameters"] = "CR_CORE"
    isolation.measured()
    assert "--mem=1G" not in isolation.slurm.submitted[-1]


class TestSharedResources:
    def test_shared_cpu(self, isolation: Isolation) -> None:
        isolation.change_second("^0: cpus=1", "0: cpus=0-1")
        assert isolation.problems() == {"cpus_shared node0": Outcome.FAIL}

    def test_shared_gpu(self, isolation: Isolation) -> None:
        isolation.change_second("^0: opened=.*", "0: opened=/rig/dev/gpu0")
        assert isolation.problems() == {
            "gpus_shared node0": Outcome.FAIL,
            "gpus_accessible_to_both node0": Outcome.FAIL,
        }

    def test_shared_gpu_by_uuid(self, isolation: Isolation) -> None:
        same = "0: gpu=0, GPU-a, 00000000:1B:00.0"
        isolation.tasks = {job: re.sub("0: unlisted=.*", same, text) for job, text in isolation.tasks.items()}
        assert isolation.problems() == {"gpus_shared node0": Outcome.FAIL}
        isolation.change_second("GPU-a", "GPU-b")
        assert isolation.problems() == {}

    def test_device_that_both_jobs_can_open(self, isolation: Isolation) -> None:
        two = {job: text + f"0: gpu=0, GPU-{job}, 0:1B:00.0\n" for job, text in isolation.tasks.items()}
        isolation.tasks = {job: re.sub("0: unlisted=.*\n", "", text) for job, text in two.items()}
        isolation.change_second("^(0: opened=.*)", r"\1\n0: opened=/rig/dev/gpu0")
        assert isolation.problems() == {"gpus_accessible_to_both node0": Outcome.FAIL}

    def test_evidence_of_both_jobs(self, isolation: Isolation) -> None:
        isolation.change_second("^0: cpus=1", "0: cpus=0-1")
        for metric in isolation.measured().metrics:
            evidence: Any = metric.evidence
            assert (evidence["first_job"]["cpus"], evidence["second_job"]["cpus"]) == ([0], [0, 1])
            assert evidence["first_job"]["gpus"] == ["/rig/dev/gpu0"]


class TestNotApplicable:
    def test_cpus_without_binding(self, isolation: Isolation) -> None:
        isolation.slurm.settings |= {"TaskPlugin": "task/none"}
        isolation.change_second("^0: cpus=1", "0: cpus=0")
        isolation.change_second("^0: cuda=0", "0: cuda=1")
        assert isolation.problems() == {}

    @pytest.mark.parametrize(
        ("settings", "partition", "reason"),
        [
            ({"SelectTypeParameters": "CR_MEMORY"}, "NO", "SelectTypeParameters=CR_MEMORY does not allocate CPUs"),
            ({}, "FORCE:4", "partition gpu shares CPUs: OverSubscribe=FORCE:4"),
            ({"TaskPlugin": "task/cgroup", "ConstrainCores": "no"}, "NO", "TaskPlugin=task/cgroup, ConstrainCores=no"),
        ],
    )
    def test_cpus_that_slurm_shares(
        self, isolation: Isolation, settings: dict[str, str], partition: str, reason: str
    ) -> None:
        isolation.slurm.settings |= settings
        isolation.slurm.overrides[PARTITIONS] = partitions(partition)
        isolation.change_second("^0: cpus=1", "0: cpus=0")
        assert reasons(isolation.measured(), Why.DOES_NOT_APPLY) == {"cpus_shared": reason}
        assert isolation.problems() == {}

    def test_one_gpu_per_node(self, isolation: Isolation) -> None:
        assert isolation.problems(gpus=1) == {}
        assert "--gres=gpu:1" not in isolation.slurm.submitted[0]
        not_applicable = reasons(isolation.measured(gpus=1), Why.DOES_NOT_APPLY)
        assert not_applicable == dict.fromkeys(GPU_METRICS, "1 GPUs per node; two jobs need one GPU each")

    def test_no_gpus_in_slurm(self, isolation: Isolation) -> None:
        isolation.slurm.settings["GresTypes"] = "(null)"
        assert isolation.problems() == {}
        measured = isolation.measured()
        assert {metric.name for metric in measured.metrics} == {"cpus_shared"}
        assert reasons(measured, Why.DOES_NOT_APPLY).keys() == set(GPU_METRICS)

    def test_devices_without_cgroups(self, isolation: Isolation) -> None:
        isolation.slurm.settings["ConstrainDevices"] = "no"
        isolation.change_second("^0: cuda=0", "0: cuda=1")
        measured = isolation.measured()
        assert {metric.name for metric in measured.metrics} == {"cpus_shared", "gpus_shared"}
        assert reasons(measured, Why.DOES_NOT_APPLY) == {
            "gpus_accessible_to_both": "TaskPlugin=task/affinity,task/cgroup, ConstrainDevices=no"
        }
        assert isolation.problems() == {}


class TestOneJobPerNode:
    def reason(self, isolation: Isolation) -> str:
        """The reason why no metric applies; each has the verdict SKIP, although Slurm is there."""
        measured = isolation.measured()
        not_applicable = reasons(measured, Why.DOES_NOT_APPLY)
        assert not_applicable.keys() == set(CHECK.units)
        assert {(verdict.metric, verdict.outcome) for verdict in judge(CHECK, measured)} == {
            (name, Outcome.SKIP) for name in CHECK.units
        }
        assert (measured.skipped, measured.error) == (None, None)
        (reason,) = set(not_applicable.values())
        return reason

    def test_whole_nodes(self, isolation: Isolation) -> None:
        isolation.slurm.settings["SelectType"] = "select/linear"
        assert "SelectType=select/linear" in self.reason(isolation)
        assert isolation.slurm.submitted == []

    def test_exclusive_partition(self, isolation: Isolation) -> None:
        isolation.slurm.overrides[PARTITIONS] = partitions("EXCLUSIVE")
        assert "partition gpu has OverSubscribe=EXCLUSIVE" in self.reason(isolation)

    def test_selected_partition_is_not_exclusive(self, isolation: Isolation) -> None:
        isolation.slurm.overrides[PARTITIONS] = partitions("EXCLUSIVE")
        assert isolation.measured(partition="short").error is None


class TestErrors:
    def test_second_job_stays_pending(self, isolation: Isolation) -> None:
        isolation.slurm.states["2"] = "PENDING"
        error = str(isolation.measured(second_job_wait_s=7).error)
        assert "no second job started on node0 with job 1: job 2 still pending after 7 s: Resources" in error
        assert isolation.slurm.steps == []

    def test_first_job_stays_pending(self, isolation: Isolation) -> None:
        isolation.slurm.states["1"] = "PENDING"
        assert "job 1 still pending after 300 s" in str(isolation.measured().error)

    def test_first_job_ends_early(self, isolation: Isolation) -> None:
        def end(argv: Sequence[str]) -> CommandResult:
            isolation.slurm.states["1"] = "TIMEOUT"
            return success(isolation.task_output(argv))

        isolation.slurm.overrides["srun"] = end
        assert "job 1 ended before both jobs were compared: TIMEOUT" in str(isolation.measured().error)

    def test_step_without_output(self, isolation: Isolation) -> None:
        isolation.tasks = {**isolation.tasks, "--jobid=2": ""}
        assert "job 2: expected one task on node0, got no task" in str(isolation.measured().error)

    def test_step_on_another_node(self, isolation: Isolation) -> None:
        isolation.change_second("^0: node=node0", "0: node=node1")
        assert "expected one task on node0, got node1/rank0" in str(isolation.measured().error)

    def test_unknown_gpu_of_a_job(self, isolation: Isolation) -> None:
        isolation.change_second("^0: opened=.*\n", "")
        assert isolation.problems() == {f"{name} login": Outcome.ERROR for name in GPU_METRICS}
        assert reasons(isolation.measured(), Why.UNREADABLE).keys() == set(GPU_METRICS)


def partitions(oversubscribe: str) -> CommandResult:
    """Return the recorded partitions with OverSubscribe changed in the default partition."""
    text = recorded("scontrol-show-partition.txt").out
    return success(text.replace("OverSubscribe=NO", f"OverSubscribe={oversubscribe}", 1))


def test_no_slurm_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
