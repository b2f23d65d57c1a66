"""Restarts of a training run by Slurm: a job submitted with ``sbatch --requeue`` starts again after a lost node.

Slurm counts the starts of a job in SLURM_RESTART_COUNT (sbatch(1)): not set at the first one, then 1, 2, …
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from seatrial.model import UsageError
from seatrial.train.step_speed import STEPS_FILE
from seatrial.train.train_config import TrainConfig
from seatrial.util import journal
from seatrial.util.input_files import read_json
from seatrial.util.journal import Journal

COUNT_VARIABLE = "SLURM_RESTART_COUNT"
STARTS_FILE = "starts.jsonl"


def restart_count() -> int:
    """How often Slurm has restarted this job; 0 at its first start and outside of jobs."""
    value = os.environ.get(COUNT_VARIABLE, "")
    return int(value) if value.isdigit() else 0


def config_with_resume(config: TrainConfig, out: Path | None) -> TrainConfig:
    """The config, with checkpoint.resume set to true if checkpoint.requeue is true and Slurm has restarted the job.

    With checkpoint.requeue, raises UsageError in three cases: Slurm has restarted the job more than
    checkpoint.max_restarts times; ``out`` is None (each start would get a new folder); or ``out`` has steps of another
    job and checkpoint.resume is false. Slurm also counts a start that wrote no steps because its prolog failed.
    """
    settings, restarts = config.checkpoint, restart_count()
    if not settings.requeue:
        return config
    if out is None:
        raise UsageError("checkpoint.requeue requires --out: each start of the job must find the same directory")
    if restarts > settings.max_restarts:
        job = os.environ.get("SLURM_JOB_ID", "JOB")
        raise UsageError(
            f"restart {restarts} of job {job}: checkpoint.max_restarts is {settings.max_restarts}. {out} is unchanged. "
            f"Run first: scontrol show job {job}; sinfo -R"
        )
    steps = out / STEPS_FILE
    if restarts and not settings.resume and steps.is_file() and steps.stat().st_size:
        _require_earlier_start(steps)
    resume = settings.resume or restarts > 0
    return config.model_copy(update={"checkpoint": settings.model_copy(update={"resume": resume})})


def earlier_metrics(config: TrainConfig, out: Path | None) -> dict[str, Any] | None:
    """The content of metrics.json if checkpoint.requeue is true and an earlier start of this job has completed the run.

    Otherwise None. Raises UsageError if the file cannot be read, or if another job wrote it.
    """
    path = Path(out or "") / "metrics.json"
    if not (config.checkpoint.requeue and restart_count() and path.is_file()):
        return None
    try:
        metrics: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path} of an earlier start of this job: {error}") from error
    _require_earlier_start(path)
    if os.environ.get("RANK", "0") == "0":
        print(f"an earlier start of this job completed the training in {out}", file=sys.stderr)
    return metrics


def _require_earlier_start(path: Path) -> None:
    """Raise UsageError if starts.jsonl beside ``path`` does not list this job, or cannot be read."""
    file, job = path.with_name(STARTS_FILE), os.environ.get("SLURM_JOB_ID", "")
    try:
        starts, _ = journal.read(file)  # empty if there is no file
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    if job not in [start.get("job") for start in starts]:
        raise UsageError(f"{path} was not written by job {job}, which is not in {STARTS_FILE}: set another --out")


def record_start(config: TrainConfig, out: Path, completed_steps: int) -> None:
    """With checkpoint.requeue, append this start to ``out``/starts.jsonl; print it if it is a restart. Rank 0 only."""
    settings = config.checkpoint
    if not settings.requeue:
        return
    job, nodes = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"))
    start = {
        "restart": restart_count(),
        "time": time.time(),
        "job": job,
        "nodes": nodes,
        "completed_steps": completed_steps,
    }
    Journal(out / STARTS_FILE).append(start)
    if restart_count():
        number = f"restart {restart_count()} of at most {settings.max_restarts}"
        print(f"{number}, on {nodes or 'this machine'}: continuing after step {completed_steps}", file=sys.stderr)
