"""Signals that stop this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from seatrial.util.signals import (
    STOP_SIGNALS,
    SigtermWatch,
    end_on_sigterm,
    interrupt_once,
    raise_lost_interrupt,
    stop_signals_ignored,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers after each test."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    interrupt_once()  # as if no signal had arrived
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)  # runs the handler before it returns; os.kill may signal another thread first


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_first_signal_interrupts_and_second_is_ignored(number: signal.Signals) -> None:
    interrupt_once()
    with pytest.raises(KeyboardInterrupt):
        send(number)
    for stop in STOP_SIGNALS:
        os.kill(os.getpid(), stop)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_that_python_drops_is_raised_later() -> None:
    class SendsSignal:
        def __del__(self) -> None:
            send(signal.SIGINT)

    interrupt_once()
    raise_lost_interrupt()
    sender = SendsSignal()
    del sender  # Python prints the KeyboardInterrupt of the handler and goes on
    with pytest.raises(KeyboardInterrupt):
        raise_lost_interrupt()


def test_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt_once()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_stop_signals_are_ignored_in_the_context() -> None:
    interrupt_once()
    handler = signal.getsignal(signal.SIGTERM)
    with stop_signals_ignored():
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_sigterm_is_seen_by_another_thread() -> None:
    watch, seen = SigtermWatch(lambda *_: None), list[bool]()
    assert not watch.wait(0.01)
    thread = threading.Thread(target=lambda: seen.append(watch.wait(10)))
    thread.start()
    os.kill(os.getpid(), signal.SIGTERM)
    thread.join()
    assert seen == [True]


def test_end_on_sigterm_needs_the_main_thread() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    thread = threading.Thread(target=end_on_sigterm)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    end_on_sigterm()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
