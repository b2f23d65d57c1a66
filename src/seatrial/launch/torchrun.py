"""Torchrun launcher, for clusters without a scheduler: renders a script that the user starts on each node.

seatrial starts and watches nothing here; ``run --resume`` collects the ranks' results from the run directory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from seatrial.config.schema import Config
from seatrial.launch import script
from seatrial.launch.base import Launcher, RenderedJob, StartedJob
from seatrial.model import Job, SeatrialError
from seatrial.util.files import atomic_write
from seatrial.util.secrets import PRIVATE
from seatrial.util.text import plural

_SCRIPT = "torchrun.sh"


class TorchrunLauncher(Launcher):
    """Renders torchrun scripts that the user starts."""

    name, runtimes = "torchrun", ("apptainer", "docker", "podman")

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        text = script.job_script("torchrun.sh.j2", self._settings, job, attempt, run_dir=str(run_dir))
        return RenderedJob(argv=(), text=text)

    def start(self, rendered: RenderedJob, folder: Path) -> StartedJob:
        """Write the script, then always raise SeatrialError, which tells the user how to run the scripts of all jobs.

        If the script has run already, its preflight errors are copied into ``launcher.err`` of this attempt.
        """
        atomic_write(folder.parent / _SCRIPT, rendered.text.encode(), mode=PRIVATE)
        errors = [file.read_text(encoding="utf-8", errors="replace") for file in folder.parent.glob("preflight.*")]
        (folder / "launcher.err").write_text("".join(errors), encoding="utf-8")
        run_dir = folder.parents[2]
        commands = [_command(script_file) for script_file in sorted(run_dir.glob(f"jobs/*/{_SCRIPT}"))]
        host = ", HOST: host name of node 0" if any("HOST" in command for command in commands) else ""
        have_run = any(run_dir.glob("jobs/*/attempt*/logs/*"))
        logs = f"; logs of scripts that ran: {run_dir}/jobs/*/attempt*/logs" if have_run else ""
        raise SeatrialError(
            f"start {plural(len(commands), 'script')} on each node: {'; then '.join(commands)} "
            f"(NODE: index of the node from 0{host}){logs}. Run first, on each node: {commands[0]}"
        )


def _command(script_file: Path) -> str:
    address = "MASTER_ADDR=HOST " if "MASTER_ADDR" in script_file.read_text(encoding="utf-8") else ""
    return f"{address}bash {script_file} NODE"


def write_scripts(settings: Config, jobs: Iterable[Job], run_dir: Path) -> None:
    """Write the script of each job, and its job file; remove the scripts of earlier jobs, which are complete."""
    for script_file in run_dir.glob(f"jobs/*/{_SCRIPT}"):
        script_file.unlink()
    for job in jobs:
        if job.placement != "control":  # run --resume runs the control job on this host
            folder = run_dir / "jobs" / job.name
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / "job.json", job.model_dump_json(indent=2).encode(), mode=PRIVATE)
            attempt = 1 + sum(1 for path in folder.glob("attempt*"))
            text = TorchrunLauncher(settings).render(job, run_dir, attempt).text
            atomic_write(folder / _SCRIPT, text.encode(), mode=PRIVATE)
