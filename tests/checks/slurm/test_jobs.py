from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checks.slurm import _probe_jobs, jobs
from seatrial.checks.slurm.jobs import CHECK, METRICS, RULES
from seatrial.model import Measurement, Outcome
from seatrial.util.processes import CommandResult
from tests.fakes.slurm import FakeSlurm, Reply, config_with, failure, judge, not_passed, recorded, run_check, success

KINDS = {"SEATRIAL_PROBE": "batch", "trap": "signal", "tail": "memory", "sleep 3600": "time"}
UNLIMITED_MEMORY = {"memory_limited": Outcome.WARN}
# What the script would have told by its exit code.
UNMEASURED = {"sbatch_environment login": Outcome.ERROR, "sbatch_directory login": Outcome.ERROR}


class Queue:
    """A Slurm that runs jobs by the book, but for what a test changes. Its clock goes by asking and by waiting."""

    def __init__(self) -> None:
        self.ends = {
            "batch": "FAILED 7:0",
            "signal": "FAILED 12:0",
            "memory": "OUT_OF_MEMORY 0:125",
            "time": "TIMEOUT 0:15",
        }
        self.begins = "RUNNING"  # what a job is in the first second after its submission
        self.instead: dict[str, Reply] = {}  # of what it does by the book, by the command's name
        self.settings = {"TaskPlugin": "task/none", "JobAcctGatherParams": "(null)"}
        self.now = 1000.0
        self.submitted: dict[str, tuple[str, float, Sequence[str]]] = {}
        self.signalled = self.deaf = False
        self.cancelled: list[str] = []
        self._ids = map(str, itertools.count(1))

    def replies(self) -> dict[str, Reply]:
        tools = {"sbatch": self._sbatch, "srun": self._srun, "scontrol": self._scontrol, "scancel": self._scancel}
        return {**tools, "scontrol show config": config_with(**self.settings), **self.instead}

    def _sbatch(self, argv: Sequence[str]) -> CommandResult:
        script = next(word for word in argv if word.startswith("--wrap="))
        (kind,) = (kind for mark, kind in KINDS.items() if mark in script)
        job_id = next(self._ids)
        self.submitted[job_id] = (kind, self.now, argv)
        return success(f"{job_id};seatrial\n")

    def _srun(self, argv: Sequence[str]) -> CommandResult:
        (probe,) = (word for word in argv if word.startswith("SEATRIAL_PROBE="))
        text = f"probe={probe.partition('=')[2]}\ndirectory={os.getcwd()}\nnode=node0\n"
        return CommandResult(7, text, "srun: error: node0: task 0: Exited with exit code 7\n")

    def _scontrol(self, argv: Sequence[str]) -> CommandResult:
        assert argv[1:3] == ["show", "job"]
        kind, when, _ = self.submitted[argv[3]]
        waits = self.now - when < 1 or (kind == "signal" and not self.signalled)
        state, _, code = f"{self.begins} 0:0".partition(" ") if waits else self.ends[kind].partition(" ")
        nodes = "" if state == "PENDING" or code.endswith(":1") else "node0"
        return success(
            f"JobId={argv[3]} JobName=x\n   JobState={state} Reason=Resources Dependency=(null)\n"
            f"   Requeue=1 ExitCode={code}\n   RunTime=00:00:00 TimeLimit=00:05:00 TimeMin=N/A\n   NodeList={nodes}\n"
        )

    def _scancel(self, argv: Sequence[str]) -> CommandResult:
        if argv[1].startswith("--name="):
            self.cancelled.append(argv[1].removeprefix("--name="))
        else:
            assert argv[1:3] == ["--signal=USR1", "--batch"]
            self.signalled = not self.deaf
        return success("")

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now

    @property
    def names(self) -> set[str]:
        words = [word for _, _, argv in self.submitted.values() for word in argv]
        return {word.removeprefix("--job-name=") for word in words if word.startswith("--job-name=")}


