"""Prints as YAML the decision on every shipped record, and its verdicts by outcome, by the rules of this version.

tests/test_shipped_decisions.py compares this with docs/results/decisions.yaml.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import yaml

from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs" / "results"
LIST = RECORDS / "decisions.yaml"


def decisions() -> dict[str, dict[str, str | dict[str, int]]]:
    """Record (path below docs/results) → its decision and the number of verdicts of each outcome."""
    listed: dict[str, dict[str, str | dict[str, int]]] = {}
    for path in sorted(RECORDS.rglob("*trial.json")):
        trial = rejudge(load_trial(path))
        outcomes = Counter(verdict.outcome.value for verdict in trial.verdicts)
        listed[str(path.relative_to(RECORDS))] = {
            "decision": trial.decision.value.value,
            "outcomes": dict(sorted(outcomes.items())),
        }
    return listed


if __name__ == "__main__":
    print(yaml.safe_dump(decisions(), sort_keys=False), end="")
