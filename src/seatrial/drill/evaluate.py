"""Compares the record of a drill's trial with the expectation of the drill. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase

from seatrial.drill.base import BAD_OUTCOMES, Drill, DrillResult, Expected
from seatrial.model import DecisionValue, Finding, Trial, Verdict
from seatrial.util.text import cut_at_sentence

MAX_CHARS = 300  # characters of a problem, or of a quoted message


def evaluate(drill: Drill, trial: Trial | None, error_output: str, seconds: float, failure: str = "") -> DrillResult:
    """Compare what the trial reported with what the drill expects.

    ``trial``: its record, None if it left none. ``seconds``: see DrillResult. ``failure``: why the fault could not be
    injected, why the trial did not end, or why its record is unreadable; else empty.
    """
    result = DrillResult(name=drill.name, title=drill.title, machine=drill.machine, seconds=seconds)
    if failure:
        return result.model_copy(update={"problems": (failure[:MAX_CHARS],)})
    if drill.expected.refusal:
        return _evaluate_refusal(result, drill.expected, trial, error_output)
    if trial is None:
        lines = error_output.strip().splitlines() or ["empty"]
        return result.model_copy(update={"problems": (f"no record; last line of stderr: {lines[-1][:MAX_CHARS]}",)})
    return _evaluate_record(result, replace(drill.expected, check=drill.expected_check), trial)


def finding_cause(finding: Finding) -> str:
    """The id of the cause of a finding, or of the signature that it comes from; empty for other findings."""
    return finding.cause or finding.signature


def _evaluate_record(result: DrillResult, expected: Expected, trial: Trial) -> DrillResult:
    fault_verdicts = [verdict for verdict in trial.verdicts if _shows_fault(verdict, expected)]
    finding = trial.findings[0] if trial.findings else None
    cause = finding_cause(finding) if finding else ""
    command = finding.first_command if finding else ""
    action = finding.action if finding else None
    place_texts = [f"{finding.subject}: {finding.title}: {finding.evidence}"] if finding else []
    place_texts += [f"{verdict.subject}: {verdict.detail}: {verdict.evidence}" for verdict in fault_verdicts]
    parts = {
        "seen": bool(fault_verdicts),
        "located": any(re.search(expected.place, text) for text in place_texts),
        "explained": cause != "" and cause == expected.cause,
        "command_right": command != "" and re.search(expected.command, command) is not None,
        "action_right": None if expected.action is None else action == expected.action,
    }
    differences = {
        "seen": f"{expected.check} {expected.metric} {'|'.join(expected.outcomes)}; verdicts: {_bad_verdicts(trial)}",
        "located": f"{expected.place}; read: {'; '.join(place_texts) or 'nothing'}",
        "explained": f"cause {expected.cause}; first finding: {cause or 'none'} "
        f"({finding.title if finding else 'none'})",
        "command_right": f"{expected.command}; first command: {command or 'none'}",
        "action_right": f"{expected.action}; action: {action}",
    }
    return result.model_copy(
        update={
            **parts,
            "decision": trial.decision.value.value,
            "finding": f"{cause}: {finding.title}" if finding else "",
            "place": finding.subject
            if finding
            else ", ".join(dict.fromkeys(verdict.subject for verdict in fault_verdicts)),
            "first_command": command,
            "problems": tuple(
                f"not {name}: expected {differences[name]}"[:MAX_CHARS]
                for name, holds in parts.items()
                if holds is False
            ),
        }
    )


def _shows_fault(verdict: Verdict, expected: Expected) -> bool:
    return (
        verdict.outcome in expected.outcomes
        and fnmatchcase(verdict.check, expected.check)
        and fnmatchcase(verdict.metric, expected.metric)
    )


def _bad_verdicts(trial: Trial) -> str:
    bad = [verdict for verdict in trial.verdicts if verdict.outcome in BAD_OUTCOMES]
    return "; ".join(f"{verdict.outcome} {verdict.check} {verdict.metric}".strip() for verdict in bad) or "none is bad"


def _evaluate_refusal(result: DrillResult, expected: Expected, trial: Trial | None, error_output: str) -> DrillResult:
    """Compare the message of a trial that must not start or must end early with the drill's expectation."""
    message = f"{trial.stop_reason}\n{error_output}" if trial else error_output
    is_accepted = trial is not None and trial.decision.value is DecisionValue.ACCEPTED
    seen = re.search(expected.refusal, message) is not None and not is_accepted
    command = trial.findings[0].first_command if trial and trial.findings else message
    parts = {
        "seen": seen,
        "located": seen and re.search(expected.place, message) is not None,
        "explained": seen and expected.cause in message,
        "command_right": seen and re.search(expected.command, command) is not None,
    }
    refusal_line = next((line for line in message.splitlines() if re.search(expected.refusal, line)), "")
    last_line = (error_output.strip().splitlines() or ["empty"])[-1]
    quoted = (refusal_line or last_line)[:MAX_CHARS]
    return result.model_copy(
        update={
            **parts,
            "action_right": None,
            "decision": trial.decision.value.value if trial else "refused",
            "finding": cut_at_sentence(refusal_line.strip(), MAX_CHARS),
            "problems": tuple(f"not {name}: message: {quoted}" for name, holds in parts.items() if not holds),
        }
    )