class Trial:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.queue = Queue()
        self.monkeypatch = monkeypatch
        self.folder = folder

    def measure(self, **options: Any) -> Measurement:
        FakeSlurm(self.queue.replies()).install(self.monkeypatch)
        clock = SimpleNamespace(sleep=self.queue.sleep, monotonic=self.queue.monotonic)
        for module in (jobs, _probe_jobs):
            self.monkeypatch.setattr(module, "time", clock)
        return run_check(CHECK, self.folder, **options)

    def bad(self, **options: Any) -> dict[str, Outcome]:
        return not_passed(judge(CHECK, self.measure(**options)))

    def error(self, **options: Any) -> str:
        """Why it could not be measured; whatever that was, what was submitted has been cancelled."""
        error = self.measure(**options).error
        assert error
        assert set(self.queue.cancelled) >= self.queue.names
        return error


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trial:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return Trial(monkeypatch, tmp_path)


def with_cgroups(queue: Queue) -> None:
    queue.settings |= {"TaskPlugin": "task/cgroup"}


class TestWhenAllIsWell:
    def test_only_what_is_not_set_up_is_told(self, trial: Trial) -> None:
        assert trial.bad() == UNLIMITED_MEMORY

    def test_with_every_limit(self, trial: Trial) -> None:
        with_cgroups(trial.queue)
        assert trial.bad(time_limit=True) == {}

    def test_every_rule_judges_a_metric_that_is_measured(self, trial: Trial) -> None:
        with_cgroups(trial.queue)
        measured = {metric.name for metric in trial.measure(time_limit=True).metrics}
        assert measured == set(METRICS)
        assert {rule.metric for rule in RULES} == measured - {"srun_seconds"}

    def test_a_trap_that_was_not_set_yet_is_no_lost_signal(self, trial: Trial) -> None:
        trial.queue.ends["signal"] = "FAILED 0:10"
        assert trial.bad() == UNLIMITED_MEMORY


class TestSubmission:
    def test_a_job_is_small_short_and_goes_by_itself(self, trial: Trial) -> None:
        trial.measure(wait_s=60)
        ((name,), (_, _, argv)) = trial.queue.names, trial.queue.submitted["1"]
        wanted = {
            "--nodes=1",
            "--ntasks=1",
            "--time=5",
            "--deadline=now+420seconds",
            "--output=/dev/null",
            "--parsable",
        }
        assert wanted < set(argv)
        assert f"SEATRIAL_PROBE={name}" in argv
        assert trial.queue.cancelled == [name]

    def test_options_become_words(self, trial: Trial) -> None:
        trial.measure(partition="gpu", account="ada", extra=["--qos=test"])
        for _, _, argv in trial.queue.submitted.values():
            assert {"--partition=gpu", "--account=ada", "--qos=test"} < set(argv)

    def test_inside_a_job_of_our_own_it_is_hidden(self, trial: Trial) -> None:
        for name, value in (("SLURM_JOB_ID", "4"), ("SLURM_MEM_PER_NODE", "9"), ("SLURM_CONF", "/etc/slurm.conf")):
            trial.monkeypatch.setenv(name, value)
        trial.measure()
        argv = trial.queue.submitted["1"][2]
        assert [word for word in argv if word.startswith("--unset=")] == [
            "--unset=SLURM_JOB_ID",
            "--unset=SLURM_MEM_PER_NODE",
        ]


