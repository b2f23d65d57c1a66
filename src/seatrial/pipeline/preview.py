"""Previews of a run, and run directories for jobs that the user starts with torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.judge import plausibility
from seatrial.launch import runs_as_root, runs_remotely
from seatrial.model import Baseline, Job
from seatrial.pipeline.plan import Plan, localization_job
from seatrial.pipeline.planned_jobs import plan_request, planning_host, rendered_jobs
from seatrial.pipeline.rejudge import load_baseline
from seatrial.pipeline.run_directory import Request, RunDir
from seatrial.pipeline.tested_hardware import cpu_only
from seatrial.pipeline.this_host import ThisHost
from seatrial.report import inventory
from seatrial.report.reference_metrics import unjudged_metrics

_NO_GPU = "no GPU on {place}: the decision will be INCOMPLETE at best; for a CPU-only run: --gpus-per-node 0"


@dataclass(frozen=True)
class Preview:
    """The plan of a run. ``rendered``: each job with its command as text, both without secrets.

    ``notes``: see ``planned_notes``. ``localization``: a job that starts only if a multi-node metric violates a
    threshold. ``as_root``: the jobs are known to run as root.
    """

    plan: Plan
    rendered: tuple[tuple[Job, str], ...]
    notes: tuple[str, ...] = ()
    localization: Job | None = None
    as_root: bool = False


def preview(request: Request) -> Preview:
    """Return the plan and the commands of a run without starting it. Raises UsageError."""
    settings, this_host, baseline, plan = _planned(request)
    search = localization_job(settings, catalog(), plan.jobs, request.time_limit_s)
    notes = planned_notes(settings, plan, this_host, baseline)
    return Preview(plan, rendered_jobs(settings, plan.jobs), notes, search, runs_as_root(settings))


def prepare(request: Request, path: Path) -> tuple[tuple[Job, str], ...]:
    """Create a run directory for jobs that the user starts, with job files and scripts; return the jobs as text.

    ``run --resume`` on the directory then collects their results. Raises UsageError.
    """
    from seatrial.launch.torchrun import write_scripts  # `seatrial run --dry-run` needs no scripts

    run_dir = RunDir.create(path, request)
    settings, this_host, _, plan = _planned(request)
    run_dir.save(this_host.machine(settings))
    by_user = [job for job in plan.jobs if job.placement != "control"]
    write_scripts(settings, plan.jobs, run_dir.path)
    return rendered_jobs(settings, by_user, run_dir.path)


def _planned(request: Request) -> tuple[Config, ThisHost, Baseline | None, Plan]:
    settings, this_host = request.config, planning_host(request.config)
    baseline = load_baseline(settings)
    plausibility.validate_thresholds(settings, catalog(), this_host.gpu_models(settings), baseline)
    return settings, this_host, baseline, plan_request(request, this_host)


def planned_notes(settings: Config, plan: Plan, this_host: ThisHost, baseline: Baseline | None) -> tuple[str, ...]:
    """Return lines about the decision that are known before the run: no GPU, and metrics that will be UNJUDGED.

    Without a known GPU model no metrics are named.
    """
    gpus = this_host.gpu_models(settings)
    no_gpu = cpu_only(plan.jobs) and settings.cluster.gpus_per_node != 0 and not this_host.gpu_error(settings)
    place = "the nodes of this trial" if runs_remotely(settings) else "this host"
    no_gpu_lines = [_NO_GPU.format(place=place)] if no_gpu else []
    planned = [check for job in plan.jobs for check in job.checks]
    unjudged = unjudged_metrics(settings, catalog(), planned, gpus, baseline)
    return (*no_gpu_lines, *inventory.unjudged_lines(unjudged, gpus, settings.cluster.nodes))
