"""A Slurm in whose jobs nothing runs but our probes: what they tell is a test's to say."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checks.base import Check
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
    """Every job runs at once on the nodes that ``details`` names, until it is cancelled."""

    def __init__(self, tell: Callable[[Sequence[str]], str], details: str) -> None:
        self.task_output = tell  # srun's command line → what the probe's tasks told
        self.details = details  # scontrol --details show job
        self.settings: dict[str, str] = dict(CONFINED)
        self.overrides: dict[str, Reply] = {}
        self.states: dict[str, str] = {}  # of a job by its id; others are RUNNING
        self.submitted: list[Sequence[str]] = []
        self.steps: list[Sequence[str]] = []
        self.cancelled: list[str] = []
        self.now = 0.0

    def replies(self) -> dict[str, Reply]:
        """Of a controller that counts its jobs from 1."""
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
    def __init__(self, check: Check, holder: FakeCluster, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.check = check
        self.slurm = holder
        self.monkeypatch = monkeypatch
        self.folder = folder

    def measure(self, promised: tuple[int, int | None], **options: Any) -> Measurement:
        """``promised`` are nodes, and GPUs of a node. Whatever happens, what was submitted is cancelled."""
        FakeSlurm(self.slurm.replies()).install(self.monkeypatch)
        clock = SimpleNamespace(sleep=self.slurm.sleep, monotonic=lambda: self.slurm.now)
        self.monkeypatch.setattr(_probe_jobs, "time", clock)
        measurement = run_check(self.check, self.folder, promised, **options)
        names = {word for argv in self.slurm.submitted for word in argv if word.startswith("--job-name=")}
        assert {name.replace("--job-name", "--name") for name in names} <= set(self.slurm.cancelled)
        return measurement

    def not_passed(self, promised: tuple[int, int | None], **options: Any) -> dict[str, Outcome]:
        return not_passed(judge(self.check, self.measure(promised, **options)))
