"""The config of a trial, its plan, and its jobs as text.

`seatrial render` calls only this module. The module imports neither the judge nor the reports, so that the command
starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from seatrial.checks import catalog
from seatrial.config import layers
from seatrial.config.layers import ResolvedTrial
from seatrial.config.schema import Config, Override
from seatrial.discover.gpu import GpuFacts
from seatrial.launch import runs_remotely, select_launcher
from seatrial.model import Job
from seatrial.pipeline.plan import Plan, make_plan
from seatrial.pipeline.run_directory import Request
from seatrial.pipeline.this_host import ThisHost, discover
from seatrial.util.secrets import redacted, secret_values


def resolve(trial: str, overrides: Sequence[Override]) -> ResolvedTrial:
    """Return the config of a trial with SEATRIAL_SET_* variables and overrides. Raises UsageError.

    ``trial``: the name of a shipped trial, or a file.
    """
    return layers.resolve(trial, overrides=overrides, environ=os.environ, schemas=catalog())


def plan_request(request: Request, this_host: ThisHost, nodes: int | None = None, done: Sequence[str] = ()) -> Plan:
    """Return the plan of a run, without the checks ``done``. Raises UsageError.

    ``nodes``: number of nodes; by default all nodes of the config.
    """
    return make_plan(
        request.config,
        catalog(),
        this_host.node_gpus(request.config),
        only=request.only,
        skip=request.skip,
        done=done,
        topology=this_host.topology(request.config),
        nodes=nodes,
        time_limit_s=request.time_limit_s,
        max_job_s=this_host.max_job_s(request.config),
    )


def planning_host(settings: Config) -> ThisHost:
    """Return the facts of this host that a plan needs; empty facts if the jobs run on other machines."""
    return ThisHost({}, GpuFacts()) if runs_remotely(settings) else discover()


def rendered_jobs(settings: Config, jobs: Iterable[Job], run_dir: Path = Path("RUN")) -> tuple[tuple[Job, str], ...]:
    """Return each job with its command as text, both without secrets; needs no cluster tool. Raises UsageError."""
    shown = [job.without_secrets() for job in jobs]
    texts = [select_launcher(settings, job.placement).render(job, run_dir).text for job in shown]
    return tuple((job, redacted(text, secret_values())) for job, text in zip(shown, texts, strict=True))
