"""A check counts as measured only if all planned subjects were measured."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.checks.check import Check, Needs, SkipIf
from seatrial.config.schema import CheckSettings, Config
from seatrial.judge.coverage import (
    RecordedPlan,
    coverage_errors,
    identity_errors,
    retry_errors,
    unevaluated_thresholds,
    unplanned_checks,
)
from seatrial.model import (
    CLUSTER,
    GPUS_USED,
    PORTS_USED,
    Basis,
    BasisKind,
    Job,
    Measurement,
    Metric,
    Outcome,
    Phase,
    Reason,
    Scope,
    Threshold,
)
from tests.judge.test_rules import not_called


def job(name: str = "ranks", nodes: int = 2, ranks_per_node: int = 2, *checks: str) -> Job:
    return Job(
        name=name,
        placement="control" if name == "control" else "nodes" if name == "nodes" else "ranks",
        device="cpu",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        checks=checks or ("a",),
        options={},
        expected_gpus=None,
        expected_nodes=nodes if name != "control" else 2,
        limit_s=1,
    )


def on(rank: int, check: str = "a", node: str = "", **others: str) -> Measurement:
    return Measurement(check=check, subject=f"{node or f'n{rank // 2}'}/rank{rank}", rank=rank, **others)


def check(
    name: str = "a",
    scope: Scope = Scope.CLUSTER,
    needs: Needs | None = None,
    skip_if: tuple[SkipIf, ...] = (),
) -> Check:
    return Check(
        name=name,
        title=name,
        phase=Phase.INTERCONNECT,
        scope=scope,
        declared=(),
        measure=not_called,
        limit_s=1,
        needs=needs or Needs(),
        skip_if=skip_if,
    )


def config(launcher: str = "local", **cluster: int) -> Config:
    checks: dict[str, Any] = {"a": {}, "b": {}}
    return Config.model_validate(
        {"name": "t", "launcher": launcher, "cluster": {"nodes": 2} | cluster, "checks": checks}
    )


def errors(
    *measurements: Measurement,
    settings: Config | None = None,
    jobs: tuple[Job, ...] = (),
    judged: Check | None = None,
) -> list[str]:
    """The details of the errors of check a, or of ``judged``."""
    by_check = {name: [item for item in measurements if item.check == name] for name in ("a", "b")}
    plan = RecordedPlan(settings or config(), jobs or (job(),), by_check)
    subject_check = judged or check()
    verdicts = list(coverage_errors(subject_check, plan, by_check[subject_check.name]))
    for verdict in verdicts:
        assert (verdict.outcome, verdict.subject, verdict.reasons) == (Outcome.ERROR, CLUSTER, (Reason.PLAN_MISMATCH,))
    return [verdict.detail for verdict in verdicts]


def on_gpus(count: int = 4, ranks_per_node: int = 2, **others: Any) -> list[Measurement]:
    return [
        Measurement(check="a", subject=f"n{rank // ranks_per_node}/gpu{rank % ranks_per_node}", rank=rank, **others)
        for rank in range(count)
    ]


def gpu_job(**changes: Any) -> Job:
    return job().model_copy(update={"device": "cuda", "expected_gpus": 2} | changes)


def test_complete_measurement_has_no_error() -> None:
    assert errors(*(on(rank) for rank in range(4))) == []


def test_missing_rank_is_named() -> None:
    (error,) = errors(on(0), on(0), on(0), on(1), on(2))
    assert "1 of 4 ranks: 3" in error


def test_many_missing_ranks_are_counted() -> None:
    (error,) = errors(on(0), settings=config(nodes=10), jobs=(job("ranks", 10, 2),))
    assert "19 of 20 ranks: 1, 2, 3, 4, 5, 6, 7, 8 and 11 more" in error


def test_check_skipped_on_some_subjects_is_an_error() -> None:
    (error,) = errors(*(on(rank) for rank in range(3)), on(3, skipped="no GPU here"))
    assert "3 of 4" in error
    assert "n1/rank3: no GPU here" in error
    may_skip = check(skip_if=(SkipIf.NO_GPU,))
    assert errors(*(on(rank, skipped="no GPU here") for rank in range(4)), judged=may_skip) == []


def test_two_nodes_with_the_same_name_are_an_error() -> None:
    (error,) = errors(*(on(rank, node="localhost") for rank in range(4)))
    assert "2 nodes" in error
    assert error.endswith("measured 4 on localhost")


def test_two_ranks_on_the_same_gpu_are_an_error() -> None:
    same_gpu = [Measurement(check="a", subject=f"n{rank // 2}/gpu0", rank=rank) for rank in range(4)]
    (error,) = errors(*same_gpu, jobs=(gpu_job(expected_gpus=2),), settings=config(gpus_per_node=2))
    assert "n0/gpu0 (2 times), n1/gpu0 (2 times)" in error


@pytest.mark.parametrize(
    ("settings", "planned", "key"),
    [
        (config(nodes=4), "expected_nodes 2", "expected 4"),
        (config(gpus_per_node=8), "expected_gpus None", "expected 8 by cluster.gpus_per_node"),
    ],
)
def test_configuration_changed_after_the_plan_is_an_error(settings: Config, planned: str, key: str) -> None:
    (error,) = errors(*(on(rank) for rank in range(4)), settings=settings, jobs=(job(),))
    assert planned in error
    assert key in error


def test_two_checks_on_different_nodes_are_an_error() -> None:
    jobs = (job("nodes", 2, 1, "b"), job())
    inventory = [Measurement(check="b", subject=name, rank=rank) for rank, name in enumerate(("n0", "n7"))]
    (error,) = errors(*inventory, *(on(rank) for rank in range(4)), jobs=jobs)
    assert "n0, n1" in error
    assert "n0, n7" in error


def test_login_node_need_not_be_a_compute_node() -> None:
    jobs = (job("control", 1, 1, "b"), job())
    slurm = Measurement(check="b", subject="login", rank=0)
    assert errors(slurm, *(on(rank) for rank in range(4)), jobs=jobs) == []
    assert errors(slurm, *(on(rank) for rank in range(4)), jobs=jobs, judged=check("b", Scope.CONTROL)) == []


def test_failed_or_missing_measurement_has_no_second_error() -> None:
    assert errors(Measurement(check="a", subject=CLUSTER, error="rank 3 was killed")) == []
    assert errors() == []


def test_check_without_a_job_may_be_skipped_but_not_measured() -> None:
    others, skipped = (job("ranks", 2, 2, "b"),), Measurement(check="a", subject=CLUSTER, skipped="no GPU")
    assert errors(skipped, jobs=others, judged=check(needs=Needs(gpus=True))) == []
    assert errors(skipped, jobs=others, judged=check(needs=Needs(min_ranks=5))) == []
    (contradiction,) = errors(skipped, jobs=others, judged=check())
    assert "no GPU" in contradiction
    (error,) = errors(on(0), jobs=others)
    assert "no job" in error


def test_threshold_on_a_skipped_check_is_an_error_unless_it_may_skip() -> None:
    settings = CheckSettings(expect={"busbw.8GiB": Threshold.parse("> 350 GB/s")})
    skipped = [Measurement(check="a", subject=CLUSTER, skipped="needs 2 ranks")]
    (verdict,) = unevaluated_thresholds("a", settings, skipped, "mine")
    assert (verdict.outcome, verdict.metric) == (Outcome.ERROR, "busbw.8GiB")
    assert (verdict.reasons, verdict.detail) == ((Reason.THRESHOLD_NOT_EVALUATED,), "needs 2 ranks")
    assert "checks.a.may_skip=true" in verdict.fix
    (allowed,) = unevaluated_thresholds("a", settings.model_copy(update={"may_skip": True}), skipped, "mine")
    assert (allowed.outcome, allowed.basis) == (Outcome.SKIP, Basis(BasisKind.TRIAL, "mine", 350, "GB/s", ">"))
    assert list(unevaluated_thresholds("a", CheckSettings(), skipped, "mine")) == []
    assert list(unevaluated_thresholds("a", settings, [on(0)], "mine")) == []
    assert list(unevaluated_thresholds("a", settings, [], "mine")) == []


def test_rank_that_counted_more_ranks_than_planned_is_an_error() -> None:
    (error,) = errors(*on_gpus(2, 1, facts={"world_size": 4}), jobs=(gpu_job(ranks_per_node=1, expected_gpus=1),))
    assert "n0/gpu0 reports world_size 4, but the job ranks has 2" in error
    assert errors(*on_gpus(facts={"world_size": 1}), jobs=(gpu_job(),)) == []


def test_another_number_of_nodes_than_planned_is_an_error() -> None:
    (error,) = errors(*on_gpus(2, 1, facts={"nodes": 3}), jobs=(gpu_job(ranks_per_node=1, expected_gpus=1),))
    assert "reports nodes 3, but the job ranks has 2" in error
    assert errors(*on_gpus(facts={"nodes": 1}), jobs=(gpu_job(),)) == []


def test_check_in_a_job_of_another_placement_is_an_error() -> None:
    measured = [on(0), on(1, node="n1")]
    (error,) = errors(*measured, jobs=(job("nodes", 2, 1),))
    assert "placement nodes, expected ranks" in error


def test_any_number_of_planned_ranks_is_compared() -> None:
    huge = job("ranks", 2, 10**19)
    (error,) = errors(*(on(rank) for rank in range(4)), jobs=(huge,))
    assert "19999999999999999996 of 20000000000000000000 ranks: 4, 5" in error


def test_measurement_of_a_rank_that_is_recorded_twice_is_an_error() -> None:
    (error,) = errors(*(on(rank) for rank in range(4)), on(3))
    assert error.endswith("measured n1/rank3 (2 times)")


def test_ranks_are_distributed_evenly() -> None:
    (error,) = errors(on(0), on(1, node="n1"), on(2), on(3))
    assert "2 ranks on each of 2 nodes" in error
    assert error.endswith("measured 1 on n0, 3 on n1")


def test_check_on_other_ranks_than_the_first_one_is_an_error() -> None:
    jobs = (job("ranks", 2, 2, "b", "a"),)
    first = [on(rank, "b") for rank in range(4)]
    moved = on(0).model_copy(update={"subject": "n0/rank7"})
    (error,) = errors(*first, moved, *(on(rank) for rank in range(1, 4)), jobs=jobs)
    assert "n0/rank0, n0/rank7" in error


def test_skipped_check_with_metrics_is_an_error() -> None:
    metrics = (Metric(name="speed", value=1, unit="GB/s", subject="n1/rank3"),)
    measured = [
        *(on(rank, skipped="no GPU") for rank in range(3)),
        on(3, skipped="no GPU").model_copy(update={"metrics": metrics}),
    ]
    (error,) = errors(*measured, judged=check(skip_if=(SkipIf.NO_GPU,)))
    assert "n1/rank3 has 1 metrics" in error


@pytest.mark.parametrize(
    ("scope", "subject", "has_subject"),
    [
        (Scope.CLUSTER, CLUSTER, True),
        (Scope.CLUSTER, "n1", True),
        (Scope.CLUSTER, "n1/rank2", True),
        (Scope.CLUSTER, "n0->n1", True),
        (Scope.CLUSTER, "n0/rank0->rank1", True),
        (Scope.CLUSTER, "rail1", True),
        (Scope.CLUSTER, "rail2", False),
        (Scope.CLUSTER, "rail", False),
        (Scope.CLUSTER, "n2", False),
        (Scope.CLUSTER, "n1/rank0", False),
        (Scope.CLUSTER, "n0->n0", False),
        (Scope.CLUSTER, "n0/rank0->rank2", False),
        (Scope.CLUSTER, "n0/rank0->", False),
        (Scope.CLUSTER, "", False),
        (Scope.GPU, "n0", True),
        (Scope.GPU, "n0/rank1", False),
        (Scope.GPU, CLUSTER, False),
    ],
)
def test_metric_on_a_subject_that_the_plan_lacks_is_an_error(scope: Scope, subject: str, has_subject: bool) -> None:
    metric = Metric(name="speed", value=1, unit="GB/s", subject=subject)
    measured = [on(0).model_copy(update={"metrics": (metric,)}), *(on(rank) for rank in range(1, 4))]
    found = errors(*measured, judged=check(scope=scope))
    assert found == ([] if has_subject else [f"metrics of {subject}, which the plan did not measure"])


@pytest.mark.parametrize(
    ("facts", "subject", "has_subject"),
    [
        ({}, "n0/gpu5", True),
        ({GPUS_USED: [0, 5]}, "n0/gpu5", True),
        ({GPUS_USED: [0, 1]}, "n0/gpu5", False),
        ({}, "n1/gpu0", False),
        ({}, "n0/nic0", False),
    ],
)
def test_check_of_a_node_measures_its_gpus(facts: dict[str, Any], subject: str, has_subject: bool) -> None:
    metrics = (Metric(name="speed", value=1, unit="GB/s", subject=subject),)
    first = Measurement(check="a", subject="n0", rank=0, metrics=metrics, facts=facts)
    found = errors(
        first,
        Measurement(check="a", subject="n1", rank=1),
        jobs=(job("nodes", 2, 1),),
        judged=check(scope=Scope.NODE),
    )
    assert bool(found) is not has_subject


@pytest.mark.parametrize(
    ("ports", "subject", "has_subject"),
    [
        ({"n0": ["mlx5_0"], "n1": ["mlx5_4"]}, "n1/mlx5_4", True),
        ({"n0": ["mlx5_0"], "n1": ["mlx5_4"]}, "n1/mlx5_0", False),
        ({"n7": ["mlx5_0"]}, "n7/mlx5_0", False),  # not a node of the plan
        (["mlx5_0"], "n0/mlx5_0", False),
        (None, "n0/mlx5_0", False),
    ],
)
def test_check_of_the_cluster_measures_the_ports_that_it_lists(ports: Any, subject: str, has_subject: bool) -> None:
    metrics = (Metric(name="speed", value=1, unit="GB/s", subject=subject),)
    first = on(0).model_copy(update={"metrics": metrics, "facts": {PORTS_USED: ports}})
    found = errors(first, *(on(rank) for rank in range(1, 4)), judged=check(scope=Scope.CLUSTER))
    assert found == ([] if has_subject else [f"metrics of {subject}, which the plan did not measure"])


def test_retry_on_other_subjects_is_an_error() -> None:
    (error,) = retry_errors("a", [on(0), on(1)], [on(0), on(1, node="n7")])
    assert (error.outcome, error.reasons) == (Outcome.ERROR, (Reason.PLAN_MISMATCH,))
    assert "n7/rank1" in error.detail
    assert list(retry_errors("a", [on(0)], [on(0)])) == []
    assert len(list(retry_errors("a", [], [on(0)]))) == 1
    assert list(retry_errors("a", [on(0)], [on(1, error="lost")])) == [], "an error has its own verdict"


def test_check_in_the_record_but_not_in_the_configuration_is_an_error() -> None:
    (error,) = unplanned_checks(config(), {}, ["a", "gone", "gone"])
    assert (error.check, error.outcome, error.reasons) == ("gone", Outcome.ERROR, (Reason.PLAN_MISMATCH,))
    (excluded,) = unplanned_checks(config(), {"a": "--skip"}, ["a"])
    assert "excluded by --skip" in excluded.detail
    assert list(unplanned_checks(config(), {"b": "--skip"}, ["a"])) == []


def on_gpu(subject: str, uuid: str, check: str = "a") -> Measurement:
    return Measurement(check=check, subject=subject, rank=0, gpu_uuid=uuid)


@pytest.mark.parametrize(
    ("measured", "checks"),
    [
        ([on_gpu("n0/gpu0", "GPU-a"), on_gpu("n0/gpu1", "GPU-b"), on_gpu("n0/gpu0", "GPU-a", "b")], []),
        ([on_gpu("n0/gpu0", "GPU-a"), on_gpu("n1/gpu0", "GPU-a")], ["a"]),
        ([on_gpu("n0/gpu0", "GPU-a"), on_gpu("n0/gpu0", "GPU-b", "b")], ["b"]),
        ([on_gpu("n0/gpu0", ""), on_gpu("n1/gpu0", "")], []),
    ],
    ids=[
        "the same in all checks",
        "one GPU twice",
        "another GPU in the second check",
        "a record of an earlier version",
    ],
)
def test_each_gpu_is_one_subject_and_stays_it(measured: list[Measurement], checks: list[str]) -> None:
    errors = list(identity_errors(measured))
    assert [(error.check, error.outcome, error.reasons) for error in errors] == [
        (name, Outcome.ERROR, (Reason.PLAN_MISMATCH,)) for name in checks
    ]
