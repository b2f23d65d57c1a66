"""Previews of a run, and run directories for jobs that the user starts with torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.checks import catalog
from seatrial.config import layers
from seatrial.config.layers import CheckSchema, ResolvedTrial
from seatrial.judge import plausibility
from seatrial.launch import launcher_for
from seatrial.model import Job
from seatrial.pipeline.plan import Plan, make_plan
from seatrial.pipeline.rejudge import load_baseline
from seatrial.pipeline.run_directory import Request, RunDir
from seatrial.pipeline.this_host import discover


@dataclass(frozen=True)
class Preview:
    """The plan of a run. ``rendered``: each job with its command as text."""

    plan: Plan
    rendered: tuple[tuple[Job, str], ...]


def preview(request: Request) -> Preview:
    """Return the plan and the commands of a run without starting it. Raises UsageError."""
    settings, this_host = request.config, discover()
    plausibility.validate_thresholds(settings, catalog(), this_host.gpu_models(settings), load_baseline(settings))
    plan = make_plan(settings, catalog(), this_host.node_gpus(settings), only=request.only, skip=request.skip)
    rendered = ((job, launcher_for(settings, job.placement).render(job, Path("RUN")).text) for job in plan.jobs)
    return Preview(plan, tuple(rendered))


def prepare(request: Request, path: Path) -> Preview:
    """Create a run directory for jobs that the user starts, with their job files and scripts. Raises UsageError.

    ``run --resume`` on the directory then collects their results.
    """
    run_dir = RunDir.create(path, request)
    settings, this_host = request.config, discover()
    plausibility.validate_thresholds(settings, catalog(), this_host.gpu_models(settings), load_baseline(settings))
    plan = make_plan(settings, catalog(), this_host.node_gpus(settings), only=request.only, skip=request.skip)
    run_dir.save_machine(this_host.machine(settings))
    rendered = []
    for job in plan.jobs:
        if job.placement != "control":  # run --resume runs the control job on this host
            folder = run_dir.path / "jobs" / job.name
            folder.mkdir(parents=True)
            (folder / "job.json").write_text(job.model_dump_json(indent=2), encoding="utf-8")
            text = launcher_for(settings, job.placement).render(job, run_dir.path).text
            (folder / "torchrun.sh").write_text(text, encoding="utf-8")
            rendered.append((job, text))
    return Preview(plan, tuple(rendered))


def resolve(trial: str, overrides: Sequence[tuple[str, str, Any]]) -> ResolvedTrial:
    """Return the config of the trial ``trial``, with overrides and environment variables. Raises UsageError."""
    schemas = {name: CheckSchema(check.options, check.metrics) for name, check in catalog().items()}
    return layers.resolve(trial, overrides=overrides, environ=os.environ, schemas=schemas)
