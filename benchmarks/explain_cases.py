"""Right, silent or wrong: the first answer of ``seatrial explain`` and ``judge`` to logs of public reports.

    python benchmarks/explain_cases.py [--write] [GROUP...]

The groups are the folders of tests/fixtures/explain-cases; cases.yaml of each has the answers that were expected before
the first run. Only title, cause, place and first command of the first finding are an answer, without the line and the
message that it quotes. Right: the answer matches must_match and none of wrong_if; for a log of a healthy system, no
finding. Wrong: any other finding above confidence low that is no general family, and any finding in a healthy log.
Silent: exit code 4, and one of the lines that are printed then matches must_match. Generic: anything else. Of
``judge``, the lines with outcomes and reasons are the answer. ``--write`` updates docs/results/explain-cases.json;
``first`` of a group stays.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from seatrial.cli.app import app
from seatrial.diagnose.signatures import all_signatures
from seatrial.model import Finding, Frozen

_ROOT = Path(__file__).parent.parent
CASES = _ROOT / "tests" / "fixtures" / "explain-cases"
RESULT = _ROOT / "docs" / "results" / "explain-cases.json"
_EXIT_NOTHING_KNOWN = 4
_QUOTE = re.compile(r" ?Log line: .*", re.DOTALL)
_MESSAGE = re.compile(r': ".*"$', re.DOTALL)
_JUDGED = re.compile(r"^\s*(?:(?:Outcome: )?(?:PASS|WARN|FAIL|UNJUDGED|ERROR)\b|why: ).*", re.MULTILINE)
_ERROR_LINES = 5  # printed lines that count if nothing is known
Score = Literal["right", "silent", "generic", "wrong"]


class Case(Frozen):
    """A log and the expected answer; the fields are those of cases.yaml."""

    id: int
    file: str
    what: str
    source: str
    tool: Literal["explain", "judge"]
    args: str
    healthy: bool
    expected_cause: str
    first_words: str
    must_match: str
    wrong_if: tuple[str, ...]


class Answer(NamedTuple):
    """What a command says: ``text`` is empty without a finding; ``lines``: printed if nothing is known."""

    text: str
    is_general: bool
    lines: tuple[str, ...]


def cases(group: str) -> list[Case]:
    """The cases of a group."""
    rows = yaml.safe_load((CASES / group / "cases.yaml").read_text(encoding="utf-8"))
    return [Case.model_validate(row) for row in rows]


def answer(case: Case, group: str) -> Answer:
    """The answer of today's code."""
    log = str(CASES / group / case.file)
    if case.tool == "judge":
        _, output, _ = _call("judge", log, *shlex.split(case.args))
        return Answer("\n".join(_JUDGED.findall(output)), is_general=False, lines=())
    code, output, errors = _call("explain", "--json", log)
    findings = [Finding.model_validate(row) for row in json.loads(output)]
    lines = tuple(line for line in errors.splitlines() if line.startswith("  ")) if code == _EXIT_NOTHING_KNOWN else ()
    if not findings:
        return Answer("", is_general=False, lines=lines[:_ERROR_LINES])
    first = findings[0]
    roles = {signature.id: signature.role for signature in all_signatures()}
    is_general = first.confidence == "low" or roles.get(first.signature) in ("family", "general")
    parts = (_MESSAGE.sub("", first.title), _QUOTE.sub("", first.evidence), first.subject, first.first_command)
    return Answer("\n".join(parts), is_general, ())


def score(case: Case, given: Answer) -> Score:
    """The score of an answer."""
    if case.healthy and case.tool == "explain":
        return "wrong" if given.text else "right"
    if not given.text:
        return "silent" if any(_matches(case.must_match, line) for line in given.lines) else "generic"
    is_wrong = any(_matches(pattern, given.text) for pattern in case.wrong_if)
    if not is_wrong and _matches(case.must_match, given.text):
        return "right"
    return "generic" if given.is_general else "wrong"


def scores(group: str) -> dict[int, Score]:
    """The score of each case of a group."""
    return {case.id: score(case, answer(case, group)) for case in cases(group)}


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


def _call(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app(args=list(arguments), standalone_mode=False)
    return code or 0, out.getvalue(), err.getvalue()


def _counts(group: str, by_id: dict[int, Score]) -> dict[str, dict[str, int]]:
    kinds = {
        case.id: "judge" if case.tool == "judge" else "healthy" if case.healthy else "failing" for case in cases(group)
    }
    return {
        kind: dict(sorted(Counter(by_id[number] for number in kinds if kinds[number] == kind).items()))
        for kind in sorted(set(kinds.values()))
    }


def main() -> None:
    """Print the scores of the groups."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", help="folders of tests/fixtures/explain-cases; all by default")
    parser.add_argument("--write", action="store_true", help=f"update {RESULT.relative_to(_ROOT)}")
    arguments = parser.parse_args()
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"first": {}, "now": {}}
    for group in arguments.groups or sorted(path.parent.name for path in CASES.glob("*/cases.yaml")):
        by_id = scores(group)
        counts = _counts(group, by_id)
        for kind, row in counts.items():
            print(f"{group}, {kind}: " + ", ".join(f"{number} {name}" for name, number in row.items()))
        others = {number: name for number, name in by_id.items() if name != "right"}
        for case in cases(group):
            if case.id in others:
                print(f"  {case.id} {others[case.id]}: {case.what}")
        result_row: dict[str, object] = {
            "counts": counts,
            "not_right": {str(number): name for number, name in others.items()},
        }
        result["first"].setdefault(group, result_row)
        result["now"][group] = result_row
    if arguments.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
