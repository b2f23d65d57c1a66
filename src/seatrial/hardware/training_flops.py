"""Floating-point operations per token of a training run, from the facts of its check or from the trial's options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from seatrial.model.rule import ALL_REDUCE, BOUND, GEMM

MFU, TOKENS_PER_GPU = "mfu", "tokens_per_second_per_gpu"
# Metrics whose bound follows from peak FLOP/s: NAME, or NAME.RUN if a check trains several times
BOUNDED_METRICS = (MFU, TOKENS_PER_GPU)
_METRIC = re.compile(rf"(?:(?P<mfu>{MFU})|{TOKENS_PER_GPU})(?P<run>(?:\.\w+)?)")
# Compute precision → key of the peak in a SKU's spec. For fp32 it is tf32: torch can run fp32 products in TF32.
_SPEC_KEYS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp32": "tf32"}
# Base of a limit → entries of the fact of a training from which the limit is computed
_ENTRIES = {
    GEMM: ("precision", "flops_per_token"),
    BOUND: ("precision", "flops_per_token"),
    ALL_REDUCE: ("parameters", "batch", "seq_len"),
}
_MAX_FLOPS_PER_TOKEN = 1e18  # more than any existing model needs


@dataclass(frozen=True)
class TrainingWork:
    """The work of a training. ``flops_per_token``: None if not recorded.

    ``spec_key``: key of the SKU's spec whose value is the peak FLOP/s of the training's precision.
    ``is_mfu``: the metric is MFU (model FLOPs utilization) in percent, otherwise tokens/s per GPU.
    """

    flops_per_token: float | None
    spec_key: str
    is_mfu: bool


def training_work(metric: str, facts: Mapping[str, JsonValue]) -> TrainingWork | None:
    """The work behind a training metric, from the fact ``run`` (of a named run: ``run.NAME``) or ``training``.

    None if ``metric`` is no training metric, or if the facts do not name the precision.
    """
    match = _METRIC.fullmatch(metric)
    training = next(filter(None, map(facts.get, training_facts(metric))), None)
    if not match or not isinstance(training, Mapping):
        return None
    spec_key = _SPEC_KEYS.get(str(training.get("precision")).partition(" ")[0])
    return TrainingWork(_flops(training.get("flops_per_token")), spec_key, bool(match["mfu"])) if spec_key else None


def training_facts(metric: str) -> tuple[str, ...]:
    """The names of the facts of which one describes the training of a metric; () if it is no training metric."""
    match = _METRIC.fullmatch(metric)
    return (f"run{match['run']}", "training") if match else ()


def missing_work(metric: str, bases: Sequence[str], facts: Mapping[str, JsonValue]) -> str:
    """What the facts lack of the work of a training that limits relative to ``bases`` need, as text; empty if nothing.

    It is empty for metrics of which no training is the work, and for a rule without limits.
    """
    if not bases or not (names := training_facts(metric)):
        return ""
    name = next(filter(facts.get, names), names[0])
    if not isinstance(training := facts.get(name), Mapping):
        return f"the fact {name}, the work of the training, is missing or no mapping"
    needed = dict.fromkeys(entry for base in bases for entry in _ENTRIES.get(base, ()))
    missing = [entry for entry in needed if not training.get(entry)]
    return f"the fact {name} has no {', '.join(missing)}" if missing else ""


def _flops(value: JsonValue) -> float | None:
    """Floating-point operations; None if the recorded value is no plausible number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 1 <= value < _MAX_FLOPS_PER_TOKEN else None
