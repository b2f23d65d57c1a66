from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
from pydantic import JsonValue

from seatrial import __version__
from seatrial.checks import catalog
from seatrial.checks.check import Check, Context, Needs, Options
from seatrial.checks.declare import Answer
from seatrial.config.kubernetes import Kubernetes, PodOverlay
from seatrial.config.schema import CheckSettings, Cluster, Config, Slurm
from seatrial.model import TIME_LIMIT, Job, Phase, Preflight, Scope, UsageError
from seatrial.pipeline import durations as durations_module
from seatrial.pipeline.durations import TypicalSeconds
from seatrial.pipeline.plan import NodeGpus, jobs_as_run, make_plan, retry_jobs
from seatrial.report.plan_text import plan_lines


def never(context: Context, options: Options) -> Iterator[Answer]:
    raise AssertionError("planning measures nothing")


def make_check(name: str, scope: Scope, needs: Needs | None = None, limit_s: float = 10) -> Check:
    return Check(
        name=name,
        title=name,
        phase=Phase.ENVIRONMENT,
        scope=scope,
        declared=(),
        measure=never,
        limit_s=limit_s,
        needs=needs or Needs(),
    )


class PlacementOptions(Options):
    """Some of the options that select the nodes of Slurm jobs."""

    partition: str | None = None
    nodelist: str | None = None


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


def test_plan_for_the_nodes_that_are_there() -> None:
    jobs = make_plan(config(nodes=4, gpus=2), CHECKS, NodeGpus(2), nodes=3).jobs
    assert {(job.nodes, job.expected_nodes) for job in jobs} == {(3, 3)}


def test_checks_that_ran_on_fewer_nodes_are_in_a_job_of_their_own() -> None:
    planned = make_plan(config(nodes=4), CHECKS, NodeGpus(2)).jobs
    smaller = planned[1].model_copy(update={"name": "ranks-on3", "nodes": 3, "checks": ("all.c", "all.d")})
    second_attempt = smaller.model_copy(update={"checks": ("all.d",)})
    retry = planned[1].model_copy(update={"name": "ranks-retry", "retry": 1})
    jobs = jobs_as_run(planned, [*planned, smaller, second_attempt, retry])
    assert [(job.name, job.nodes, job.checks) for job in jobs] == [
        ("nodes", 4, ("host.a",)),
        ("ranks", 4, ("gpu.b",)),
        ("ranks-on3", 3, ("all.c", "all.d")),
    ]
    assert jobs_as_run(jobs, [*planned, smaller]) == jobs
    smallest = smaller.model_copy(update={"name": "ranks-on3-on2", "nodes": 2, "checks": ("all.d",)})
    assert [(job.nodes, job.checks) for job in jobs_as_run(planned, [*planned, smaller, smallest])[2:]] == [
        (3, ("all.c",)),
        (2, ("all.d",)),
    ]


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


# a: 11 s, b: 12 s, c: 24 s, d: of unknown duration, counted with its limit of 10 s; start of the jobs: 1 s and 2 s
DURATIONS = TypicalSeconds.model_validate(
    {
        "jobs": {"nodes": 1, "ranks": 2, "control": 3, "child_tasks": 4},
        "checks": {"host.a": {"seconds": 11}, "gpu.b": {"per": {"gpu": 3}}, "all.c": {"seconds": 24}},
    }
)


@pytest.fixture
def durations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations_module, "typical_seconds", lambda: DURATIONS)


def test_jobs_have_typical_durations(durations: None) -> None:
    nodes, ranks = make_plan(config(nodes=2), CHECKS, NodeGpus(4)).jobs
    assert (nodes.typical, nodes.start_s) == ({"host.a": 11}, 1)
    assert (ranks.typical, ranks.start_s) == ({"gpu.b": 12, "all.c": 24}, 2)
    assert ranks.expected_s == 2 + 12 + 24 + 10


@pytest.mark.parametrize(
    ("time_limit_s", "left_out"),
    [
        (60, []),
        (59.9, ["all.d"]),
        (50, ["all.d"]),
        (49, ["all.d", "all.c"]),
        (26, ["all.d", "all.c"]),
        (25, ["all.d", "all.c", "gpu.b"]),
        (12, ["all.d", "all.c", "gpu.b"]),
    ],
)
def test_time_limit_leaves_out_the_last_checks(durations: None, time_limit_s: float, left_out: list[str]) -> None:
    plan = make_plan(config(nodes=2), CHECKS, NodeGpus(4), time_limit_s=time_limit_s)
    assert plan.excluded_checks == dict.fromkeys(left_out, TIME_LIMIT)
    assert {name for job in plan.jobs for name in job.checks} == CHECKS.keys() - set(left_out)
    resumed = make_plan(config(nodes=2), CHECKS, NodeGpus(4), time_limit_s=time_limit_s, done=["host.a"])
    assert resumed.excluded_checks == plan.excluded_checks, "--resume measures the rest of the same plan"


def test_time_limit_leaves_out_checks_that_are_not_required_first(durations: None) -> None:
    optional = config(nodes=2)
    optional.checks["host.a"] = CheckSettings(required=False)
    plan = make_plan(optional, CHECKS, NodeGpus(4), time_limit_s=59)
    assert plan.excluded_checks == {"host.a": TIME_LIMIT}


