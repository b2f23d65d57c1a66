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
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from seatrial import shell
from seatrial.discover import slurm
from seatrial.discover.slurm import SlurmUnavailable
from seatrial.discover.slurm_facts import Job as JobFacts
from seatrial.launch.base import Rendered, Waiting, Whereabouts
from seatrial.model import Job
from seatrial.settings import Config
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
        return None if shutil.which("sbatch") else "there is no sbatch here: run it on a login node of the cluster"

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> Rendered:
        folder = run_dir / "jobs" / job.name
        settings = self._settings
        text = _template().render(
            job=job,
            attempt=attempt,
            folder=str(folder),
            header=_header(job, settings.slurm, folder / f"attempt{attempt}"),
            environment=_environment(settings, job),
            cpus=settings.slurm.cpus_per_task or '"$SLURM_CPUS_ON_NODE"',
            interface=settings.slurm.interface,
            srun_flags=_srun_flags(settings, run_dir),
            python=shlex.join(_python(settings, run_dir)),
        )
        return Rendered(argv=("sbatch", "--parsable"), env={}, text=text)

    def start(self, rendered: Rendered, folder: Path) -> SlurmJob:
        script = folder / "job.sbatch"
        script.write_text(rendered.text, encoding="utf-8", errors="surrogateescape")
        answer = slurm.call([*rendered.argv, str(script)])
        return SlurmJob(answer.strip().partition(";")[0], self._settings.slurm.queue_s)


@dataclass
class SlurmJob:
    """A submitted job. Slurm is asked once a second: a controller has more to do than to answer us."""

    id: str
    queue_s: float
    submitted: float = field(default_factory=time.monotonic)
    _asked: float = 0.0
    _last: JobFacts | None = None

    def poll(self) -> int | None:
        job = self._look()
        if job is None or not (job.gone or not job.known):
            return None
        return 0 if job.state == "COMPLETED" else job.exit_code or 1

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
        if job is None or job.state == "COMPLETED":
            return ""
        return f"Slurm says that job {self.id} on {job.nodes or 'no node'} is {job.state}: {job.reason or 'no reason'}"

    def cancel(self) -> str:
        job = self._look(now=True)
        if job is not None and job.gone:
            return ""
        shell.ask(["scancel", self.id], timeout_s=30)
        deadline = time.monotonic() + 60  # KillWait is 30 s by default: SIGTERM first, SIGKILL then
        while (job := self._look(now=True)) is not None and not job.gone and time.monotonic() < deadline:
            time.sleep(0.2)
        gone = job is not None and job.gone
        return "" if gone else f"Slurm job {self.id} is still {job.state if job else 'there'} a minute after scancel"

    def _look(self, now: bool = False) -> JobFacts | None:
        """What Slurm says, at most once a second. A controller that does not answer for a while changes nothing."""
        if now or time.monotonic() - self._asked > _ASK_EVERY_S:
            self._asked = time.monotonic()
            with contextlib.suppress(SlurmUnavailable):
                self._last = slurm.job(self.id)
        return self._last


def _header(job: Job, wanted: Header, folder: Path) -> list[str]:
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
        ("output", shlex.quote(str(folder / "launcher.out"))),
        ("error", shlex.quote(str(folder / "launcher.err"))),
    ]
    lines = [f"--{name}={value}" for name, value in options if value is not None]
    # a job that Slurm starts again would overwrite what it measured before
    return [*lines, *(["--exclusive"] if wanted.exclusive else []), "--no-requeue", *wanted.extra]


def _environment(settings: Config, job: Job) -> list[str]:
    wanted = settings.environment
    checked = "# shellcheck source=/dev/null"  # not there where the script is checked
    lines = [checked, f"source {shlex.quote(wanted.source)}"] if wanted.source else []
    lines += [f"module load {shlex.join(wanted.modules)}"] if wanted.modules else []
    lines += [checked, f"source {shlex.quote(wanted.venv)}/bin/activate"] if wanted.venv else []
    lines += [f"export HF_HOME={shlex.quote(wanted.hf_home)}"] if wanted.hf_home else []
    return lines + [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]


def _python(settings: Config, run_dir: Path) -> list[str]:
    """What starts Python on a node. apptainer wraps it; pyxis needs nothing here, but flags for srun."""
    container = settings.container
    if container.runtime == "apptainer":
        mounts = (f"{run_dir}:{run_dir}", *container.mounts)
        binds = [argument for mount in mounts for argument in ("--bind", mount)]
        return ["apptainer", "exec", "--nv", *binds, container.image or "", "python3"]
    if container.runtime == "pyxis":
        return ["python3"]
    return ["python"] if settings.environment.venv else [sys.executable]


def _srun_flags(settings: Config, run_dir: Path) -> list[str]:
    container = settings.container
    if container.runtime != "pyxis":
        return []
    mounts = ",".join((f"{run_dir}:{run_dir}", *container.mounts))
    return [f"--container-image={container.image}", f"--container-mounts={mounts}"]


def _template() -> jinja2.Template:
    # no autoescape: this is a shell script, and every value in it goes through shlex.quote
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("seatrial.launch", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template("sbatch.sh.j2")
