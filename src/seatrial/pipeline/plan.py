"""Plans the jobs of a trial from its config and the GPUs of a node: one job per placement of checks."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from seatrial import __version__
from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.model import CLUSTER, Job, Measurement, Phase, Preflight, Scope, UsageError

Placement = Literal["control", "nodes", "ranks"]

_PLACEMENTS: dict[Scope, Placement] = {
    Scope.CONTROL: "control",
    Scope.NODE: "nodes",
    Scope.GPU: "ranks",
    Scope.CLUSTER: "ranks",
}

# Without a GPU two processes communicate over gloo, so that CLUSTER checks run there too
RANKS_WITHOUT_GPU = 2


@dataclass(frozen=True)
class NodeGpus:
    """The number of GPUs per node, from this host, the scheduler or the config."""

    usable_gpus: int
    gpu_error: str | None = None  # why installed or expected GPUs cannot be used
    expected_gpus: int | None = None  # from the scheduler, if cluster.gpus_per_node is not set


@dataclass(frozen=True)
class Plan:
    """The jobs of a trial.

    ``not_run``: a SKIP or ERROR measurement for each check that no job can run. ``excluded_checks``: check name -> the
    option that excluded it, ``--only`` or ``--skip``.
    """

    jobs: tuple[Job, ...]
    not_run: tuple[Measurement, ...]
    excluded_checks: dict[str, str]


def make_plan(
    config: Config,
    checks: Mapping[str, Check],
    node_gpus: NodeGpus,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    done: Iterable[str] = (),
) -> Plan:
    """Return the plan of the trial's checks, without those ``done`` (--resume). Raises UsageError."""
    excluded = _excluded_checks(list(config.checks), list(only), list(skip))
    selected = [checks[name] for name in config.checks if name not in excluded and name not in set(done)]
    results = {check.name: _skip_or_error(check, config, node_gpus) for check in selected}
    not_run = {name: measurement for name, measurement in results.items() if measurement}
    runnable = [check for check in selected if check.name not in not_run]
    placements: tuple[Placement, ...] = ("nodes", "ranks", "control")
    jobs = [job for placement in placements if (job := _job(placement, runnable, config, node_gpus)).checks]
    preflight = _preflight(runnable, jobs)
    jobs = [job if job.placement == "control" else job.model_copy(update={"preflight": preflight}) for job in jobs]
    return Plan(_preflight_first(jobs), tuple(not_run.values()), excluded)


def _preflight_first(jobs: list[Job]) -> tuple[Job, ...]:
    """Return the first job on nodes, whose preflight precedes all checks, then the control job, which starts trials."""
    on_nodes = [job for job in jobs if job.placement != "control"]
    control = [job for job in jobs if job.placement == "control"]
    return (*on_nodes[:1], *control, *on_nodes[1:])


def _preflight(runnable: Iterable[Check], jobs: Iterable[Job]) -> Preflight:
    """Return what every node must have for all checks of the plan, not only for those of one job."""
    ranks = [job for job in jobs if job.placement == "ranks"]
    return Preflight(
        version=__version__,
        torch=bool(ranks),
        gpus=max((job.ranks_per_node for job in ranks if job.device == "cuda"), default=0),
        hf_cache=any(check.phase in (Phase.SINGLE_GPU, Phase.DISTRIBUTED) for check in runnable),
    )


def retry_jobs(jobs: Iterable[Job], checks: Container[str], startup_s: float, number: int) -> Iterator[Job]:
    """Yield the jobs of retry ``number`` of ``checks``, with the same placement."""
    for job in jobs:
        if names := tuple(name for name in job.checks if name in checks):
            limits = {name: job.limits[name] for name in names}
            changes = {"checks": names, "limits": limits, "limit_s": startup_s + sum(limits.values()), "retry": number}
            retry = job.model_copy(update=changes)
            yield retry.model_copy(update={"name": f"{job.name}{retry.retry_suffix}"})


def _excluded_checks(names: list[str], only: list[str], skip: list[str]) -> dict[str, str]:
    for pattern in [*only, *skip]:
        if not fnmatch.filter(names, pattern):
            similar = difflib.get_close_matches(pattern, names, n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise UsageError(f"no check of this trial matches {pattern!r}{hint} (checks: {', '.join(names)})")
    excluded = {name: "--only" for name in names if only and not any(fnmatch.fnmatch(name, p) for p in only)}
    return excluded | {name: "--skip" for name in names if any(fnmatch.fnmatch(name, p) for p in skip)}


def _skip_or_error(check: Check, config: Config, node_gpus: NodeGpus) -> Measurement | None:
    """Return a SKIP measurement if the check does not apply, an ERROR if GPUs cannot be used, else None."""
    if check.scope in (Scope.CONTROL, Scope.NODE):
        return None
    if node_gpus.gpu_error:
        return Measurement(check=check.name, subject=CLUSTER, error=node_gpus.gpu_error)
    if check.needs.gpus and not node_gpus.usable_gpus:
        return Measurement(
            check=check.name,
            subject=CLUSTER,
            skipped="needs GPUs: none on this host, and cluster.gpus_per_node is 0 or not set",
        )
    world_size = config.cluster.nodes * _ranks_per_node(config, node_gpus)
    if world_size < check.needs.min_ranks:
        reason = f"needs {check.needs.min_ranks} ranks, this trial has {world_size}"
        return Measurement(check=check.name, subject=CLUSTER, skipped=reason)
    return None


def _ranks_per_node(config: Config, node_gpus: NodeGpus) -> int:
    return config.cluster.gpus_per_node or node_gpus.usable_gpus or RANKS_WITHOUT_GPU


def _options(check: Check, config: Config) -> dict[str, JsonValue]:
    """Return the trial's options of a check; slurm.reservation is the default of its option ``reservation``."""
    defaults = {"reservation": config.slurm.reservation} if "reservation" in check.options.model_fields else {}
    return {**defaults, **config.checks[check.name].options}


def _job(placement: Placement, runnable: list[Check], config: Config, node_gpus: NodeGpus) -> Job:
    checks = [check for check in runnable if _PLACEMENTS[check.scope] == placement]
    expected_gpus = config.cluster.gpus_per_node
    limits = {check.name: config.checks[check.name].limit_s or check.limit_s for check in checks}
    return Job(
        name=placement,
        placement=placement,
        device="cuda" if node_gpus.usable_gpus else "cpu",
        nodes=1 if placement == "control" else config.cluster.nodes,
        ranks_per_node=_ranks_per_node(config, node_gpus) if placement == "ranks" else 1,
        checks=tuple(check.name for check in checks),
        options={check.name: _options(check, config) for check in checks},
        expected_gpus=node_gpus.expected_gpus if expected_gpus is None else expected_gpus,
        expected_nodes=config.cluster.nodes,
        limits=limits,
        limit_s=config.limits.startup_s + sum(limits.values()),
        env=config.env,
        telemetry_hz=config.telemetry.hz if config.telemetry.enabled and placement != "control" else 0,
    )
