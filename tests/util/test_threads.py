"""Calls that may never return."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from seatrial.util.threads import start_in_thread


def test_start_in_thread_returns_the_result_or_raises_the_error() -> None:
    assert start_in_thread(lambda: 7).result(5) == 7
    with pytest.raises(FileNotFoundError):
        start_in_thread(lambda: os.stat("/no/such/file")).result(5)


def test_a_call_that_hangs_does_not_keep_the_process_alive() -> None:
    program = """
import time
from seatrial.util.threads import start_in_thread
try:
    start_in_thread(lambda: time.sleep(600)).result(0.1)
except TimeoutError:
    print("timeout")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout == "timeout\n"
