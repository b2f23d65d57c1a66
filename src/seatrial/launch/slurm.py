"""Slurm: one sbatch script a job, one srun task a node, torchrun with static rendezvous at the first node.

seatrial renders, submits, watches and cancels; it schedules nothing itself.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import shutil
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

from seatrial.config.schema import Config, Container
from seatrial.config.schema import Slurm as Header
from seatrial.discover import slurm
from seatrial.launch import script
from seatrial.launch.base import Rendered
from seatrial.launch.slurm_job import JOB_ID, SCRIPT, TOKEN, SlurmJob, cancel_remaining_jobs, job_collector
from seatrial.model import Job, SeatrialError
from seatrial.util.files import atomic_write


class SlurmLauncher:
    """Submits a rendered sbatch script and watches it in the queue."""

    name = "slurm"

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def available(self, nodes: int) -> str | None:
        del nodes  # how many there are is for Slurm to say
        if shutil.which("sbatch"):
            return None
        return "there is no sbatch here: run it on a login node, or without a scheduler see seatrial render torchrun"

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> Rendered:
        settings = self._settings
        text = script.template("sbatch.sh.j2").render(
            job=job,
            attempt=attempt,
            run_dir=str(run_dir),
            scratch=settings.slurm.scratch,
            header=_header(job, settings.slurm),
            needs=_needs(settings),
            environment=script.environment(settings, job),
            cpus=settings.slurm.cpus_per_task,
            interface=settings.slurm.interface,
            srun_flags=_srun_flags(settings.container),
            python=script.python(settings, "SEATRIAL_RUN_DIR"),
        )
        return Rendered(argv=("sbatch", "--parsable"), env={}, text=text)

    def start(self, rendered: Rendered, folder: Path) -> SlurmJob:
        batch, token = folder / SCRIPT, uuid.uuid4().hex
        atomic_write(batch, rendered.text.encode(errors="surrogateescape"))
        atomic_write(folder / TOKEN, token.encode())  # before Slurm knows of the job: it is how we find it again
        try:
            said = slurm.command_output([*slurm.env_prefix_outside_job(), *rendered.argv, str(batch), token])
            job_id = _job_id(said)
        except BaseException:  # Ctrl-C, or no answer in time: Slurm may have taken the job all the same
            with contextlib.suppress(SeatrialError):
                list(cancel_remaining_jobs(folder.parent, self._settings))
            raise
        atomic_write(folder / JOB_ID, job_id.encode())
        return SlurmJob(job_id, self._settings, job_collector(job_id, self._settings, folder))


def _job_id(said: str) -> str:
    """``sbatch --parsable`` prints ``7`` or ``7;cluster``; a wrapper or plugin of the site may print more before it."""
    found = re.findall(r"^(\d+)(?:;\S+)?$", said, re.MULTILINE)
    if not found:
        raise SeatrialError(f"sbatch told no job id, but {said[:200]!r}. Run first: type -a sbatch; squeue --me")
    return str(found[-1])


def _header(job: Job, wanted: Header) -> list[str]:
    """The #SBATCH lines, in the order in which a person would write them."""
    gpus = f"gpu:{job.expected_gpus}" if job.expected_gpus else None
    minutes = wanted.time_min or math.ceil(job.limit_s / 60) + 1
    options: list[tuple[str, object]] = [
        ("job-name", f"seatrial-{job.name}"),
        ("partition", wanted.partition),
        ("account", wanted.account),
        ("qos", wanted.qos),
        ("reservation", wanted.reservation),
        ("constraint", wanted.constraint),
        ("nodelist", wanted.nodelist or job.nodelist or None),
        ("exclude", wanted.exclude),
        ("nodes", job.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", wanted.cpus_per_task),
        ("gres", wanted.gres or gpus),
        ("mem", wanted.mem),
        ("time", minutes),
        # until the script knows where its log belongs: no run directory need be where Slurm would open it
        ("output", f"{wanted.scratch}/seatrial-%j.log"),
    ]
    # sbatch reads quotes as a shell does, and expands nothing
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options if value is not None]
    # a job that Slurm starts again would overwrite what it measured before
    return [*lines, *(["--exclusive"] if wanted.exclusive else []), "--no-requeue", *wanted.extra]


class Need(NamedTuple):
    """What a node must have: a test in words of the shell, and what to say where it fails."""

    test: str
    missing: str
    command: str


def _needs(settings: Config) -> list[Need]:
    """In the order in which they build on each other: a module may bring the container's runtime."""
    wanted, container = settings.environment, settings.container
    needs = []
    if wanted.source:
        path = shlex.quote(wanted.source)
        # In a shell of its own first: a file that ends the shell would end this test, and say nothing.
        # shellcheck cannot follow what is not there where it runs.
        twice = f"[[ $(source {path} && echo whole) == *whole ]] && source {path}"
        test = f"# shellcheck source=/dev/null\n    {{ {twice}; }} >/dev/null 2>&1"
        missing = f"environment.source {wanted.source} cannot be read, fails, or ends the shell"
        needs.append(Need(test, missing, shlex.join(["bash", "-x", wanted.source])))
    if wanted.modules:
        names = shlex.join(wanted.modules)
        needs.append(
            Need(f"module load {names} >/dev/null 2>&1", f"environment.modules: no {names}", 'bash -lc "module avail"')
        )
    if wanted.venv:
        python = f"{wanted.venv}/bin/python"
        needs.append(
            Need(_is("-x", python), f"environment.venv: there is no {python}", shlex.join(["ls", "-l", python]))
        )
    elif container.runtime == "none":
        ours = f"the python that seatrial runs in, {sys.executable}, is not there: set environment.venv"
        needs.append(Need(_is("-x", sys.executable), ours, shlex.join(["ls", "-l", sys.executable])))
    return needs + _container_needs(container)


def _container_needs(container: Container) -> list[Need]:
    image = container.image or ""
    needs = []
    if container.runtime == "apptainer":
        test = "command -v apptainer >/dev/null"
        needs.append(Need(test, "container.runtime: apptainer is not installed", "which apptainer"))
    if container.runtime == "pyxis":
        test = "srun --help 2>&1 | grep -q -e --container-image"
        needs.append(Need(test, "container.runtime: Slurm has no pyxis", "scontrol show config | grep -i plugstack"))
    if image.startswith(("/", "./")):  # any other is a registry's, and for the runtime to find
        needs.append(Need(_is("-e", image), f"container.image {image} is not there", shlex.join(["ls", "-l", image])))
    return needs


def _is(what: str, path: str) -> str:
    return f"[ {what} {shlex.quote(path)} ]"


def _srun_flags(container: Container) -> list[str]:
    if container.runtime != "pyxis":
        return []
    mounts = "".join(f",{mount}" for mount in container.mounts)
    image, more = shlex.quote(container.image or ""), shlex.quote(mounts) if mounts else ""
    return [f"--container-image={image}", f'--container-mounts="$SEATRIAL_RUN_DIR:$SEATRIAL_RUN_DIR"{more}']
