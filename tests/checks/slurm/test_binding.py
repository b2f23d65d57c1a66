from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.slurm.binding import CHECK, METRICS, RULES
from seatrial.model import Measurement, Outcome
from tests.checks.slurm.fake_cluster import FakeCluster, ProbeCheckRunner
from tests.fakes.slurm import NODES, failure, recorded, run_check, success
from tests.paths import FIXTURES

TASKS = (FIXTURES / "slurm-task/rig-confined.txt").read_text()
DETAILS = (FIXTURES / "slurm-task/scontrol-show-job-details.txt").read_text()
UNCONFINED = {"TaskPlugin": "task/none"}


class Binding(ProbeCheckRunner):
    """The rig's confined cluster: two nodes with two GPUs and two CPUs each, one of each for a task."""

    tasks = TASKS
    alone = re.sub(r"^2: ", "1: ", re.sub(r"^[13]: .*\n", "", TASKS, flags=re.MULTILINE), flags=re.MULTILINE)

    def tell(self, argv: Sequence[str]) -> str:
        return self.alone if "--ntasks-per-node=1" in argv else self.tasks

    def change(self, pattern: str, instead: str, *, alone: bool = False) -> None:
        text, found = re.subn(pattern, instead, self.alone if alone else self.tasks, flags=re.MULTILINE)
        assert found
        setattr(self, "alone" if alone else "tasks", text)

    def found(self, gpus: int | None = 2) -> dict[str, Outcome]:
        return self.not_passed((2, gpus), cpus_per_task=1)

    def measured(self, gpus: int | None = 2, **options: Any) -> Measurement:
        return self.measure((2, gpus), **{"cpus_per_task": 1, **options})


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Binding:
    trial = Binding(CHECK, FakeCluster(lambda argv: trial.tell(argv), DETAILS), monkeypatch, tmp_path)
    return trial


def test_a_healthy_cluster(binding: Binding) -> None:
    assert binding.found() == {}
    measured = {metric.name for metric in binding.measured().metrics}
    assert {rule.metric for rule in RULES} == set(METRICS) == measured | {"numa_distance"}


def test_what_is_asked_for(binding: Binding) -> None:
    binding.measured(partition="gpu", extra=["--qos=test"])
    (job,), (together, alone) = binding.slurm.submitted, binding.slurm.steps
    size = {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-task=1"}
    assert size | {"--mem=2G", "--time=5", "--partition=gpu", "--qos=test"} < set(job)
    assert size | {"--jobid=1", "--overlap", "--cpu-bind=threads"} < set(together)
    assert {"--ntasks=2", "--ntasks-per-node=1", "--gpus-per-task=1"} < set(alone)


class TestCpus:
    def test_too_few(self, binding: Binding) -> None:
        assert binding.not_passed((2, 2), cpus_per_task=2).keys() == {
            f"cpus_missing {task}" for task in ("node0/rank0", "node0/rank1", "node1/rank2", "node1/rank3")
        }

    def test_of_others(self, binding: Binding) -> None:
        binding.change("^1: cpus=1", "1: cpus=1-3")
        assert binding.found() == {"cpus_outside_allocation node0": Outcome.FAIL}

    def test_where_slurm_counts_cores_both_threads_are_the_jobs(self, binding: Binding) -> None:
        """16 CPUs are online, and 8 configured."""
        binding.change("^([0-3]): siblings=.*", r"\1: siblings=0,8")
        binding.change("^([0-3]): numa=.*", r"\1: numa=0|0-15|10")
        binding.change("^([13]): cpus=1", r"\1: cpus=1,9")
        assert binding.found() == {}
        binding.change("^1: cpus=1,9", "1: cpus=1-4")
        assert binding.found() == {"cpus_outside_allocation node0": Outcome.FAIL}

    def test_the_same_for_two_tasks(self, binding: Binding) -> None:
        binding.change("^3: cpus=1", "3: cpus=0")
        assert binding.found() == {"cpus_shared node1": Outcome.FAIL}

    def test_where_nothing_binds_they_are_not_judged(self, binding: Binding) -> None:
        binding.slurm.settings = UNCONFINED
        binding.change("^([0-3]): cpus=.*", r"\1: cpus=0-7")
        binding.change("^([13]): cuda=0", r"\1: cuda=1")
        assert binding.found() == {"devices_confined": Outcome.WARN}


class TestMemory:
    def test_more_than_was_given(self, binding: Binding) -> None:
        binding.change("^2: memory=2097152000", "2: memory=4194304000")
        assert binding.found() == {"memory_confined node1/rank2": Outcome.FAIL}

    def test_no_limit_at_all(self, binding: Binding) -> None:
        binding.change("^2: memory=.*", "2: memory=max")
        assert binding.found() == {"memory_confined node1/rank2": Outcome.FAIL}

    def test_out_of_sight_is_not_measured(self, binding: Binding) -> None:
        binding.change("^([0-3]): memory=.*\n", "")
        assert binding.found() == {"memory_confined login": Outcome.ERROR}

    def test_not_set_up(self, binding: Binding) -> None:
        binding.slurm.settings["ConstrainRAMSpace"] = "no"
        binding.change("^([0-3]): memory=.*", r"\1: memory=max")
        assert binding.found() == {}


class TestGpus:
    def test_one_for_two_tasks(self, binding: Binding) -> None:
        binding.change("^1: opened=.*", "1: opened=/rig/dev/gpu0")
        assert binding.found() == {"gpus_shared node0": Outcome.FAIL}

    def test_none_for_a_task(self, binding: Binding) -> None:
        binding.change("^1: opened=.*\n", "")
        assert binding.found() == {"gpus_per_task node0/rank1": Outcome.FAIL}

    def test_both_for_a_task(self, binding: Binding) -> None:
        binding.change("^1: opened=.*", "1: opened=/rig/dev/gpu1\n1: opened=/rig/dev/gpu2")
        assert binding.found() == {"gpus_per_task node0/rank1": Outcome.FAIL}

    def test_another_in_reach(self, binding: Binding) -> None:
        binding.change("^1: opened=.*", "1: opened=/rig/dev/gpu0\n1: opened=/rig/dev/gpu1", alone=True)
        assert binding.found() == {"gpus_accessible node1/rank1": Outcome.FAIL}

    def test_that_nvml_lists_though_it_cannot_be_opened(self, binding: Binding) -> None:
        two = "1: gpu=0, GPU-a, 00000000:1B:00.0\n1: gpu=1, GPU-b, 00000000:9A:00.0"
        binding.change("^1: unlisted=.*", two, alone=True)
        assert binding.found() == {"gpus_accessible node1/rank1": Outcome.FAIL}

    def test_with_one_of_a_node_there_is_nothing_to_hide(self, binding: Binding) -> None:
        binding.tasks = binding.alone
        assert binding.found(gpus=1) == {}
        assert binding.measured(gpus=1).facts["gpu_isolation_tested"] == "no: the trial has one GPU a node"

    def test_without_device_cgroups_by_cudas_numbers(self, binding: Binding) -> None:
        binding.slurm.settings["ConstrainDevices"] = "no"
        assert binding.found() == {
            "devices_confined": Outcome.WARN,
            "gpus_shared node0": Outcome.FAIL,
            "gpus_shared node1": Outcome.FAIL,
        }

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"GresTypes": "(null)"}, "GresTypes of slurm.conf has no gpu"),
            ({"SelectType": "select/cons_res"}, "select/cons_res knows no --gpus-per-task"),
        ],
    )
    def test_that_slurm_does_not_hand_out(self, binding: Binding, settings: dict[str, str], why: str) -> None:
        binding.slurm.settings |= settings
        measurement = binding.measured()
        assert measurement.facts["gpu_per_task"] == f"no: {why}"
        assert {metric.name for metric in measurement.metrics} == {
            *("cpus_missing", "cpus_outside_allocation", "cpus_shared", "memory_confined"),
        }
        assert "--gpus-per-task=1" not in binding.slurm.submitted[0]
        assert binding.found() == {}

    def test_as_many_as_slurm_has_where_nobody_promised(self, binding: Binding) -> None:
        assert binding.found(gpus=None) == {}
        assert "--gpus-per-task=1" in binding.slurm.submitted[0]

    def test_none_promised(self, binding: Binding) -> None:
        assert binding.found(gpus=0) == {}
        assert len(binding.slurm.steps) == 1


