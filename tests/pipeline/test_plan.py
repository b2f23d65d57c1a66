from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from pydantic import JsonValue

from seatrial import __version__
from seatrial.checks.base import Check, Context, Needs, Options
from seatrial.config.schema import CheckSettings, Cluster, Config, Slurm
from seatrial.model import Observation, Phase, Preflight, Scope, UsageError
from seatrial.pipeline.plan import NodeGpus, make_plan, retry_jobs


def never(context: Context, options: Options) -> Iterator[Observation]:
    raise AssertionError("planning measures nothing")


def make_check(name: str, scope: Scope, needs: Needs | None = None, limit_s: float = 10) -> Check:
    return Check(
        name=name,
        title=name,
        phase=Phase.ENVIRONMENT,
        scope=scope,
        metrics={},
        rules=(),
        measure=never,
        limit_s=limit_s,
        needs=needs or Needs(),
    )


class ReservationOptions(Options):
    """Options with a reservation."""

    reservation: str | None = None


CHECKS = {
    check.name: check
    for check in (
        make_check("host.a", Scope.NODE),
        make_check("gpu.b", Scope.GPU, Needs(gpus=True)),
        make_check("all.c", Scope.CLUSTER, Needs(min_ranks=2), limit_s=20),
        make_check("all.d", Scope.CLUSTER),
    )
}


def config(nodes: int = 1, gpus: int | None = None) -> Config:
    return Config(
        name="t",
        cluster=Cluster(nodes=nodes, gpus_per_node=gpus),
        checks={name: CheckSettings(options={"option": name}) for name in CHECKS},
    )


def test_checks_that_share_a_placement_share_a_job() -> None:
    plan = make_plan(config(nodes=2), CHECKS, NodeGpus(4))
    assert [(job.name, job.checks) for job in plan.jobs] == [
        ("nodes", ("host.a",)),
        ("ranks", ("gpu.b", "all.c", "all.d")),
    ]
    nodes, ranks = plan.jobs
    assert (nodes.nodes, nodes.ranks_per_node) == (2, 1)
    assert (ranks.nodes, ranks.ranks_per_node, ranks.device) == (2, 4, "cuda")
    assert ranks.limits == {"gpu.b": 10, "all.c": 20, "all.d": 10}
    assert ranks.limit_s == 180 + 10 + 20 + 10
    assert ranks.options["all.c"] == {"option": "all.c"}


def test_control_checks_run_once_on_this_host() -> None:
    checks = {"slurm.x": make_check("slurm.x", Scope.CONTROL)}
    settings = config(nodes=4).model_copy(update={"checks": {"slurm.x": CheckSettings()}})
    (job,) = make_plan(settings, checks, NodeGpus(0)).jobs
    assert (job.name, job.nodes, job.ranks_per_node, job.expected_nodes) == ("control", 1, 1, 4)


def test_first_job_on_nodes_precedes_the_control_job() -> None:
    """Its preflight: the control job starts trials in the same environment."""
    checks = {**CHECKS, "slurm.x": make_check("slurm.x", Scope.CONTROL)}
    settings = config().model_copy(update={"checks": dict.fromkeys(checks, CheckSettings())})

    def names(*done: str) -> list[str]:
        return [job.name for job in make_plan(settings, checks, NodeGpus(2), done=done).jobs]

    assert names() == ["nodes", "control", "ranks"]
    assert names("host.a") == ["ranks", "control"]
    assert names("host.a", "gpu.b", "all.c", "all.d") == ["control"]


def test_preflight_tries_what_all_jobs_need() -> None:
    plan = make_plan(config(nodes=2), CHECKS, NodeGpus(4))
    expected = Preflight(version=__version__, torch=True, gpus=4, hf_cache=False)
    assert [job.preflight for job in plan.jobs] == [expected, expected]
    (nodes,) = make_plan(config(), CHECKS, NodeGpus(4), only=["host.*"]).jobs
    assert nodes.preflight == Preflight(version=__version__, torch=False, gpus=0, hf_cache=False)
    checks = {"train.x": replace(CHECKS["all.d"], name="train.x", phase=Phase.SINGLE_GPU)}
    settings = config().model_copy(update={"checks": {"train.x": CheckSettings()}})
    (ranks,) = make_plan(settings, checks, NodeGpus(0)).jobs
    assert ranks.preflight == Preflight(version=__version__, torch=True, gpus=0, hf_cache=True)


