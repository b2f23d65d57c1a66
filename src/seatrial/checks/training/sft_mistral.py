"""Full fine-tune of Mistral-7B on one GPU, ten steps: the baseline before anything is distributed."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Context
from seatrial.checks.training import _results
from seatrial.checks.training._workload import WorkloadOptions
from seatrial.model import Fact, Observation, Phase, Scope

NAME = "sft-mistral-7b-1gpu"


def measure(context: Context, options: WorkloadOptions) -> Iterator[Observation]:
    # 14.5 GB that nobody would read
    trained = yield from _results.train_on_one_gpu(
        context, options, NAME, "export=false", after_training="nothing is exported"
    )
    if context.rank == 0:
        yield Fact(name="precision", value=trained.value("precision"))


CHECK = Check(
    name="train.sft_mistral",
    title="A 7B fine-tuned on one GPU, all of its weights (Mistral-7B)",
    phase=Phase.SINGLE_GPU,
    scope=Scope.CLUSTER,
    metrics=_results.metric_units(),
    rules=_results.RULES,
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(options, NAME),
    limit_s=700.0,
    options=WorkloadOptions,
    performance_metrics=_results.PERFORMANCE,
)
