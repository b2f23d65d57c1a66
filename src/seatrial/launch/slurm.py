"""Slurm launcher: one sbatch script per job, one srun task per node, torchrun with static rendezvous at the first node.

seatrial renders, submits, watches and cancels jobs; Slurm schedules them.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from seatrial.config.schema import Config, Slurm
from seatrial.config.slurm_options import option_lines, placement_options
from seatrial.discover import slurm
from seatrial.discover.slurm_nodes import candidate_nodes
from seatrial.launch import script
from seatrial.launch.base import TOKEN, JobRefused, Launcher, RenderedJob, token_files
from seatrial.launch.slurm_job import JOB_ID, SCRIPT, SlurmJob
from seatrial.model import Job, NodeShortage, SeatrialError, UsageError
from seatrial.util.files import atomic_write
from seatrial.util.secrets import PRIVATE


def require_sbatch() -> None:
    """Raise UsageError if no job can be submitted from this machine."""
    if not shutil.which("sbatch"):
        raise UsageError(
            "sbatch is not in PATH; run on a login node, or without a scheduler use: seatrial render torchrun"
        )


def require_client() -> None:
    """Raise UsageError if Slurm's client cannot work on this machine, for example without slurm.conf.

    A controller that does not respond is no error here: a check reports it, with the controller's host.
    """
    require_sbatch()
    try:
        slurm.ping()
    except slurm.ControllerDown:
        return
    except slurm.SlurmUnavailable as error:
        raise UsageError(str(error)) from None


class SlurmLauncher(Launcher):
    """Submits rendered sbatch scripts and watches their jobs."""

    name = "slurm"
    # containers of docker and podman run outside the job's cgroups: Slurm neither confines nor ends them
    runtimes = ("apptainer", "pyxis")

    def require_access(self) -> None:
        try:
            require_client()
        except UsageError as error:
            if self._settings.launcher != "auto":
                raise
            raise UsageError(
                f"--nodes {self._settings.cluster.nodes} needs a launcher for several nodes: --launcher slurm, "
                f"torchrun or kubernetes. auto has chosen slurm, but {error}"
            ) from error

    def node_shortage(self) -> NodeShortage | None:
        return candidate_nodes(self._settings.slurm).shortage(self._settings.cluster.nodes)

    def cancel_earlier_jobs(self, folder: Path) -> Iterator[str]:
        """A job belongs to the run if its script or its token is in the folder."""
        folder_by_token = {file.read_text(encoding="utf-8"): file.parent for file in token_files(folder)}
        if not folder_by_token:
            return
        for job_id, command in slurm.queued_job_scripts().items():
            for token, attempt in folder_by_token.items():
                if command.endswith(f" {token}") or command == str(attempt / SCRIPT):
                    yield f"Slurm job {job_id} of an earlier run in {folder} has not ended: cancelling it"
                    if remaining := SlurmJob(job_id, self._settings, attempt).cancel():
                        raise SeatrialError(f"an earlier run may still write to {folder}: {remaining}")

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        settings = self._settings
        text = script.job_script(
            "sbatch.sh.j2",
            settings,
            job,
            attempt,
            run_dir=str(run_dir),
            scratch=settings.slurm.scratch,
            sbatch_options=_sbatch_options(job, settings.slurm),
            cpus=settings.slurm.cpus_per_task,
            interface=settings.slurm.interface,
            srun_flags=_srun_flags(settings),
        )
        return RenderedJob(argv=("sbatch", "--parsable"), text=text)

    def start(self, rendered: RenderedJob, folder: Path) -> SlurmJob:
        batch, token_file = folder / SCRIPT, folder / TOKEN
        try:
            if token_file.exists():  # Slurm may have accepted the job, although an earlier sbatch failed
                list(self.cancel_earlier_jobs(folder))
            else:
                atomic_write(batch, rendered.text.encode(errors="surrogateescape"), mode=PRIVATE)
                atomic_write(token_file, uuid.uuid4().hex.encode())  # before sbatch: cancel_earlier_jobs reads it
            command = [*rendered.argv, str(batch), token_file.read_text(encoding="utf-8")]
            job_id = slurm.submit([*slurm.env_prefix_outside_job(), *command])
        except BaseException as error:  # Ctrl-C or timeout: Slurm may have accepted the job
            with contextlib.suppress(SeatrialError):
                list(self.cancel_earlier_jobs(folder))
            if isinstance(error, (slurm.ControllerDown, slurm.TemporarilyRefused)):
                raise JobRefused(str(error), transient=True) from None
            raise
        atomic_write(folder / JOB_ID, job_id.encode())
        return SlurmJob(job_id, self._settings, folder)


def _sbatch_options(job: Job, config: Slurm) -> list[str]:
    gpus = f"gpu:{job.expected_gpus}" if job.expected_gpus else None
    minutes = config.time_min or math.ceil(job.requested_s / 60)
    nodes = {
        "nodelist": config.nodelist or job.nodelist or None,
        "exclude": ",".join(filter(None, [config.exclude, job.exclude])) or None,
    }
    options: list[tuple[str, object]] = [
        ("job-name", f"seatrial-{job.name}"),
        *placement_options(config.model_copy(update=nodes)),
        ("nodes", job.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", config.cpus_per_task),
        ("gres", config.gres or gpus),
        ("mem", config.mem),
        ("time", minutes),
        # used until the script redirects its output, since the run directory may not exist on the node
        ("output", f"{config.scratch}/seatrial-%j.log"),
    ]
    # --no-requeue: a second start of the job would overwrite its measurements
    return [*option_lines(options), *(["--exclusive"] if config.exclusive else []), "--no-requeue", *config.extra]


def _srun_flags(settings: Config) -> list[str]:
    config, hf_home = settings.container, settings.environment.hf_home
    if config.runtime != "pyxis":
        return []
    mounts = "".join(f",{mount}" for mount in (*config.mounts, *([f"{hf_home}:{hf_home}"] if hf_home else [])))
    image, quoted_mounts = shlex.quote(config.image or ""), shlex.quote(mounts) if mounts else ""
    return [f"--container-image={image}", f'--container-mounts="$SEATRIAL_RUN_DIR:$SEATRIAL_RUN_DIR"{quoted_mounts}']
