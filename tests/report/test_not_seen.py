"""The slowdowns that a record does not see are those at which the judge starts to reject it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from tools.records import record_path

from seatrial.model import Basis, BasisKind, Metric, Outcome, Trial, Verdict
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import html_page, markdown, terminal
from seatrial.report.not_seen import not_seen, unseen_slowdowns
from tests.report import samples


def judged(name: str) -> Trial:
    return rejudge(load_trial(record_path(name)).model_copy(update={"telemetry": None}))


@pytest.fixture(scope="module")
def one_gpu() -> Trial:
    return judged("2026-11-29-1xh200/acceptance")


def slower(trial: Trial, shares: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], set[Outcome]]:
    """The outcomes of these metrics, of which all values are slower by their share."""
    measurements = []
    for measurement in trial.measurements:
        values = [(each, shares.get((measurement.check, each.name), 0.0)) for each in measurement.metrics]
        metrics = tuple(slower_metric(each, share) if share else each for each, share in values)
        measurements.append(measurement.model_copy(update={"metrics": metrics}))
    outcomes: dict[tuple[str, str], set[Outcome]] = {name: set() for name in shares}
    for verdict in rejudge(trial.model_copy(update={"measurements": tuple(measurements)})).verdicts:
        outcomes.get((verdict.check, verdict.metric), set()).add(verdict.outcome)
    return outcomes


def slower_metric(metric: Metric, share: float) -> Metric:
    value = metric.value * (1 - share if "/s" in metric.unit else 1 / (1 - share))
    return replace(metric, value=value, samples=(value,) * len(metric.samples))  # without noise


def test_each_share_is_the_slowdown_from_which_the_judge_rejects(one_gpu: Trial) -> None:
    shares = {(check, name): share for check, of in unseen_slowdowns(one_gpu).items() for name, share in of.items()}
    assert {"train.ddp", "train.checkpoint", "transfer.host"} <= {check for check, _ in shares}
    for factor, is_rejected in ((1.01, False), (0.98, True)):
        outcomes = slower(one_gpu, {name: 1 - factor * (1 - share) for name, share in shares.items()})
        assert {name: Outcome.FAIL in each for name, each in outcomes.items()} == dict.fromkeys(shares, is_rejected)


def test_peers_and_rules_that_only_warn_are_no_limits() -> None:
    peers = Basis(BasisKind.PEERS, expected=100, fail_below=0.9)
    verdict = Verdict("device.gemm", "n0/gpu0", Outcome.PASS, "tflops.bf16", value=100, unit="TFLOP/s", basis=peers)
    reference = Basis(BasisKind.SKU, expected=100, fail_below=0.8)
    for others, share in (((), 1.0), ((reference,), 0.2)):
        trial = samples.accepted().model_copy(update={"verdicts": (replace(verdict, other_limits=others),)})
        assert unseen_slowdowns(trial) == {"device.gemm": {"tflops.bf16": pytest.approx(share)}}
    seen = replace(reference, fail_below=0.9)
    assert unseen_slowdowns(trial.model_copy(update={"verdicts": (replace(verdict, basis=seen),)})) == {}


def test_all_pages_have_the_line(one_gpu: Trial) -> None:
    line = not_seen(one_gpu)
    assert "% in transfer.host" in line
    assert "differences between GPUs" in line
    assert "differences between GPUs" not in not_seen(judged("2026-11-28-2xh200-second/quick"))
    console = Console(width=2000, record=True, file=StringIO())
    terminal.summary(one_gpu, console)
    assert console.export_text().count(line) == 1
    assert html_page.render(one_gpu).count(line) == 1
    assert markdown.render(one_gpu).count("Not seen: ") == 1
