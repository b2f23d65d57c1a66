"""Finds the job, pod or service that owns a process, without a command of Slurm or Kubernetes."""

from __future__ import annotations

import os
import re
from pathlib import Path

# The process title of the daemon that Slurm runs for each job step: while it exists, the job runs on this node
_STEP_TITLE = re.compile(r"slurmstepd: \[(\d+)\.")
_SLURM_CGROUP = re.compile(r"/job_(\d+)(/|$)", re.MULTILINE)
_JOB_VARIABLE = re.compile(rb"(?:^|\0)SLURM_JOB_ID=(\d+)\0")
_POD = re.compile(r"/kubepods")
_SERVICE = re.compile(r"/system\.slice/(?!slurmd)([^/\n]+\.service)")


def owner(pid: int, ended_job: str = "", root: Path = Path("/")) -> str | None:
    """Return who owns a process: ``job 12``, ``a pod`` or ``service x.service``; empty if it has no owner.

    None if the process is not visible here: it ended, or is in another namespace. A job owns its processes while a step
    of the job runs on this node. ``ended_job``: for an epilog, the job that has ended and owns nothing any more.
    """
    process = root / "proc" / str(pid)
    try:
        cgroup = (process / "cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    job = _job(process, cgroup)
    if job and job != ended_job and job in _running_jobs(root):
        return f"job {job}"
    if _POD.search(cgroup):
        return "a pod"
    service = None if job else _SERVICE.search(cgroup)
    return f"service {service[1]}" if service else ""


def _job(process: Path, cgroup: str) -> str:
    """Return the Slurm job of a process, by its cgroup or else by its environment; empty if it has none."""
    if match := _SLURM_CGROUP.search(cgroup):
        return match[1]
    try:
        variable = _JOB_VARIABLE.search((process / "environ").read_bytes() + b"\0")
    except OSError:  # a process of another user, or one that has ended
        return ""
    return variable[1].decode() if variable else ""


def _running_jobs(root: Path) -> set[str]:
    jobs = set()
    for name in os.listdir(root / "proc"):
        if name.isdecimal():
            try:
                title = (root / "proc" / name / "cmdline").read_bytes().decode("utf-8", errors="replace")
            except OSError:  # ended
                continue
            if match := _STEP_TITLE.match(title):
                jobs.add(match[1])
    return jobs
