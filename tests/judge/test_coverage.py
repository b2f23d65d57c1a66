"""Nothing counts as measured that was not measured at every place that was promised."""

from __future__ import annotations

from seatrial.config.schema import CheckSettings, Cluster
from seatrial.judge.coverage import coverage_errors, unevaluated_thresholds
from seatrial.model import CLUSTER, Job, Measurement, Outcome, Threshold


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


def faults(*measurements: Measurement, cluster: Cluster | None = None, jobs: tuple[Job, ...] = ()) -> list[str]:
    by_check = {check: [one for one in measurements if one.check == check] for check in ("a", "b")}
    verdicts = list(coverage_errors("a", cluster or Cluster(nodes=2), jobs or (job(),), by_check))
    assert all((one.outcome, one.subject) == (Outcome.ERROR, CLUSTER) for one in verdicts)
    return [one.message for one in verdicts]


def test_everything_measured_everywhere_is_no_fault() -> None:
    assert faults(*(on(rank) for rank in range(4))) == []


def test_a_rank_that_is_missing_is_named_however_often_another_was_measured() -> None:
    (fault,) = faults(on(0), on(0), on(0), on(1), on(2))
    assert fault == "not measured everywhere: 1 of 4 ranks are missing (3)"


def test_many_missing_ranks_are_counted_and_some_named() -> None:
    (fault,) = faults(on(0), cluster=Cluster(nodes=10), jobs=(job("ranks", 10, 2),))
    assert fault == "not measured everywhere: 19 of 20 ranks are missing (1, 2, 3, 4, 5, 6, 7, 8 and 11 more)"


def test_what_applies_at_one_place_applies_at_all() -> None:
    (fault,) = faults(*(on(rank) for rank in range(3)), on(3, skipped="no GPU here"))
    assert fault == "measured at 3 of 4 places; not at n1/rank3: no GPU here"
    assert faults(*(on(rank, skipped="no GPU here") for rank in range(4))) == []


def test_two_nodes_of_one_name_cannot_be_told_apart() -> None:
    (fault,) = faults(*(on(rank, node="localhost") for rank in range(4)))
    assert fault == "2 nodes were to be measured, and the measurements name 1: localhost"


def test_two_ranks_on_one_gpu_have_not_measured_two() -> None:
    on_gpus = [Measurement(check="a", subject=f"n{rank // 2}/gpu0", rank=rank) for rank in range(4)]
    assert faults(*on_gpus) == ["4 ranks were to be at as many places, and several are at n0/gpu0, n1/gpu0"]


def test_a_promise_raised_after_the_measuring_is_not_kept() -> None:
    everywhere = [on(rank) for rank in range(4)]
    assert faults(*everywhere, cluster=Cluster(nodes=4)) == ["planned for 2 nodes, and 4 were promised"]
    (fault,) = faults(*everywhere, cluster=Cluster(nodes=2, gpus_per_node=8))
    assert fault == "planned for None GPUs a node, and 8 were promised"


def test_two_checks_on_different_nodes_speak_of_none_of_them() -> None:
    jobs = (job("nodes", 2, 1, "b"), job())
    inventory = [Measurement(check="b", subject=name, rank=rank) for rank, name in enumerate(("n0", "n7"))]
    (fault,) = faults(*inventory, *(on(rank) for rank in range(4)), jobs=jobs)
    assert fault == "measured on n0, n1, but b on n0, n7: not on the same nodes"


def test_the_login_node_need_not_be_one_of_them() -> None:
    jobs = (job("control", 1, 1, "b"), job())
    slurm = Measurement(check="b", subject="login", rank=0)
    assert faults(slurm, *(on(rank) for rank in range(4)), jobs=jobs) == []


def test_an_error_is_told_once() -> None:
    assert faults(Measurement(check="a", subject=CLUSTER, error="rank 3 was killed")) == []
    assert faults() == []


def test_a_check_that_no_job_runs_may_be_skipped_but_not_measured() -> None:
    assert faults(Measurement(check="a", subject=CLUSTER, skipped="no GPU"), jobs=(job("ranks", 2, 2, "b"),)) == []
    (fault,) = faults(on(0), jobs=(job("ranks", 2, 2, "b"),))
    assert fault == "it was measured, and no job of the plan has it"


def test_a_threshold_on_a_check_that_did_not_apply_is_not_dropped() -> None:
    asked = CheckSettings(expect={"busbw.8GiB": Threshold.parse("> 350 GB/s")})
    alone = [Measurement(check="a", subject=CLUSTER, skipped="needs 2 ranks")]
    (verdict,) = unevaluated_thresholds("a", asked, alone, "mine")
    assert (verdict.outcome, verdict.metric) == (Outcome.ERROR, "busbw.8GiB")
    assert verdict.message == "a is not held to busbw.8GiB > 350 GB/s: needs 2 ranks"
    assert verdict.fix == "Where it need not apply: --set checks.a.may_skip=true"
    (spared,) = unevaluated_thresholds("a", asked.model_copy(update={"may_skip": True}), alone, "mine")
    assert (spared.outcome, spared.basis_text) == (Outcome.SKIP, "trial mine: > 350 GB/s")
    assert list(unevaluated_thresholds("a", CheckSettings(), alone, "mine")) == []
    assert list(unevaluated_thresholds("a", asked, [on(0)], "mine")) == []
    assert list(unevaluated_thresholds("a", asked, [], "mine")) == []
