"""The slowdowns that a record does not see are those at which the judge starts to reject it."""

from __future__ import annotations

import pytest
from tools.records import record_path

from seatrial.model import CLUSTER, Basis, BasisKind, Outcome, Trial, Verdict
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.report.not_seen import MAX_UNSEEN, not_seen, unseen_slowdowns
from tests.report.pages import page_text


def judged(name: str) -> Trial:
    return rejudge(load_trial(record_path(name)).model_copy(update={"telemetry": None}))


@pytest.fixture(scope="module", params=["2026-11-28-2xh200-second/quick", "2026-11-29-1xh200/acceptance"])
def record(request: pytest.FixtureRequest) -> Trial:
    return judged(request.param)


def slower(trial: Trial, check: str, metric: str, share: float) -> set[Outcome]:
    """The outcomes of a metric, of which all values are slower by this share."""
    measurements = []
    for measurement in trial.measurements:
        metrics = []
        for each in measurement.metrics:
            if (measurement.check, each.name) == (check, metric):
                factor = 1 - share if "/s" in each.unit else 1 / (1 - share)
                samples = tuple(factor * sample for sample in each.samples)
                each = each.model_copy(update={"value": factor * each.value, "samples": samples})  # noqa: PLW2901
            metrics.append(each)
        measurements.append(measurement.model_copy(update={"metrics": tuple(metrics)}))
    verdicts = rejudge(trial.model_copy(update={"measurements": tuple(measurements)})).verdicts
    return {verdict.outcome for verdict in verdicts if (verdict.check, verdict.metric) == (check, metric)}


def test_each_share_is_the_slowdown_from_which_the_judge_rejects(record: Trial) -> None:
    unseen = [(check, *each) for check, shares in unseen_slowdowns(record).items() for each in shares.items()]
    assert len(unseen) > 3
    for check, metric, share in unseen:
        passed = 1 - share
        assert Outcome.FAIL not in slower(record, check, metric, 1 - 1.01 * passed), (check, metric)
        only_warns = check == "filesystem.metadata"
        assert (Outcome.FAIL in slower(record, check, metric, 1 - 0.98 * passed)) is not only_warns, (check, metric)