def test_trial_overrides_limit_s() -> None:
    longer = config().model_copy(update={"checks": {"all.c": CheckSettings(limit_s=99)}})
    assert make_plan(longer, CHECKS, NodeGpus(2)).jobs[0].limits == {"all.c": 99}


def test_without_gpu_two_cpu_ranks_run() -> None:
    plan = make_plan(config(), CHECKS, NodeGpus(0))
    assert (plan.jobs[1].ranks_per_node, plan.jobs[1].device) == (2, "cpu")
    (skipped,) = plan.not_run
    assert skipped.check == "gpu.b"
    assert "cluster.gpus_per_node" in (skipped.skipped or "")


def test_missing_gpus_never_lead_to_a_cpu_run() -> None:
    plan = make_plan(config(gpus=8), CHECKS, NodeGpus(0, "8 GPUs expected, 0 usable"))
    assert [job.name for job in plan.jobs] == ["nodes"]
    assert {measurement.check: measurement.error for measurement in plan.not_run} == dict.fromkeys(
        ("gpu.b", "all.c", "all.d"), "8 GPUs expected, 0 usable"
    )


def test_check_for_several_ranks_is_skipped_on_one_gpu() -> None:
    plan = make_plan(config(), CHECKS, NodeGpus(1))
    (skipped,) = plan.not_run
    assert (skipped.check, skipped.skipped) == ("all.c", "needs 2 ranks, this trial has 1")


def test_only_and_skip_patterns() -> None:
    plan = make_plan(config(), CHECKS, NodeGpus(2), only=["all.*", "host.a"], skip=["all.d"])
    assert [job.checks for job in plan.jobs] == [("host.a",), ("all.c",)]
    assert plan.excluded_checks == {"gpu.b": "--only", "all.d": "--skip"}


def test_pattern_without_match_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"no check of this trial matches 'host\.b'; did you mean 'host\.a'"):
        make_plan(config(), CHECKS, NodeGpus(2), only=["host.b"])


def test_done_checks_are_not_planned() -> None:
    plan = make_plan(config(), CHECKS, NodeGpus(2), done=["host.a", "all.c"])
    assert [job.checks for job in plan.jobs] == [("gpu.b", "all.d")]


def test_retry_job_has_the_same_placement() -> None:
    first = make_plan(config(nodes=2), CHECKS, NodeGpus(4))
    (job,) = retry_jobs(first.jobs, {"all.c": "slow", "gpu.b": "slow"}, startup_s=180, number=1)
    assert (job.name, job.checks, job.retry) == ("ranks-retry", ("gpu.b", "all.c"), 1)
    assert (job.limits, job.limit_s) == ({"gpu.b": 10, "all.c": 20}, 180 + 10 + 20)
    changed = {"name", "checks", "limits", "limit_s", "retry"}
    assert job.model_dump(exclude=changed) == first.jobs[1].model_dump(exclude=changed)
    assert list(retry_jobs(first.jobs, {}, 180, 1)) == []


@pytest.mark.parametrize(("options", "expected"), [({}, "week47"), ({"reservation": "other"}, "other")])
def test_reservation_is_the_default_option(options: dict[str, JsonValue], expected: str) -> None:
    with_reservation = replace(make_check("host.a", Scope.NODE), options=ReservationOptions)
    trial = config().model_copy(
        update={"slurm": Slurm(reservation="week47"), "checks": {"host.a": CheckSettings(options=options)}}
    )
    (job,) = make_plan(trial, {"host.a": with_reservation}, NodeGpus(0)).jobs
    assert job.options == {"host.a": {"reservation": expected}}
    (job,) = make_plan(
        trial.model_copy(update={"slurm": Slurm()}), {"host.a": make_check("host.a", Scope.NODE)}, NodeGpus(0)
    ).jobs
    assert job.options == {"host.a": options}