@pytest.mark.parametrize("time_limit_s", [0, 11.9, float("nan")])
def test_time_limit_too_short_for_any_check_names_the_shortest(durations: None, time_limit_s: float) -> None:
    with pytest.raises(UsageError, match=r"shortest useful limit is 0\.2 minutes"):
        make_plan(config(nodes=2), CHECKS, NodeGpus(4), time_limit_s=time_limit_s)
    assert make_plan(config(nodes=2), CHECKS, NodeGpus(4), time_limit_s=0.2 * 60).jobs


def slurm_config(**slurm: JsonValue) -> Config:
    """Return a trial whose four checks may take 1000 s each and are of unknown duration."""
    checks = {name: CheckSettings(limit_s=1000) for name in CHECKS}
    return config(nodes=2, gpus=4).model_copy(update={"slurm": Slurm.model_validate(slurm), "checks": checks})


def test_a_job_longer_than_the_partition_allows_is_split() -> None:
    whole = make_plan(slurm_config(), CHECKS, NodeGpus(4), max_job_s=180 + 3000)
    assert [(job.name, job.checks) for job in whole.jobs][1:] == [("ranks", ("gpu.b", "all.c", "all.d"))]
    parts = make_plan(slurm_config(), CHECKS, NodeGpus(4), max_job_s=180 + 2000).jobs
    assert [(job.name, job.checks) for job in parts] == [
        ("nodes", ("host.a",)),
        ("ranks", ("gpu.b", "all.c")),
        ("ranks-2", ("all.d",)),
    ]
    assert [job.requested_s for job in parts] == [1180, 2180, 1180]
    assert [job.limit_s for job in parts] == [1180, 2180, 1180]


def test_a_check_longer_than_the_partition_allows_is_refused_before_submission() -> None:
    with pytest.raises(UsageError, match=r"host\.a requests 20 minutes, but partition short allows 15 minutes"):
        make_plan(slurm_config(partition="short"), CHECKS, NodeGpus(4), max_job_s=900)
    with pytest.raises(UsageError, match=r"slurm\.time_min is 16 minutes, but .* allows 15 minutes"):
        make_plan(slurm_config(time_min=16), CHECKS, NodeGpus(4), max_job_s=900)
    assert len(make_plan(slurm_config(time_min=15), CHECKS, NodeGpus(4), max_job_s=900).jobs) == 2


def test_retry_job_has_the_same_placement() -> None:
    first = make_plan(config(nodes=2), CHECKS, NodeGpus(4))
    (job,) = retry_jobs(first.jobs, {"all.c": "slow", "gpu.b": "slow"}, number=1)
    assert (job.name, job.checks, job.retry) == ("ranks-retry", ("gpu.b", "all.c"), 1)
    assert (job.limits, job.limit_s) == ({"gpu.b": 10, "all.c": 20}, 180 + 10 + 20)
    changed = {"name", "checks", "limits", "limit_s", "typical", "retry"}
    assert job.model_dump(exclude=changed) == first.jobs[1].model_dump(exclude=changed)
    assert list(retry_jobs(first.jobs, {}, 1)) == []


@pytest.mark.parametrize("launcher", ["kubernetes", "local"])
def test_checks_of_kubernetes_get_the_settings_of_the_launcher(launcher: Literal["kubernetes", "local"]) -> None:
    """Their other options remain; with another launcher they get no settings and skip themselves."""
    settings = Kubernetes(
        image="registry.example/seatrial:1", namespace="team", overlay=PodOverlay(resources={"rdma/ib": "1"})
    )
    trial = Config(
        name="t",
        launcher=launcher,
        cluster=Cluster(nodes=2, gpus_per_node=8),
        kubernetes=settings,
        checks={"kubernetes.pods": CheckSettings(options={"wait_s": 60})},
    )
    (job,) = make_plan(trial, catalog(), NodeGpus(8)).jobs
    options = catalog()["kubernetes.pods"].options.model_validate(job.options["kubernetes.pods"])
    assert options.model_dump()["wait_s"] == 60
    assert options.model_dump()["kubernetes"] == (settings.model_dump() if launcher == "kubernetes" else None)


