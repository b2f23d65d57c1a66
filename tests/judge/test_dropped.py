"""An accepted run from which one metric of one GPU is removed must not be accepted."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from tools.records import record_path

from seatrial.checks.gpu.inventory import CHECK
from seatrial.model import DecisionValue, Metric, Outcome, Reason, Trial, Verdict
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial

RECORD = record_path("2026-11-22-4xh200/acceptance")
GPUS = tuple(f"vm/gpu{index}" for index in range(4))
PER_GPU = [each.name for each in CHECK.declared if each.per == "gpu"]


@pytest.fixture(scope="module")
def accepted() -> Trial:
    """An accepted trial with the GPU inventory as its only check."""
    trial = load_trial(RECORD)
    inventory = tuple(measurement for measurement in trial.measurements if measurement.check == CHECK.name)
    config = {**trial.config, "checks": {CHECK.name: trial.config["checks"][CHECK.name]}}
    jobs = tuple(job.model_copy(update={"checks": (CHECK.name,)}) for job in trial.jobs if CHECK.name in job.checks)
    update = {"config": config, "jobs": jobs, "measurements": inventory, "retries": (), "excluded_checks": {}}
    return trial.model_copy(update=update)


def without(trial: Trial, is_removed: Callable[[Metric], bool], **removed_facts: None) -> Trial:
    (measurement,) = trial.measurements
    metrics = tuple(metric for metric in measurement.metrics if not is_removed(metric))
    facts = {name: value for name, value in measurement.facts.items() if name not in removed_facts}
    changed = measurement.model_copy(update={"metrics": metrics, "facts": facts})
    return rejudge(trial.model_copy(update={"measurements": (changed,)}))


def errors(trial: Trial) -> list[Verdict]:
    return [verdict for verdict in trial.verdicts if verdict.outcome is Outcome.ERROR]


def test_complete_record_is_accepted(accepted: Trial) -> None:
    assert without(accepted, lambda _: False).decision.value is DecisionValue.ACCEPTED
    (measurement,) = accepted.measurements
    measured = {(metric.name, metric.subject) for metric in measurement.metrics}
    assert measured >= {(name, gpu) for name in PER_GPU for gpu in GPUS}
    assert len(PER_GPU) == 18


@pytest.mark.parametrize("metric", PER_GPU)
@pytest.mark.parametrize("removed", [*((gpu,) for gpu in GPUS), GPUS[1:]], ids=" ".join)
def test_removed_metric_of_a_gpu_is_an_error(accepted: Trial, metric: str, removed: Collection[str]) -> None:
    trial = without(accepted, lambda candidate: candidate.name == metric and candidate.subject in removed)
    assert trial.decision.value is DecisionValue.INCOMPLETE
    (error,) = errors(trial)
    assert (error.metric, error.reasons) == (metric, (Reason.METRIC_PARTLY_MISSING,))
    assert f"{len(removed)} of 4" in error.detail
    assert ", ".join(removed) in error.detail


@pytest.mark.parametrize("metric", CHECK.units)
def test_removed_metric_of_the_node_is_an_error(accepted: Trial, metric: str) -> None:
    trial = without(accepted, lambda candidate: candidate.name == metric)
    assert trial.decision.value is DecisionValue.INCOMPLETE
    assert (errors(trial)[0].metric, errors(trial)[0].reasons) == (metric, (Reason.METRIC_MISSING,))


def test_removed_list_of_used_gpus_is_an_error(accepted: Trial) -> None:
    trial = without(accepted, lambda _: False, gpus_used=None)
    assert trial.decision.value is DecisionValue.INCOMPLETE
    assert errors(trial)[0].reasons == (Reason.METRIC_PARTLY_MISSING,)
    assert "gpus_used" in errors(trial)[0].detail
