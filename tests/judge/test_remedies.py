"""The fix of UNJUDGED verdicts, and the GPU models without SKU data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seatrial.config.schema import CheckSettings, Config
from seatrial.judge import judge
from seatrial.judge.decision import decide
from seatrial.judge.remedies import unknown_gpus, with_remedies
from seatrial.model import DecisionValue, Measurement, Metric, Outcome, Reason, Verdict
from tests.judge.test_rules import by_reference, check

SPEED = by_reference("key", meaning="slow", fix="look at the cable")
UNJUDGED = Verdict("c", "n0/gpu0", Outcome.UNJUDGED, "speed", unit="GB/s", fix=SPEED.fix)


def measured(gpu: str) -> Measurement:
    metric = Metric(name="speed", value=400, unit="GB/s", subject="cluster")
    return Measurement(check="c", subject="cluster", metrics=(metric,), facts={"gpu": gpu, "world_size": 4, "nodes": 1})


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        (Reason.NO_REFERENCE, "--set 'checks.c.expect.speed=>= VALUE GB/s'"),
        (Reason.NO_REFERENCE, "seatrial baseline learn RUN1 RUN2 RUN3 --out site.yaml"),
        (Reason.IMPLAUSIBLY_HIGH, "seatrial baseline learn RUN1 RUN2 RUN3 --out site.yaml"),
        (Reason.INCONCLUSIVE, "seatrial run TRIAL --only c"),
        (Reason.ALGORITHM_UNKNOWN, "seatrial run TRIAL` without --only and --skip"),
        (Reason.NO_THIRD_MEASUREMENT, "seatrial run --resume RUN"),
        (Reason.UNIT_MISMATCH, "GB/s"),
    ],
)
def test_fix_is_by_reason(reason: Reason, command: str) -> None:
    (verdict,) = with_remedies([replace(UNJUDGED, reasons=(Reason.THRESHOLD_VIOLATED, reason))])
    assert command in verdict.fix
    assert SPEED.fix not in verdict.fix


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.WARN, Outcome.ERROR])
def test_other_outcomes_keep_the_fix_of_the_rule(outcome: Outcome) -> None:
    verdict = replace(UNJUDGED, outcome=outcome, reasons=(Reason.NO_REFERENCE,))
    assert list(with_remedies([verdict])) == [verdict]


@pytest.mark.parametrize("reason", [Reason.FACT_INVALID, Reason.METRIC_MISSING, Reason.METRIC_PARTLY_MISSING])
def test_an_error_of_a_missing_value_names_the_check_to_run_again(reason: Reason) -> None:
    (error,) = with_remedies([replace(UNJUDGED, outcome=Outcome.ERROR, reasons=(reason,), fix="")])
    assert "seatrial run TRIAL --only c" in error.fix


def test_judged_record_of_an_unknown_gpu() -> None:
    config, measurement = Config(name="t", checks={"c": CheckSettings()}), measured("NVIDIA X999")
    verdicts = judge(config, [], [measurement], {"c": check(SPEED)}, {})
    (verdict,) = [verdict for verdict in verdicts if verdict.outcome is Outcome.UNJUDGED]
    assert "seatrial baseline learn" in verdict.fix
    assert unknown_gpus([measurement]) == ("NVIDIA X999",)
    decision = decide({"c": True}, [verdict], {}, "", unknown_gpus=("NVIDIA X999",))
    assert (decision.value, decision.unknown_gpus) == (DecisionValue.INCOMPLETE, ("NVIDIA X999",))
    assert decision.reason.startswith("unknown GPU model NVIDIA X999")


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "", "NVIDIA X999"])
def test_known_and_unnamed_models_are_not_unknown(gpu: str) -> None:
    assert unknown_gpus([measured(gpu)]) == (("NVIDIA X999",) if gpu == "NVIDIA X999" else ())
