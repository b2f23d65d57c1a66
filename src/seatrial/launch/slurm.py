"""Slurm launcher: one sbatch script per job, one srun task per node, torchrun with static rendezvous at the first node.

seatrial renders, submits, watches and cancels jobs; Slurm schedules them.
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

from seatrial.config.schema import Config, Container, Slurm
from seatrial.discover import slurm
from seatrial.launch import script
from seatrial.launch.base import RenderedJob
from seatrial.launch.slurm_job import JOB_ID, SCRIPT, TOKEN, SlurmJob, cancel_remaining_jobs, job_collector
from seatrial.model import Job, SeatrialError
from seatrial.util.files import atomic_write
from seatrial.util.secrets import PRIVATE


class SlurmLauncher:
    """Submits rendered sbatch scripts and watches their jobs."""

    name = "slurm"

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def available(self, nodes: int) -> str | None:
        del nodes  # checked by Slurm
        if shutil.which("sbatch"):
            return None
        return "sbatch is not in PATH; run on a login node, or without a scheduler use: seatrial render torchrun"

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        settings = self._settings
        text = script.template("sbatch.sh.j2").render(
            job=job,
            attempt=attempt,
            run_dir=str(run_dir),
            scratch=settings.slurm.scratch,
            sbatch_options=_sbatch_options(job, settings.slurm),
            requirements=_requirements(settings),
            environment=script.environment(settings, job),
            cpus=settings.slurm.cpus_per_task,
            interface=settings.slurm.interface,
            srun_flags=_srun_flags(settings.container),
            python=script.python(settings, "SEATRIAL_RUN_DIR"),
        )
        return RenderedJob(argv=("sbatch", "--parsable"), env={}, text=text)

    def start(self, rendered: RenderedJob, folder: Path) -> SlurmJob:
        batch, token = folder / SCRIPT, uuid.uuid4().hex
        atomic_write(batch, rendered.text.encode(errors="surrogateescape"), mode=PRIVATE)
        atomic_write(folder / TOKEN, token.encode())  # before sbatch: cancel_remaining_jobs finds the job by it
        try:
            output = slurm.command_output([*slurm.env_prefix_outside_job(), *rendered.argv, str(batch), token])
            job_id = _job_id(output)
        except BaseException:  # Ctrl-C or timeout: Slurm may have accepted the job
            with contextlib.suppress(SeatrialError):
                list(cancel_remaining_jobs(folder, self._settings))
            raise
        atomic_write(folder / JOB_ID, job_id.encode())
        return SlurmJob(job_id, self._settings, job_collector(job_id, self._settings, folder))


def _job_id(output: str) -> str:
    """Return the job id from ``sbatch --parsable``: ``7`` or ``7;cluster``, also after output of a wrapper."""
    job_ids = re.findall(r"^(\d+)(?:;\S+)?$", output, re.MULTILINE)
    if not job_ids:
        error = f"could not parse a job id from sbatch's output: {output[:200]!r}"
        raise SeatrialError(f"{error}. Run first: type -a sbatch; squeue --me")
    return str(job_ids[-1])


def _sbatch_options(job: Job, config: Slurm) -> list[str]:
    """Return one option per #SBATCH line."""
    gpus = f"gpu:{job.expected_gpus}" if job.expected_gpus else None
    minutes = config.time_min or math.ceil(job.requested_s / 60)
    options: list[tuple[str, object]] = [
        ("job-name", f"seatrial-{job.name}"),
        ("partition", config.partition),
        ("account", config.account),
        ("qos", config.qos),
        ("reservation", config.reservation),
        ("constraint", config.constraint),
        ("nodelist", config.nodelist or job.nodelist or None),
        ("exclude", ",".join(filter(None, [config.exclude, job.exclude])) or None),
        ("nodes", job.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", config.cpus_per_task),
        ("gres", config.gres or gpus),
        ("mem", config.mem),
        ("time", minutes),
        # used until the script redirects its output, since the run directory may not exist on the node
        ("output", f"{config.scratch}/seatrial-%j.log"),
    ]
    # sbatch parses quotes as a shell does, without expansion
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options if value is not None]
    # --no-requeue: a second start of the job would overwrite its measurements
    return [*lines, *(["--exclusive"] if config.exclusive else []), "--no-requeue", *config.extra]


class Requirement(NamedTuple):
    """A requirement of each node: a shell test, the message if it fails, and the first command to run then."""

    test: str
    message: str
    command: str


def _requirements(settings: Config) -> list[Requirement]:
    """Return the requirements of the config, each after those it depends on (a module may provide apptainer)."""
    environment, container = settings.environment, settings.container
    requirements = []
    if environment.source:
        path = shlex.quote(environment.source)
        # a subshell first: a file that calls `exit` would end this test without a message
        sourced = f"[[ $(source {path} && echo complete) == *complete ]] && source {path}"
        test = f"# shellcheck source=/dev/null\n    {{ {sourced}; }} >/dev/null 2>&1"
        message = f"environment.source {environment.source} is not readable, fails or exits the shell"
        requirements.append(Requirement(test, message, shlex.join(["bash", "-x", environment.source])))
    if environment.modules:
        names = shlex.join(environment.modules)
        test = f"module load {names} >/dev/null 2>&1"
        message = f"environment.modules: cannot load {names}"
        requirements.append(Requirement(test, message, 'bash -lc "module avail"'))
    if environment.venv:
        python = f"{environment.venv}/bin/python"
        message = f"environment.venv: {python} does not exist or is not executable"
        requirements.append(Requirement(_test("-x", python), message, shlex.join(["ls", "-l", python])))
    elif container.runtime == "none":
        message = f"seatrial's Python {sys.executable} does not exist on this node: set environment.venv"
        command = shlex.join(["ls", "-l", sys.executable])
        requirements.append(Requirement(_test("-x", sys.executable), message, command))
    return requirements + _container_requirements(container)


def _container_requirements(container: Container) -> list[Requirement]:
    image = container.image or ""
    requirements = []
    if container.runtime == "apptainer":
        test, message = "command -v apptainer >/dev/null", "container.runtime: apptainer is not installed"
        requirements.append(Requirement(test, message, "which apptainer"))
    if container.runtime == "pyxis":
        test, message = "srun --help 2>&1 | grep -q -e --container-image", "container.runtime: Slurm has no pyxis"
        requirements.append(Requirement(test, message, "scontrol show config | grep -i plugstack"))
    if image.startswith(("/", "./")):  # other images are pulled from a registry
        message, command = f"container.image {image} does not exist", shlex.join(["ls", "-l", image])
        requirements.append(Requirement(_test("-e", image), message, command))
    return requirements


def _test(operator: str, path: str) -> str:
    return f"[ {operator} {shlex.quote(path)} ]"


def _srun_flags(container: Container) -> list[str]:
    if container.runtime != "pyxis":
        return []
    mounts = "".join(f",{mount}" for mount in container.mounts)
    image, quoted_mounts = shlex.quote(container.image or ""), shlex.quote(mounts) if mounts else ""
    return [f"--container-image={image}", f'--container-mounts="$SEATRIAL_RUN_DIR:$SEATRIAL_RUN_DIR"{quoted_mounts}']
