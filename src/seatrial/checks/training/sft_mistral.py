"""Full fine-tune of Mistral-7B on one GPU, ten steps: the baseline for distributed training."""

from __future__ import annotations

from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answers, fact
from seatrial.checks.training import _results
from seatrial.checks.training._workload import WorkloadOptions
from seatrial.model import Phase, Scope

NAME = "sft-mistral-7b-1gpu"


def measure(context: Context, options: WorkloadOptions) -> Answers:
    """Train on the GPU of rank 0; yield the metrics of the training on rank 0."""
    # the export would write 14.5 GB
    result = yield from _results.train_on_one_gpu(context, options, NAME, "export=false", after_training="no export")
    if context.rank == 0:
        yield fact("precision", result.value("precision"))


CHECK = Check(
    name="train.sft_mistral",
    title="Full fine-tune of Mistral-7B on one GPU",
    phase=Phase.SINGLE_GPU,
    scope=Scope.CLUSTER,
    declared=(*_results.DECLARED, *_results.speed(""), *_results.ONE_TRAINING),
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(options, NAME),
    limit_s=700.0,
    options=WorkloadOptions,
)
