"""The share of real incident logs that ``seatrial explain`` explains, for the sources that no pattern was written from.

    python benchmarks/explain_held_out.py [--unseen] [--write]

The logs are in tests/fixtures/incidents; index.yaml has the source and the expected root cause of each. A log is
explained if the first finding is an expected one; a log of a healthy system passes if there is no finding. ``--write``
updates docs/results/explain-held-out.json: ``first`` of a round was measured before any pattern was written from one of
its held-out logs, and stays; ``now`` has the signatures of today, which the held-out misses improved.

``--unseen`` measures the code of today on logs that the signatures have not seen: for each round of BEFORE it takes the
signatures as they were before its misses became signatures, alone, and with the families and roles of today. A family
finding has no label: JUDGED has whether it leads to the cause that the thread names, and whether its command is right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from seatrial.diagnose import explain
from seatrial.diagnose.log_search import search

_ROOT = Path(__file__).parent.parent
INCIDENTS = _ROOT / "tests" / "fixtures" / "incidents"
RESULT = _ROOT / "docs" / "results" / "explain-held-out.json"
JUDGED = _ROOT / "docs" / "results" / "explain-families-judged.yaml"
BEFORE = {6: "f30d618d", 7: "11f560cb", 8: "e9dd00b5", 9: "584c450c"}  # round → commit before its misses were used
_SIGNATURES = Path("src/seatrial/data/signatures")
_FAMILIES = "reasons.yaml"


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
        return [each.signature for each in explain(search(file, path.name)) if each.signature]


def unseen(number: int) -> dict[str, Any]:
    """Counts of a round with the signatures from before it: alone, with the families of today, and judged by hand."""
    index = INCIDENTS.relative_to(_ROOT) / "index.yaml"
    old_rows = yaml.safe_load(_git("show", f"{BEFORE[number]}:{index}"))
    old_labels = {row["file"]: row["expected"] for row in old_rows}  # some signatures have been renamed or split
    judged = {row["file"]: row for row in yaml.safe_load(JUDGED.read_text(encoding="utf-8"))}
    counts: dict[str, Any] = {}
    for name, has_families in (("signatures alone", False), ("with families", True)):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(_ROOT / "src" / "seatrial", Path(folder) / "seatrial")
            _replace_signatures(Path(folder) / "seatrial" / "data" / "signatures", BEFORE[number], has_families)
            logs = _logs_of(folder, number)
        incidents = [log for log in logs if log.expected]
        strict = {log.file for log in incidents if set(log.findings[:1]) & {*log.expected, *old_labels[log.file]}}
        counts |= {"incidents": len(incidents), "healthy": len(logs) - len(incidents)}
        counts[name] = {"strict": len(strict), "false_alarms": sum(not log.expected and not log.passed for log in logs)}
        if has_families:
            others = [log for log in incidents if log.file not in strict and log.file in judged]
            current = [judged[log.file] for log in others if judged[log.file]["finding"] in log.findings[:1]]
            counts[name]["cause_right"] = len(strict) + sum(row["cause"] for row in current)
            counts[name]["cause_and_command_right"] = len(strict) + sum(
                row["cause"] and row["command"] for row in current
            )
    return counts


def _replace_signatures(folder: Path, commit: str, has_families: bool) -> None:
    """Put the signatures of ``commit`` into ``folder``; ``has_families``: with the families and steps of today."""
    today = [row for path in folder.glob("*.yaml") for row in yaml.safe_load(path.read_text(encoding="utf-8"))]
    families = (folder / _FAMILIES).read_text(encoding="utf-8")
    steps = {row["id"] for row in today if row.get("role") == "step"} | {"containers.enroot_hook"}
    for path in folder.glob("*.yaml"):
        path.unlink()
    for name in _git("ls-tree", "--name-only", commit, f"{_SIGNATURES}/").split():
        rows = yaml.safe_load(_git("show", f"{commit}:{name}"))
        for row in rows:
            if has_families and row["id"] in steps and row.get("role", "root") == "root":
                row["role"] = "step"
        (folder / Path(name).name).write_text(yaml.safe_dump(rows), encoding="utf-8")
    if has_families:
        (folder / _FAMILIES).write_text(families, encoding="utf-8")


def _logs_of(source: str, number: int) -> list[Log]:
    """The logs of a round, searched by the package in the folder ``source``."""
    command = [sys.executable, __file__, "--round", str(number)]
    environment = os.environ | {"PYTHONPATH": source}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return [Log(**row) for row in json.loads(output)]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print the table and the logs that are not explained."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"update {RESULT.relative_to(_ROOT)}")
    parser.add_argument("--used-only", action="store_true", help="only logs that patterns may be written from")
    parser.add_argument("--unseen", action="store_true", help="signatures from before each round, and today's families")
    parser.add_argument("--round", type=int, help="print the logs and findings of one round as JSON")
    arguments = parser.parse_args()
    if arguments.round:
        print(json.dumps([asdict(log) for log in read_logs() if log.round == arguments.round]))
        return
    if arguments.unseen:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
        result["unseen"] = {f"round {number}": unseen(number) for number in BEFORE}
        print(json.dumps(result["unseen"], indent=2))
        if arguments.write:
            RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return
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
