"""benchmarks/localisation.py with few draws: exact in all of them; and the committed result meets its requirement."""

from __future__ import annotations

import json
import runpy

import pytest

from tests.paths import BENCHMARKS, ROOT

SCRIPT = runpy.run_path(str(BENCHMARKS / "localisation.py"))
RESULT = ROOT / "docs" / "results" / "localisation.json"


@pytest.mark.parametrize("case", SCRIPT["CASES"])
def test_faults_are_named_exactly(case: str) -> None:
    row = SCRIPT["simulate"](case, 16, 10)
    assert (row["exact"], row["draws"]) == (10, 10)


def test_committed_result_has_all_cases_and_meets_the_requirement() -> None:
    result = json.loads(RESULT.read_text())
    assert (result["noise"], result["fault"], result["rounds"]) == (0.01, 0.05, 3)
    rows = {(row["case"], row["nodes"]): row for row in result["rows"]}
    assert rows.keys() == {(case, size) for case in SCRIPT["CASES"] for size in SCRIPT["SIZES"]}
    assert min(row["exact"] / row["draws"] for row in rows.values()) >= SCRIPT["REQUIRED_SHARE"]
    assert {row["draws"] for row in rows.values()} == {1000}
