"""The share of real incident logs that ``seatrial explain`` explains, for the sources that no pattern was written from.

    python benchmarks/explain_held_out.py [--write]

The logs are in tests/fixtures/incidents; index.yaml has the source and the expected root cause of each. A log is
explained if the first finding is an expected one; a log of a healthy system passes if there is no finding. ``--write``
updates docs/results/explain-held-out.json: ``first`` of a round was measured before any pattern was written from one of
its held-out logs, and stays; ``now`` has the signatures of today, which the held-out misses improved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from seatrial.diagnose import ordered_matches
from seatrial.diagnose.log_search import search

_ROOT = Path(__file__).parent.parent
INCIDENTS = _ROOT / "tests" / "fixtures" / "incidents"
RESULT = _ROOT / "docs" / "results" / "explain-held-out.json"


@dataclass(frozen=True)
class Log:
    """A log, its source, the signatures that name its root cause (none: a healthy system) and its findings.

    ``round``: each was collected after the one before was measured; from the second on all of it is held out.
    """

    file: str
    source: str
    expected: list[str]
    round: int
    held_out: bool
    findings: list[str]

    @property
    def passed(self) -> bool:
        """Whether the first finding is expected, or there is none and none is expected."""
        return self.findings[:1] == [] if not self.expected else bool(set(self.findings[:1]) & set(self.expected))


def is_held_out(source: str) -> bool:
    """Whether logs of round 1 from this GitHub URL are held out: a third of the repositories, by a hash of the name."""
    repository = "/".join(source.split("/")[3:5]).lower()
    return hashlib.sha256(repository.encode()).digest()[0] % 3 == 0


def read_logs() -> list[Log]:
    """All logs of the index, searched with the signatures of today."""
    rows = yaml.safe_load((INCIDENTS / "index.yaml").read_text(encoding="utf-8"))
    return [Log(**row, findings=_findings(INCIDENTS / row["file"])) for row in rows]


def counts(logs: Iterable[Log]) -> dict[str, dict[str, int]]:
    """Logs and passed logs by round and kind: incidents and healthy systems, held out or used for patterns."""
    table: dict[str, dict[str, int]] = {}
    for log in logs:
        kind = "incidents" if log.expected else "healthy"
        use = "held out" if log.held_out else "used for patterns"
        row = table.setdefault(f"round {log.round}, {kind}, {use}", {"logs": 0, "passed": 0})
        row["logs"] += 1
        row["passed"] += log.passed
    return dict(sorted(table.items()))


def _as_json(logs: list[Log]) -> dict[str, object]:
    return {"counts": counts(logs), "failed": [asdict(log) for log in logs if not log.passed]}


def _findings(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [match.signature.id for match in ordered_matches(search(file, path.name))]


def main() -> None:
    """Print the table and the logs that are not explained."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"update {RESULT.relative_to(_ROOT)}")
    parser.add_argument("--used-only", action="store_true", help="only logs that patterns may be written from")
    arguments = parser.parse_args()
    logs = [log for log in read_logs() if not (arguments.used_only and log.held_out)]
    table = counts(logs)
    print(f"{'logs':<44}{'number':>8}{'passed':>8}{'share':>8}")
    for kind, row in table.items():
        print(f"{kind:<44}{row['logs']:>8}{row['passed']:>8}{row['passed'] / row['logs']:>8.1%}")
    failed = [log for log in logs if not log.passed]
    for log in failed:
        expected, findings = " or ".join(log.expected) or "nothing", ", ".join(log.findings) or "nothing"
        print(f"{log.file}: expected {expected}, findings: {findings}")
    if arguments.write:
        result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"first": {}}
        result["now"] = _as_json(logs)
        for number in {log.round for log in logs}:
            result["first"].setdefault(f"round {number}", _as_json([log for log in logs if log.round == number]))
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
