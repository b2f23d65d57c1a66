from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.slurm.binding import CHECK
from seatrial.model import Measurement, Outcome, Why
from tests.checks.slurm.fake_cluster import FakeCluster, ProbeCheckRunner
from tests.fakes.slurm import NODES, failure, judge, reasons, recorded, run_check, success
from tests.paths import FIXTURES

TASKS = (FIXTURES / "slurm-task/rig-confined.txt").read_text()
DETAILS = (FIXTURES / "slurm-task/scontrol-show-job-details.txt").read_text()
UNCONFINED = {"TaskPlugin": "task/none"}


class Binding(ProbeCheckRunner):
    """The confined test cluster: two nodes with two GPUs and two CPUs each, one of each per task."""

    tasks = TASKS
    single_task = re.sub(r"^2: ", "1: ", re.sub(r"^[13]: .*\n", "", TASKS, flags=re.MULTILINE), flags=re.MULTILINE)

    def task_output(self, argv: Sequence[str]) -> str:
        return self.single_task if "--ntasks-per-node=1" in argv else self.tasks

    def change(self, pattern: str, replacement: str, *, single_task: bool = False) -> None:
        text, count = re.subn(pattern, replacement, self.single_task if single_task else self.tasks, flags=re.MULTILINE)
        assert count
        setattr(self, "single_task" if single_task else "tasks", text)

    def problems(self, gpus: int | None = 2) -> dict[str, Outcome]:
        return self.not_passed((2, gpus), cpus_per_task=1)

    def measured(self, gpus: int | None = 2, **options: Any) -> Measurement:
        return self.measure((2, gpus), **{"cpus_per_task": 1, **options})


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Binding:
    runner = Binding(CHECK, FakeCluster(lambda argv: runner.task_output(argv), DETAILS), monkeypatch, tmp_path)
    return runner


def test_a_healthy_cluster(binding: Binding) -> None:
    assert binding.problems() == {}
    measured = {metric.name for metric in binding.measured().metrics}
    assert set(CHECK.units) == measured | {"numa_distance"}


