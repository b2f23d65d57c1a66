"""Signal handlers of this process: no other module calls signal.signal."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C; scheduler or kill; closed terminal
EXIT_TERMINATED = 128 + signal.SIGTERM  # the shell's exit code for a process that SIGTERM ended

_interrupted = threading.Event()  # a stop signal has arrived in this process


def interrupt_once() -> None:
    """From now on, raise KeyboardInterrupt on the first of ``STOP_SIGNALS``, and ignore later ones.

    So the cleanup after the first signal completes. Signals that this process already ignores stay ignored.
    """
    _interrupted.clear()

    def interrupt(_number: int, _frame: object) -> None:
        for stop in STOP_SIGNALS:
            signal.signal(stop, signal.SIG_IGN)
        _interrupted.set()
        raise KeyboardInterrupt

    for stop in STOP_SIGNALS:
        if signal.getsignal(stop) != signal.SIG_IGN:  # ignored by nohup, or by a shell for background jobs
            signal.signal(stop, interrupt)


def raise_lost_interrupt() -> None:
    """Raise KeyboardInterrupt if a stop signal has arrived. Call this in loops that Ctrl-C must end.

    If a signal handler raises KeyboardInterrupt inside ``__del__`` or a callback of weakref, Python prints the
    exception and continues: the interrupt is lost.
    """
    if _interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def stop_signals_ignored() -> Iterator[None]:
    """Ignore ``STOP_SIGNALS`` inside the context."""
    before = {stop: signal.signal(stop, signal.SIG_IGN) for stop in STOP_SIGNALS}
    try:
        yield
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)


def end_on_sigterm() -> None:
    """Restore the default action of SIGTERM (the process ends at once). In other threads than the main: do nothing."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class SigtermWatch:
    """Reports SIGTERM to another thread, even while the main thread is in a collective and runs no Python handler.

    Uses signal.set_wakeup_fd. ``handler`` runs in the main thread, as soon as this thread runs Python code again.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._signals, wake_up = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_up)
        signal.signal(signal.SIGTERM, handler)

    def wait(self, seconds: float) -> bool:
        """Wait for any signal, at most ``seconds``; return whether SIGTERM arrived."""
        return bool(select.select([self._signals], [], [], seconds)[0]) and signal.SIGTERM in os.read(self._signals, 16)
