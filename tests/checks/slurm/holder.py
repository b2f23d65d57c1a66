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
from seatrial.util.processes import Answer
from tests.fakes.slurm import NODES, PARTITIONS, FakeSlurm, Reply, bad, configured, judge, recorded, run, said

CONFINED = {
    "TaskPlugin": "task/affinity,task/cgroup",
    "ConstrainCores": "yes",
    "ConstrainDevices": "yes",
    "ConstrainRAMSpace": "yes",
}


class Holder:
    """Every job runs at once on the nodes that ``details`` names, until it is cancelled."""

    def __init__(self, tell: Callable[[Sequence[str]], str], details: str) -> None:
        self.tell = tell  # srun's command line → what the probe's tasks told
        self.details = details  # scontrol --details show job
        self.settings: dict[str, str] = dict(CONFINED)
        self.instead: dict[str, Reply] = {}
        self.states: dict[str, str] = {}  # of a job by its id; others are RUNNING
        self.submitted: list[Sequence[str]] = []
        self.steps: list[Sequence[str]] = []
        self.cancelled: list[str] = []
        self.now = 0.0

    def replies(self) -> dict[str, Reply]:
        """Of a controller that counts its jobs from 1."""
        self._ids = map(str, itertools.count(1))
        return {
            "scontrol show config": configured(**self.settings),
            PARTITIONS: recorded("scontrol-show-partition.txt"),
            "scontrol": self._scontrol,
            "sbatch": self._sbatch,
            "srun": self._srun,
            "scancel": self._scancel,
            NODES: recorded("scontrol-show-nodes-healthy.txt"),
            **self.instead,
        }

    def _sbatch(self, argv: Sequence[str]) -> Answer:
        self.submitted.append(argv)
        return said(f"{next(self._ids)}\n")

    def _srun(self, argv: Sequence[str]) -> Answer:
        self.steps.append(argv)
        return said(self.tell(argv))

    def _scontrol(self, argv: Sequence[str]) -> Answer:
        if argv[1:3] == ["show", "hostnames"]:
            return said("node0\nnode1\n" if argv[3] == "node[0-1]" else f"{argv[3]}\n")
        if argv[1:4] == ["--details", "show", "job"]:
            return said(self.details)
        assert argv[1:3] == ["show", "job"]
        state = self.states.get(argv[3], "RUNNING")
        (nodes,) = re.findall(r" NodeList=(\S+)", self.details)
        return said(f"JobId={argv[3]} JobName=x\n   JobState={state} Reason=Resources\n   NodeList={nodes}\n")

    def _scancel(self, argv: Sequence[str]) -> Answer:
        self.cancelled.append(argv[1])
        return said("")

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Trial:
    def __init__(self, check: Check, holder: Holder, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.check = check
        self.holder = holder
        self.monkeypatch = monkeypatch
        self.folder = folder

    def measure(self, promised: tuple[int, int | None], **options: Any) -> Measurement:
        """``promised`` are nodes, and GPUs of a node. Whatever happens, what was submitted is cancelled."""
        FakeSlurm(self.holder.replies()).install(self.monkeypatch)
        clock = SimpleNamespace(sleep=self.holder.sleep, monotonic=lambda: self.holder.now)
        self.monkeypatch.setattr(_probe_jobs, "time", clock)
        measurement = run(self.check, self.folder, promised, **options)
        names = {word for argv in self.holder.submitted for word in argv if word.startswith("--job-name=")}
        assert {name.replace("--job-name", "--name") for name in names} <= set(self.holder.cancelled)
        return measurement

    def bad(self, promised: tuple[int, int | None], **options: Any) -> dict[str, Outcome]:
        return bad(judge(self.check, self.measure(promised, **options)))
