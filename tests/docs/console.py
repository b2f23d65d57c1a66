"""The console blocks of the pages: their commands are run, and their output is compared.

A comment on the line before a block says how:

    <!-- run -->              in a folder with docs/ of the clone; the output is as shown
    <!-- run on cluster -->   on a Slurm cluster of two nodes without GPUs (make test-cluster); numbers may differ
    <!-- not run: REASON -->

and before a block that is a file, so that commands of the page can use it:

    <!-- file: NAME -->

In shown output, `…` on a line of its own stands for any number of lines, and in a line for any text. Output that is not
shown is not compared. A command must end with exit code 0, unless the next one is `echo $?`. /shared stands for a
folder of the test.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.processes import call

BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<marker>[^\n]*?) -->\n *)?```(?P<language>\w+)\n(?P<text>.*?)^ *```$", re.M | re.S
)
COMMAND_LANGUAGES = ("console", "sh", "bash")
_MARKER = re.compile(r"run|run on cluster|not run: \S.*|file: \S+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``marker``: the text of the comment before it, "" without one."""

    page: Path
    language: str
    marker: str
    text: str

    @property
    def numbers_vary(self) -> bool:
        return self.marker == "run on cluster"

    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with its shown output lines. A prompt is "$ " or, of a node, "node0$ "."""
        commands: list[tuple[str, list[str]]] = []
        lines = iter(self.text.splitlines())
        for line in lines:
            if prompt := re.match(r"(?:\w+\d)?\$ ", line):
                command = line[prompt.end() :]
                while command.endswith("\\"):
                    command = command[:-1].rstrip() + " " + next(lines).strip()
                commands.append((re.sub(r"\s{2,}# .*", "", command), []))
            elif commands:
                commands[-1][1].append(line)
        return [(command, "\n".join(shown).strip("\n").splitlines()) for command, shown in commands]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page. Raises ValueError for a marker that is not one of those above."""
    found = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        marker = block["marker"] or ""
        if marker and not _MARKER.fullmatch(marker):
            raise ValueError(f"{page.name}: unknown marker <!-- {marker} -->")
        text = re.sub(rf"^{block['indent']}", "", block["text"], flags=re.M)
        found.append(Block(page, block["language"], marker, text))
    return found


def _write_file(block: Block, folder: Path) -> None:
    path = folder / block.marker.removeprefix("file: ").removeprefix("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")


def environment() -> dict[str, str]:
    """Variables for commands: `seatrial` is that of this Python, as in an activated virtual environment."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}


def run_here(page_blocks: Iterable[Block], folder: Path) -> None:
    """Run the blocks marked as run. A plain seatrial command runs in this process, which saves the start of another."""
    code = 0
    for block in page_blocks:
        if block.marker.startswith("file: "):
            _write_file(block, folder)
        if block.marker != "run":
            continue
        commands = block.commands()
        for number, (written, shown) in enumerate(commands):
            command = written.replace("/shared/", f"{folder}/shared/")
            if command == "echo $?":
                output = str(code)
            elif command.startswith("seatrial ") and not set("|>&;$*") & set(command):
                code, out, err = call(*shlex.split(command)[1:], cwd=folder, columns=100)
                output = err + out
            else:
                done = subprocess.run(
                    ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, check=False
                )
                code, output = done.returncode, done.stdout + done.stderr
            check(block, written, shown, output.replace(f"{folder}/shared/", "/shared/"))
            next_is_code = number + 1 < len(commands) and commands[number + 1][0] == "echo $?"
            assert code == 0 or next_is_code or command == "echo $?", f"{block.page.name}: {command}: exit code {code}"


def run_in_shell(page_blocks: Iterable[Block], folder: Path, env: dict[str, str]) -> None:
    """Run the blocks marked as run on cluster in one shell, so that folder and variables stay."""
    shell = subprocess.Popen(
        ["bash"],
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    with shell:
        for block in page_blocks:
            if block.marker.startswith("file: "):
                _write_file(block, folder)
            for written, shown in block.commands() if block.marker == "run on cluster" else []:
                command = written.replace("/shared/", f"{folder}/shared/")
                shell.stdin.write(f"{{ {command}; }} </dev/null; code=$?; echo; echo END $code\n")
                shell.stdin.flush()
                lines: list[str] = []
                while not (line := shell.stdout.readline()).startswith("END "):
                    assert line, f"{block.page.name}: {written}: the shell ended\n{''.join(lines)}"
                    lines.append(line)
                assert line == "END 0\n", f"{block.page.name}: {written}: {line}{''.join(lines)}"
                check(block, written, shown, "".join(lines).replace(f"{folder}/shared/", "/shared/"))


def check(block: Block, command: str, shown: list[str], output: str) -> None:
    """Raise AssertionError with the lines that are shown and not in the output, in this order."""
    real = [line.rstrip() for line in output.strip("\n").splitlines()]
    missing = _missing([_comparable(line, block) for line in shown], [_comparable(line, block) for line in real])
    lines = "\n".join(missing)
    assert not missing, f"{block.page.name}: {command}: the output is not as shown. Not there, or elsewhere:\n{lines}"


def _comparable(line: str, block: Block) -> str:
    line = line.rstrip()
    return re.sub(r"\s+", " ", re.sub(r"\d+(?:[.,]\d+)*", "#", line)) if block.numbers_vary else line


def _missing(shown: list[str], real: list[str]) -> list[str]:
    """The first group of shown lines that is not where it should be, or an empty list."""
    position = 0
    for group, first, last in _groups(shown):
        starts = range(position, len(real) - len(group) + 1)
        starts = starts[:1] if first else starts[-1:] if last else starts
        if first and last and len(group) != len(real):
            return group
        start = next((start for start in starts if _equal(group, real[start : start + len(group)])), None)
        if start is None:
            return group
        position = start + len(group)
    return []


def _groups(shown: list[str]) -> Iterator[tuple[list[str], bool, bool]]:
    """The runs of lines between lines `…`: each with whether it begins, and whether it ends, the output."""
    ends = [-1, *(number for number, line in enumerate(shown) if line.strip() == "…"), len(shown)]
    for before, after in pairwise(ends):
        if group := shown[before + 1 : after]:
            yield group, before == -1, after == len(shown)


def _equal(shown: list[str], real: list[str]) -> bool:
    return len(shown) == len(real) and all(
        re.fullmatch(".*".join(map(re.escape, line.split("…"))), other) for line, other in zip(shown, real, strict=True)
    )
