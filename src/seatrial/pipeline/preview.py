"""What a run would do, and run directories for jobs that a person starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.checks import catalog
from seatrial.config import layers
from seatrial.config.layers import CheckSchema, Resolved
from seatrial.judge import plausibility
from seatrial.launch import launcher_for
from seatrial.model import Job
from seatrial.pipeline.plan import Plan, make_plan
from seatrial.pipeline.rejudge import baseline_of
from seatrial.pipeline.run_directory import Request, RunDir
from seatrial.pipeline.survey import discover


@dataclass(frozen=True)
class Preview:
    """What a run would do: its plan, and each job's rendered command."""

    plan: Plan
    rendered: tuple[tuple[Job, str], ...]


def preview(request: Request) -> Preview:
    """Plan and render, and start nothing. Raises UsageError."""
    settings, survey = request.config, discover()
    plausibility.validate_thresholds(settings, catalog(), survey.models(settings), baseline_of(settings))
    plan = make_plan(settings, catalog(), survey.devices(settings), only=request.only, skip=request.skip)
    rendered = ((job, launcher_for(settings, job.placement).render(job, Path("RUN")).text) for job in plan.jobs)
    return Preview(plan, tuple(rendered))


def prepare(request: Request, path: Path) -> Preview:
    """A run directory for jobs that a person starts: all that their workers need. Raises UsageError.

    What they leave there is taken up by ``run`` on the same directory.
    """
    run_dir = RunDir.create(path, request)
    survey = discover()
    plausibility.validate_thresholds(
        request.config, catalog(), survey.models(request.config), baseline_of(request.config)
    )
    plan = make_plan(request.config, catalog(), survey.devices(request.config), only=request.only, skip=request.skip)
    run_dir.save_machine(survey.machine(request.config))
    rendered = []
    for job in plan.jobs:
        if job.placement != "control":  # which runs here, when the others have ended
            folder = run_dir.path / "jobs" / job.name
            folder.mkdir(parents=True)
            (folder / "job.json").write_text(job.model_dump_json(indent=2), encoding="utf-8")
            text = launcher_for(request.config, job.placement).render(job, run_dir.path).text
            (folder / "torchrun.sh").write_text(text, encoding="utf-8")
            rendered.append((job, text))
    return Preview(plan, tuple(rendered))


def resolve(trial: str, overrides: Sequence[tuple[str, str, Any]]) -> Resolved:
    """The config of the trial called ``trial``. Raises UsageError."""
    schemas = {name: CheckSchema(check.options, check.metrics) for name, check in catalog().items()}
    return layers.resolve(trial, overrides=overrides, environ=os.environ, schemas=schemas)