class TestWhatIsMeasuredBad:
    @pytest.mark.parametrize(
        ("end", "found"),
        [
            ("COMPLETED 0:0", {"sbatch_exit_code": Outcome.FAIL, **UNMEASURED}),
            ("FAILED 1:0", {"sbatch_exit_code": Outcome.FAIL, **UNMEASURED}),
            ("FAILED 8:0", {"sbatch_environment": Outcome.FAIL}),
            ("FAILED 9:0", {"sbatch_directory": Outcome.WARN}),
            ("FAILED 10:0", {"sbatch_environment": Outcome.FAIL, "sbatch_directory": Outcome.WARN}),
        ],
    )
    def test_sbatch(self, trial: Trial, end: str, found: dict[str, Outcome]) -> None:
        trial.queue.ends["batch"] = end
        assert trial.bad() == {**UNLIMITED_MEMORY, **found}

    def test_a_lost_signal(self, trial: Trial) -> None:
        trial.queue.ends["signal"] = "COMPLETED 0:0"
        assert trial.bad() == {**UNLIMITED_MEMORY, "signal_delivered": Outcome.FAIL}

    def test_a_job_that_hears_nothing_is_given_up(self, trial: Trial) -> None:
        trial.queue.deaf = True
        assert trial.bad()["signal_delivered"] is Outcome.FAIL
        assert trial.queue.now < 1100

    @pytest.mark.parametrize(
        ("answer", "found"),
        [
            (CommandResult(0, "probe=\ndirectory=/tmp\nnode=node0\n", ""), {"srun_exit_code", "srun_environment"}),
            (CommandResult(7, "probe=\ndirectory=/tmp\nnode=node0\n", ""), {"srun_environment"}),
        ],
    )
    def test_srun(self, trial: Trial, answer: CommandResult, found: set[str]) -> None:
        trial.queue.instead["srun"] = answer
        assert trial.bad() == {
            **UNLIMITED_MEMORY,
            **dict.fromkeys(found, Outcome.FAIL),
            "srun_directory": Outcome.WARN,
        }

    def test_a_memory_limit_that_does_not_bite(self, trial: Trial) -> None:
        with_cgroups(trial.queue)
        trial.queue.ends["memory"] = "COMPLETED 0:0"
        assert trial.bad() == {"memory_limit_enforced": Outcome.FAIL}

    @pytest.mark.parametrize("end", ["FAILED 137:0", "FAILED 0:9", "CANCELLED 0:15"])
    def test_every_way_to_die_of_it(self, trial: Trial, end: str) -> None:
        with_cgroups(trial.queue)
        trial.queue.ends["memory"] = end
        assert trial.bad() == {}

    def test_a_time_limit_that_does_not_bite(self, trial: Trial) -> None:
        trial.queue.ends["time"] = "RUNNING 0:0"
        assert trial.bad(time_limit=True)["time_limit_enforced"] is Outcome.FAIL
        assert trial.queue.now < 1400


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({}, "not enforced: neither task/cgroup with ConstrainRAMSpace nor OverMemoryKill is configured"),
        ({"SelectTypeParameters": "CR_CORE"}, "not enforced: memory is not handed out to jobs"),
        ({"TaskPlugin": "task/affinity,task/cgroup"}, "task/cgroup"),
        ({"TaskPlugin": "task/cgroup", "ConstrainRAMSpace": "no"}, "not enforced: neither"),
        ({"JobAcctGatherParams": "OverMemoryKill"}, "OverMemoryKill"),
    ],
)
def test_what_holds_jobs_to_their_memory(trial: Trial, settings: dict[str, str], fact: str) -> None:
    trial.queue.settings |= settings
    assert str(trial.measure().facts["memory_limit"]).startswith(fact)


class TestWhatCannotBeMeasured:
    def test_a_job_that_never_starts(self, trial: Trial) -> None:
        trial.queue.begins = "PENDING"
        trial.queue.ends["batch"] = "PENDING 0:0"
        error = trial.error(wait_s=20)
        assert "job 1 waited 20 s in vain: Resources. Run first: squeue --start --job 1; sinfo" in error
        assert 1020 < trial.queue.now < 1025

    @pytest.mark.parametrize("end", ["NODE_FAIL 0:0", "TIMEOUT 0:15", "CANCELLED 0:15", "FAILED 0:1", "RUNNING 0:0"])
    def test_a_job_that_is_not_left_to_run(self, trial: Trial, end: str) -> None:
        trial.queue.ends["batch"] = end
        assert "job 1 was not left to run" in trial.error()

    def test_a_job_that_slurm_forgets(self, trial: Trial) -> None:
        trial.queue.instead["scontrol"] = recorded("scontrol-show-job-unknown.txt")
        assert "job 1 was lost from sight: Slurm drops jobs 300 s after" in trial.error()

    def test_a_memory_job_that_took_none(self, trial: Trial) -> None:
        with_cgroups(trial.queue)
        trial.queue.ends["memory"] = "FAILED 127:0"
        assert "the memory limit could not be tried: job 3 ended as FAILED" in trial.error()

    def test_sbatch_refused(self, trial: Trial) -> None:
        trial.queue.instead["sbatch"] = recorded("sbatch-partition-unknown.txt")
        assert "SlurmRefused: no such partition" in trial.error(partition="nosuch")

    def test_srun_refused(self, trial: Trial) -> None:
        trial.queue.instead["srun"] = failure("srun: error: Unable to allocate resources: Invalid qos specification\n")
        assert "no such QOS" in trial.error()

    def test_no_client(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
