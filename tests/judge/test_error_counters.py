from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from seatrial.analysis import trial_insights
from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.judge import judge
from seatrial.judge.error_counters import insights, verdicts
from seatrial.model import CLUSTER, ERROR_COUNTERS, Measurement, Outcome, Verdict
from seatrial.pipeline.run_directory import load_trial
from tests.paths import RESULTS

RECORD = RESULTS / "2026-11-22-2xh200/transfer-host-1.trial.json"
CHECK = catalog()["transfer.peers"]
HEALTHY: dict[str, Any] = {"read": 13}


def measured(fact: Any = None, gpu: int = 3, seconds: float = 5.0, **more: Any) -> Measurement:
    facts = {} if fact is None else {ERROR_COUNTERS: fact}
    values: dict[str, Any] = {"subject": f"vm/gpu{gpu}", "rank": gpu, "facts": facts, "seconds": seconds, **more}
    return Measurement(check=CHECK.name, **values)


def judged(*ranks: Measurement) -> list[Verdict]:
    return list(verdicts(CHECK, ranks))


def said(*ranks: Measurement) -> list[tuple[Outcome, str, str]]:
    return [(one.outcome, one.subject, one.metric) for one in judged(*ranks)]


def test_nothing_is_said_of_healthy_gpus_and_of_cpus() -> None:
    assert judged(measured(HEALTHY, 0), measured(HEALTHY, 1)) == []
    assert judged(measured(subject="vm/rank0"), measured(subject="vm/rank1")) == []


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
def test_growth_is_a_verdict_on_the_gpu(counter: str, outcome: Outcome) -> None:
    fact = {**HEALTHY, "grew": {"gpu3": {counter: [4, 6]}}}
    (one,) = judged(measured(HEALTHY, 0), measured(fact))
    assert (one.outcome, one.subject, one.metric) == (outcome, "vm/gpu3", f"new_errors.{counter}")
    assert f"gpu3 {counter} 4 → 6" in one.message
    assert one.fix
    assert one.basis_text


@pytest.mark.parametrize("counter", ["ecc_corrected", "nvlink_crc_data"])
def test_what_was_repaired_is_told_in_an_insight_only(counter: str) -> None:
    ranks = [measured(HEALTHY, 0), measured({**HEALTHY, "grew": {"gpu3": {counter: [0, 60]}}})]
    assert judged(*ranks) == []
    (insight,) = insights(ranks)
    assert insight.text == f"13 at each of 2 GPUs, read before and after: these grew: {counter} on vm/gpu3"


def test_ports_that_count_the_same_are_one_verdict_on_their_node() -> None:
    grew = {"mlx5_0/1": {"link_downed": [3, 4]}, "mlx5_7/1": {"link_downed": [0, 1], "symbol_error": [1, 5]}}
    found = judged(measured({**HEALTHY, "grew": grew}, 0))
    assert [(one.outcome, one.subject, one.metric) for one in found] == [
        (Outcome.FAIL, "vm", "new_errors.link_downed"),
        (Outcome.WARN, "vm", "new_errors.symbol_error"),
    ]
    assert "mlx5_0/1 link_downed 3 → 4, mlx5_7/1 link_downed 0 → 1" in found[0].message


def test_a_counter_at_its_limit_or_cleared_is_no_growth() -> None:
    def ports(before: int, after: int) -> list[tuple[Outcome, str, str]]:
        return said(measured({**HEALTHY, "grew": {"mlx5_0/1": {"link_downed": [before, after]}}}))

    assert ports(255, 255) == [(Outcome.WARN, "vm", "new_errors.link_downed")]
    assert ports(254, 255) == [(Outcome.FAIL, "vm", "new_errors.link_downed")]
    assert ports(9, 0) == []
    assert ports(9, 1) == [(Outcome.FAIL, "vm", "new_errors.link_downed")]


@pytest.mark.parametrize(("replays", "seconds", "warns"), [(8, 1, False), (9, 1, True), (16, 120, False)])
def test_pcie_replays_are_judged_by_the_minute(replays: int, seconds: float, warns: bool) -> None:
    fact = {**HEALTHY, "grew": {"gpu3": {"pcie_replays": [0, replays]}}}
    assert bool(said(measured(fact, seconds=seconds))) == warns


def test_an_xid_of_the_hardware_fails_and_one_of_a_program_is_told() -> None:
    ranks = [measured({**HEALTHY, "xids": [45, 43, 79, 79, 63]})]
    assert said(*ranks) == [
        (Outcome.FAIL, "vm/gpu3", "new_errors.xid"),
        (Outcome.WARN, "vm/gpu3", "new_errors.xid"),
    ]
    assert "Xid 43 on vm/gpu3" in next(insights(ranks)).text


