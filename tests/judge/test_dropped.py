"""Of a run that was accepted, one figure of one GPU is taken out: nobody may accept it then."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from seatrial.checks.gpu.inventory import CHECK
from seatrial.model import DecisionValue, Metric, Outcome, Trial
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from tests.paths import RESULTS

RECORD = RESULTS / "2026-11-22-4xh200/acceptance.trial.json"
GPUS = tuple(f"vm/gpu{index}" for index in range(4))


@pytest.fixture(scope="module")
def accepted() -> Trial:
    """The inventory of its four GPUs alone."""
    trial = load_trial(RECORD)
    own = tuple(one for one in trial.measurements if one.check == CHECK.name)
    config = {**trial.config, "checks": {CHECK.name: trial.config["checks"][CHECK.name]}}
    return trial.model_copy(update={"config": config, "measurements": own, "retries": (), "excluded_checks": {}})


def without(trial: Trial, gone: Callable[[Metric], bool], **facts: None) -> Trial:
    (own,) = trial.measurements
    kept = tuple(metric for metric in own.metrics if not gone(metric))
    told = {name: value for name, value in own.facts.items() if name not in facts}
    return rejudge(
        trial.model_copy(update={"measurements": (own.model_copy(update={"metrics": kept, "facts": told}),)})
    )


def errors(trial: Trial) -> list[str]:
    return [one.message for one in trial.verdicts if one.outcome is Outcome.ERROR]


def test_the_record_itself_is_accepted_and_has_every_figure_of_every_gpu(accepted: Trial) -> None:
    assert without(accepted, lambda _: False).decision.value is DecisionValue.ACCEPTED
    (own,) = accepted.measurements
    assert {(one.name, one.subject) for one in own.metrics} >= {
        (name, gpu) for name in CHECK.required_per for gpu in GPUS
    }
    assert len(CHECK.required_per) == 18


@pytest.mark.parametrize("metric", CHECK.required_per)
@pytest.mark.parametrize("gone", [*((gpu,) for gpu in GPUS), GPUS[1:]], ids=" ".join)
def test_no_figure_of_a_gpu_can_be_lost_without_a_word(accepted: Trial, metric: str, gone: Collection[str]) -> None:
    trial = without(accepted, lambda one: one.name == metric and one.subject in gone)
    assert trial.decision.value is DecisionValue.INCOMPLETE
    assert errors(trial) == [f"{metric} was not measured everywhere; not of {len(gone)} of 4: {', '.join(gone)}"]


@pytest.mark.parametrize("metric", CHECK.metrics)
def test_no_figure_of_the_node_can_be_lost_without_a_word(accepted: Trial, metric: str) -> None:
    trial = without(accepted, lambda one: one.name == metric)
    assert trial.decision.value is DecisionValue.INCOMPLETE
    assert errors(trial)[0].startswith(f"{metric} was not measured, ")


def test_nor_the_list_of_the_gpus_that_were_used(accepted: Trial) -> None:
    trial = without(accepted, lambda _: False, gpus_used=None)
    assert trial.decision.value is DecisionValue.INCOMPLETE
    assert errors(trial)[0].endswith("not of the GPUs that were used, since the fact gpus_used lists none")