def test_submit_options_of_job_and_steps(binding: Binding) -> None:
    binding.measured(partition="gpu", extra=["--qos=test"])
    (job,), (all_tasks, single_task) = binding.slurm.submitted, binding.slurm.steps
    size = {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-task=1"}
    assert size | {"--mem=2G", "--time=5", "--partition=gpu", "--qos=test"} < set(job)
    assert size | {"--jobid=1", "--overlap", "--cpu-bind=threads"} < set(all_tasks)
    assert {"--ntasks=2", "--ntasks-per-node=1", "--gpus-per-task=1"} < set(single_task)


def test_a_job_on_some_nodes_of_the_list_excludes_the_others(binding: Binding) -> None:
    binding.measured(partition="gpu", nodelist="node[0-1]")
    assert "--nodelist=node[0-1]" in binding.slurm.submitted[-1]
    (missing_task,) = binding.not_passed((2, 2), nodes=1, partition="gpu", nodelist="node[0-1]")
    assert missing_task == "login"  # the fake runs tasks on both nodes
    (job,) = binding.slurm.submitted[1:]
    assert {"--nodes=1", "--partition=gpu", "--exclude=node2,node3"} < set(job)
    assert not any(option.startswith("--nodelist") for option in job)


class TestCpus:
    def test_fewer_cpus_than_allocated(self, binding: Binding) -> None:
        assert binding.not_passed((2, 2), cpus_per_task=2).keys() == {
            f"cpus_missing {task}" for task in ("node0/rank0", "node0/rank1", "node1/rank2", "node1/rank3")
        }

    def test_cpus_outside_the_allocation(self, binding: Binding) -> None:
        binding.change("^1: cpus=1", "1: cpus=1-3")
        assert binding.problems() == {"cpus_outside_allocation node0": Outcome.FAIL}

    def test_both_hyperthreads_of_a_core_belong_to_the_job(self, binding: Binding) -> None:
        """Slurm counts cores: 16 CPUs are online, 8 are configured."""
        binding.change("^([0-3]): siblings=.*", r"\1: siblings=0,8")
        binding.change("^([0-3]): numa=.*", r"\1: numa=0|0-15|10")
        binding.change("^([13]): cpus=1", r"\1: cpus=1,9")
        assert binding.problems() == {}
        binding.change("^1: cpus=1,9", "1: cpus=1-4")
        assert binding.problems() == {"cpus_outside_allocation node0": Outcome.FAIL}

    def test_two_tasks_on_the_same_cpu(self, binding: Binding) -> None:
        binding.change("^3: cpus=1", "3: cpus=0")
        assert binding.problems() == {"cpus_shared node1": Outcome.FAIL}
        evidence = {m.subject: m.evidence for m in binding.measured().metrics if m.name == "cpus_shared"}
        assert evidence == {"node0": [], "node1": [0]}

    def test_cpus_are_not_judged_without_binding(self, binding: Binding) -> None:
        binding.slurm.settings = UNCONFINED
        binding.change("^([0-3]): cpus=.*", r"\1: cpus=0-7")
        binding.change("^([13]): cuda=0", r"\1: cuda=1")
        assert binding.problems() == {"devices_confined": Outcome.WARN}


class TestMemory:
    def test_limit_above_the_allocation(self, binding: Binding) -> None:
        binding.change("^2: memory=2097152000", "2: memory=4194304000")
        assert binding.problems() == {"memory_confined node1/rank2": Outcome.FAIL}

    def test_no_limit(self, binding: Binding) -> None:
        binding.change("^2: memory=.*", "2: memory=max")
        assert binding.problems() == {"memory_confined node1/rank2": Outcome.FAIL}

    def test_invisible_cgroup_is_an_error(self, binding: Binding) -> None:
        binding.change("^([0-3]): memory=.*\n", "")
        assert binding.problems() == {"memory_confined login": Outcome.ERROR}

    def test_invisible_cgroup_of_one_task_is_an_error(self, binding: Binding) -> None:
        binding.change("^2: memory=.*\n", "")
        assert binding.problems() == {"memory_confined node1/rank2": Outcome.ERROR}

    def test_not_configured(self, binding: Binding) -> None:
        binding.slurm.settings["ConstrainRAMSpace"] = "no"
        binding.change("^([0-3]): memory=.*", r"\1: memory=max")
        assert binding.problems() == {}


class TestGpus:
    def test_two_tasks_with_the_same_gpu(self, binding: Binding) -> None:
        binding.change("^1: opened=.*", "1: opened=/rig/dev/gpu0")
        assert binding.problems() == {"gpus_shared node0": Outcome.FAIL}

    def test_task_without_gpu(self, binding: Binding) -> None:
        binding.change("^1: opened=.*\n", "")
        assert binding.problems() == {"gpus_per_task node0/rank1": Outcome.FAIL}

    def test_task_with_two_gpus(self, binding: Binding) -> None:
        binding.change("^1: opened=.*", "1: opened=/rig/dev/gpu1\n1: opened=/rig/dev/gpu2")
        assert binding.problems() == {"gpus_per_task node0/rank1": Outcome.FAIL}

    def test_access_to_another_gpu(self, binding: Binding) -> None:
        binding.change("^1: opened=.*", "1: opened=/rig/dev/gpu0\n1: opened=/rig/dev/gpu1", single_task=True)
        assert binding.problems() == {"gpus_accessible node1/rank1": Outcome.FAIL}

    def test_gpu_that_nvml_lists_but_cannot_be_opened(self, binding: Binding) -> None:
        two = "1: gpu=0, GPU-a, 00000000:1B:00.0\n1: gpu=1, GPU-b, 00000000:9A:00.0"
        binding.change("^1: unlisted=.*", two, single_task=True)
        assert binding.problems() == {"gpus_accessible node1/rank1": Outcome.FAIL}

    def test_one_gpu_per_node_needs_no_isolation(self, binding: Binding) -> None:
        binding.tasks = binding.single_task
        assert binding.problems(gpus=1) == {}
        measured = binding.measured(gpus=1)
        assert reasons(measured, Why.DOES_NOT_APPLY)["gpus_accessible"] == "one GPU per node"
        assert {v.outcome for v in judge(CHECK, measured) if v.metric == "gpus_accessible"} == {Outcome.SKIP}

    def test_gpus_by_cuda_index_without_device_cgroups(self, binding: Binding) -> None:
        binding.slurm.settings["ConstrainDevices"] = "no"
        assert binding.problems() == {
            "devices_confined": Outcome.WARN,
            "gpus_shared node0": Outcome.FAIL,
            "gpus_shared node1": Outcome.FAIL,
        }

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"GresTypes": "(null)"}, "GresTypes in slurm.conf does not contain gpu"),
            ({"SelectType": "select/cons_res"}, "SelectType=select/cons_res does not support --gpus-per-task"),
        ],
    )
    def test_gpus_that_slurm_cannot_allocate(self, binding: Binding, settings: dict[str, str], reason: str) -> None:
        binding.slurm.settings |= settings
        measurement = binding.measured()
        gpu_metrics = ("gpus_per_task", "gpus_shared", "gpus_accessible", "devices_confined", "numa_distance")
        assert reasons(measurement, Why.DOES_NOT_APPLY) == dict.fromkeys(gpu_metrics, reason)
        assert {v.metric for v in judge(CHECK, measurement) if v.outcome is Outcome.SKIP} == set(gpu_metrics)
        assert {metric.name for metric in measurement.metrics} == {
            *("cpus_missing", "cpus_outside_allocation", "cpus_shared", "memory_confined"),
        }
        assert "--gpus-per-task=1" not in binding.slurm.submitted[0]
        assert binding.problems() == {}

    def test_gpu_count_from_slurm_without_expected_gpus(self, binding: Binding) -> None:
        assert binding.problems(gpus=None) == {}
        assert "--gpus-per-task=1" in binding.slurm.submitted[0]

    def test_no_gpus_expected(self, binding: Binding) -> None:
        assert binding.problems(gpus=0) == {}
        assert len(binding.slurm.steps) == 1


