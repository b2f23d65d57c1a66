"""What a record must contain for each part of a drill to hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.records import record_path

from seatrial.drill.base import Drill, DrillResult, Expected
from seatrial.drill.evaluate import evaluate, finding_cause
from seatrial.model import Decision, DecisionValue, Finding, Outcome, Trial, Verdict
from seatrial.model.trial import Action
from seatrial.pipeline.run_directory import load_trial

RECORD = load_trial(record_path("2026-11-23-2xh200/p2p-disabled"))
EXPECTED = Expected(
    check="collectives.*",
    metric="busbw.*",
    outcomes=(Outcome.FAIL,),
    cause="data_corrupted",
    place=r"rank 1\b",
    command="dmesg",
    action="call-vendor",
)
VERDICT = Verdict("collectives.all_reduce", "cluster", Outcome.FAIL, "busbw.1MiB", evidence="rank 0")
PARTS = ("seen", "located", "explained", "command_right", "action_right")


def finding(
    cause: str = "data_corrupted", place: str = "rank 1", command: str = "dmesg -T", action: Action = "call-vendor"
) -> Finding:
    return Finding(
        title="wrong data",
        subject=place,
        confidence="high",
        evidence="",
        first_command=command,
        cause=cause,
        action=action,
    )


def result(findings: tuple[Finding, ...], verdict: Verdict = VERDICT, expected: Expected = EXPECTED) -> DrillResult:
    trial = RECORD.model_copy(update={"findings": findings, "verdicts": (verdict,)})
    return evaluated(trial, "", expected)


def evaluated(trial: Trial | None, errors: str, expected: Expected = EXPECTED, failure: str = "") -> DrillResult:
    drill = Drill(name="drill", title="", machine="cpu", checks={}, expected=expected)
    return evaluate(drill, trial, errors, 1.5, failure)


def test_all_parts_hold() -> None:
    assert result((finding(),)).holds
    assert result((finding(),)).problems == ()


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("located", {"place": "rank 0"}),
        ("explained", {"cause": "busy_cpus"}),
        ("command_right", {"command": "ps"}),
        ("action_right", {"action": "none"}),
    ],
)
def test_each_part_is_evaluated_alone(part: str, changes: dict[str, Any]) -> None:
    parts = result((finding(**changes),))
    assert {name: getattr(parts, name) for name in PARTS} == {name: name != part for name in PARTS}
    assert len(parts.problems) == 1


def test_only_the_first_finding_explains() -> None:
    parts = result((finding(cause="busy_cpus"), finding()))
    assert (parts.explained, parts.finding) == (False, "busy_cpus: wrong data")


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict("collectives.all_reduce", "cluster", Outcome.WARN, "busbw.1MiB"),
        Verdict("collectives.all_reduce", "cluster", Outcome.FAIL, "wrong_elements"),
        Verdict("train.ddp", "cluster", Outcome.FAIL, "busbw.1MiB"),
    ],
)
def test_another_verdict_is_not_seen(verdict: Verdict) -> None:
    assert not result((finding(),), verdict).seen


def test_without_a_finding_nothing_is_explained() -> None:
    parts = result((), Verdict("collectives.all_reduce", "rank 1", Outcome.FAIL, "busbw.1MiB"))
    assert [getattr(parts, name) for name in PARTS] == [True, True, False, False, False]


def test_cause_of_a_log_line_is_the_id_of_its_signature() -> None:
    memory = Finding(
        title="GPU out of memory", subject="", confidence="low", evidence="", signature="cuda.out_of_memory"
    )
    assert finding_cause(memory) == "cuda.out_of_memory"
    assert finding_cause(Finding(title="no signature", subject="", confidence="low", evidence="")) == ""


REFUSAL = Expected(
    refusal="cannot write to --out",
    cause="Read-only file system",
    place="/data/run",
    command=r"name another folder",
)
MESSAGE = "seatrial: cannot write to --out /data/run: Read-only file system; name another folder"


def test_a_refusal_is_read_from_standard_error() -> None:
    refused = evaluated(None, MESSAGE, REFUSAL)
    assert (refused.holds, refused.action_right) == (True, None)
    assert not evaluated(None, "Traceback", REFUSAL).seen
    assert not evaluated(None, MESSAGE.replace("/data", "/other"), REFUSAL).located


def test_a_refusal_is_read_from_the_reason_why_a_trial_ended() -> None:
    stopped = RECORD.model_copy(update={"stop_reason": MESSAGE})
    assert evaluated(stopped, "", REFUSAL).holds
    accepted = stopped.model_copy(update={"decision": Decision(value=DecisionValue.ACCEPTED, reason="")})
    assert not evaluated(accepted, "", REFUSAL).seen


def test_nothing_holds_without_a_record_or_an_injection() -> None:
    for parts in (evaluated(None, MESSAGE), evaluated(RECORD, MESSAGE, failure="not injected")):
        assert not any(getattr(parts, name) for name in PARTS)
        assert parts.problems
    assert evaluated(None, "", failure="x" * 1000).problems == ("x" * 300,)


def test_seconds_and_decision_are_recorded(tmp_path: Path) -> None:
    assert (result(()).seconds, result(()).decision) == (1.5, RECORD.decision.value.value)
