"""seatrial watch: one text block, one JSON document, a refreshed view on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import call, until

STEP = '{"step": 7, "loss": NaN, "tokens": 256, "seconds": 0.5}\n'


@pytest.fixture
def training(tmp_path: Path) -> Path:
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "steps.jsonl").write_text(STEP)
    (folder / "config.json").write_text('{"max_steps": 30}')
    return folder


def test_text_and_json(training: Path) -> None:
    code, out, err = call("watch", training)
    assert (code, err) == (0, "")
    assert "step 7 of 30, loss nan, 2 steps/s, 512 tokens/s" in out
    assert "\x1b" not in out
    code, out, _ = call("watch", training, "--json")
    document = json.loads(out, parse_constant=pytest.fail)
    assert (code, document["training"]["step"], document["state"]) == (0, 7, "training")


def test_bad_input(tmp_path: Path) -> None:
    for arguments, message in (
        (("no-such-job",), "not a job ID"),
        ((tmp_path / "file",), "not a directory"),
        (("1", "--interval", "0.1"), "interval"),
        ((), "missing argument"),
    ):
        (tmp_path / "file").touch()
        code, _, err = call("watch", *arguments)
        assert code == 2
        assert message.lower() in err.lower()


def test_a_terminal_shows_each_change_and_ctrl_c_ends_the_view_at_once(training: Path) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "seatrial", "watch", str(training), "--interval", "2"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=environment) as process:
        os.close(terminal)
        screen = b""

        def shows(text: bytes) -> bool:
            nonlocal screen
            screen += os.read(controller, 65536)
            return text in screen

        until(lambda: shows(b"step 7 of 30"))
        with (training / "steps.jsonl").open("a") as file:
            file.write(STEP.replace("7", "8"))
        until(lambda: shows(b"step 8 of 30"))
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    os.close(controller)


def test_a_view_ends_with_the_training(training: Path) -> None:
    controller, terminal = pty.openpty()
    (training / "metrics.json").write_text("{}")
    command = [sys.executable, "-m", "seatrial", "watch", str(training)]
    with subprocess.Popen(command, stdout=terminal) as process:
        os.close(terminal)
        assert process.wait(60) == 0
    assert b"ended" in os.read(controller, 65536)
    os.close(controller)
