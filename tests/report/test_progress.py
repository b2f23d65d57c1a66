"""Live progress on a terminal, in a log file, and on a stream that cannot be written."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from rich.console import Console

from seatrial.model import Job, Outcome
from seatrial.report.progress import Live, Remaining
from seatrial.report.tables import STYLES

JOB = Job(
    name="pair",
    placement="ranks",
    device="cuda",
    nodes=2,
    ranks_per_node=8,
    checks=("a.one", "a.two"),
    options={},
    expected_gpus=8,
    limits={"a.one": 30, "a.two": 60},
    limit_s=90,
    typical={"a.one": 20, "a.two": 200},
)


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def live(out: io.StringIO) -> Live:
    return Live(Console(file=out, width=60))


def lines(out: io.StringIO) -> list[str]:
    """The printed lines without the elapsed time at their start."""
    assert all(line[2] == ":" for line in out.getvalue().splitlines())
    return [line[7:] for line in out.getvalue().splitlines()]


def test_a_log_gets_the_step_only_after_30_s_without_a_line(out: io.StringIO) -> None:
    """A status is shown 10 times a second; a log has no line for each step, and never a silence of minutes."""
    now = 1000.0
    live = Live(Console(file=out, width=60), lambda: now)
    live.show_plan((JOB,), Path("runs/x"), {}, (), as_root=False)
    live.job_started(JOB, 1)
    out.truncate(0)
    for tenth in range(700):
        now = 1000.0 + tenth / 10
        if tenth == 450:
            live.show_outcome("a.one", Outcome.PASS, "", 20)
        live.show_status(f"a.two: step {tenth}" if tenth else "starting")
    assert [line.partition("running ")[2] for line in out.getvalue().lstrip("\0").splitlines()] == [
        "job pair: a.two: step 300, 0 of 2 checks, about 3 min left",
        "",  # PASS: the next line follows 30 s later
    ]


def test_a_log_gets_each_state_of_the_scheduler_once_then_once_a_minute(live: Live, out: io.StringIO) -> None:
    for second in range(130):
        live.show_waiting("PENDING (Priority)" if second % 2 else "PENDING (Resources)", second)
    assert lines(out) == [
        "waiting: PENDING (Resources), 0 s",
        "waiting: PENDING (Priority), 1 s",
        "waiting: PENDING (Resources), 1 min 0 s",
        "waiting: PENDING (Priority), 1 min 1 s",
        "waiting: PENDING (Resources), 2 min 0 s",
        "waiting: PENDING (Priority), 2 min 1 s",
    ]
    live.job_started(JOB, 1)
    live.show_waiting("PENDING (Resources)", 3900)
    assert lines(out)[-1] == "waiting: PENDING (Resources), 1 h 5 min"


def test_the_same_error_of_several_ranks_is_one_line(live: Live, out: io.StringIO) -> None:
    for reason in ("node1 is drained", "node1 is drained", "another"):
        live.show_outcome("a.one", Outcome.ERROR, reason, 0)
    assert [line.partition(": ")[2] for line in lines(out)] == ["node1 is drained", "another"]


def test_a_plan_lists_each_job_with_its_processes_and_limit(live: Live, out: io.StringIO) -> None:
    nodes = JOB.model_copy(update={"name": "hosts", "placement": "nodes"})
    live.show_plan((JOB, nodes), Path("runs/x"), {}, (), as_root=False)
    run, ranks, hosts, cost, _ = lines(out)
    assert run.endswith("runs/x")
    assert all(part in ranks for part in ("pair", "2 × 8", "cuda", "at most 1 min 30 s", "a.one, a.two"))
    assert all(part in hosts for part in ("hosts", "2 × 1"))
    assert "16 GPUs" in cost


def test_only_later_attempts_are_numbered(live: Live, out: io.StringIO) -> None:
    live.job_started(JOB, 1)
    live.job_started(JOB, 2)
    first, second = lines(out)
    assert ("attempt" in first, second.endswith("attempt 2")) == (False, True)


def test_a_retry_gives_the_reason_of_each_check(live: Live, out: io.StringIO) -> None:
    live.retry_started(JOB, {"a.one": "slow", "a.two": "slower"})
    first, second = lines(out)
    assert ("a.one" in first, "slow" in first) == (True, True)
    assert ("a.two" in second, "slower" in second) == (True, True)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_verdict_is_printed_with_its_reason_unless_it_passes(outcome: Outcome, live: Live, out: io.StringIO) -> None:
    assert outcome in STYLES
    live.show_outcome("a.one", outcome, "too [slow]", 1.25)
    (line,) = lines(out)
    assert line.split()[:2] == [outcome, "a.one"]
    assert ("too [slow]" in line) is (outcome is not Outcome.PASS)


def test_a_log_has_the_remaining_time_with_each_verdict(live: Live, out: io.StringIO) -> None:
    live.show_plan((JOB,), Path("runs/x"), {}, (), as_root=False)
    live.show_outcome("a.one", Outcome.PASS, "", 20)
    live.show_outcome("a.two", Outcome.PASS, "", 200)
    first, last = lines(out)[-2:]
    assert first.startswith("[1/2, about 3 min left] PASS")
    assert last.startswith("[2/2] PASS")


def test_a_check_that_no_job_can_run_is_counted_and_numbered(live: Live, out: io.StringIO) -> None:
    live.show_plan((JOB,), Path("runs/x"), {}, ("a.three",), as_root=False)
    live.show_outcome("a.three", Outcome.SKIP, "one node", 0)
    live.show_outcome("a.one", Outcome.PASS, "", 20)
    live.show_outcome("a.two", Outcome.PASS, "", 200)
    cost, _, *outcomes = lines(out)[2:]
    assert cost.split()[1:3] == ["3", "checks"]
    assert [line.partition(",")[0].partition("]")[0] for line in outcomes] == ["[1/3", "[2/3", "[3/3"]


def test_text_of_a_job_does_not_control_the_terminal(live: Live, out: io.StringIO) -> None:
    live.warn("\x1b[2Jgone [bold]")
    assert lines(out) == ["gone [bold]"]


def test_on_a_terminal_the_current_check_updates_the_status_line() -> None:
    out = io.StringIO()
    with Live(Console(file=out, force_terminal=True, width=60)) as live:
        live.job_started(JOB, 1)
        live.show_status("a.one")
        assert "job pair: a.one" in str(live._status.status)
    assert "running a.one" not in out.getvalue()


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_full_disk_does_not_end_the_trial(terminal: bool) -> None:
    with Live(Console(file=FullDisk(), force_terminal=terminal, width=60)) as live:
        live.show_plan((JOB,), Path("runs/x"), {}, (), as_root=False)
        live.show_status("a.one")
        live.show_outcome("a.one", Outcome.FAIL, "slow", 1)


def test_a_new_job_replaces_the_status_of_the_last_one() -> None:
    with Live(Console(file=io.StringIO(), force_terminal=True, width=60)) as live:
        live.job_started(JOB, 1)
        live.show_status("a.one: 3 of 4")
        live.job_started(JOB.model_copy(update={"name": "next"}), 1)
        assert "job next: starting" in str(live._status.status)


def test_a_terminal_wraps_between_words_and_a_log_does_not() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        with Live(Console(file=out, force_terminal=terminal, width=60, legacy_windows=False)) as live:
            live.show_outcome("a.one", Outcome.FAIL, "word " * 30, 1)
        printed = [line for line in out.getvalue().splitlines() if "word" in line]
        assert (len(printed) > 1) is terminal
        assert all(line.rstrip("\x1b[0m").rstrip().endswith("word") for line in printed)


def test_progress_counts_checks_and_scales_typical_durations() -> None:
    remaining = Remaining([JOB])
    assert remaining.seconds(0) == 220
    remaining.finish("a.one", 2 * 20)
    assert (remaining.done_count, remaining.check_count) == (1, 2)
    assert remaining.seconds(0) == 2 * 200, "this machine needs twice the typical time"
    remaining.finish("a.one", 2 * 20)
    assert remaining.done_count == 1, "a retry does not count twice"
    assert remaining.text(0) == "1 of 2 checks, about 7 min left"


def test_remaining_time_follows_the_running_check() -> None:
    remaining = Remaining([JOB])
    remaining.finish("a.one", 20)
    remaining.start("a.two", 1000)
    for elapsed_s, text in ((50, "about 2 min left"), (140, "about 60 s left"), (195, "about 10 s left")):
        remaining.start("a.two", 1000 + elapsed_s)
        assert remaining.text(1000 + elapsed_s) == f"1 of 2 checks, {text}"
    assert remaining.text(1300) == "1 of 2 checks, a.two takes 1 min 40 s longer than expected"
    remaining.finish("a.two", 300)
    assert remaining.text(1300) == "2 of 2 checks"


def test_short_checks_are_not_late_from_the_start() -> None:
    remaining = Remaining([JOB.model_copy(update={"typical": dict.fromkeys(JOB.checks, 0.0)})])
    assert remaining.text(1000) == "0 of 2 checks, about 10 s left"
    remaining.start(JOB.checks[0], 1000)
    assert remaining.text(1005) == "0 of 2 checks, about 10 s left"
    assert remaining.text(1050) == "0 of 2 checks, a.one takes 50 s longer than expected"


def test_an_exceeded_estimate_is_shown_while_other_checks_remain() -> None:
    remaining = Remaining([JOB])
    remaining.start("a.one", 1000)
    assert remaining.text(1029) == "0 of 2 checks, about 3 min left"
    assert remaining.text(1050) == "0 of 2 checks, about 3 min left, a.one takes 30 s longer than expected"


def test_checks_that_cannot_run_are_one_line(live: Live, out: io.StringIO) -> None:
    live.show_not_run([f"a.check{number}" for number in range(36)], Outcome.ERROR, "8 GPUs expected, 0 usable")
    (line,) = out.getvalue().splitlines()
    assert "36 checks not run: 8 GPUs expected, 0 usable" in line


def test_progress_names_the_number_of_checks_of_unknown_duration() -> None:
    remaining = Remaining([JOB.model_copy(update={"typical": {"a.two": 200}})])
    assert remaining.seconds(0) == 200
    assert remaining.text(0) == "0 of 2 checks, about 3 min left and 1 check of unknown duration"
    remaining.finish("a.two", 200)
    assert remaining.text(0) == "1 of 2 checks, 1 check of unknown duration"


def test_a_check_that_was_not_measured_does_not_scale_the_estimate() -> None:
    remaining = Remaining([JOB])
    remaining.finish("a.one", None)
    assert remaining.seconds(0) == 200
