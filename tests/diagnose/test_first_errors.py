"""seatrial.diagnose.first_errors: lines that look like errors in a log without a known failure."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from seatrial.diagnose.first_errors import MAX_LINES, first_errors
from tests.processes import call


@pytest.mark.parametrize(
    ("line", "is_error"),
    [
        ("[ERROR] flux capacitor", True),
        ("level=fatal msg=x", True),
        ("FluxError: empty", True),
        ("step 3 failed", True),
        ("exited with code 3", True),
        ("exit status: 0", False),
        ("0 failed, 12 passed", False),
        ("failed=0", False),
        ("errors per second: 0", False),
    ],
)
def test_lines_that_look_like_errors(line: str, is_error: bool) -> None:
    lines = first_errors(io.BytesIO(f"fine\nfine\r{line}\n".encode()), "x")
    assert lines == ([("x:2", line)] if is_error else [])


def test_lines_are_limited() -> None:
    lines = first_errors(io.BytesIO(b"error " + b"y" * 999 + b"\n" + b"error\n" * 99), "x")
    assert len(lines) == MAX_LINES
    assert len(lines[0][1]) == 300


def test_explain_prints_them_without_a_known_failure(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("fine\nflux [bold]error\a\n")
    code, out, err = call("explain", tmp_path / "a.log")
    assert (code, err) == (4, "")
    assert f"Not known; the first errors are:\n  {tmp_path}/a.log:2: flux [bold]error\ufffd\n" in out
    code, out, err = call("explain", "--json", tmp_path)
    assert (code, out.strip(), "a.log:2: flux" in err) == (4, "[]", True)
