"""A transcript that differs from the real output is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.console import Block, blocks, check, run_here

REAL = "seatrial quick · 12.5 s\n\nPASS  one   3.1 GB/s\nPASS  two  12.0 GB/s\n\nACCEPTED\n"


@pytest.mark.parametrize(
    ("shown", "numbers_vary", "same"),
    [
        (REAL, False, True),
        ("…\nACCEPTED\n", False, True),
        ("seatrial quick · 12.5 s\n…\nPASS  two  12.0 GB/s\n…\n", False, True),
        ("seatrial quick · … s\n…\n", False, True),
        ("seatrial quick · 99 s\n\nPASS one 44.0 GB/s\n…\n", True, True),
        ("seatrial quick · 99 s\n…\n", False, False),
        ("…\nREJECTED\n", False, False),
        ("…\nPASS  two  12.0 GB/s\n", False, False),  # not the last line
        ("PASS  one   3.1 GB/s\n…\n", False, False),  # not the first line
        ("…\nPASS  two  12.0 GB/s\n…\nPASS  one   3.1 GB/s\n…\n", False, False),  # another order
        (REAL + "more\n", False, False),
        ("seatrial quick · 12.5 s\n", False, False),
    ],
)
def test_shown_output_is_compared(shown: str, numbers_vary: bool, same: bool) -> None:
    block = Block(Path("page.md"), "console", "run on cluster" if numbers_vary else "run", "")
    if same:
        check(block, "command", shown.splitlines(), REAL)
    else:
        with pytest.raises(AssertionError, match="not as shown"):
            check(block, "command", shown.splitlines(), REAL)


def test_commands_of_a_page_are_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: a.txt -->\n```text\nhello\n```\n\n1. Step:\n\n   <!-- run -->\n   ```console\n"
        "   $ cat \\\n       a.txt   # a comment\n   hello\n"
        "   $ seatrial explain a.txt\n   …\n   $ echo $?\n   4\n   ```\n"
    )
    run_here(blocks(page), tmp_path)
    (tmp_path / "a.txt").unlink()
    failing = tmp_path / "failing.md"
    failing.write_text("<!-- run -->\n```console\n$ cat a.txt\n```\n")
    with pytest.raises(AssertionError, match=r"failing\.md: cat a\.txt: exit code 1"):
        run_here(blocks(failing), tmp_path)


def test_an_unknown_marker_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- not run -->\n```console\n$ true\n```\n")
    with pytest.raises(ValueError, match="unknown marker"):
        blocks(tmp_path / "page.md")
