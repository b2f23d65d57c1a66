"""Full fine-tune of Mistral-7B on one GPU, ten steps: the baseline before anything is distributed."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Place
from seatrial.checks.training import _results
from seatrial.checks.training._workload import WorkloadOptions
from seatrial.model import Fact, Observation, Phase, Scope

NAME = "sft-mistral-7b-1gpu"


def measure(place: Place, options: WorkloadOptions) -> Iterator[Observation]:
    # 14.5 GB that nobody would read
    trained = yield from _results.on_one_gpu(place, options, NAME, "export=false", then="nothing is exported")
    if place.rank == 0:
        yield Fact(name="precision", value=trained.value("precision"))


CHECK = Check(
    name="train.sft_mistral",
    title="A 7B fine-tuned on one GPU, all of its weights (Mistral-7B)",
    phase=Phase.SINGLE_GPU,
    scope=Scope.CLUSTER,
    metrics=_results.units(),
    rules=_results.RULES,
    measure=measure,
    foretold=lambda options: _results.foretold(options, NAME),
    limit_s=700.0,
    options=WorkloadOptions,
    performance=_results.PERFORMANCE,
)
