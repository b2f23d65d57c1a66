"""A fake Slurm cluster for checks with probe jobs; the test sets the output of the steps."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checks.check import Check
from seatrial.checks.slurm import _probe_jobs
from seatrial.model import Measurement, Outcome
from seatrial.util.processes import CommandResult
from tests.fakes.slurm import (
    NODES,
    PARTITIONS,
    FakeSlurm,
    Reply,
    config_with,
    judge,
    not_passed,
    recorded,
    run_check,
    success,
)

CONFINED = {
    "TaskPlugin": "task/affinity,task/cgroup",
    "ConstrainCores": "yes",
    "ConstrainDevices": "yes",
    "ConstrainRAMSpace": "yes",
}


class FakeCluster:
    """Every job runs immediately on the nodes in ``details``, until it is cancelled."""

    def __init__(self, task_output: Callable[[Sequence[str]], str], details: str) -> None:
        self.task_output = task_output  # srun's command line → output of the tasks
        self.details = details  # output of scontrol --details show job
        self.settings: dict[str, str] = dict(CONFINED)
        self.overrides: dict[str, Reply] = {}
        self.states: dict[str, str] = {}  # by job id; other jobs are RUNNING
        self.submitted: list[Sequence[str]] = []
        self.steps: list[Sequence[str]] = []
        self.cancelled: list[str] = []
        self.now = 0.0

    def replies(self) -> dict[str, Reply]:
        """Return the answers of the Slurm commands; job ids start at 1."""
        self._ids = map(str, itertools.count(1))
        return {
            "scontrol show config": config_with(**self.settings),
            PARTITIONS: recorded("scontrol-show-partition.txt"),
            "scontrol": self._scontrol,
            "sbatch": self._sbatch,
            "srun": self._srun,
            "scancel": self._scancel,
            NODES: recorded("scontrol-show-nodes-healthy.txt"),
            **self.overrides,
        }

    def _sbatch(self, argv: Sequence[str]) -> CommandResult:
        self.submitted.append(argv)
        return success(f"{next(self._ids)}\n")

    def _srun(self, argv: Sequence[str]) -> CommandResult:
        self.steps.append(argv)
        return success(self.task_output(argv))

    def _scontrol(self, argv: Sequence[str]) -> CommandResult:
        if argv[1:3] == ["show", "hostnames"]:
            return success("node0\nnode1\n" if argv[3] == "node[0-1]" else f"{argv[3]}\n")
        if argv[1:4] == ["--details", "show", "job"]:
            return success(self.details)
        assert argv[1:3] == ["show", "job"]
        state = self.states.get(argv[3], "RUNNING")
        (nodes,) = re.findall(r" NodeList=(\S+)", self.details)
        return success(f"JobId={argv[3]} JobName=x\n   JobState={state} Reason=Resources\n   NodeList={nodes}\n")

    def _scancel(self, argv: Sequence[str]) -> CommandResult:
        self.cancelled.append(argv[1])
        return success("")

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ProbeCheckRunner:
    def __init__(self, check: Check, slurm: FakeCluster, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.check = check
        self.slurm = slurm
        self.monkeypatch = monkeypatch
        self.folder = folder

    def measure(self, expected: tuple[int, int | None], **options: Any) -> Measurement:
        """Run the check with ``expected`` nodes and GPUs per node, and assert that all its jobs are cancelled."""
        FakeSlurm(self.slurm.replies()).install(self.monkeypatch)
        clock = SimpleNamespace(sleep=self.slurm.sleep, monotonic=lambda: self.slurm.now)
        self.monkeypatch.setattr(_probe_jobs, "time", clock)
        measurement = run_check(self.check, self.folder, expected, **options)
        names = {option for argv in self.slurm.submitted for option in argv if option.startswith("--job-name=")}
        assert {name.replace("--job-name", "--name") for name in names} <= set(self.slurm.cancelled)
        return measurement

    def not_passed(self, expected: tuple[int, int | None], **options: Any) -> dict[str, Outcome]:
        return not_passed(judge(self.check, self.measure(expected, **options)))