def test_a_gpu_of_which_nobody_read_any_is_an_error() -> None:
    (one,) = judged(measured(HEALTHY, 0), measured())
    assert (one.outcome, one.subject) == (Outcome.ERROR, "vm/gpu3")
    assert "were not read" in one.message
    assert said(measured(gpu=0), measured()) == [(Outcome.ERROR, f"vm/gpu{gpu}", "") for gpu in (0, 3)]


@pytest.mark.parametrize(
    "fact",
    [
        {"read": 0},
        {"read": 12, "unread": {"gpu3 ecc_uncorrected": "Unknown Error"}},
        {"read": 0, "unread": {"gpu3": "NVML: Driver Not Loaded"}, "lacks": {"no RDMA port": ["ports"]}},
        {},
        "what?",
        {"read": "q"},
        {"read": True},
        {"read": [12], "lacks": {}},
        {"read": 1, "grew": {"gpu3": {"of_the_future": [0, 1]}}},
        {"read": 1, "grew": {"gpu3": {"ecc_uncorrected": "many"}}},
    ],
)
def test_what_could_not_be_read_is_an_error(fact: Any) -> None:
    assert [one[:2] for one in said(measured(HEALTHY, 0), measured(fact))] == [(Outcome.ERROR, "vm/gpu3")]
    list(insights([measured(fact)]))


def test_what_may_not_be_read_is_skipped_once_with_the_reason() -> None:
    denied = {"read": 12, "denied": {"Insufficient Permissions": ["gpu3 xid"]}, "lacks": {"no RDMA port": ["ports"]}}
    (one,) = judged(*(measured(denied, gpu) for gpu in range(4)))
    assert (one.outcome, one.subject, one.basis_text) == (Outcome.SKIP, CLUSTER, "")
    assert one.message.endswith("xid: Insufficient Permissions")


def test_where_nothing_can_be_read_the_reasons_are_told() -> None:
    (one,) = judged(measured({"read": 0, "lacks": {"Not Supported": ["gpu3 xid", "gpu3 pcie_replays"]}}))
    assert (one.outcome, one.message.partition(": ")[2]) == (Outcome.SKIP, "xid, pcie_replays: Not Supported")


def test_beside_an_error_of_the_check_only_growth_is_told() -> None:
    """What train.failure asks of its victim: one ERROR of it, and nothing else."""
    broken = measured({"read": 12, "unread": {"gpu3 xid": "?"}, "xids": [43]}, error="RuntimeError: on purpose")
    assert judged(measured(gpu=0), measured(HEALTHY, 1), broken) == []
    lost = measured({**HEALTHY, "xids": [79]}, error="GPU is lost")
    assert said(lost) == [(Outcome.FAIL, "vm/gpu3", "new_errors.xid")]


def test_a_skipped_check_needs_no_counters() -> None:
    assert list(verdicts(CHECK, [measured(skipped="no peers")])) == []


def test_that_none_grew_is_an_insight() -> None:
    ranks = [
        measured({"read": 93}, 0),
        measured(HEALTHY, 1),
        measured({"read": 9, "lacks": {"Not Supported": ["gpu2 xid"]}}, 2),
    ]
    (insight,) = insights(ranks)
    assert insight.text == "9 to 93 at each of 3 GPUs, read before and after: none grew; not there: xid (Not Supported)"


def test_of_a_whole_trial_both_measurements_are_judged() -> None:
    trial = load_trial(RECORD)
    config = Config.model_validate(trial.config)

    def with_fact(measurements: Sequence[Measurement], **fact: Any) -> list[Measurement]:
        return [one.model_copy(update={"facts": {**one.facts, ERROR_COUNTERS: fact}}) for one in measurements]

    bad = with_fact(trial.measurements, read=12, xids=[79])
    again = [one.model_copy(update={"retry": True}) for one in bad]
    good = with_fact(trial.measurements, read=12)
    for own, more in ((bad, []), (good, again)):
        found = judge(config, trial.jobs, own, catalog(), trial.excluded_checks, None, more)
        assert {one.outcome for one in found if one.metric == "new_errors.xid"} == {Outcome.FAIL}
        titles = [one.title for one in trial_insights(config, own, catalog())]
        assert "Error counters" in titles
    found = judge(config, trial.jobs, good, catalog(), trial.excluded_checks)
    assert {one.outcome for one in found} == {one.outcome for one in trial.verdicts}
