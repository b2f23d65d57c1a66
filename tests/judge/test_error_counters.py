"""Verdicts and insights on error counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.judge import judge
from seatrial.judge.error_counters import insights, verdicts
from seatrial.judge.insights import trial_insights
from seatrial.model import CLUSTER, ERROR_COUNTERS, Measurement, Outcome, Reason, Verdict
from seatrial.pipeline.run_directory import load_trial

RECORD = record_path("2026-11-22-2xh200/transfer-host-1")
CHECK = catalog()["transfer.peers"]
HEALTHY: dict[str, Any] = {"counters_read": 13}


def measured(fact: Any = None, gpu: int = 3, seconds: float = 5.0, **more: Any) -> Measurement:
    facts = {} if fact is None else {ERROR_COUNTERS: fact}
    values: dict[str, Any] = {"subject": f"vm/gpu{gpu}", "rank": gpu, "facts": facts, "seconds": seconds, **more}
    return Measurement(check=CHECK.name, **values)


def verdicts_on(*ranks: Measurement) -> list[Verdict]:
    return list(verdicts(CHECK, ranks))


def outcomes(*ranks: Measurement) -> list[tuple[Outcome, str, str]]:
    return [(verdict.outcome, verdict.subject, verdict.metric) for verdict in verdicts_on(*ranks)]


def test_healthy_gpus_and_cpus_have_no_verdict() -> None:
    assert verdicts_on(measured(HEALTHY, 0), measured(HEALTHY, 1)) == []
    assert verdicts_on(measured(subject="vm/rank0"), measured(subject="vm/rank1")) == []


@pytest.mark.parametrize(
    ("counter", "outcome"),
    [
        ("ecc_uncorrected", Outcome.FAIL),
        ("remap_failed", Outcome.FAIL),
        ("nvlinks_down", Outcome.FAIL),
        ("nvlink_recoveries", Outcome.FAIL),
        ("rows_remapped", Outcome.WARN),
        ("nvlink_replays", Outcome.WARN),
    ],
)
def test_increase_is_a_verdict_on_the_gpu(counter: str, outcome: Outcome) -> None:
    fact = {**HEALTHY, "increased": {"gpu3": {counter: [4, 6]}}}
    (verdict,) = verdicts_on(measured(HEALTHY, 0), measured(fact))
    assert (verdict.outcome, verdict.subject, verdict.metric) == (outcome, "vm/gpu3", f"new_errors.{counter}")
    assert verdict.reasons == (Reason.ERROR_COUNTERS,)
    assert verdict.detail.startswith(f"gpu3 {counter} 4 → 6 during this check, expected ")
    assert verdict.fix
    assert verdict.basis_text


@pytest.mark.parametrize("counter", ["ecc_corrected", "nvlink_crc_data"])
def test_increase_of_an_informational_counter_is_an_insight_only(counter: str) -> None:
    ranks = [measured(HEALTHY, 0), measured({**HEALTHY, "increased": {"gpu3": {counter: [0, 60]}}})]
    assert verdicts_on(*ranks) == []
    (insight,) = insights(ranks)
    assert f"increased: {counter} on vm/gpu3 (recorded only: " in insight.text


def test_ports_with_increases_of_one_counter_have_one_verdict_on_the_node() -> None:
    increased = {"mlx5_0/1": {"link_downed": [3, 4]}, "mlx5_7/1": {"link_downed": [0, 1], "symbol_error": [1, 5]}}
    on_ports = verdicts_on(measured({**HEALTHY, "increased": increased}, 0))
    assert [(verdict.outcome, verdict.subject, verdict.metric) for verdict in on_ports] == [
        (Outcome.FAIL, "vm", "new_errors.link_downed"),
        (Outcome.WARN, "vm", "new_errors.symbol_error"),
    ]
    assert on_ports[0].detail.startswith("mlx5_0/1 link_downed 3 → 4, mlx5_7/1 link_downed 0 → 1 during")


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        (255, 255, Outcome.WARN),  # at its maximum
        (254, 255, Outcome.FAIL),
        (9, 0, None),  # reset
        (9, 1, Outcome.FAIL),
    ],
)
def test_counter_at_its_maximum_or_reset(before: int, after: int, outcome: Outcome | None) -> None:
    fact = {**HEALTHY, "increased": {"mlx5_0/1": {"link_downed": [before, after]}}}
    assert outcomes(measured(fact)) == ([(outcome, "vm", "new_errors.link_downed")] if outcome else [])


@pytest.mark.parametrize(("replays", "seconds", "warns"), [(8, 1, False), (9, 1, True), (16, 120, False)])
def test_pcie_replays_are_evaluated_per_minute(replays: int, seconds: float, warns: bool) -> None:
    fact = {**HEALTHY, "increased": {"gpu3": {"pcie_replays": [0, replays]}}}
    assert bool(outcomes(measured(fact, seconds=seconds))) == warns


def test_hardware_xid_fails_and_application_xid_is_an_insight() -> None:
    ranks = [measured({**HEALTHY, "xids": [45, 43, 79, 79, 63]})]
    assert outcomes(*ranks) == [
        (Outcome.FAIL, "vm/gpu3", "new_errors.xid"),
        (Outcome.WARN, "vm/gpu3", "new_errors.xid"),
    ]
    assert "Xid 43 on vm/gpu3" in next(insights(ranks)).text


def test_gpu_without_counters_is_an_error() -> None:
    (verdict,) = verdicts_on(measured(HEALTHY, 0), measured())
    assert (verdict.outcome, verdict.subject) == (Outcome.ERROR, "vm/gpu3")
    assert verdict.reasons == (Reason.ERROR_COUNTERS,)
    assert outcomes(measured(gpu=0), measured()) == [(Outcome.ERROR, f"vm/gpu{gpu}", "") for gpu in (0, 3)]


@pytest.mark.parametrize(
    "fact",
    [
        {"counters_read": 0},
        {"counters_read": 12, "unreadable": {"gpu3 ecc_uncorrected": "Unknown Error"}},
        {
            "counters_read": 0,
            "unreadable": {"gpu3": "NVML: Driver Not Loaded"},
            "not_supported": {"no RDMA port": ["ports"]},
        },
        {},
        "malformed",
        {"counters_read": "q"},
        {"counters_read": True},
        {"counters_read": [12], "not_supported": {}},
        {"counters_read": 1, "increased": {"gpu3": {"unknown_counter": [0, 1]}}},
        {"counters_read": 1, "increased": {"gpu3": {"ecc_uncorrected": "many"}}},
    ],
)
def test_unreadable_or_malformed_counters_are_an_error(fact: Any) -> None:
    results = outcomes(measured(HEALTHY, 0), measured(fact))
    assert [result[:2] for result in results] == [(Outcome.ERROR, "vm/gpu3")]
    list(insights([measured(fact)]))


@pytest.mark.parametrize(
    ("fact", "detail"),
    [
        (
            {
                "counters_read": 12,
                "permission_denied": {"Insufficient Permissions": ["gpu3 xid"]},
                "not_supported": {"no RDMA port": ["ports"]},
            },
            "xid: Insufficient Permissions",
        ),
        (
            {"counters_read": 0, "not_supported": {"Not Supported": ["gpu3 xid", "gpu3 pcie_replays"]}},
            "xid, pcie_replays: Not Supported",
        ),
    ],
)
def test_unavailable_counters_are_skipped_once_per_reason(fact: Any, detail: str) -> None:
    (verdict,) = verdicts_on(*(measured(fact, gpu) for gpu in range(4)))
    assert (verdict.outcome, verdict.subject, verdict.basis) == (Outcome.SKIP, CLUSTER, None)
    assert verdict.reasons == (Reason.ERROR_COUNTERS,)
    assert verdict.detail.endswith(f": {detail}")


def test_failed_check_reports_increases_only() -> None:
    """train.failure expects one ERROR of its failing job and no other verdict."""
    failed = measured(
        {"counters_read": 12, "unreadable": {"gpu3 xid": "?"}, "xids": [43]}, error="RuntimeError: on purpose"
    )
    assert verdicts_on(measured(gpu=0), measured(HEALTHY, 1), failed) == []
    lost = measured({**HEALTHY, "xids": [79]}, error="GPU is lost")
    assert outcomes(lost) == [(Outcome.FAIL, "vm/gpu3", "new_errors.xid")]


def test_skipped_check_needs_no_counters() -> None:
    assert list(verdicts(CHECK, [measured(skipped="no peers")])) == []


def test_no_increase_is_an_insight() -> None:
    ranks = [
        measured({"counters_read": 93}, 0),
        measured(HEALTHY, 1),
        measured({"counters_read": 9, "not_supported": {"Not Supported": ["gpu2 xid"]}}, 2),
    ]
    (insight,) = insights(ranks)
    for text in ("9 to 93", "3 GPUs", "none increased", "xid (Not Supported)"):
        assert text in insight.text


def test_first_measurement_and_retry_of_a_trial_are_both_evaluated() -> None:
    trial = load_trial(RECORD)
    config = Config.model_validate(trial.config)

    def with_fact(measurements: Sequence[Measurement], **fact: Any) -> list[Measurement]:
        return [
            measurement.model_copy(update={"facts": {**measurement.facts, ERROR_COUNTERS: fact}})
            for measurement in measurements
        ]

    bad = with_fact(trial.measurements, counters_read=12, xids=[79])
    bad_retries = [measurement.model_copy(update={"retry": True}) for measurement in bad]
    good = with_fact(trial.measurements, counters_read=12)
    for first, retries in ((bad, []), (good, bad_retries)):
        results = judge(config, trial.jobs, first, catalog(), trial.excluded_checks, None, retries)
        on_xid = {verdict.outcome for verdict in results if verdict.metric == "new_errors.xid"}
        assert on_xid == {Outcome.FAIL}
        titles = [insight.title for insight in trial_insights(config, first, catalog())]
        assert "Error counters" in titles
    results = judge(config, trial.jobs, good, catalog(), trial.excluded_checks)
    assert {verdict.outcome for verdict in results} == {verdict.outcome for verdict in trial.verdicts}