@pytest.mark.parametrize(
    ("kubernetes", "options", "paths"),
    [
        ({}, {}, None),
        ({"claim": {"name": "results", "path": "/claim"}}, {}, ["/claim"]),
        ({"claim": {"name": "results"}}, {"paths": ["/data"]}, ["/data"]),
        ({}, {"paths": ["/data"]}, ["/data"]),
    ],
)
def test_check_of_shared_folders_needs_a_claim_or_paths_on_kubernetes(
    kubernetes: dict[str, JsonValue], options: dict[str, JsonValue], paths: list[str] | None
) -> None:
    """Each pod has its own run directory, on the claim too; ``paths``: None if the check does not apply."""
    trial = Config.model_validate(
        {
            "name": "t",
            "launcher": "kubernetes",
            "cluster": {"nodes": 2, "gpus_per_node": 8},
            "kubernetes": {"image": "registry.example/seatrial:1", **kubernetes},
            "checks": {"filesystem.shared": {"options": options}, "nodes.reachable": {}, "train.checkpoint": {}},
        }
    )
    plan = make_plan(trial, catalog(), NodeGpus(8))
    assert [job.options.get("filesystem.shared", {}).get("paths") for job in plan.jobs] == [paths]
    skipped = {each.check for each in plan.not_run if "kubernetes.claim" in (each.skipped or "")}
    without_paths = set() if "claim" in kubernetes else {"train.checkpoint"}
    assert skipped == without_paths | (set() if paths else {"filesystem.shared"})
    assert "paths" not in plan.jobs[0].options.get("train.checkpoint", {})
    one_node = trial.model_copy(update={"cluster": Cluster(nodes=1, gpus_per_node=8)})
    assert make_plan(one_node, catalog(), NodeGpus(8)).not_run == ()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"partition": "gpu", "nodelist": "n[1-3]"}),
        ({"partition": "cpu", "nodelist": None}, {"partition": "cpu", "nodelist": None}),
    ],
)
def test_partition_and_nodes_of_the_trial_are_default_options(
    options: dict[str, JsonValue], expected: dict[str, JsonValue]
) -> None:
    check = replace(make_check("host.a", Scope.NODE), options=PlacementOptions)
    placement = Slurm(partition="gpu", nodelist="n[1-3]", account="ops")  # the check has no option account
    trial = config().model_copy(update={"slurm": placement, "checks": {"host.a": CheckSettings(options=options)}})
    (job,) = make_plan(trial, {"host.a": check}, NodeGpus(0)).jobs
    assert job.options == {"host.a": expected}
    (job,) = make_plan(
        trial.model_copy(update={"slurm": Slurm()}), {"host.a": make_check("host.a", Scope.NODE)}, NodeGpus(0)
    ).jobs
    assert job.options == {"host.a": options}


def tcp_plan(rate: str | None, expect: dict[str, str] | None = None, **options: JsonValue) -> Job:
    settings = Config.model_validate(
        {
            "name": "t",
            "cluster": {"nodes": 4, "gpus_per_node": 8, "fabric": {"kind": "tcp", "rate": rate}},
            "checks": {
                "collectives.all_reduce": {"options": options, "expect": expect or {}},
                "train.fsdp": {},
                "device.gemm": {},
            },
        }
    )
    (job,) = make_plan(settings, catalog(), NodeGpus(8)).jobs
    return job


def test_a_slow_tcp_network_extends_duration_and_time_limits() -> None:
    fast, slow = tcp_plan("400 Gb/s"), tcp_plan("10 Gb/s")
    assert slow.network_gbps == 10
    assert slow.typical["train.fsdp"] > 10 * fast.typical["train.fsdp"]
    assert slow.typical["device.gemm"] == fast.typical["device.gemm"]
    assert slow.limits["train.fsdp"] > 4 * slow.typical["train.fsdp"], "four times as slow, and no time limit ends it"
    assert slow.requested_s >= sum(4 * slow.typical[name] for name in ("collectives.all_reduce", "train.fsdp"))
    training_limit_s = slow.options["train.fsdp"]["limit_s"]
    assert isinstance(training_limit_s, float)
    assert training_limit_s > slow.typical["train.fsdp"]


def test_sizes_that_take_too_long_are_left_out_and_named_in_the_plan() -> None:
    job = tcp_plan("10 Gb/s")
    assert job.left_out.keys() == {"collectives.all_reduce"}
    assert job.left_out["collectives.all_reduce"].startswith("8 GiB takes about 111 s")
    (line,) = (line for line in plan_lines([job], {}, catalog()) if "judged at a smaller size" in line)
    assert "8 GiB takes about 111 s" in line
    assert not tcp_plan("100 Gb/s").left_out
    assert not job.with_checks(("device.gemm",)).left_out
    assert job.on_fewer_nodes(2).left_out == job.left_out
    assert not job.on_fewer_nodes(1).left_out, "no size is left out on one node"


def test_sizes_with_a_threshold_or_set_by_the_trial_are_not_left_out() -> None:
    asked = tcp_plan("10 Gb/s", sizes=["1GiB", "8GiB"])
    assert not asked.left_out
    judged = tcp_plan("10 Gb/s", expect={"busbw.8GiB": "> 0.5 GB/s"})
    assert not judged.left_out
    sizes = judged.options["collectives.all_reduce"]["sizes"]
    assert isinstance(sizes, list)
    assert 2**33 in sizes
    assert judged.typical["collectives.all_reduce"] > tcp_plan("10 Gb/s").typical["collectives.all_reduce"] + 100


def test_over_tcp_of_unknown_rate_checks_count_with_their_time_limit() -> None:
    job = tcp_plan(None)
    assert job.network_gbps is None
    assert not job.left_out
    assert job.typical.keys() == {"device.gemm"}
    assert job.expected_s > job.limits["collectives.all_reduce"] + job.limits["train.fsdp"]
    assert job.requested_s > job.limits["collectives.all_reduce"] + job.limits["train.fsdp"]
