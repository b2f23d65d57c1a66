"""The conclusion of train.lora: the machine, one framework, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.checks.training import lora
from seatrial.diagnose.causes import Run
from seatrial.diagnose.implementations import SLOW_IMPLEMENTATION, SLOW_MACHINE, implementation_findings
from seatrial.hardware.links import Links
from seatrial.hardware.references import References, skus
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Basis, BasisKind, Finding, Measurement, Metric, Outcome, Verdict

FACTS = {"device": "cuda", "trained": "yes", "settings": "shipped", "gpu": "NVIDIA H200", "nodes": 1}
WORK: dict[str, JsonValue] = {"precision": "bf16", "flops_per_token": 3e10}
NATIVE, HF = 17183.0, 10118.0  # the reference values of two H200


def verdicts(native: float, hf: float, ranks: int = 2) -> list[Verdict]:
    """The verdicts on the speeds of both stacks, by the check's rules and the SKU file."""
    speeds = {"native": native, "hf": hf}
    metrics = tuple(
        Metric(name=f"tokens_per_second_per_gpu.{stack}", value=speed, unit="tokens/s/GPU", subject=CLUSTER)
        for stack, speed in speeds.items()
    )
    measurement = Measurement(
        check="train.lora",
        subject="n0/gpu0",
        metrics=metrics,
        facts=FACTS | {"world_size": ranks, "run.native": WORK, "run.hf": WORK},
    )
    judged = judge_check(lora.CHECK, [measurement], {}, "t", References(None, skus(), links=Links()))
    return [verdict for verdict in judged if verdict.metric.startswith("tokens_per_second")]


def findings(judged: list[Verdict], causes: tuple[Finding, ...] = ()) -> list[Finding]:
    return list(implementation_findings(Run(judged, [], catalog()), causes))


@pytest.mark.parametrize(
    ("native", "hf", "cause", "stack"),
    [
        (NATIVE, HF, None, None),
        (0.6 * NATIVE, 0.6 * HF, SLOW_MACHINE, None),
        (0.6 * NATIVE, HF, SLOW_IMPLEMENTATION, "native"),
        (NATIVE, 0.6 * HF, SLOW_IMPLEMENTATION, "hf"),
    ],
)
def test_conclusion_from_both_stacks(native: float, hf: float, cause: str | None, stack: str | None) -> None:
    conclusions = findings(verdicts(native, hf))
    assert [finding.cause for finding in conclusions] == ([cause] if cause else [])
    explained = {key.metric for finding in conclusions for key in finding.explains}
    slow = {"native", "hf"} if cause == SLOW_MACHINE else {stack} - {None}
    assert explained == {f"tokens_per_second_per_gpu.{name}" for name in slow}


def test_without_a_reference_of_the_other_stack_there_is_no_conclusion() -> None:
    slow_native = verdicts(0.6 * NATIVE, HF, ranks=4)  # the SKU file has no value of hf on four GPUs
    assert {verdict.metric.rpartition(".")[2]: verdict.outcome for verdict in slow_native} == {
        "native": Outcome.FAIL,
        "hf": Outcome.UNJUDGED,
    }
    assert findings(slow_native) == []


def test_lax_threshold_of_a_trial_does_not_show_that_the_machine_is_fast() -> None:
    slow_native, fast_hf = verdicts(0.6 * NATIVE, HF)
    assert fast_hf.basis
    assert fast_hf.basis.kind is BasisKind.SKU
    threshold = replace(fast_hf, basis=Basis(kind=BasisKind.TRIAL, expected=500, op=">"))
    assert [len(findings([slow_native, hf])) for hf in (fast_hf, threshold)] == [1, 0]


def test_machine_is_not_named_again_where_a_cause_explains_it() -> None:
    slow = verdicts(0.6 * NATIVE, 0.6 * HF)
    (machine,) = findings(slow)
    thermal = machine.model_copy(
        update={
            "cause": "thermal_slowdown",
            "confidence": "high",
            "explains": tuple(each.key for each in slow),
        }
    )
    assert findings(slow, (thermal,)) == []
