from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checks.slurm import _probe_jobs, jobs
from seatrial.checks.slurm.jobs import CHECK
from seatrial.model import Measurement, Outcome, Why
from seatrial.util.processes import CommandResult
from tests.fakes.slurm import (
    FakeSlurm,
    Reply,
    cluster,
    config_with,
    failure,
    judge,
    not_passed,
    reasons,
    recorded,
    run_check,
    success,
)

KINDS = {"SEATRIAL_PROBE": "batch", "trap": "signal", "tail": "memory", "sleep 3600": "time"}
UNLIMITED_MEMORY = {"memory_limited": Outcome.WARN}
# Metrics that the batch script reports by its exit code.
UNMEASURED = {"sbatch_environment login": Outcome.ERROR, "sbatch_directory login": Outcome.ERROR}


class Queue:
    """A fake Slurm that runs jobs correctly except for a test's changes; its clock advances on query and sleep."""

    def __init__(self) -> None:
        self.ends = {
            "batch": "FAILED 7:0",
            "signal": "FAILED 12:0",
            "memory": "OUT_OF_MEMORY 0:125",
            "time": "TIMEOUT 0:15",
        }
        self.first_state = "RUNNING"  # state in the first second after submission
        self.overrides: dict[str, Reply] = {}  # command name → answer
        self.settings = {"TaskPlugin": "task/none", "JobAcctGatherParams": "(null)"}
        self.now = 1000.0
        self.submitted: dict[str, tuple[str, float, Sequence[str]]] = {}
        self.signalled = self.ignores_signals = False
        self.cancelled: list[str] = []
        self._ids = map(str, itertools.count(1))

    def replies(self) -> dict[str, Reply]:
        tools = {"sbatch": self._sbatch, "srun": self._srun, "scontrol": self._scontrol, "scancel": self._scancel}
        recorded_cluster = {**cluster(), "scontrol show config": config_with(**self.settings)}
        return {**tools, **recorded_cluster, "squeue": success(""), **self.overrides}

    def _sbatch(self, argv: Sequence[str]) -> CommandResult:
        script = next(option for option in argv if option.startswith("--wrap="))
        (kind,) = (kind for mark, kind in KINDS.items() if mark in script)
        job_id = next(self._ids)
        self.submitted[job_id] = (kind, self.now, argv)
        return success(f"{job_id};seatrial\n")

    def _srun(self, argv: Sequence[str]) -> CommandResult:
        (variable,) = (part for part in argv if part.startswith("SEATRIAL_PROBE="))
        text = f"probe={variable.partition('=')[2]}\ndirectory={os.getcwd()}\nnode=node0\n"
        return CommandResult(7, text, "srun: error: node0: task 0: Exited with exit code 7\n")

    def _scontrol(self, argv: Sequence[str]) -> CommandResult:
        assert argv[1:3] == ["show", "job"]
        kind, submitted_at, _ = self.submitted[argv[3]]
        pending = self.now - submitted_at < 1 or (kind == "signal" and not self.signalled)
        state, _, code = f"{self.first_state} 0:0".partition(" ") if pending else self.ends[kind].partition(" ")
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
            self.signalled = not self.ignores_signals
        return success("")

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now

    @property
    def names(self) -> set[str]:
        options = [option for _, _, argv in self.submitted.values() for option in argv]
        return {option.removeprefix("--job-name=") for option in options if option.startswith("--job-name=")}


class JobsRunner:
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

    def not_passed(self, **options: Any) -> dict[str, Outcome]:
        return not_passed(judge(CHECK, self.measure(**options)))

    def error(self, **options: Any) -> str:
        """Return the error of the measurement, and assert that all submitted jobs are cancelled."""
        error = self.measure(**options).error
        assert error
        assert set(self.queue.cancelled) >= self.queue.names
        return error


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> JobsRunner:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return JobsRunner(monkeypatch, tmp_path)


def with_cgroups(queue: Queue) -> None:
    queue.settings |= {"TaskPlugin": "task/cgroup"}


