"""Commands, help texts, shell completion and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.cli.examples import EXAMPLES
from tests.processes import call

COMMANDS = {
    "Run": ["run", "judge", "explain", "drill"],
    "Look": ["discover", "render", "watch", "ticket", "show"],
    "Hand over": ["bundle", "verify", "compare", "history"],
    "Operate": ["init", "readmit", "baseline", "hook"],
    "Train": ["train"],
}
OLD_NAMES = ("checks", "skus", "preprocess", "evaluate", "report")


def test_commands_by_heading() -> None:
    _, out, _ = call("--help")
    for heading, commands in COMMANDS.items():
        _, _, panel = out.partition(f"╭─ {heading} ─")
        assert re.findall(r"^│ ([a-z]+) ", panel.partition("╰")[0], re.MULTILINE) == commands
    assert len(re.findall(r"^│ [a-z]+ ", out, re.MULTILINE)) == sum(map(len, COMMANDS.values())), "schema is hidden"


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names_are_refused(name: str) -> None:
    code, _, err = call(name)
    assert (code, f"No such command '{name}'" in err) == (2, True)


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_help_text_has_an_example_that_starts_with_its_command(command: str) -> None:
    words = command.split()[command.startswith("seatrial") :]
    code, out, _ = call(*words, "-h")
    assert code == 0
    examples = re.findall(r"^ \$ seatrial (.*)", out.partition("Example")[2], re.MULTILINE)
    assert examples
    assert all(example.startswith(" ".join(words)) for example in examples)


def test_the_shell_completes_commands() -> None:
    environment = {"_SEATRIAL_COMPLETE": "complete_bash", "COMP_WORDS": "seatrial show s", "COMP_CWORD": "2"}
    done = subprocess.run(
        [Path(sys.executable).with_name("seatrial")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["skus"]


@pytest.mark.parametrize(
    ("ignored", "sent", "exit_code"),
    [
        ("HUP", signal.SIGHUP, 4),  # as nohup starts a program
        ("INT", signal.SIGINT, 4),  # as a shell starts one in the background
        ("TERM", signal.SIGTERM, 4),
        ("INT", signal.SIGHUP, 130),
        ("HUP", signal.SIGTERM, 130),
    ],
)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(ignored: str, sent: int, exit_code: int) -> None:
    shell = f'trap "" {ignored}; exec "$0" -m seatrial explain -'
    process = subprocess.Popen(
        ["sh", "-c", shell, sys.executable],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=_default_signal_handlers,
    )
    assert process.stdin
    process.stdin.write(b"nothing wrong\n" * 100_000)  # more than a pipe holds, so the process has started to read
    process.stdin.flush()
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == exit_code


def test_an_error_message_does_not_control_the_terminal() -> None:
    code, _, err = call("watch", "a\x1b[31m")
    assert (code, err[:21]) == (2, r"seatrial: a\x1b[31m: ")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("run", "--nodes", "abc"), "'abc'"),
        (("watch", "7", "--interval", "1"), "'1'"),
        (("hook", "prolog", "--caller", "xx"), "'xx'"),
    ],
)
def test_a_usage_error_repeats_the_rejected_value(arguments: tuple[str, ...], value: str) -> None:
    code, _, err = call(*arguments)
    assert (code, err.count(value)) == (2, 1)


def test_a_truncated_file_is_no_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncated(_self: object) -> None:
        raise EOFError("No data left in file")

    monkeypatch.setattr("seatrial.pipeline.watch.Watcher.status", truncated)
    code, _, err = call("watch", "7")
    assert (code, "EOFError: No data left in file" in err) == (3, True)


def test_a_reader_that_exits_is_no_rejection() -> None:
    process = subprocess.Popen([sys.executable, "-m", "seatrial", "schema"], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    assert process.wait(60) == 141


def _default_signal_handlers() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