class TestNumaDistance:
    SOCKETS = "{0}: pci=0000:1b:00.0 1\n{0}: numa=0|0|10 21\n{0}: numa=1|1|21 10\n{0}: gpu=0, GPU-{0}, 00000000:1B:00.0"

    def sockets(self, binding: Binding, *ranks: int) -> None:
        for rank in ranks:
            binding.change(f"^{rank}: unlisted=.*", self.SOCKETS.format(rank))
            binding.change(rf"^{rank}: numa=0\|0-1\|10\n", "")

    def test_gpu_on_another_socket(self, binding: Binding) -> None:
        self.sockets(binding, 0, 1, 2, 3)
        assert binding.problems() == {
            "numa_distance node0/rank0": Outcome.WARN,
            "numa_distance node1/rank2": Outcome.WARN,
        }

    def test_unreadable_distance_has_a_reason(self, binding: Binding) -> None:
        self.sockets(binding, 1)
        measurement = binding.measured()
        distances = {m.subject: m.value for m in measurement.metrics if m.name == "numa_distance"}
        unknown = {each.subject: each.reason for each in measurement.absent if each.metric == "numa_distance"}
        assert distances == {"node0/rank1": 10}
        assert unknown.keys() == {"node0/rank0", "node1/rank2", "node1/rank3"}
        assert all("nvidia-smi" in reason for reason in unknown.values())


class TestErrors:
    def test_missing_task(self, binding: Binding) -> None:
        binding.change("^3: .*\n", "")
        assert "3 of 4 tasks" in str(binding.measured().error)

    def test_task_on_another_node(self, binding: Binding) -> None:
        binding.change("^3: node=node1", "3: node=node7")
        assert "node7" in str(binding.measured().error)

    def test_job_stays_pending(self, binding: Binding) -> None:
        binding.slurm.states["1"] = "PENDING"
        assert "job 1 still pending after 9 s: Resources" in str(binding.measured(wait_s=9).error)
        assert binding.slurm.steps == []

    def test_job_fails_immediately(self, binding: Binding) -> None:
        binding.slurm.states["1"] = "FAILED"
        assert "job 1 did not run: state FAILED" in str(binding.measured().error)

    def test_srun_is_rejected(self, binding: Binding) -> None:
        binding.slurm.overrides["srun"] = failure(
            "srun: error: Unable to create step: Invalid generic resource (gres)\n"
        )
        assert "no such generic resource" in str(binding.measured().error)

    def test_nodes_with_different_gpu_counts(self, binding: Binding) -> None:
        healthy = recorded("scontrol-show-nodes-healthy.txt").out
        binding.slurm.overrides[NODES] = success(healthy.replace("Gres=gpu:fake:2", "Gres=gpu:fake:1", 1))
        assert "different numbers of GPUs" in str(binding.measured(gpus=None).error)


def test_no_slurm_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
