"""Live progress on a terminal, in a log, and where nobody can be written to."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from rich.console import Console

from seatrial.model import Job, Outcome
from seatrial.report.progress import STYLES, Live

JOB = Job(
    name="pair",
    placement="ranks",
    device="cuda",
    nodes=2,
    ranks_per_node=8,
    checks=("a.one", "a.two"),
    options={},
    expected_gpus=8,
    limit_s=90,
)


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def live(out: io.StringIO) -> Live:
    return Live(Console(file=out, width=60))


def lines(out: io.StringIO) -> list[str]:
    """Without the time at the start of each line."""
    assert all(line[2] == ":" for line in out.getvalue().splitlines())
    return [line[7:] for line in out.getvalue().splitlines()]


def test_a_log_gets_a_line_only_when_something_changes(live: Live, out: io.StringIO) -> None:
    for words in ("starting", "waiting: Resources", "waiting: Resources", "a.one", "a.one", "a.one: 3 of 4", "closing"):
        live.current_check(words)
    assert lines(out) == ["waiting: Resources", "running a.one", "running a.one: 3 of 4"]


def test_a_plan_names_each_job_with_its_places_and_limit(live: Live, out: io.StringIO) -> None:
    nodes = JOB.model_copy(update={"name": "hosts", "placement": "nodes"})
    live.planned((JOB, nodes), Path("runs/x"))
    run, ranks, hosts = lines(out)
    assert run.endswith("runs/x")
    assert all(part in ranks for part in ("pair", "2 × 8", "cuda", "01:30", "a.one, a.two"))
    assert all(part in hosts for part in ("hosts", "2 × 1"))


def test_only_later_attempts_are_numbered(live: Live, out: io.StringIO) -> None:
    live.job_started(JOB, 1)
    live.job_started(JOB, 2)
    first, second = lines(out)
    assert ("attempt" in first, second.endswith("attempt 2")) == (False, True)


def test_a_retry_gives_the_reason_of_each_check(live: Live, out: io.StringIO) -> None:
    live.retry_started(JOB, {"a.one": "slow", "a.two": "slower"})
    one, two = lines(out)
    assert ("a.one" in one, one.endswith("slow")) == (True, True)
    assert ("a.two" in two, two.endswith("slower")) == (True, True)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_verdict_is_printed_with_its_reason_unless_it_passes(outcome: Outcome, live: Live, out: io.StringIO) -> None:
    assert outcome in STYLES
    live.judged("a.one", outcome, "too [slow]", 1.25)
    (line,) = lines(out)
    assert line.split()[:2] == [outcome, "a.one"]
    assert ("too [slow]" in line) is (outcome is not Outcome.PASS)


def test_text_of_a_job_does_not_control_the_terminal(live: Live, out: io.StringIO) -> None:
    live.warn("\x1b[2Jgone [bold]")
    assert lines(out) == ["gone [bold]"]


def test_on_a_terminal_doing_moves_the_status_line_and_prints_none() -> None:
    out = io.StringIO()
    with Live(Console(file=out, force_terminal=True, width=60)) as live:
        live.job_started(JOB, 1)
        live.current_check("a.one")
        assert "job pair: a.one" in str(live._status.status)
    assert "running a.one" not in out.getvalue()


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_full_log_ends_no_trial(terminal: bool) -> None:
    with Live(Console(file=Full(), force_terminal=terminal, width=60)) as live:
        live.planned((JOB,), Path("runs/x"))
        live.current_check("a.one")
        live.judged("a.one", Outcome.FAIL, "slow", 1)
