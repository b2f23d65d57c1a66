"""Full fine-tune of Mistral-7B on one GPU, ten steps: the baseline before anything is distributed."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Place
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._workload import WorkloadOptions
from seatrial.model import Fact, Observation, Phase, Scope

NAME = "sft-mistral-7b-1gpu"
OVERRIDES = ("export=false",)  # 14.5 GB that nobody would read


def measure(place: Place, options: WorkloadOptions) -> Iterator[Observation]:
    """Yields on rank 0, whose GPU trains; the others wait. Raises SeatrialError where nothing could be trained."""
    facts = _results.here(place, alone=True)
    config = options.config or _workload.config_for(place, NAME)
    (trained,) = _workload.train(place, "sft", config, (*OVERRIDES, *options.overrides), [[0]], options.limit_s)
    if place.rank:
        return
    yield from facts
    yield Fact(name="precision", value=trained.value("precision"))
    yield Fact(name="how", value=f"{config} on one GPU, once, {trained.max_steps} steps; nothing is exported")
    yield from _results.judged({"sft": trained})
    yield from _results.each(place, trained)


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
