from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.slurm.isolation import CHECK, METRICS, RULES
from seatrial.model import Measurement, Outcome
from seatrial.util.processes import CommandResult
from tests.checks.slurm.fake_cluster import FakeCluster, ProbeCheckRunner
from tests.fakes.slurm import PARTITIONS, recorded, run_check, success
from tests.paths import FIXTURES

TASKS = (FIXTURES / "slurm-task/rig-confined.txt").read_text()
DETAILS = "JobId=1\n   NodeList=node0\n     Nodes=node0 CPU_IDs=0 Mem=1000 GRES=gpu:fake:1(IDX:0)\n"
REACH = "gpus_accessible_to_both login"
OUTPUT = {
    rank: re.sub(f"^(?!{rank}: ).*\n", "", TASKS, flags=re.MULTILINE).replace(f"{rank}: ", "0: ") for rank in "01"
}


class Isolation(ProbeCheckRunner):
    """Two jobs on a node of the rig's confined cluster, each with a GPU and a CPU. Jobs are told apart by their ids."""

    tasks = {"--jobid=1": OUTPUT["0"], "--jobid=2": OUTPUT["1"]}

    def tell(self, argv: Sequence[str]) -> str:
        (job,) = (word for word in argv if word.startswith("--jobid="))
        return self.tasks[job]

    def second(self, pattern: str, instead: str) -> None:
        text, found = re.subn(pattern, instead, self.tasks["--jobid=2"], flags=re.MULTILINE)
        assert found
        self.tasks = {**self.tasks, "--jobid=2": text}

    def found(self, gpus: int | None = 2) -> dict[str, Outcome]:
        return self.not_passed((1, gpus), cpus=1)

    def measured(self, gpus: int | None = 2, **options: Any) -> Measurement:
        return self.measure((1, gpus), **{"cpus": 1, **options})


@pytest.fixture
def isolation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Isolation:
    trial = Isolation(CHECK, FakeCluster(lambda argv: trial.tell(argv), DETAILS), monkeypatch, tmp_path)
    return trial


def test_two_that_share_nothing(isolation: Isolation) -> None:
    assert isolation.found() == {}
    assert {metric.name for metric in isolation.measured().metrics} == set(METRICS) == {rule.metric for rule in RULES}


def test_what_is_asked_for(isolation: Isolation) -> None:
    isolation.measured(account="ops")
    first, second = isolation.slurm.submitted
    assert {"--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gres=gpu:1", "--time=5", "--account=ops"} < set(first)
    assert set(second) - set(first) == {"--nodelist=node0"}
    assert {"--overlap", "--gres=gpu:1"} < set(isolation.slurm.steps[0])


def test_memory_is_asked_for_where_it_is_handed_out(isolation: Isolation) -> None:
    """Else a node may not say how much it has, and refuse any number."""
    isolation.measured()
    assert "--mem=1G" in isolation.slurm.submitted[0]
    isolation.slurm.settings["SelectTypeParameters"] = "CR_CORE"
    isolation.measured()
    assert "--mem=1G" not in isolation.slurm.submitted[-1]


class TestWhatTheyShare:
    def test_a_cpu(self, isolation: Isolation) -> None:
        isolation.second("^0: cpus=1", "0: cpus=0-1")
        assert isolation.found() == {"cpus_shared node0": Outcome.FAIL}

    def test_a_gpu(self, isolation: Isolation) -> None:
        isolation.second("^0: opened=.*", "0: opened=/rig/dev/gpu0")
        assert isolation.found() == {"gpus_shared node0": Outcome.FAIL, "gpus_accessible_to_both node0": Outcome.FAIL}

    def test_a_gpu_by_its_uuid(self, isolation: Isolation) -> None:
        same = "0: gpu=0, GPU-a, 00000000:1B:00.0"
        isolation.tasks = {job: re.sub("0: unlisted=.*", same, text) for job, text in isolation.tasks.items()}
        assert isolation.found() == {"gpus_shared node0": Outcome.FAIL}
        isolation.second("GPU-a", "GPU-b")
        assert isolation.found() == {}

    def test_what_both_can_open(self, isolation: Isolation) -> None:
        two = {job: text + f"0: gpu=0, GPU-{job}, 0:1B:00.0\n" for job, text in isolation.tasks.items()}
        isolation.tasks = {job: re.sub("0: unlisted=.*\n", "", text) for job, text in two.items()}
        isolation.second("^(0: opened=.*)", r"\1\n0: opened=/rig/dev/gpu0")
        assert isolation.found() == {"gpus_accessible_to_both node0": Outcome.FAIL}

    def test_the_jobs_are_told(self, isolation: Isolation) -> None:
        isolation.second("^0: cpus=1", "0: cpus=0-1")
        facts = isolation.measured().facts
        assert isinstance(facts["first"], dict)
        assert isinstance(facts["second"], dict)
        assert (facts["first"]["cpus"], facts["second"]["cpus"]) == ([0], [0, 1])


