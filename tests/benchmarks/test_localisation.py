"""benchmarks/localisation.py with few draws: exact in all of them; and the committed result meets its requirement."""

from __future__ import annotations

import json

import pytest

from benchmarks import localisation
from tests.paths import ROOT

RESULT = ROOT / "docs" / "results" / "localisation.json"


@pytest.mark.parametrize("case", localisation.CASES)
def test_faults_are_named_exactly(case: str) -> None:
    row = localisation.simulate(case, 16, 10)
    assert (row["exact"], row["draws"]) == (10, 10)


def test_committed_result_has_all_cases_and_meets_the_requirement() -> None:
    result = json.loads(RESULT.read_text())
    assert (result["noise"], result["fault"], result["rounds"]) == (0.01, 0.05, 3)
    rows = {(row["case"], row["nodes"]): row for row in result["rows"]}
    assert rows.keys() == {(case, size) for case in localisation.CASES for size in localisation.SIZES}
    assert min(row["exact"] / row["draws"] for row in rows.values()) >= localisation.REQUIRED_SHARE
    assert {row["draws"] for row in rows.values()} == {1000}
