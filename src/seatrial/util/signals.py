"""What this process does on the signals that ask it to end. The only caller of signal.signal."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler or a person, a lost terminal
EXIT_TERMINATED = 128 + signal.SIGTERM  # as a shell shows a process that SIGTERM ended


def interrupt_once() -> None:
    """Let the first of ``STOPS`` raise KeyboardInterrupt; a second one does not cut short what follows."""

    def interrupt(_number: int, _frame: object) -> None:
        for stop in STOPS:
            signal.signal(stop, signal.SIG_IGN)
        raise KeyboardInterrupt

    for stop in STOPS:
        if signal.getsignal(stop) != signal.SIG_IGN:  # as nohup sets it, or a shell for what it starts in background
            signal.signal(stop, interrupt)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Within, ``STOPS`` are ignored."""
    before = {stop: signal.signal(stop, signal.SIG_IGN) for stop in STOPS}
    try:
        yield
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)


def end_on_sigterm() -> None:
    """Let SIGTERM end this process at once, without any handler. Does nothing outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class SigtermWatch:
    """Lets another thread see a SIGTERM while the main thread waits inside a collective, where Python runs no handler.

    The wake-up descriptor is written all the same. ``handler`` runs in the main thread, once that is back in Python.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._signals, wake_up = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_up)
        signal.signal(signal.SIGTERM, handler)

    def wait(self, seconds: float) -> bool:
        """Whether SIGTERM came; returns on it, on any other signal, or after so many seconds."""
        return bool(select.select([self._signals], [], [], seconds)[0]) and signal.SIGTERM in os.read(self._signals, 16)
