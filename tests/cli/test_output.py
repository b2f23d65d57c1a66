"""Output of results."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from seatrial.cli import output
from seatrial.cli.output import print_json, print_lines, print_result
from seatrial.model import Trial
from seatrial.report.console import Stream
from tests.report import samples

LONG = "  " + "word " * 30 + "end"
COMMAND = "  next: `" + "command " * 30 + "end`"


def test_json_output_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(samples.rejected(), as_json=True, run_dir=Path("runs/x"))
    out, err = capsys.readouterr()
    assert Trial.model_validate_json(out) == samples.rejected()
    assert err == ""
    print_json({"gpus": []})
    assert json.loads(capsys.readouterr().out) == {"gpus": []}


def test_the_summary_is_short_unless_it_is_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(samples.rejected(), as_json=False)
    short = capsys.readouterr().out
    print_result(samples.rejected(), as_json=False, verbose=True)
    full = capsys.readouterr().out
    assert "REJECTED" in short
    assert "REJECTED" in full
    assert ("evidence" in short, "evidence" in full) == (False, True)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_break_between_words_only_at_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Stream(file=io.StringIO(), force_terminal=is_terminal, width=80)
    monkeypatch.setattr(output, "stdout", lambda: console)
    print_lines(["short", LONG, COMMAND])
    first, *wrapped, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("short", COMMAND)
    assert [word for line in wrapped for word in line.split()] == LONG.split()
    if is_terminal:
        assert max(map(len, wrapped)) <= 80
        assert all(line.startswith("    ") for line in wrapped[1:])
    else:
        assert wrapped == [LONG]
