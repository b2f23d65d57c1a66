"""Exit codes: each caller's, and the same table in docs/hooks.md."""

from __future__ import annotations

import re

import pytest

from seatrial.operate.hook_exit_codes import EXIT_CODES, Result, changes_node_state, exit_code
from tests.paths import ROOT


def test_the_page_has_the_same_table() -> None:
    page = (ROOT / "docs/hooks.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (\d) \| (\d) \| (\d) \| (\d) \|$", page, re.MULTILINE)
    expected = {caller: tuple(codes[result] for result in Result) for caller, codes in EXIT_CODES.items()}
    assert {caller: tuple(map(int, codes)) for caller, *codes in rows} == expected


@pytest.mark.parametrize("caller", EXIT_CODES)
def test_only_a_failure_is_exit_code_1_for_callers_that_drain_nodes(caller: str) -> None:
    codes = EXIT_CODES[caller]  # type: ignore[index]
    assert codes[Result.PASSED] == 0
    assert codes[Result.FAILED] == 1
    if changes_node_state(caller, "prolog"):  # type: ignore[arg-type]
        assert 1 not in (codes[Result.LIMITED], codes[Result.INCOMPLETE])


def test_fail_closed_changes_only_unmeasured_checks() -> None:
    assert exit_code("slurm", Result.INCOMPLETE, True) == 1
    assert exit_code("slurm", Result.LIMITED, True) == 0
    assert exit_code("npd", Result.PASSED, True) == 0


def test_slurm_only_logs_the_exit_code_of_its_health_check() -> None:
    assert changes_node_state("slurm", "prolog")
    assert not changes_node_state("slurm", "health")
    assert changes_node_state("soperator", "health")
