"""Runs the checks of the trial ``hook`` on this node up to a deadline, and judges them by their own rules."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial import worker
from seatrial.checks import catalog
from seatrial.checks.check import Check, Context
from seatrial.config.schema import Config
from seatrial.hardware.links import role_facts
from seatrial.judge import judge
from seatrial.model import Measurement, Outcome, Verdict
from seatrial.operate import hook_children as children
from seatrial.operate import node_owners as owners
from seatrial.pipeline.plan import NodeGpus, make_plan
from seatrial.pipeline.planned_jobs import resolve
from seatrial.util import data_files
from seatrial.util.grouping import grouped
from seatrial.util.node_name import node_name
from seatrial.util.text import printable

TRIAL = "hook"  # data/trials/hook.yaml


@dataclass(frozen=True)
class NodeResult:
    """The results of the checks. ``failures``, ``warnings``: verdicts FAIL and WARN of the checks' own rules."""

    seconds_by_check: Mapping[str, float]  # of each check that applies here and had no error
    not_measured: Mapping[str, str]  # check → reason
    not_judged: Mapping[str, str]  # GPU → reason
    failures: tuple[Verdict, ...]
    warnings: tuple[Verdict, ...]
    not_applicable: Mapping[str, str] = field(default_factory=dict)  # check → why this node has nothing to measure


def check_node(expected_gpus: int | None, gpu_model: str | None, ended_job: str, deadline: float) -> NodeResult:
    """Measure and judge this node. A check without a result at ``deadline`` (time.monotonic) is not measured.

    ``expected_gpus``, ``gpu_model``: None if not known. ``ended_job``: for an epilog, the Slurm job that has ended.
    """
    policy = data_files.read("hooks.yaml")  # metrics that are never judged, or only on GPUs without processes
    overrides: list[tuple[str, str, Any]] = [("hook", "cluster.nodes", 1), ("hook", "launcher", "local")]
    if expected_gpus is not None:
        overrides.append(("--gpus-per-node", "cluster.gpus_per_node", expected_gpus))
    if gpu_model is not None:
        key = "checks.{check}.options.{option}".format(**policy["gpu_model"])
        overrides.append(("--gpu-model", key, gpu_model))
    config = resolve(TRIAL, overrides).config
    checks = {name: catalog()[name] for name in config.checks}
    measurements = list(_measure(checks, config, expected_gpus, deadline))
    plan = make_plan(config, checks, NodeGpus(expected_gpus or 0, expected_gpus=expected_gpus))
    verdicts = judge(config, plan.jobs, measurements, checks, {})
    used_gpus = _used_gpus(measurements, checks, ended_job)
    judged = [
        verdict
        for verdict in verdicts
        if verdict.metric not in policy["not_of_a_job"]
        and not (verdict.metric in policy["idle_gpu_only"] and verdict.subject in used_gpus)
    ]
    not_measured = _not_measured(measurements, verdicts)
    return NodeResult(
        seconds_by_check={
            each.check: round(each.seconds, 3)
            for each in measurements
            if each.check not in not_measured and not each.skipped
        },
        not_measured=not_measured,
        not_judged=used_gpus,
        failures=tuple(verdict for verdict in judged if verdict.outcome is Outcome.FAIL),
        warnings=tuple(verdict for verdict in judged if verdict.outcome is Outcome.WARN),
        not_applicable={each.check: printable(each.skipped) for each in measurements if each.skipped},
    )


def _measure(
    checks: Mapping[str, Check], config: Config, expected_gpus: int | None, deadline: float
) -> Iterator[Measurement]:
    """Yield one measurement per check, with an error if the check has no result at ``deadline``."""
    # in memory: /tmp can be on a disk that is full or does not answer
    memory = next((folder for folder in ("/run", "/dev/shm") if os.access(folder, os.W_OK)), "/tmp")
    with tempfile.TemporaryDirectory(prefix="seatrial-hook-", dir=memory, ignore_cleanup_errors=True) as folder:
        context = Context(
            node=node_name(),
            rank=0,
            world_size=1,
            local_rank=0,
            device="cpu",
            expected_gpus=expected_gpus,
            artifacts_dir=Path(folder),
            run_dir=Path(folder),
        )
        calls = {name: partial(_measurement_json, check, context, config) for name, check in checks.items()}
        started = time.monotonic()
        results = children.run_all(calls, deadline)
    for name, result in results.items():
        error = f"no result within {time.monotonic() - started:.1f} s" if result is None else "its process ended"
        try:
            yield Measurement.model_validate_json(result or b"")
        except ValidationError:
            yield Measurement(check=name, subject=context.node, error=error)


def _measurement_json(check: Check, context: Context, config: Config) -> bytes:
    options = config.checks[check.name].options
    return worker.measure(check, context, options).model_dump_json().encode()


def _used_gpus(measurements: Sequence[Measurement], checks: Mapping[str, Check], ended_job: str) -> dict[str, str]:
    """Return GPU → the owners of its processes as text, for GPUs that something uses legitimately.

    Each process of such a GPU has an owner or is not visible here. A GPU with a process that no job, pod or service
    owns is omitted: the process should have ended with its job.
    """
    owners_by_gpu = grouped(
        (f"{measurement.subject}/gpu{process['gpu']}", owners.owner(process["pid"], ended_job))
        for measurement, processes in role_facts("gpu_processes", measurements, checks)
        for process in (processes if isinstance(processes, list) else ())
        if isinstance(process, dict) and isinstance(process["pid"], int)
    )
    return {
        subject: f"used by {', '.join(sorted({name or 'a process that is not visible here' for name in names}))}"
        for subject, names in owners_by_gpu.items()
        if "" not in names
    }


def _not_measured(measurements: Sequence[Measurement], verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Return check → its first error. Metrics that such a check measured are judged all the same."""
    reasons = {each.check: each.error for each in measurements if each.error}
    for verdict in verdicts:
        if verdict.outcome is Outcome.ERROR:
            reasons.setdefault(verdict.check, verdict.summary)
    return {check: printable(str(reason)) for check, reason in reasons.items()}
