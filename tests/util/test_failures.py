"""Selection of the first failure."""

from __future__ import annotations

import signal

import pytest

from seatrial.util.failures import Failure, exit_hint, exit_reason, first_failure, killed

KILLED = Failure(2, -signal.SIGKILL, reported=False, order=9)
MESSAGE = Failure(1, 1, reported=True, order=1)


@pytest.mark.parametrize(
    "others",
    [
        [MESSAGE],
        [Failure(1, 0, reported=True, order=1)],
        [Failure(1, None, reported=True, order=1)],
        [Failure(1, 3, reported=False, order=1)],  # exits because of its peer
        [Failure(1, -signal.SIGABRT, reported=False, order=1)],  # aborts because of its peer
        [Failure(1, -signal.SIGTERM, reported=False, order=1), Failure(3, 143, reported=False, order=2)],
        [Failure(1, -signal.SIGSEGV, reported=False, order=10)],
    ],
)
def test_killed_rank_precedes_its_peers(others: list[Failure]) -> None:
    assert first_failure([*others, KILLED]) is KILLED


def test_killed_rank_precedes_although_it_reported_an_error() -> None:
    killed_later = Failure(2, -signal.SIGSEGV, reported=True, order=9)
    assert first_failure([MESSAGE, killed_later]) is killed_later


@pytest.mark.parametrize("code", [0, 3, -signal.SIGABRT])
def test_end_without_message_precedes_messages(code: int) -> None:
    silent = Failure(0, code, reported=False, order=2)
    assert first_failure([MESSAGE, silent]) is silent


def test_earliest_of_messages_and_sigterm_ends() -> None:
    abort = Failure(0, -signal.SIGABRT, reported=True, order=2)
    ended = Failure(3, -signal.SIGTERM, reported=False, order=0.5)
    assert first_failure([abort, MESSAGE]) is MESSAGE
    assert first_failure([abort, MESSAGE, ended]) is ended


def test_lowest_rank_of_equal_failures() -> None:
    assert first_failure([Failure(1, 1, True, 0), Failure(0, 1, True, 0)]).rank == 0


def test_exit_code_text() -> None:
    assert exit_reason(3) == "exit code 3"
    assert exit_reason(-9) == "killed by SIGKILL"
    assert exit_reason(143) == exit_reason(-15) == "terminated by SIGTERM from outside"
    assert exit_reason(-40).startswith("killed by signal 40 (SIGRTMIN+")
    assert "dmesg" in exit_hint(-9)
    assert not exit_hint(-11)
    assert [killed(code) for code in (-9, -11, -6, -15, 1, 0)] == [True, True, False, False, False, False]
