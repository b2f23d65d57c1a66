"""Runs drills: each starts its own trial, injects its fault, and evaluates the record."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from seatrial.config.schema import JobPlacement
from seatrial.discover import gpu, slurm
from seatrial.discover.slurm_nodes import candidate_nodes
from seatrial.drill.base import Drill, DrillResult, Needs
from seatrial.drill.evaluate import evaluate
from seatrial.drill.injection import Injection
from seatrial.model import SeatrialError, Trial
from seatrial.pipeline.run_directory import load_trial
from seatrial.util.text import plural

Progress = Callable[[str], None]


def run_drills(drills: Iterable[Drill], folder: Path, progress: Progress) -> Iterator[DrillResult]:
    """Run the drills in order; yield the result of each drill when it ends. Its files are in ``folder``/NAME."""
    for drill in drills:
        progress(f"{drill.name}: {drill.title}")
        if reason := unmet_need(drill.needs):
            progress(f"{drill.name}: cannot run here: {reason}")
            yield DrillResult(name=drill.name, title=drill.title, machine=drill.machine, could_not_run=reason)
            continue
        yield run_drill(drill, folder / drill.name, progress)


def run_drill(drill: Drill, folder: Path, progress: Progress) -> DrillResult:
    """Run one drill in the new folder ``folder``. Raises OSError if it cannot be created."""
    folder.mkdir(parents=True)
    injection = Injection(drill, folder.resolve(), lambda text: progress(f"{drill.name}: {text}"))
    failure, seconds = "", 0.0
    try:
        if drill.fault:
            injection.use_fault(drill.fault)
        drill.prepare(injection)
        injection.start_trial()
        drill.act(injection)
        injection.wait_for_end(drill.limit_s)
    except (SeatrialError, OSError) as error:
        failure = f"{type(error).__name__}: {error}"
    finally:
        seconds = time.monotonic() - injection.started if injection.started else 0.0
        progress(f"{drill.name}: undoing its changes")
        injection.close()
    record = None
    try:
        record = load_record(injection.run_dir)
    except SeatrialError as error:
        failure = failure or str(error)
    return evaluate(drill, record, injection.error_output(), round(seconds, 1), failure)


def load_record(run_dir: Path) -> Trial | None:
    """The record of an ended trial; None if there is none. Raises UsageError if the record is damaged."""
    return load_trial(run_dir) if (run_dir / "trial.json").exists() else None


def unmet_need(needs: Needs) -> str:
    """The first of ``needs`` that this machine does not meet, as text; empty if it meets all.

    Reads the driver if the drill needs GPUs, and asks Slurm if it needs several nodes.
    """
    if needs.root and os.geteuid() != 0:
        return "needs root"
    if missing := [name for name in needs.programs if not shutil.which(name)]:
        return f"needs {', '.join(missing)} in PATH"
    if missing := [name for name in needs.device_files if not os.access(name, os.R_OK | os.W_OK)]:
        return f"needs access to {', '.join(missing)}"
    cpus = len(os.sched_getaffinity(0))
    if needs.cpus > cpus:
        return f"needs {needs.cpus} CPUs, this process may use {cpus}"
    gpus = len(gpu.read_with_timeout().gpus) if needs.gpus else 0
    if needs.gpus > gpus:
        return f"needs {plural(needs.gpus, 'GPU')}, this host has {gpus}"
    if needs.other and (reason := needs.other()):
        return reason
    return _too_few_nodes(needs.nodes) if needs.nodes > 1 else ""


def _too_few_nodes(nodes: int) -> str:
    if not slurm.installed():
        return f"needs {nodes} nodes of Slurm, sbatch is not installed"
    try:
        candidates = candidate_nodes(JobPlacement())
    except SeatrialError as error:
        return f"needs {nodes} nodes of Slurm: {error}"
    usable = len(candidates.nodes) - len(candidates.unusable)
    return f"needs {nodes} nodes of Slurm, {usable} are usable" if usable < nodes else ""
