"""A strict fake of the Slurm commands with recorded answers; it fails the test on an unexpected command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.check import Check, Context
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Verdict, Why
from seatrial.util.processes import CommandResult
from seatrial.worker import measure
from tests.paths import FIXTURES

RECORDED = FIXTURES / "slurm-22.05"
NODES = "scontrol --all show nodes"
PARTITIONS = "scontrol --all show partitions"
NEWER_NODES = FIXTURES / "slurm-24.11/scontrol-show-nodes.txt"

# of a client without slurm.conf, on a machine whose DNS knows no controller
NO_CONFIGURATION = """\
scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
scontrol: error: fetch_config: DNS SRV lookup failed
scontrol: error: _establish_config_source: failed to fetch config
scontrol: fatal: Could not establish a configuration source
"""

Reply = CommandResult | Exception | Callable[[Sequence[str]], CommandResult]


def success(out: str) -> CommandResult:
    return CommandResult(0, out, "")


def failure(err: str, code: int = 1) -> CommandResult:
    return CommandResult(code, "", err)


def recorded(name: str) -> CommandResult:
    """Returns a recorded answer of Slurm 22.05 by its name in ``commands.txt`` (``scontrol-ping-healthy.txt``)."""
    rows = [line.split("\t") for line in (RECORDED / "commands.txt").read_text().splitlines()]
    (code,) = (int(row[1]) for row in rows if row[0] == name)
    stderr = (RECORDED / name).with_suffix(".err")
    return CommandResult(code, (RECORDED / name).read_text(), stderr.read_text() if stderr.exists() else "")


def config_with(**settings: str) -> CommandResult:
    """Returns the recorded ``scontrol show config`` with changed settings: ``TaskPlugin="task/cgroup"``."""
    text = recorded("scontrol-show-config.txt").out
    for key, value in settings.items():
        text, count = re.subn(rf"^{key}\s*=.*$", f"{key} = {value}", text, flags=re.MULTILINE)
        text += "" if count else f"{key} = {value}\n"
    return success(text)


def cluster(state: str = "healthy") -> dict[str, Reply]:
    """Returns the answers of the recorded four-node cluster: healthy, busy, ended or troubled."""
    return {
        "scontrol ping": recorded(f"scontrol-ping-{state}.txt"),
        "scontrol show config": recorded("scontrol-show-config.txt"),
        NODES: recorded(f"scontrol-show-nodes-{state}.txt"),
        PARTITIONS: recorded("scontrol-show-partition.txt"),
    }


class FakeSlurm:
    """Answers Slurm commands by command line or by program name; ``commands`` lists the executed command lines."""

    def __init__(self, replies: Mapping[str, Reply]) -> None:
        self.replies = dict(replies)
        self.commands: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
        monkeypatch.setattr("seatrial.util.processes.run_command", self.run_command)
        monkeypatch.setattr("seatrial.discover.slurm.installed", lambda: True)
        answer = "port 6818 of {} refuses connections"  # of a slurmd; no connection is made
        monkeypatch.setattr("seatrial.discover.slurm.slurmd_answer", answer.format)
        return self

    def run_command(self, argv: Sequence[str], timeout_s: float) -> CommandResult:
        assert timeout_s > 0
        command = shlex.join(argv)
        self.commands.append(command)
        tool = next(part for part in argv if part != "env" and "=" not in part and not part.startswith("-"))
        for key in (command, tool):
            if key in self.replies:
                return _result(self.replies[key], argv)
        raise AssertionError(f"unexpected command: {command}")


def _result(reply: Reply, argv: Sequence[str]) -> CommandResult:
    if isinstance(reply, Exception):
        raise reply
    return reply(argv) if callable(reply) else reply


class CheckRunner:
    """Runs a check against a fake Slurm and judges it with the check's rules."""

    def __init__(self, check: Check, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.check = check
        self.monkeypatch = monkeypatch
        self.folder = folder

    def measure(self, replies: Mapping[str, Reply], expected: tuple[int, int | None], **options: Any) -> Measurement:
        """``expected``: number of nodes, and of GPUs per node."""
        FakeSlurm(replies).install(self.monkeypatch)
        return run_check(self.check, self.folder, expected, **options)

    def not_passed(self, replies: Mapping[str, Reply], *, nodes: int = 4, gpus: int | None = 2) -> dict[str, Outcome]:
        """Returns outcomes other than PASS and SKIP by metric, or by ``metric subject`` unless it is the cluster."""
        return not_passed(self.verdicts(replies, nodes=nodes, gpus=gpus))

    def verdicts(self, replies: Mapping[str, Reply], *, nodes: int = 4, gpus: int | None = 2) -> list[Verdict]:
        return judge(self.check, self.measure(replies, (nodes, gpus)))


def run_check(check: Check, folder: Path, expected: tuple[int, int | None] = (1, None), **options: Any) -> Measurement:
    context = Context(
        node="login",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_nodes=expected[0],
        expected_gpus=expected[1],
        artifacts_dir=folder,
        run_dir=folder,
    )
    return measure(check, context, options)


def judge(check: Check, measurement: Measurement) -> list[Verdict]:
    return judge_check(check, [measurement], {}, "")


def reasons(measurement: Measurement, why: Why) -> dict[str, str]:
    """Metric → the reason why it has no value, of metrics with this kind of reason."""
    return {each.metric: each.reason for each in measurement.absent if each.why is why}


def not_passed(verdicts: Sequence[Verdict]) -> dict[str, Outcome]:
    return {
        verdict.metric if verdict.subject == "cluster" else f"{verdict.metric} {verdict.subject}".strip(): outcome
        for verdict in verdicts
        if (outcome := verdict.outcome) not in (Outcome.PASS, Outcome.SKIP)
    }
