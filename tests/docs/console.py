"""The console blocks of the pages: their commands are run, and their output is compared.

A comment on the line before a block says how:

    <!-- run -->                 in a folder with docs/ of the clone; the output is as shown
    <!-- run: numbers vary -->   the same, but numbers and the widths of columns may differ
    <!-- run on cluster -->      on a Slurm cluster of two nodes without GPUs (make test-cluster); numbers may differ
    <!-- not run: REASON -->

and before a block that is a file, so that commands of the page can use it:

    <!-- file: NAME -->

In shown output, `…` on a line of its own stands for any number of lines, and in a line for any text. Output that is not
shown is not compared. A command must end with exit code 0, unless the next one is `echo $?`. /shared stands for a folder
of the test.
"""

from __future__ import annotations

import difflib
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.processes import call

BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<marker>[^\n]*?) -->\n *)?```(?P<language>\w+)\n(?P<text>.*?)^ *```$", re.M | re.S
)
COMMAND_LANGUAGES = ("console", "sh", "bash")
_MARKER = re.compile(r"run|run: numbers vary|run on cluster|not run: \S.*|file: \S+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``marker``: the text of the comment before it, "" without one."""

    page: Path
    language: str
    marker: str
    text: str

    @property
    def numbers_vary(self) -> bool:
        return self.marker in ("run: numbers vary", "run on cluster")

    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with its shown output lines. Prompts end with "$ " or, of root, with "# "."""
        commands: list[tuple[str, list[str]]] = []
        lines = iter(self.text.splitlines())
        for line in lines:
            if prompt := re.match(r"(?:\w+\d)?[$#] ", line):
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


def write_file(block: Block, folder: Path) -> None:
    (folder / block.marker.removeprefix("file: ")).write_text(block.text, encoding="utf-8")


def run_here(page_blocks: Iterable[Block], folder: Path) -> None:
    """Run the blocks marked as run in ``folder``; a plain seatrial command runs in this process, which saves its start."""
    code = 0
    for block in page_blocks:
        if block.marker.startswith("file: "):
            write_file(block, folder)
        if block.marker not in ("run", "run: numbers vary"):
            continue
        commands = block.commands()
        for number, (command, shown) in enumerate(commands):
            if command == "echo $?":
                output = str(code)
            elif command.startswith("seatrial ") and not set("|>&;$*") & set(command):
                code, out, err = call(*shlex.split(command)[1:], cwd=folder, env={"COLUMNS": "100"})
                output = err + out
            else:
                done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
                code, output = done.returncode, done.stdout + done.stderr
            check(block, command, shown, output)
            next_is_code = number + 1 < len(commands) and commands[number + 1][0] == "echo $?"
            assert code == 0 or next_is_code or command == "echo $?", f"{block.page.name}: {command}: {code}\n{output}"


def check(block: Block, command: str, shown: list[str], output: str) -> None:
    """Raise AssertionError with the difference if the shown output is not the real one."""
    real = [line.rstrip() for line in output.strip("\n").splitlines()]
    if shown and not _matches([_comparable(line, block) for line in shown], [_comparable(line, block) for line in real]):
        difference = "\n".join(difflib.unified_diff(shown, real, "shown", "real", lineterm="", n=1))
        raise AssertionError(f"{block.page.name}: {command}: the output is not as shown\n{difference}")


def _comparable(line: str, block: Block) -> str:
    line = line.rstrip()
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,:]*", "#", line)) if block.numbers_vary else line


def _matches(shown: list[str], real: list[str]) -> bool:
    position = 0
    for group, first, last in _groups(shown):
        if first and last:
            return _equal(group, real)
        starts = range(position, len(real) - len(group) + 1)
        starts = starts[:1] if first else starts[-1:] if last else starts
        start = next((start for start in starts if _equal(group, real[start : start + len(group)])), None)
        if start is None:
            return False
        position = start + len(group)
    return True


def _groups(shown: list[str]) -> Iterator[tuple[list[str], bool, bool]]:
    """The runs of lines between lines `…`: each with whether it begins, and whether it ends, the output."""
    ends = [-1, *(number for number, line in enumerate(shown) if line.strip() == "…"), len(shown)]
    for before, after in zip(ends, ends[1:], strict=False):
        if group := shown[before + 1 : after]:
            yield group, before == -1, after == len(shown)


def _equal(shown: list[str], real: list[str]) -> bool:
    return len(shown) == len(real) and all(
        re.fullmatch(".*".join(map(re.escape, line.split("…"))), other) for line, other in zip(shown, real, strict=True)
    )
