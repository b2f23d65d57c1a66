"""Plans the jobs of a trial from its config and the GPUs of a node: one job per placement of checks.

Placements: ``control``, one process on this host; ``nodes``, one per node; ``ranks``, one per GPU. A job that requests
more time than a partition of Slurm allows is split.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue, ValidationError

from seatrial import __version__
from seatrial.checks.check import Check
from seatrial.config.expect import matching
from seatrial.config.schema import Config, JobPlacement, duration_setting
from seatrial.hardware.network_time import SLOW_FACTOR, TcpNetwork
from seatrial.model import (
    CLUSTER,
    TIME_LIMIT,
    Job,
    Measurement,
    Phase,
    Preflight,
    Scope,
    Topology,
    UsageError,
    size_label,
    validation_message,
)
from seatrial.pipeline.durations import Network, configured_network, network_duration, start_duration, typical_duration

Placement = Literal["control", "nodes", "ranks"]

_PLACEMENTS: dict[Scope, Placement] = {
    Scope.CONTROL: "control",
    Scope.NODE: "nodes",
    Scope.GPU: "ranks",
    Scope.CLUSTER: "ranks",
}

# A node without a GPU gets two ranks, which communicate over gloo, so that CLUSTER checks run there too
RANKS_WITHOUT_GPU = 2

LOCALIZATION_JOB = "localization"  # name of the job that searches for slow nodes after the checks of the trial


@dataclass(frozen=True)
class NodeGpus:
    """The number of GPUs per node, from this host, the scheduler or the config."""

    usable_gpus: int
    gpu_error: str | None = None  # why installed or expected GPUs cannot be used
    expected_gpus: int | None = None  # for jobs on other machines: cluster.gpus_per_node, or the scheduler's number


@dataclass(frozen=True)
class Plan:
    """The jobs of a trial.

    ``not_run``: a SKIP or ERROR measurement for each check that no job can run. ``excluded_checks``: check name → the
    option that excluded it: ``--only``, ``--skip`` or ``--time-limit``.
    """

    jobs: tuple[Job, ...]
    not_run: tuple[Measurement, ...]
    excluded_checks: dict[str, str]

    @property
    def checks_not_run(self) -> list[str]:
        """The checks that no job can run."""
        return [measurement.check for measurement in self.not_run]


def make_plan(
    config: Config,
    checks: Mapping[str, Check],
    node_gpus: NodeGpus,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    done: Iterable[str] = (),
    topology: Topology | None = None,
    nodes: int | None = None,
    time_limit_s: float | None = None,
    max_job_s: float | None = None,
) -> Plan:
    """Return the plan of the trial's checks, without the checks in ``done`` (--resume).

    ``only``, ``skip``: names or patterns of checks. ``nodes``: the number of available nodes, by default all of the
    trial. ``time_limit_s``: checks are excluded one by one until the typical duration of the others fits. The last
    optional check of the trial is excluded first; the required checks follow, also the last one first. ``max_job_s``:
    the longest time that Slurm's partition allows a job. Raises UsageError if a pattern matches no check, if
    ``time_limit_s`` is too short for any check, or if a check requests more than ``max_job_s``.
    """
    nodes, done = nodes or config.cluster.nodes, set(done)
    if config.budget is not None and not any("budget_s" in checks[name].options.model_fields for name in config.checks):
        raise UsageError(f"--budget: no check of the trial {config.name} takes a budget: use burn-in")
    excluded = _excluded_checks(list(config.checks), list(only), list(skip))
    selected = [checks[name] for name in config.checks if name not in excluded]
    skip_or_error = {check.name: _skip_or_error(check, config, node_gpus, nodes) for check in selected}
    not_run = {name: measurement for name, measurement in skip_or_error.items() if measurement}
    runnable = [check for check in selected if check.name not in not_run]
    if time_limit_s is not None:
        excluded |= dict.fromkeys(_checks_over_time_limit(runnable, config, node_gpus, nodes, time_limit_s), TIME_LIMIT)
    remaining = [check for check in runnable if check.name not in {*excluded, *done}]
    whole_jobs = _jobs_by_placement(remaining, config, node_gpus, nodes)
    jobs = [part for job in whole_jobs for part in _split_job(job, config, max_job_s)]
    control = [job for job in jobs if job.placement == "control"]
    preflight, on_nodes = _preflight(remaining, jobs), []
    for job in jobs:
        if job.placement != "control":
            update = {"preflight": preflight, "topology": topology if job.placement == "ranks" else None}
            on_nodes.append(job.model_copy(update=update))
    not_run_now = tuple(measurement for name, measurement in not_run.items() if name not in done)
    # the first job on nodes has the preflight
    return Plan((*on_nodes[:1], *control, *on_nodes[1:]), not_run_now, excluded)


def _preflight(runnable: Iterable[Check], jobs: Iterable[Job]) -> Preflight:
    """Return what every node must have for all checks of the plan, not only for those of one job."""
    rank_jobs = [job for job in jobs if job.placement == "ranks"]
    return Preflight(
        version=__version__,
        torch=bool(rank_jobs),
        gpus=max((job.ranks_per_node for job in rank_jobs if job.device == "cuda"), default=0),
        hf_cache=any(check.phase in (Phase.SINGLE_GPU, Phase.DISTRIBUTED) for check in runnable),
    )


def jobs_as_run(planned: Sequence[Job], started: Sequence[Job]) -> tuple[Job, ...]:
    """Return the planned jobs, with separate jobs for the checks that ran on fewer nodes after the loss of a node."""
    planned_nodes = {check: job.nodes for job in planned for check in job.checks}
    smaller_jobs: dict[str, Job] = {}
    for job in started:
        if not job.retry and any(job.nodes < planned_nodes.get(name, 0) for name in job.checks):
            # keep the first attempt of this job: later attempts have only the remaining checks
            smaller_jobs.setdefault(job.name, job)
    candidates = (*planned, *smaller_jobs.values())
    # check → name of the last of these jobs that has the check
    job_name_of_check = {check: job.name for job in candidates for check in job.checks}
    jobs = [
        job.model_copy(update={"checks": tuple(check for check in job.checks if job_name_of_check[check] == job.name)})
        for job in candidates
    ]
    return tuple(job for job in jobs if job.checks)


def retry_jobs(jobs: Iterable[Job], checks: Container[str], number: int) -> Iterator[Job]:
    """Yield the jobs of retry ``number`` of ``checks``, with the same placement."""
    for job in jobs:
        if names := tuple(name for name in job.checks if name in checks):
            retry = job.with_checks(names).model_copy(update={"retry": number})
            yield retry.model_copy(update={"name": f"{job.name}{retry.retry_suffix}"})


def localization_job(
    config: Config, checks: Mapping[str, Check], jobs: Iterable[Job], time_limit_s: float | None = None
) -> Job | None:
    """Return the job that searches for slow nodes, on the nodes of the last ``ranks`` job in ``jobs``.

    None if the config turns the search off, the trial itself has the check, the nodes are too few, or the job does not
    fit into ``time_limit_s``. On two nodes only rails and directions can be compared. Two nodes without GPUs are too
    few: they have one rail, and over TCP the rates of the two directions differ too much even between healthy nodes.
    """
    jobs = list(jobs)
    check = next((check for check in checks.values() if check.localizes), None)
    last_job = next((job for job in reversed(jobs) if job.placement == "ranks"), None)
    if not config.localize or check is None or last_job is None or check.name in config.checks:
        return None
    if last_job.nodes < (2 if last_job.device == "cuda" else 3):
        return None
    network = configured_network(config, last_job.nodes, last_job.ranks_per_node, on_gpus=last_job.device == "cuda")
    typical = typical_duration(check, {}, config, last_job.ranks_per_node, network)
    limit_s = check.limit_s + SLOW_FACTOR * network_duration(check, {}, network)
    job = last_job.model_copy(
        update={
            "name": LOCALIZATION_JOB,
            "checks": (check.name,),
            "options": {check.name: {}},
            "limits": {check.name: limit_s},
            "limit_s": config.limits.startup_s + limit_s,
            "typical": {} if typical is None else {check.name: round(typical, 1)},
            "left_out": {},
            "telemetry_hz": 0,
        }
    )
    too_long = time_limit_s is not None and sum(each.expected_s for each in (*jobs, job)) > time_limit_s
    return None if too_long else job


def _checks_over_time_limit(
    runnable: Sequence[Check], config: Config, node_gpus: NodeGpus, nodes: int, time_limit_s: float
) -> Iterator[str]:
    """Yield the checks that do not fit into ``time_limit_s``. Raises UsageError if none fits."""
    kept = sorted(runnable, key=lambda check: not config.checks[check.name].required)  # required checks first
    while kept:
        expected_s = sum(job.expected_s for job in _jobs_by_placement(kept, config, node_gpus, nodes))
        if expected_s <= time_limit_s:
            return
        yield kept.pop().name
        if not kept:
            raise UsageError(
                f"{TIME_LIMIT} {time_limit_s / 60:g} minutes is too short for any check of this trial; the shortest "
                f"useful limit is {math.ceil(10 * expected_s / 60) / 10:g} minutes"
            )


def _jobs_by_placement(checks: Sequence[Check], config: Config, node_gpus: NodeGpus, nodes: int) -> list[Job]:
    placements: tuple[Placement, ...] = ("control", "nodes", "ranks")
    jobs = [_job_of_placement(placement, checks, config, node_gpus, nodes) for placement in placements]
    return [job for job in jobs if job.checks]


def _split_job(job: Job, config: Config, max_job_s: float | None) -> Iterator[Job]:
    """Yield ``job``, or parts of it that request at most ``max_job_s``. Raises UsageError if a check requests more."""
    if max_job_s is None or job.placement == "control":
        yield job
        return
    partition = f"partition {config.slurm.partition}" if config.slurm.partition else "Slurm's default partition"
    allowed = f"{partition} allows {max_job_s / 60:g} minutes"
    if (minutes := config.slurm.time_min) is not None:
        if 60 * minutes > max_job_s:
            raise UsageError(
                f"slurm.time_min is {minutes} minutes, but {allowed}: choose another partition (slurm.partition)"
            )
        yield job
        return
    part_number, remaining = 1, job.checks
    while remaining:
        count = len(remaining)
        while job.with_checks(remaining[:count]).requested_s > max_job_s:
            count -= 1
            if not count:
                minutes = math.ceil(job.with_checks(remaining[:1]).requested_s / 60)
                raise UsageError(
                    f"{remaining[0]} requests {minutes} minutes, but {allowed}: choose another partition "
                    f"(slurm.partition), --skip {remaining[0]}, or request less with slurm.time_min"
                )
        part = job.with_checks(remaining[:count])
        yield part if part_number == 1 else part.model_copy(update={"name": f"{job.name}-{part_number}"})
        part_number, remaining = part_number + 1, remaining[count:]


def _excluded_checks(names: list[str], only: list[str], skip: list[str]) -> dict[str, str]:
    """Return check → the option that excludes it. Raises UsageError if a pattern matches none of ``names``."""
    noun, hint = "check of this trial", f" (checks: {', '.join(names)})"
    selected = matching(only, names, noun, hint) if only else names
    excluded = {name: "--only" for name in names if name not in selected}
    return excluded | dict.fromkeys(matching(skip, names, noun, hint), "--skip")


def _skip_or_error(check: Check, config: Config, node_gpus: NodeGpus, nodes: int) -> Measurement | None:
    """Return a SKIP measurement if the check does not apply, an ERROR if GPUs cannot be used, else None."""
    if check.scope in (Scope.CONTROL, Scope.NODE):
        return None
    if node_gpus.gpu_error:
        return Measurement(check=check.name, subject=CLUSTER, error=node_gpus.gpu_error)
    world_size, reason = nodes * _ranks_per_node(config, node_gpus), ""
    if check.needs.gpus and not node_gpus.usable_gpus:
        is_zero = config.cluster.gpus_per_node == 0
        found = "cluster.gpus_per_node is 0" if is_zero else "none found, and cluster.gpus_per_node is not set"
        reason = f"needs GPUs: {found}"
    elif world_size < check.needs.min_ranks:
        reason = f"needs {check.needs.min_ranks} ranks, this trial has {world_size}"
    elif check.needs.shared_folder and not config.has_shared_folder(check.name):
        reason = "pods share no folder: set kubernetes.claim"
    return Measurement(check=check.name, subject=CLUSTER, skipped=reason) if reason else None


def _ranks_per_node(config: Config, node_gpus: NodeGpus) -> int:
    return config.cluster.gpus_per_node or node_gpus.usable_gpus or RANKS_WITHOUT_GPU


def _options(check: Check, config: Config, network: Network) -> dict[str, JsonValue]:
    """Return the options of a check: those of the trial, and defaults that depend on the config and the network.

    A default applies if the check has the option, and the trial does not set it. ``partition`` and the other fields of
    JobPlacement: the settings slurm.*. ``kubernetes``: the settings kubernetes.*, only with this launcher. ``paths`` of
    a check that needs a shared folder: the claim of Kubernetes, where each pod has its own run directory.
    ``limit_s``: longer on a slow network.
    ``sizes``, on a TCP network: the sizes that are timed by default, and each size that the network is too slow for but
    that has a threshold in the trial.
    """
    defaults: dict[str, JsonValue] = {}
    fields = check.options.model_fields
    settings = config.checks[check.name]
    if "limit_s" in fields and (slow_s := network_duration(check, settings.options, network)):
        defaults["limit_s"] = fields["limit_s"].default + SLOW_FACTOR * slow_s
    if check.timed_sizes and isinstance(network, TcpNetwork):
        options = check.options.model_validate(settings.options)
        sizes_with_threshold = {metric.rpartition(".")[2] for metric in settings.expect}  # such as 8GiB
        too_slow_sizes = check.omitted_sizes(options, network) if check.omitted_sizes else ()
        if added_sizes := [size for size in too_slow_sizes if size_label(size) in sizes_with_threshold]:
            defaults["sizes"] = [*check.timed_sizes(options, network).get("back_to_back", ()), *added_sizes]
    if config.budget is not None and "budget_s" in fields:
        defaults["budget_s"] = config.budget
    placement = config.slurm.model_dump(include={*JobPlacement.model_fields}, exclude_none=True)
    defaults |= {name: value for name, value in placement.items() if name in fields}
    if "kubernetes" in fields and config.launcher == "kubernetes":
        defaults["kubernetes"] = config.kubernetes.model_dump(mode="json", exclude_defaults=True)
    claim = config.kubernetes.claim if config.launcher == "kubernetes" else None
    if claim and check.needs.shared_folder and "paths" in fields:
        defaults["paths"] = [claim.path]
    return {**defaults, **settings.options}


def _budget_s(check: Check, options: Mapping[str, JsonValue]) -> float:
    """Return the option budget_s, 0 without one. Raises UsageError for a budget that the check refuses."""
    if "budget_s" not in check.options.model_fields:
        return 0.0
    try:
        validated = check.options.model_validate(options)
    except ValidationError as error:
        given = duration_setting(float(str(options["budget_s"])))
        raise UsageError(f"--budget {given}: {check.name}: {validation_message(error.errors()[0])}") from error
    return float(validated.model_dump()["budget_s"])


def _job_of_placement(
    placement: Placement, runnable: Sequence[Check], config: Config, node_gpus: NodeGpus, nodes: int
) -> Job:
    checks = [check for check in runnable if _PLACEMENTS[check.scope] == placement]
    configured_gpus = config.cluster.gpus_per_node
    ranks_per_node = _ranks_per_node(config, node_gpus)
    network = configured_network(
        config, nodes, ranks_per_node, on_gpus=placement == "ranks" and bool(node_gpus.usable_gpus)
    )
    options = {check.name: _options(check, config, network) for check in checks}
    typical = {
        check.name: typical_duration(check, options[check.name], config, ranks_per_node, network) for check in checks
    }
    limits = {
        check.name: config.checks[check.name].limit_s
        or check.limit_s
        + SLOW_FACTOR * network_duration(check, options[check.name], network)
        + _budget_s(check, options[check.name])
        for check in checks
    }
    return Job(
        name=placement,
        placement=placement,
        device="cuda" if node_gpus.usable_gpus else "cpu",
        nodes=1 if placement == "control" else nodes,
        ranks_per_node=ranks_per_node if placement == "ranks" else 1,
        checks=tuple(check.name for check in checks),
        options=options,
        expected_gpus=node_gpus.expected_gpus if configured_gpus is None else configured_gpus,
        expected_nodes=nodes,
        limits=limits,
        limit_s=config.limits.startup_s + sum(limits.values()),
        typical={name: round(seconds, 1) for name, seconds in typical.items() if seconds is not None},
        start_s=start_duration(placement, checks, on_gpus=bool(node_gpus.usable_gpus)),
        network_gbps=network.gbps if isinstance(network, TcpNetwork) else None,
        left_out=dict(_reasons_to_leave_out_sizes(checks, options, network)),
        env=config.env,
        telemetry_hz=config.telemetry.hz if config.telemetry.enabled and placement != "control" else 0,
    )


def _reasons_to_leave_out_sizes(
    checks: Sequence[Check], options: Mapping[str, Mapping[str, JsonValue]], network: Network
) -> Iterator[tuple[str, str]]:
    """Yield (name of the check, reasons) for each check that omits sizes since the network is too slow for them."""
    if not isinstance(network, TcpNetwork):
        return
    for check in checks:
        if check.omitted_sizes is not None:
            sizes = check.omitted_sizes(check.options.model_validate(options[check.name]), network)
            if reasons := [network.too_slow_reason(check.operation, size) for size in sizes]:
                yield check.name, "; ".join(reasons)
