"""Slurm: one sbatch script a job, one srun task a node, torchrun with static rendezvous at the first node.

seatrial renders, submits, watches and cancels; it schedules nothing itself.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from seatrial import shell
from seatrial.discover import slurm
from seatrial.discover.slurm import SlurmUnavailable
from seatrial.discover.slurm_facts import Job as JobFacts
from seatrial.launch import script
from seatrial.launch.base import Rendered, Waiting, Whereabouts
from seatrial.launch.collect_srun import Collector
from seatrial.model import Job
from seatrial.settings import Config, Container
from seatrial.settings import Slurm as Header

# A job that is pending for one of these never starts by waiting (slurm.schedmd.com, "Job reason codes").
HOPELESS = {
    "AssocGrpCpuLimit",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "JobHeldAdmin",
    "JobHeldUser",
    "PartitionConfig",
    "PartitionDown",
    "PartitionInactive",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "QOSNotAllowed",
}
_ASK_EVERY_S = 1.0


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
            cpus=settings.slurm.cpus_per_task or '"$SLURM_CPUS_ON_NODE"',
            interface=settings.slurm.interface,
            srun_flags=_srun_flags(settings.container),
            python=script.python(settings),
        )
        return Rendered(argv=("sbatch", "--parsable"), env={}, text=text)

    def start(self, rendered: Rendered, folder: Path) -> SlurmJob:
        batch, token = folder / "job.sbatch", uuid.uuid4().hex
        batch.write_text(rendered.text, encoding="utf-8", errors="surrogateescape")
        (folder / "token").write_text(token, encoding="utf-8")
        job_id = slurm.call([*rendered.argv, str(batch), token]).strip().partition(";")[0]
        node_dir = f"{self._settings.slurm.scratch}/seatrial-{job_id}"
        return SlurmJob(job_id, self._settings.slurm.queue_s, Collector(job_id, node_dir, folder))


@dataclass
class SlurmJob:
    """A submitted job. Slurm is asked once a second: a controller has more to do than to answer us."""

    id: str
    queue_s: float
    collector: Collector
    submitted: float = field(default_factory=time.monotonic)
    _asked: float = 0.0
    _last: JobFacts | None = None

    def poll(self) -> int | None:
        job = self._look()
        if job is None or job.pending:
            return None
        self.collector.look(job.nodes)
        if not (job.gone or not job.known):
            return 1 if self.collector.trouble() else None
        self.collector.close()
        return 0 if job.state == "COMPLETED" and self.collector.finished else job.exit_code or 1

    def waiting(self) -> Waiting | None:
        job = self._look()
        if job is None or not job.pending:
            return None
        waited = time.monotonic() - self.submitted
        reason = f"job {self.id} is {job.state}: {job.reason or 'Slurm has given no reason yet'}"
        if waited > self.queue_s:
            return Waiting(reason=f"{reason}, after {waited:.0f} s (slurm.queue_s)", hopeless=True)
        hopeless = (job.reason or "").partition(",")[0] in HOPELESS
        advice = f"; waiting will not help. Run first: scontrol show job {self.id}; sinfo -s" if hopeless else ""
        return Waiting(reason=reason + advice, hopeless=hopeless)

    def whereabouts(self) -> Whereabouts:
        return Whereabouts(id=self.id, nodes=(self._last.nodes if self._last else None) or "")

    def epitaph(self) -> str:
        job = self._last
        if job is None:
            return ""
        said = f"Slurm says that job {self.id} on {job.nodes or 'no node'} is {job.state}: {job.reason or 'no reason'}"
        return ". ".join(filter(None, [self.collector.lost(), said if job.ended and job.state != "COMPLETED" else ""]))

    def cancel(self) -> str:
        job = self._look(now=True)
        if job is not None and job.gone:
            self.collector.close()
            return ""
        if self.collector.active:
            self.collector.end_early()
            self._wait(15)
        self.collector.close()
        shell.ask(["scancel", self.id], timeout_s=30)
        job = self._wait(60)  # KillWait is 30 s by default: SIGTERM first, SIGKILL then
        gone = job is not None and job.gone
        return "" if gone else f"Slurm job {self.id} is still {job.state if job else 'there'} a minute after scancel"

    def _wait(self, seconds: float) -> JobFacts | None:
        """For the job to be gone: what Slurm says of it then, or when the time is up."""
        deadline = time.monotonic() + seconds
        while (job := self._look(now=True)) is not None and not job.gone and time.monotonic() < deadline:
            time.sleep(0.2)
        return job

    def _look(self, now: bool = False) -> JobFacts | None:
        """What Slurm says, at most once a second. A controller that does not answer for a while changes nothing."""
        if now or time.monotonic() - self._asked > _ASK_EVERY_S:
            self._asked = time.monotonic()
            with contextlib.suppress(SlurmUnavailable):
                self._last = slurm.job(self.id)
        return self._last


def _header(job: Job, wanted: Header) -> list[str]:
    """The #SBATCH lines, in the order in which a person would write them."""
    gpus = f"gpu:{job.promised_gpus}" if job.promised_gpus else None
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
        ("output", shlex.quote(f"{wanted.scratch}/seatrial-%j.log")),
    ]
    lines = [f"--{name}={value}" for name, value in options if value is not None]
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
        # shellcheck cannot follow what is not there where it runs
        test = f"# shellcheck source=/dev/null\n    {{ [ -r {path} ] && source {path}; }} >/dev/null 2>&1"
        needs.append(
            Need(test, f"environment.source {wanted.source} cannot be read, or fails", f"ls -l {wanted.source}")
        )
    if wanted.modules:
        names = shlex.join(wanted.modules)
        needs.append(
            Need(f"module load {names} >/dev/null 2>&1", f"environment.modules: no {names}", 'bash -lc "module avail"')
        )
    if wanted.venv:
        python = f"{wanted.venv}/bin/python"
        needs.append(Need(_is("-x", python), f"environment.venv: there is no {python}", f"ls -l {python}"))
    elif container.runtime == "none":
        ours = f"the python that seatrial runs in, {sys.executable}, is not there: set environment.venv"
        needs.append(Need(_is("-x", sys.executable), ours, f"ls -l {sys.executable}"))
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
        needs.append(Need(_is("-e", image), f"container.image {image} is not there", f"ls -l {image}"))
    return needs


def _is(what: str, path: str) -> str:
    return f"[ {what} {shlex.quote(path)} ]"


def _srun_flags(container: Container) -> list[str]:
    if container.runtime != "pyxis":
        return []
    mounts = "".join(f",{mount}" for mount in container.mounts)
    image, more = shlex.quote(container.image or ""), shlex.quote(mounts) if mounts else ""
    return [f"--container-image={image}", f'--container-mounts="$RUN_DIR:$RUN_DIR"{more}']
