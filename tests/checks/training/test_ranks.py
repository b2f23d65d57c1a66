"""Metrics of each rank: verdicts on a slow rank and on a rank that waits for data."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.checks.declare import NoValue, Value, answers
from seatrial.checks.training import _ranks
from seatrial.checks.training._workload import TrainingResult
from seatrial.checks.training.ddp import CHECK
from seatrial.diagnose.causes import Run, cause_findings
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Absent, Measurement, Metric, Outcome, Verdict, Why
from seatrial.train.rank_times import RankTimes


def times(compute: float = 1.0, wait: float = 0.0, steps: int = 12, device: str = "CPU") -> RankTimes:
    return RankTimes(device, (compute,) * steps, (wait,) * steps, (2.0,) * steps)


def measured(ranks: dict[str, RankTimes], device: str = "cuda") -> Measurement:
    given = [*_ranks.slowdown(ranks), *_ranks.data_wait(ranks)]
    observations = list(answers(given, CHECK.declared, CHECK.name, {None: CLUSTER}))
    metrics = tuple(item for item in observations if isinstance(item, Metric))
    absent = tuple(item for item in observations if isinstance(item, Absent))
    assert len(metrics) + len(absent) == len(observations)
    facts: dict[str, JsonValue] = {"device": device}
    return Measurement(check=CHECK.name, subject="n0/gpu0", metrics=metrics, absent=absent, facts=facts)


def verdicts(measurement: Measurement) -> list[Verdict]:
    judged = judge_check(CHECK, [measurement], {}, "t")
    return [verdict for verdict in judged if verdict.metric in (_ranks.SLOWDOWN, _ranks.DATA_WAIT)]


def outcomes(measurement: Measurement, metric: str) -> dict[str, Outcome]:
    return {v.subject: v.outcome for v in verdicts(measurement) if v.metric == metric and v.outcome != "SKIP"}


def test_slow_rank_fails_and_is_one_finding_with_its_place() -> None:
    ranks = {f"n{rank // 2}/gpu{rank % 2}": times(1.4 if rank == 3 else 1.0) for rank in range(4)}
    measurement = measured(ranks)
    assert outcomes(measurement, "rank_slowdown") == {
        subject: Outcome.FAIL if subject == "n1/gpu1" else Outcome.PASS for subject in ranks
    }
    speed = Verdict("train.ddp", CLUSTER, Outcome.FAIL, "scaling_efficiency")
    (finding,) = cause_findings(
        Run([*verdicts(measurement), speed], [measurement], catalog(), "srun --nodelist={node}")
    )
    assert (finding.cause, finding.subject, finding.confidence) == ("slow_rank", "n1/gpu1", "high")
    assert {(key.metric, key.subject) for key in finding.explains} == {
        ("rank_slowdown", "n1/gpu1"),
        ("scaling_efficiency", CLUSTER),
    }
    assert finding.first_command.startswith("srun --nodelist=n1 sh -c 'nvidia-smi --id=1 ")
    assert "1.40 times" in finding.evidence


def test_slow_node_is_one_finding_with_a_command_for_all_its_gpus() -> None:
    ranks = {f"n{rank // 2}/gpu{rank % 2}": times(1.4 if rank > 5 else 1.0) for rank in range(8)}
    measurement = measured(ranks)
    (finding,) = cause_findings(Run(verdicts(measurement), [measurement], catalog(), "ssh {node}"))
    assert (finding.cause, finding.subject, len(finding.explains)) == ("slow_rank", "n3", 2)
    assert finding.first_command.startswith("ssh n3 sh -c 'nvidia-smi -q ")


def test_rank_without_a_gpu_has_its_own_command() -> None:
    measurement = measured({f"n{rank}/rank{rank}": times(2.0 if rank == 1 else 1.0) for rank in range(4)}, "cpu")
    (finding,) = cause_findings(Run(verdicts(measurement), [measurement], catalog(), "ssh {node}"))
    assert (finding.cause, finding.subject) == ("slow_rank", "n1/rank1")
    assert "nvidia-smi" not in finding.first_command


def test_cpu_ranks_may_differ_more_than_gpus() -> None:
    ranks = {f"n0/rank{rank}": times(1.2 if rank == 1 else 1.0) for rank in range(4)}
    assert outcomes(measured(ranks, "cpu"), "rank_slowdown")["n0/rank1"] is Outcome.PASS
    assert outcomes(measured(ranks), "rank_slowdown")["n0/rank1"] is Outcome.FAIL


@pytest.mark.parametrize(
    ("waiting", "place"),
    [
        (["n0/gpu1"], "n0/gpu1"),
        (["n1/gpu0", "n1/gpu1"], "n1"),
        (["n0/gpu0", "n0/gpu1", "n1/gpu0", "n1/gpu1"], CLUSTER),
    ],
)
def test_slow_input_is_placed_at_rank_node_or_cluster(waiting: list[str], place: str) -> None:
    subjects = [f"n{node}/gpu{gpu}" for node in range(2) for gpu in range(2)]
    measurement = measured({subject: times(wait=1.0 if subject in waiting else 0.001) for subject in subjects})
    assert [s for s, outcome in outcomes(measurement, "rank_data_wait").items() if outcome is Outcome.FAIL] == waiting
    (finding,) = cause_findings(Run(verdicts(measurement), [measurement], catalog()))
    assert (finding.cause, finding.subject) == ("slow_input", place)
    assert len(finding.explains) == len(waiting)


def test_slow_rank_and_slow_input_are_consequences_of_their_cause() -> None:
    measurement = measured({f"n0/gpu{gpu}": times(1.5 if gpu == 1 else 1, wait=1.0 * (gpu == 1)) for gpu in range(4)})
    foreign = Verdict("gpu.inventory", "n0/gpu1", Outcome.FAIL, "foreign_processes", evidence="foreign_processes = 1")
    busy = Verdict("host.load", "n0", Outcome.WARN, "cpu_busy", evidence="cpu_busy = 90 %")
    findings = cause_findings(Run([*verdicts(measurement), foreign, busy], [measurement], catalog()))
    assert [finding.cause for finding in findings] == ["foreign_processes", "busy_cpus"]
    other_gpu = Verdict("gpu.inventory", "n0/gpu2", Outcome.FAIL, "foreign_processes")
    findings = cause_findings(Run([*verdicts(measurement), other_gpu], [measurement], catalog()))
    assert {finding.cause for finding in findings} == {"slow_rank", "slow_input", "foreign_processes"}


def test_variables_of_nccl_explain_neither_a_slow_rank_nor_slow_input() -> None:
    measurement = measured({f"n0/gpu{gpu}": times(1.5 if gpu == 1 else 1) for gpu in range(4)})
    settings = Measurement(check="collectives.transport", subject="n0/gpu0", facts={"settings": {"NCCL_ALGO": "Ring"}})
    findings = cause_findings(Run(verdicts(measurement), [measurement, settings], catalog()))
    assert [finding.cause for finding in findings] == ["slow_rank"]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ({"n0/gpu0": times()}, "fewer than 2 ranks"),
        ({"n0/gpu0": times(steps=3), "n0/gpu1": times(steps=3)}, "3 steps; 6 are needed"),
        ({"n0/gpu0": RankTimes("a", (), (), ()), "n0/gpu1": RankTimes("a", (), (), ())}, "compute time contains"),
        ({"n0/gpu0": times(device="a"), "n0/gpu1": times(device="b")}, "no two ranks have the same device model"),
    ],
)
def test_ranks_that_are_not_compared_are_skipped_with_the_reason(ranks: dict[str, RankTimes], reason: str) -> None:
    measurement = measured(ranks)
    absent = {each.subject: each for each in measurement.absent if each.metric == "rank_slowdown"}
    assert absent.keys() == ranks.keys()
    assert all(each.why is Why.DOES_NOT_APPLY and each.reason.startswith(reason) for each in absent.values())
    assert {v.outcome for v in verdicts(measurement) if v.metric == "rank_slowdown"} == {Outcome.SKIP}


def test_trainings_of_single_gpus_are_compared_and_the_last_stage_shows_the_data_wait() -> None:
    def training(ranks: tuple[int, ...], compute: float, wait: float) -> TrainingResult:
        entry = {"device": "H", "compute_s": [compute] * 8, "data_wait_s": [wait] * 8, "seconds": [1.0] * 8}
        return TrainingResult({"ranks": [entry] * len(ranks)}, Path(), "", ranks=ranks)

    failed = TrainingResult(None, Path(), "killed", 9, ranks=(0, 1))
    results = {"gpu": [training((0,), 1.0, 0.0), training((1,), 3.0, 0.0)], "node": [training((0, 1), 1.0, 0.5)]}
    subjects = ["n0/gpu0", "n0/gpu1"]
    answers = list(_ranks.slowdown_and_data_wait(results, subjects))
    values = {(each.name, each.subject): each.value for each in answers if isinstance(each, Value)}
    assert values["rank_slowdown", "n0/gpu1"] == pytest.approx(200)
    assert values["rank_data_wait", "n0/gpu0"] == 50
    without = list(_ranks.slowdown_and_data_wait({"gpu": [failed]}, subjects))
    assert [each.names for each in without if isinstance(each, NoValue)] == [("rank_slowdown",), ("rank_data_wait",)]
    assert len(without) == 2


def test_rank_of_another_model_is_skipped_beside_ranks_that_are_compared() -> None:
    measurement = measured({"n0/gpu0": times(), "n0/gpu1": times(), "n0/gpu2": times(device="other")})
    assert outcomes(measurement, "rank_slowdown") == {"n0/gpu0": Outcome.PASS, "n0/gpu1": Outcome.PASS}
    assert "n0/gpu2" in {v.subject for v in verdicts(measurement) if v.metric == "rank_slowdown"}
