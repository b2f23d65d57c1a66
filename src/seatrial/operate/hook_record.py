"""The record of one run of a hook: one line of JSON."""

from __future__ import annotations

import os
from pathlib import Path

from seatrial.model import Frozen, Verdict
from seatrial.operate.hook_exit_codes import Result
from seatrial.util.text import and_more, printable

_MAX_REASON = 300  # characters; Slurm keeps a longer Reason of a node, but `sinfo -R` shows its start only
_MAX_NAMED = 3  # failures in the reason


class Problem(Frozen):
    """A verdict FAIL or WARN. ``text``: its summary. ``fix``: the fix of its rule."""

    check: str
    subject: str
    metric: str
    text: str
    fix: str

    @classmethod
    def of_verdict(cls, verdict: Verdict) -> Problem:
        return cls(
            check=verdict.check,
            subject=printable(verdict.subject),
            metric=verdict.metric,
            text=printable(verdict.summary),
            fix=verdict.fix,
        )


class Record(Frozen):
    """The result of one run of a hook."""

    run_id: str
    time: float  # Unix seconds
    node: str
    kind: str  # prolog, epilog or health
    caller: str  # what started the hook: slurm, soperator, npd or systemd
    job: str  # Slurm's job id, or empty
    result: Result
    exit_code: int
    reason: str
    seconds: float
    measured: dict[str, float]  # check → seconds
    not_measured: dict[str, str]  # check → reason; "site": why the trial file of the site cannot be used
    not_applicable: dict[str, str] = {}  # check → why this node has nothing to measure
    not_judged: dict[str, str]  # GPU → reason
    failures: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    limit: str = ""  # why the drain limit granted or refused to drain the node; empty if no drain was requested

    def text(self) -> str:
        """Return the record as lines for a person."""
        lines = [f"{self.result.upper()} {self.reason}"]
        lines += [f"  {each.check} {each.subject}: {each.text}. Fix: {each.fix}" for each in self.failures]
        lines += [f"  {self.limit}"] if self.limit else []
        lines += [f"  warning: {each.check} {each.subject}: {each.text}" for each in self.warnings]
        lines += [f"  not measured: {check}: {reason}" for check, reason in self.not_measured.items()]
        lines += [f"  not applicable: {check}: {reason}" for check, reason in self.not_applicable.items()]
        lines += [f"  not judged: {subject}: {reason}" for subject, reason in self.not_judged.items()]
        return "\n".join([*lines, f"  measured: {', '.join(self.measured) or 'nothing'}, in {self.seconds:.1f} s"])


def reason_text(run_id: str, failures: tuple[Problem, ...], not_measured: dict[str, str]) -> str:
    """Return ``seatrial RUN_ID: CAUSE`` in one line, for the record and as the reason of a drained node."""
    causes = [f"{each.subject} {each.text}" for each in failures]
    if not causes and not_measured:
        causes = [f"not measured: {', '.join(not_measured)}"]
    text = printable(f"seatrial {run_id}: {and_more(causes, _MAX_NAMED, '; ') or 'passed'}")
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 1]}…"


def append(path: Path, record: Record) -> None:
    """Append the record as one line, in one write. Raises OSError, for example if the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (record.model_dump_json() + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        written = os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes were written")
