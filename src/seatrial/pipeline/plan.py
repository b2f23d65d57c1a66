"""Config and what was discovered → jobs. Checks that share a placement share one process start."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.model import CLUSTER, Job, Measurement, Scope, UsageError

Placement = Literal["control", "nodes", "ranks"]

# On a machine without a GPU two processes talk over gloo, so that the whole path is exercised everywhere.
RANKS_WITHOUT_GPU = 2


@dataclass(frozen=True)
class Devices:
    """What the planner must know of a node: how many GPUs can be used, and why none can where some should."""

    usable_gpus: int
    trouble: str | None = None  # set when GPUs are there (or promised) and none can be used
    promised: int | None = None  # by a scheduler, where no person said how many


@dataclass(frozen=True)
class Plan:
    """The jobs, and a measurement for every check that needs none: it cannot apply, or cannot be made, and why."""

    jobs: tuple[Job, ...]
    settled: tuple[Measurement, ...]
    left_out: dict[str, str]


def make_plan(
    config: Config,
    checks: Mapping[str, Check],
    devices: Devices,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    done: Iterable[str] = (),
) -> Plan:
    """Pack the trial's checks into jobs. ``done`` checks are measured already (--resume). Raises UsageError."""
    left_out = _left_out(list(config.checks), list(only), list(skip))
    wanted = [checks[name] for name in config.checks if name not in left_out and name not in set(done)]
    settled = {check.name: reason for check in wanted if (reason := _reason_against(check, config, devices))}
    runnable = [check for check in wanted if check.name not in settled]
    placements: tuple[Placement, ...] = ("control", "nodes", "ranks")
    jobs = [_job(placement, runnable, config, devices) for placement in placements]
    return Plan(tuple(job for job in jobs if job.checks), tuple(settled.values()), left_out)


def retry_jobs(jobs: Iterable[Job], checks: Container[str], startup_s: float) -> Iterator[Job]:
    """The jobs that measure ``checks`` a second time, each where the first did."""
    for job in jobs:
        if names := tuple(name for name in job.checks if name in checks):
            limits = {name: job.limits[name] for name in names}
            more = {"checks": names, "limits": limits, "limit_s": startup_s + sum(limits.values()), "retry": True}
            yield job.model_copy(update={"name": f"{job.name}-retry", **more})


def _left_out(names: list[str], only: list[str], skip: list[str]) -> dict[str, str]:
    for pattern in [*only, *skip]:
        if not fnmatch.filter(names, pattern):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"no check of this trial matches {pattern!r}{hint} (it has {', '.join(names)})")
    out = {name: "--only" for name in names if only and not any(fnmatch.fnmatch(name, p) for p in only)}
    return out | {name: "--skip" for name in names if any(fnmatch.fnmatch(name, p) for p in skip)}


def _reason_against(check: Check, config: Config, devices: Devices) -> Measurement | None:
    """Why a check is not run: SKIP where it cannot apply, ERROR where what it needs should be there and is not."""
    if check.scope in (Scope.CONTROL, Scope.NODE):
        return None
    if devices.trouble:
        return Measurement(check=check.name, subject=CLUSTER, error=devices.trouble)
    if check.needs.gpus and not devices.usable_gpus:
        return Measurement(check=check.name, subject=CLUSTER, skipped="no GPU on this machine, and none promised")
    world_size = config.cluster.nodes * _ranks_per_node(config, devices)
    if world_size < check.needs.min_ranks:
        reason = f"needs {check.needs.min_ranks} ranks, this placement has {world_size}"
        return Measurement(check=check.name, subject=CLUSTER, skipped=reason)
    return None


def _promised(config: Config, devices: Devices) -> int | None:
    return devices.promised if config.cluster.gpus_per_node is None else config.cluster.gpus_per_node


def _ranks_per_node(config: Config, devices: Devices) -> int:
    return config.cluster.gpus_per_node or devices.usable_gpus or RANKS_WITHOUT_GPU


_PLACEMENTS: dict[Scope, Placement] = {
    Scope.CONTROL: "control",
    Scope.NODE: "nodes",
    Scope.GPU: "ranks",
    Scope.CLUSTER: "ranks",
}


def _options(check: Check, config: Config) -> dict[str, JsonValue]:
    """Those of the trial. Which reservation its jobs name it has said once, for all."""
    named = {"reservation": config.slurm.reservation} if "reservation" in check.options.model_fields else {}
    return {**named, **config.checks[check.name].options}


def _job(placement: Placement, runnable: list[Check], config: Config, devices: Devices) -> Job:
    checks = [check for check in runnable if _PLACEMENTS[check.scope] == placement]
    limits = {check.name: config.checks[check.name].limit_s or check.limit_s for check in checks}
    return Job(
        name=placement,
        placement=placement,
        device="cuda" if devices.usable_gpus else "cpu",
        nodes=1 if placement == "control" else config.cluster.nodes,
        ranks_per_node=_ranks_per_node(config, devices) if placement == "ranks" else 1,
        checks=tuple(check.name for check in checks),
        options={check.name: _options(check, config) for check in checks},
        expected_gpus=_promised(config, devices),
        expected_nodes=config.cluster.nodes,
        limits=limits,
        limit_s=config.limits.startup_s + sum(limits.values()),
        env=config.env,
        telemetry_hz=config.telemetry.hz if config.telemetry.enabled and placement != "control" else 0,
    )