class TestWhatIsNotJudged:
    def test_cpus_that_nothing_confines(self, isolation: Isolation) -> None:
        isolation.slurm.settings |= {"TaskPlugin": "task/none"}
        isolation.second("^0: cpus=1", "0: cpus=0")
        isolation.second("^0: cuda=0", "0: cuda=1")
        assert isolation.found() == {}

    @pytest.mark.parametrize(
        ("settings", "partition", "why"),
        [
            ({"SelectTypeParameters": "CR_MEMORY"}, "NO", "SelectTypeParameters=CR_MEMORY does not hand out CPUs"),
            ({}, "FORCE:4", "partition gpu shares CPUs on purpose, OverSubscribe=FORCE:4"),
            ({"TaskPlugin": "task/cgroup", "ConstrainCores": "no"}, "NO", "TaskPlugin=task/cgroup, ConstrainCores=no"),
        ],
    )
    def test_and_why(self, isolation: Isolation, settings: dict[str, str], partition: str, why: str) -> None:
        isolation.slurm.settings |= settings
        isolation.slurm.overrides[PARTITIONS] = partitions(partition)
        isolation.second("^0: cpus=1", "0: cpus=0")
        assert isolation.measured().facts["cpus_confined"] == f"no: {why}"
        assert isolation.found() == {}

    def test_gpus_where_a_node_has_one(self, isolation: Isolation) -> None:
        assert isolation.found(gpus=1) == {}
        assert "--gres=gpu:1" not in isolation.slurm.submitted[0]
        why = isolation.measured(gpus=1).facts["gpus_compared"]
        assert why == "no: Slurm has 1 GPUs a node, and two jobs need one each"

    def test_gpus_that_slurm_does_not_know(self, isolation: Isolation) -> None:
        isolation.slurm.settings["GresTypes"] = "(null)"
        assert isolation.found() == {}
        assert {metric.name for metric in isolation.measured().metrics} == {"cpus_shared"}


class TestOneAtATime:
    def test_whole_nodes(self, isolation: Isolation) -> None:
        isolation.slurm.settings["SelectType"] = "select/linear"
        assert "SelectType=select/linear hands out whole nodes" in str(isolation.measured().skipped)
        assert isolation.slurm.submitted == []

    def test_an_exclusive_partition(self, isolation: Isolation) -> None:
        isolation.slurm.overrides[PARTITIONS] = partitions("EXCLUSIVE")
        assert "partition gpu has OverSubscribe=EXCLUSIVE" in str(isolation.measured().skipped)

    def test_another_partition_is_another_matter(self, isolation: Isolation) -> None:
        isolation.slurm.overrides[PARTITIONS] = partitions("EXCLUSIVE")
        assert isolation.measured(partition="short").error is None


class TestWhatCannotBeMeasured:
    def test_the_second_waits(self, isolation: Isolation) -> None:
        isolation.slurm.states["2"] = "PENDING"
        error = str(isolation.measured(second_job_wait_s=7).error)
        assert "no second job came to run beside job 1 on node0: job 2 waited 7 s in vain: Resources" in error
        assert isolation.slurm.steps == []

    def test_the_first_waits(self, isolation: Isolation) -> None:
        isolation.slurm.states["1"] = "PENDING"
        assert "job 1 waited 300 s in vain" in str(isolation.measured().error)

    def test_one_ends_before_the_other_was_looked_at(self, isolation: Isolation) -> None:
        def end(argv: Sequence[str]) -> CommandResult:
            isolation.slurm.states["1"] = "TIMEOUT"
            return success(isolation.tell(argv))

        isolation.slurm.overrides["srun"] = end
        assert "job 1 ended before both were compared: TIMEOUT" in str(isolation.measured().error)

    def test_a_step_tells_nothing(self, isolation: Isolation) -> None:
        isolation.tasks = {**isolation.tasks, "--jobid=2": ""}
        why = "a step of job 2 on node0 was to have one task there, and no task told"
        assert why in str(isolation.measured().error)

    def test_a_step_is_elsewhere(self, isolation: Isolation) -> None:
        isolation.second("^0: node=node0", "0: node=node1")
        assert "and node1/rank0 told" in str(isolation.measured().error)

    def test_which_gpu_a_job_has(self, isolation: Isolation) -> None:
        isolation.second("^0: opened=.*\n", "")
        assert isolation.found() == dict.fromkeys(("gpus_shared login", REACH), Outcome.ERROR)


def partitions(oversubscribe: str) -> CommandResult:
    """The recorded ones, the default of which is so."""
    text = recorded("scontrol-show-partition.txt").out
    return success(text.replace("OverSubscribe=NO", f"OverSubscribe={oversubscribe}", 1))


def test_no_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