class TestDistance:
    SOCKETS = "{0}: pci=0000:1b:00.0 1\n{0}: numa=0|0|10 21\n{0}: numa=1|1|21 10\n{0}: gpu=0, GPU-{0}, 00000000:1B:00.0"

    def sockets(self, binding: Binding, *ranks: int) -> None:
        for rank in ranks:
            binding.change(f"^{rank}: unlisted=.*", self.SOCKETS.format(rank))
            binding.change(rf"^{rank}: numa=0\|0-1\|10\n", "")

    def test_from_another_socket(self, binding: Binding) -> None:
        self.sockets(binding, 0, 1, 2, 3)
        assert binding.found() == {
            "numa_distance node0/rank0": Outcome.WARN,
            "numa_distance node1/rank2": Outcome.WARN,
        }

    def test_that_is_not_known_everywhere_is_told(self, binding: Binding) -> None:
        self.sockets(binding, 1)
        measurement = binding.measured()
        numa = measurement.facts["numa"]
        assert isinstance(numa, dict)
        assert numa["node0/rank1"] == 10
        assert "nvidia-smi" in str(numa["node0/rank0"])
        assert measurement.facts["numa_distance_readable"] == "yes"


class TestWhatCannotBeMeasured:
    def test_a_task_is_lost(self, binding: Binding) -> None:
        binding.change("^3: .*\n", "")
        assert "3 of 4 tasks told" in str(binding.measured().error)

    def test_a_task_is_elsewhere(self, binding: Binding) -> None:
        binding.change("^3: node=node1", "3: node=node7")
        assert "some on node7" in str(binding.measured().error)

    def test_the_job_waits(self, binding: Binding) -> None:
        binding.slurm.states["1"] = "PENDING"
        assert "job 1 waited 9 s in vain: Resources" in str(binding.measured(wait_s=9).error)
        assert binding.slurm.steps == []

    def test_the_job_ends_at_once(self, binding: Binding) -> None:
        binding.slurm.states["1"] = "FAILED"
        assert "job 1 was not left to run: FAILED" in str(binding.measured().error)

    def test_srun_is_refused(self, binding: Binding) -> None:
        binding.slurm.overrides["srun"] = failure(
            "srun: error: Unable to create step: Invalid generic resource (gres)\n"
        )
        assert "no such generic resource" in str(binding.measured().error)

    def test_nodes_differ_and_nobody_promised(self, binding: Binding) -> None:
        healthy = recorded("scontrol-show-nodes-healthy.txt").out
        binding.slurm.overrides[NODES] = success(healthy.replace("Gres=gpu:fake:2", "Gres=gpu:fake:1", 1))
        assert "different numbers of GPUs" in str(binding.measured(gpus=None).error)


def test_no_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
