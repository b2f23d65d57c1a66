"""Output of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.cli.output import print_json, print_result
from seatrial.model import Trial
from tests.report import samples


def test_json_output_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(samples.rejected(), as_json=True, report=Path("report.html"))
    out, err = capsys.readouterr()
    assert Trial.model_validate_json(out) == samples.rejected()
    assert err == ""
    print_json({"gpus": []})
    assert json.loads(capsys.readouterr().out) == {"gpus": []}


@pytest.mark.parametrize("report", [Path("runs/report.html"), None])
def test_the_path_of_the_report_is_printed_if_given(report: Path | None, capsys: pytest.CaptureFixture[str]) -> None:
    print_result(samples.rejected(), as_json=False, report=report)
    out = capsys.readouterr().out
    assert "REJECTED" in out
    assert ("Report: runs/report.html" in out) is (report is not None)
