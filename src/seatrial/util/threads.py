"""Runs calls in threads, so that a call that never returns does not block the program."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call in a daemon thread and return its future. The call can hang, such as on a dead NFS or DNS server.

    ``result(timeout)`` of the future raises TimeoutError. A daemon thread that hangs does not keep the process alive.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # result() raises it
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
