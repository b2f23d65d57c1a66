from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.processes import call

WORDS = ["run", "discover", "checks", "render", "train", "evaluate", "judge", "report", "explain", "schema", "baseline"]


def test_the_words_are_those_of_the_contract() -> None:
    _, out, _ = call("--help")
    assert re.findall(r"^│ ([a-z-]+) ", out.partition(" Commands ")[2], re.MULTILINE) == list(WORDS)
    assert "auto, local or slurm" in call("run", "--help")[1]
    assert "local, slurm, or torchrun" in call("render", "--help")[1]


@pytest.mark.parametrize(
    ("ignored", "sent", "code"),
    [
        ("HUP", signal.SIGHUP, 0),  # as nohup starts a program
        ("INT", signal.SIGINT, 0),  # as a shell starts one in the background
        ("TERM", signal.SIGTERM, 0),
        ("INT", signal.SIGHUP, 130),
        ("HUP", signal.SIGTERM, 130),
    ],
)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(ignored: str, sent: int, code: int) -> None:
    shell = f'trap "" {ignored}; exec "$0" -m seatrial explain -'
    process = subprocess.Popen(
        ["sh", "-c", shell, sys.executable],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=_heed_all,
    )
    assert process.stdin
    process.stdin.write(b"nothing wrong\n" * 100_000)  # more than a pipe holds: it has been reading for a while
    process.stdin.flush()
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == code


def _heed_all() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
