"""A check counts as measured only if all planned subjects were measured."""

from __future__ import annotations

import pytest

from seatrial.config.schema import CheckSettings, Cluster
from seatrial.judge.coverage import coverage_errors, unevaluated_thresholds
from seatrial.model import CLUSTER, Basis, BasisKind, Job, Measurement, Outcome, Reason, Threshold


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


def errors(*measurements: Measurement, cluster: Cluster | None = None, jobs: tuple[Job, ...] = ()) -> list[str]:
    by_check = {
        check: [measurement for measurement in measurements if measurement.check == check] for check in ("a", "b")
    }
    verdicts = list(coverage_errors("a", cluster or Cluster(nodes=2), jobs or (job(),), by_check))
    for verdict in verdicts:
        assert (verdict.outcome, verdict.subject) == (Outcome.ERROR, CLUSTER)
        assert verdict.reasons == (Reason.INCOMPLETE_COVERAGE,)
    return [verdict.detail for verdict in verdicts]


def test_complete_measurement_has_no_error() -> None:
    assert errors(*(on(rank) for rank in range(4))) == []


def test_missing_rank_is_named() -> None:
    (error,) = errors(on(0), on(0), on(0), on(1), on(2))
    assert "1 of 4 ranks: 3" in error


def test_many_missing_ranks_are_counted() -> None:
    (error,) = errors(on(0), cluster=Cluster(nodes=10), jobs=(job("ranks", 10, 2),))
    assert "19 of 20 ranks: 1, 2, 3, 4, 5, 6, 7, 8 and 11 more" in error


def test_check_skipped_on_some_subjects_is_an_error() -> None:
    (error,) = errors(*(on(rank) for rank in range(3)), on(3, skipped="no GPU here"))
    assert "3 of 4" in error
    assert "n1/rank3: no GPU here" in error
    assert errors(*(on(rank, skipped="no GPU here") for rank in range(4))) == []


def test_two_nodes_with_the_same_name_are_an_error() -> None:
    (error,) = errors(*(on(rank, node="localhost") for rank in range(4)))
    assert "2 nodes" in error
    assert "1: localhost" in error


def test_two_ranks_on_the_same_gpu_are_an_error() -> None:
    on_gpus = [Measurement(check="a", subject=f"n{rank // 2}/gpu0", rank=rank) for rank in range(4)]
    (error,) = errors(*on_gpus)
    assert "n0/gpu0, n1/gpu0" in error


@pytest.mark.parametrize(
    ("cluster", "planned", "key"),
    [
        (Cluster(nodes=4), "2 nodes", "cluster.nodes is 4"),
        (Cluster(nodes=2, gpus_per_node=8), "None GPUs", "cluster.gpus_per_node is 8"),
    ],
)
def test_configuration_changed_after_the_plan_is_an_error(cluster: Cluster, planned: str, key: str) -> None:
    (error,) = errors(*(on(rank) for rank in range(4)), cluster=cluster)
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


def test_failed_or_missing_measurement_has_no_second_error() -> None:
    assert errors(Measurement(check="a", subject=CLUSTER, error="rank 3 was killed")) == []
    assert errors() == []


def test_check_without_a_job_may_be_skipped_but_not_measured() -> None:
    assert errors(Measurement(check="a", subject=CLUSTER, skipped="no GPU"), jobs=(job("ranks", 2, 2, "b"),)) == []
    (error,) = errors(on(0), jobs=(job("ranks", 2, 2, "b"),))
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
