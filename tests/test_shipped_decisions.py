"""What today's rules make of the records that are shipped in docs/results."""

from __future__ import annotations

import yaml
from tools.shipped_decisions import LIST, decisions


def test_every_shipped_record_keeps_its_decision_and_its_outcomes() -> None:
    """A change of the list needs a reason: ``python tools/shipped_decisions.py > docs/results/decisions.yaml``."""
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    assert listed
    assert decisions() == listed
