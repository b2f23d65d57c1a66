"""The lines of ``seatrial judge RUN --why-not``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from seatrial.model import Basis, BasisKind, DecisionValue, Outcome, Reason, ReasonCode, Trial, Verdict
from seatrial.report import why_not
from seatrial.report.parts import parts, problems
from tests.report import samples

FAIL = Verdict(
    "a.b",
    "n0/gpu3",
    Outcome.FAIL,
    "speed",
    (Reason.THRESHOLD_VIOLATED,),
    value=50.0,
    unit="GB/s",
    basis=Basis(BasisKind.SKU, "X", 100.0, "GB/s", source="page", fail_below=0.9),
    ratio=0.5,
    fix="look at the cable",
)
UNJUDGED = replace(FAIL, outcome=Outcome.UNJUDGED, reasons=(Reason.NO_REFERENCE,), basis=None, ratio=None)


def trial(*verdicts: Verdict, **more: object) -> Trial:
    accepted = samples.accepted()
    decision = accepted.decision.model_copy(update={"value": DecisionValue.INCOMPLETE, "reason": "because"})
    return accepted.model_copy(update={"decision": decision, "verdicts": verdicts, **more})


def test_accepted_trial() -> None:
    assert why_not.lines(samples.accepted()) == ["accepted"]


def test_line_has_check_subjects_value_limit_and_next_step() -> None:
    (line,) = why_not.lines(trial(FAIL, replace(FAIL, subject="n0/gpu4")))
    for text in ("FAIL a.b", "n0/gpu3, n0/gpu4", "50 GB/s", "100 GB/s", "limit ≥ 90 GB/s", FAIL.fix):
        assert text in line


def test_verdicts_without_a_reference_are_one_cause_in_all_checks() -> None:
    verdicts = [replace(UNJUDGED, check=f"check{number}") for number in range(8)]
    (line,) = why_not.lines(trial(*verdicts))
    assert line.startswith("UNJUDGED check0, check1, check2 and 5 more on n0/gpu3: ")


def test_at_most_five_lines_worst_first() -> None:
    errors = [
        replace(FAIL, subject=f"n{number}", outcome=Outcome.ERROR, detail=f"error {number}", metric=f"m{number}")
        for number in range(9)
    ]
    lines = why_not.lines(trial(*errors, FAIL))
    assert len(lines) == why_not.MAX_REASONS
    assert (lines[0].partition(" ")[0], lines[-1].partition(":")[0]) == ("FAIL", "6 more reasons")


def test_warnings_and_checks_that_are_not_required_are_no_cause() -> None:
    optional = trial(UNJUDGED, replace(FAIL, outcome=Outcome.WARN), config={"checks": {"a.b": {"required": False}}})
    assert why_not.lines(optional) == ["because"]


def test_causes_besides_verdicts() -> None:
    incomplete = trial(stop_reason="interrupted", gpu_error="1 of 8 GPUs", excluded_checks={"a.b": "--only"})
    decision = incomplete.decision.model_copy(update={"reason_code": ReasonCode.NO_GPU})
    lines = why_not.lines(incomplete.model_copy(update={"decision": decision}))
    for line, text in zip(lines, ("because", "interrupted", "1 of 8 GPUs", "--only: a.b"), strict=True):
        assert text in line


def test_paragraph_has_evidence_and_next_step_on_lines_of_their_own() -> None:
    decision, title, text, next_step = why_not.paragraphs(trial(FAIL))
    assert decision == "INCOMPLETE, because:"
    assert title == "FAIL a.b on n0/gpu3"
    assert text.startswith("  speed is 50 GB/s")
    assert next_step == "  next: look at the cable"


def test_text_is_one_line_and_a_long_one_is_cut() -> None:
    command = "no heartbeat for 60 s. Run first, on its node: dmesg -T | tail; journalctl -u slurmd -n 50; " + "x" * 300
    error = replace(UNJUDGED, outcome=Outcome.ERROR, reasons=(Reason.MEASUREMENT_FAILED,), value=None, detail=command)
    _decision, _title, text, _next = why_not.paragraphs(trial(error))
    assert command in text
    long = replace(error, detail="word " * 1000)
    _decision, _title, text, _next = why_not.paragraphs(trial(long))
    assert len(text) < 1100
    assert text.endswith("word …; `seatrial judge RUN -v` shows the whole text")
    assert len(why_not.lines(trial(long))) == 1


def test_reason_code_is_text_with_a_next_step_and_is_said_once() -> None:
    no_gpu = trial()
    update = {"reason_code": ReasonCode.NO_GPU, "reason": "no GPU was used: pass --gpus-per-node 0; 1 node untested"}
    lines = why_not.paragraphs(no_gpu.model_copy(update={"decision": no_gpu.decision.model_copy(update=update)}))
    assert lines == ["INCOMPLETE, because:", "no GPU was used: pass --gpus-per-node 0; 1 node untested"]


def test_command_of_a_warning_is_never_the_first_step() -> None:
    warning = replace(FAIL, outcome=Outcome.WARN)
    warned = trial(warning, excluded_checks={"a.b": "--only"})
    assert why_not.next_step(warned, problems(parts(warned))) == "run without --only"
    failed = trial(warning, replace(FAIL, subject="n0/gpu4"))
    assert why_not.next_step(failed, problems(parts(failed))) == FAIL.fix


def test_next_step_names_the_run_directory_if_it_is_known() -> None:
    error = replace(UNJUDGED, outcome=Outcome.ERROR, reasons=(Reason.MEASUREMENT_FAILED,), detail="no answer", fix="")
    *_, placeholder = why_not.paragraphs(trial(error))
    assert placeholder == "  next: read the logs in RUN/jobs, then `seatrial run --resume RUN`"
    *_, named = why_not.paragraphs(trial(error), Path("runs/my run"))
    assert named == "  next: read the logs in 'runs/my run'/jobs, then `seatrial run --resume 'runs/my run'`"
    assert "--resume 'runs/my run'" in why_not.lines(trial(error), Path("runs/my run"))[0]
