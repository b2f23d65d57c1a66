"""Ranks that are killed, stopped or broken, for real: the right one is blamed, the rest is run again, nothing stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from seatrial.model import JobState, Outcome, Verb
from tests.processes import Program, all_doing, load, until

pytestmark = pytest.mark.slow

CHECK = "collectives.all_reduce"
TRIAL = """
limits: {silence_s: 3}
checks:
  host.inventory:
  collectives.all_reduce: {options: {sizes: [10MiB], seconds_per_size: 60}}
  nodes.reachable:
"""


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    path = tmp_path / "crash.yaml"
    path.write_text(TRIAL)
    return path


def broken_by(number: signal.Signals, trial: Path, out: Path) -> tuple[int, str, list[int]]:
    """Run the trial, send a signal to rank 1 in the middle of a collective, and let the trial end."""
    program = Program("run", trial, "--out", out)
    victim = until(lambda: all_doing(out, "ranks", CHECK, 2))[1]["pid"]
    os.kill(victim, number)
    code, output, _ = program.finish()
    return code, output, program.left_behind()


def test_a_killed_rank_is_blamed_and_the_rest_is_run_again(trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, output, left = broken_by(signal.SIGKILL, trial, out)
    assert (code, left) == (3, [])
    record = load(out)
    assert record.decision.value is Verb.INCOMPLETE
    (error,) = [verdict for verdict in record.verdicts if verdict.outcome is Outcome.ERROR]
    assert error.check == CHECK
    assert error.subject.endswith("/rank1")
    assert "rank 1 (" in error.reason
    assert "killed by SIGKILL" in error.reason
    assert "killed by SIGKILL" in output
    assert [(one.job, one.state) for one in record.results] == [
        ("nodes", JobState.COMPLETED),
        ("ranks", JobState.FAILED),
        ("ranks", JobState.COMPLETED),
    ]
    assert {verdict.outcome for verdict in record.verdicts if verdict.check == "nodes.reachable"} == {Outcome.PASS}

    code, _, err = Program("run", "--resume", out).finish()
    assert code == 0, err
    again = load(out)
    assert again.decision.value is Verb.ACCEPTED
    before = {one.started for one in record.measurements if not one.error}
    kept = [one.check for one in again.measurements if one.started in before]
    assert sorted(kept) == ["host.inventory", "nodes.reachable", "nodes.reachable"], "measured once, kept"
    assert [session.command[1] for session in again.sessions] == ["run", "run"]
    assert again.seconds > record.seconds, "the time of both sessions counts"
    assert [job.name for job in again.jobs] == [job.name for job in record.jobs]


def test_a_stopped_rank_is_named_not_its_waiting_peer(trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, left = broken_by(signal.SIGSTOP, trial, out)
    assert (code, left) == (3, [])
    record = load(out)
    hung = next(one for one in record.results if one.state is JobState.HUNG)
    assert "rank 1 (" in hung.culprit
    assert "no sign of life" in hung.cause
    assert CHECK in hung.cause
    assert "stopped by a signal" in hung.cause


def test_a_stopped_agent_is_told_when_its_ranks_have_long_ended(trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = Program("run", trial, "--out", out)
    rank = until(lambda: all_doing(out, "ranks", CHECK, 2))[0]["pid"]
    os.kill(psutil.Process(rank).ppid(), signal.SIGSTOP)
    code, _, _ = program.finish()
    assert (code, program.left_behind()) == (3, [])
    record = load(out)
    assert record.results[-1].state is JobState.HUNG
    assert "all ranks ended" in record.results[-1].cause
    assert record.decision.value is Verb.INCOMPLETE, "all was measured, and yet something is wrong"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("limits.startup_s=0.5", "2 of 2 ranks did not start within 0.5 s"),
        ("checks.collectives.all_reduce.limit_s=0.3", f"{CHECK} did not end within its limit of 0.3 s"),
    ],
)
def test_what_takes_too_long_is_given_up(trial: Path, tmp_path: Path, setting: str, words: str) -> None:
    out = tmp_path / "run"
    program = Program("run", trial, "--only", CHECK, "--set", setting, "--out", out)
    code, _, _ = program.finish()
    assert (code, program.left_behind()) == (3, [])
    record = load(out)
    assert [one.state for one in record.results] == [JobState.TIMEOUT]
    assert words in record.results[0].cause
    assert [one.outcome for one in record.verdicts if one.check == CHECK] == [Outcome.ERROR]


def test_ctrl_c_ends_every_process_and_writes_what_is_known(trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = Program("run", trial, "--out", out)
    until(lambda: all_doing(out, "ranks", CHECK, 2))
    program.process.send_signal(signal.SIGINT)
    code, output, _ = program.finish()
    assert code == 130
    assert program.left_behind() == []
    record = load(out)
    assert record.decision.value is Verb.INCOMPLETE
    assert "interrupted" in record.decision.reason
    assert "interrupted" in output
    assert [one.check for one in record.measurements] == ["host.inventory"]


def test_a_trial_that_is_killed_leaves_no_process_and_can_be_resumed(trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = Program("run", trial, "--out", out)
    until(lambda: all_doing(out, "ranks", CHECK, 2))
    program.process.kill()
    program.finish()
    until(lambda: not program.left_behind())
    assert not (out / "trial.json").exists()
    journal = out / "measurements.jsonl"
    journal.write_text(journal.read_text() + '{"measurement": {"check": "nodes.rea')
    code, _, err = Program("run", "--resume", out).finish()
    assert code == 0, err
    assert f"{journal}:" in err, "the cut-off line is named"
    assert load(out).decision.value is Verb.ACCEPTED