class TestHealthy:
    def test_unlimited_memory_is_the_only_warning(self, runner: JobsRunner) -> None:
        assert runner.not_passed() == UNLIMITED_MEMORY

    def test_all_limits(self, runner: JobsRunner) -> None:
        with_cgroups(runner.queue)
        assert runner.not_passed(time_limit=True) == {}

    def test_every_metric_has_a_value(self, runner: JobsRunner) -> None:
        with_cgroups(runner.queue)
        measured = runner.measure(time_limit=True)
        assert {metric.name for metric in measured.metrics} == set(CHECK.units)
        assert measured.absent == ()

    def test_time_limit_is_not_tested_by_default(self, runner: JobsRunner) -> None:
        measured = runner.measure()
        assert reasons(measured, Why.DOES_NOT_APPLY)["time_limit_enforced"] == "the option time_limit is not set"
        assert "sleep 3600" not in str(runner.queue.submitted)

    def test_signal_before_the_trap_is_delivered(self, runner: JobsRunner) -> None:
        runner.queue.ends["signal"] = "FAILED 0:10"
        assert runner.not_passed() == UNLIMITED_MEMORY


class TestSubmission:
    def test_submit_options_and_cancellation(self, runner: JobsRunner) -> None:
        runner.measure(wait_s=60)
        ((name,), (_, _, argv)) = runner.queue.names, runner.queue.submitted["1"]
        expected = {
            "--nodes=1",
            "--ntasks=1",
            "--time=5",
            "--deadline=now+420seconds",
            "--output=/dev/null",
            "--parsable",
        }
        assert expected < set(argv)
        assert f"SEATRIAL_PROBE={name}" in argv
        assert runner.queue.cancelled == [name]

    def test_options_of_the_check(self, runner: JobsRunner) -> None:
        runner.measure(partition="gpu", account="ada", extra=["--qos=test"])
        for _, _, argv in runner.queue.submitted.values():
            assert {"--partition=gpu", "--account=ada", "--qos=test"} < set(argv)

    def test_variables_of_an_enclosing_job_are_unset(self, runner: JobsRunner) -> None:
        for name, value in (("SLURM_JOB_ID", "4"), ("SLURM_MEM_PER_NODE", "9"), ("SLURM_CONF", "/etc/slurm.conf")):
            runner.monkeypatch.setenv(name, value)
        runner.measure()
        argv = runner.queue.submitted["1"][2]
        assert [option for option in argv if option.startswith("--unset=")] == [
            "--unset=SLURM_JOB_ID",
            "--unset=SLURM_MEM_PER_NODE",
        ]


class TestFailures:
    @pytest.mark.parametrize(
        ("end", "outcomes"),
        [
            ("COMPLETED 0:0", {"sbatch_exit_code": Outcome.FAIL, **UNMEASURED}),
            ("FAILED 1:0", {"sbatch_exit_code": Outcome.FAIL, **UNMEASURED}),
            ("FAILED 8:0", {"sbatch_environment": Outcome.FAIL}),
            ("FAILED 9:0", {"sbatch_directory": Outcome.WARN}),
            ("FAILED 10:0", {"sbatch_environment": Outcome.FAIL, "sbatch_directory": Outcome.WARN}),
        ],
    )
    def test_sbatch(self, runner: JobsRunner, end: str, outcomes: dict[str, Outcome]) -> None:
        runner.queue.ends["batch"] = end
        assert runner.not_passed() == {**UNLIMITED_MEMORY, **outcomes}

    def test_signal_not_delivered(self, runner: JobsRunner) -> None:
        runner.queue.ends["signal"] = "COMPLETED 0:0"
        assert runner.not_passed() == {**UNLIMITED_MEMORY, "signal_delivered": Outcome.FAIL}

    def test_signal_test_has_a_timeout(self, runner: JobsRunner) -> None:
        runner.queue.ignores_signals = True
        assert runner.not_passed()["signal_delivered"] is Outcome.FAIL
        assert runner.queue.now < 1100

    @pytest.mark.parametrize(
        ("answer", "failed"),
        [
            (CommandResult(0, "probe=\ndirectory=/tmp\nnode=node0\n", ""), {"srun_exit_code", "srun_environment"}),
            (CommandResult(7, "probe=\ndirectory=/tmp\nnode=node0\n", ""), {"srun_environment"}),
        ],
    )
    def test_srun(self, runner: JobsRunner, answer: CommandResult, failed: set[str]) -> None:
        runner.queue.overrides["srun"] = answer
        assert runner.not_passed() == {
            **UNLIMITED_MEMORY,
            **dict.fromkeys(failed, Outcome.FAIL),
            "srun_directory": Outcome.WARN,
        }

    def test_memory_limit_not_enforced(self, runner: JobsRunner) -> None:
        with_cgroups(runner.queue)
        runner.queue.ends["memory"] = "COMPLETED 0:0"
        assert runner.not_passed() == {"memory_limit_enforced": Outcome.FAIL}

    @pytest.mark.parametrize("end", ["FAILED 137:0", "FAILED 0:9", "CANCELLED 0:15"])
    def test_job_killed_by_the_memory_limit(self, runner: JobsRunner, end: str) -> None:
        with_cgroups(runner.queue)
        runner.queue.ends["memory"] = end
        assert runner.not_passed() == {}

    def test_time_limit_not_enforced(self, runner: JobsRunner) -> None:
        runner.queue.ends["time"] = "RUNNING 0:0"
        assert runner.not_passed(time_limit=True)["time_limit_enforced"] is Outcome.FAIL
        assert runner.queue.now < 1400

    def test_time_limit_is_not_tested_if_the_job_ends_otherwise(self, runner: JobsRunner) -> None:
        runner.queue.ends["time"] = "NODE_FAIL 0:0"
        assert "NODE_FAIL" in runner.error(time_limit=True)


