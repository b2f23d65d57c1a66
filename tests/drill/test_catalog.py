"""Every drill declares what must be seen, located and explained, with names that exist."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from importlib import import_module

import pytest

from seatrial import checks
from seatrial.diagnose.cause_data import causes
from seatrial.diagnose.hangs import CAUSE as HANG
from seatrial.diagnose.job_failures import RANK_FAILED, missing_node_causes
from seatrial.diagnose.signatures import signatures
from seatrial.diagnose.slow_nodes import SLOW_CAUSES
from seatrial.drill import catalog
from seatrial.drill.base import Drill

OTHER_CAUSES = {"environment_variable", "node_differs", RANK_FAILED, HANG, *SLOW_CAUSES}
SEARCH = "collectives.localization"  # runs by itself on three nodes or more


@pytest.mark.parametrize("drill", catalog().values(), ids=lambda drill: drill.name)
def test_drill_names_existing_checks_and_causes(drill: Drill) -> None:
    all_checks = checks.catalog()
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", drill.name)
    for name, options in drill.checks.items():
        all_checks[name].options.model_validate(options)
    if drill.fault:
        assert callable(import_module(f"seatrial.drill.faults.{drill.fault}").change)
    for pattern in (drill.expected.place, drill.expected.command, drill.expected.refusal):
        re.compile(pattern)
    assert drill.expected.place
    assert drill.expected.command
    if drill.expected.refusal:
        return
    measured = [*drill.checks, *([SEARCH] if drill.needs.nodes > 2 else [])]
    seen = [name for name in measured if fnmatchcase(name, drill.expected_check)]
    assert seen, "the check that must see the fault is not in the trial"
    ids = OTHER_CAUSES | {cause.id for cause in causes()} | {cause.id for cause in missing_node_causes()}
    ids |= {signature.id for signature in signatures()}
    assert drill.expected.cause in ids
    assert drill.expected.action


def test_machine_matches_needs() -> None:
    for drill in catalog().values():
        assert (drill.machine == "gpu") == (drill.needs.gpus > 0)
        assert (drill.machine == "cluster") == (drill.needs.nodes > 1)
        assert drill.launcher == ("slurm" if drill.machine == "cluster" else "local")