@pytest.mark.parametrize(
    ("settings", "mechanism"),
    [
        ({"TaskPlugin": "task/affinity,task/cgroup"}, "task/cgroup"),
        ({"JobAcctGatherParams": "OverMemoryKill"}, "OverMemoryKill"),
    ],
)
def test_memory_limit_mechanism(runner: JobsRunner, settings: dict[str, str], mechanism: str) -> None:
    runner.queue.settings |= settings
    measured = runner.measure()
    (evidence,) = (metric.evidence for metric in measured.metrics if metric.name == "memory_limit_enforced")
    assert isinstance(evidence, dict)
    assert evidence["memory_limit"] == mechanism
    assert runner.not_passed() == {}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "neither task/cgroup with ConstrainRAMSpace nor OverMemoryKill is configured"),
        ({"SelectTypeParameters": "CR_CORE"}, "memory is not a consumable resource"),
        ({"TaskPlugin": "task/cgroup", "ConstrainRAMSpace": "no"}, "neither"),
    ],
)
def test_unlimited_memory(runner: JobsRunner, settings: dict[str, str], reason: str) -> None:
    runner.queue.settings |= settings
    measured = runner.measure()
    (evidence,) = (metric.evidence for metric in measured.metrics if metric.name == "memory_limited")
    assert str(evidence).startswith(reason)
    assert reasons(measured, Why.DOES_NOT_APPLY)["memory_limit_enforced"] == evidence
    assert runner.not_passed() == UNLIMITED_MEMORY


class TestErrors:
    def test_job_stays_pending(self, runner: JobsRunner) -> None:
        runner.queue.first_state = "PENDING"
        runner.queue.ends["batch"] = "PENDING 0:0"
        error = runner.error(wait_s=20)
        assert "job 1 still pending after 20 s: Resources" in error
        assert 1020 < runner.queue.now < 1025

    @pytest.mark.parametrize("end", ["NODE_FAIL 0:0", "TIMEOUT 0:15", "CANCELLED 0:15", "FAILED 0:1", "RUNNING 0:0"])
    def test_job_does_not_run_to_its_end(self, runner: JobsRunner, end: str) -> None:
        runner.queue.ends["batch"] = end
        assert "job 1 did not run" in runner.error()

    def test_job_unknown_to_slurm(self, runner: JobsRunner) -> None:
        runner.queue.overrides["scontrol"] = recorded("scontrol-show-job-unknown.txt")
        assert "state of job 1 unknown" in runner.error()

    def test_memory_job_fails_otherwise(self, runner: JobsRunner) -> None:
        with_cgroups(runner.queue)
        runner.queue.ends["memory"] = "FAILED 127:0"
        assert "memory limit not tested: job 3 ended with state FAILED" in runner.error()

    def test_sbatch_rejected(self, runner: JobsRunner) -> None:
        runner.queue.overrides["sbatch"] = recorded("sbatch-partition-unknown.txt")
        assert "SlurmRefused: no such partition" in runner.error(partition="nosuch")

    def test_srun_rejected(self, runner: JobsRunner) -> None:
        runner.queue.overrides["srun"] = failure(
            "srun: error: Unable to allocate resources: Invalid qos specification\n"
        )
        assert "no such QOS" in runner.error()

    def test_no_slurm_client(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
