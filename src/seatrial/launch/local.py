"""Local launcher: torchrun with one process per GPU on this host, or a plain process for jobs without torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from seatrial.launch import container, script
from seatrial.launch.base import Launcher, RenderedJob, StartedJob
from seatrial.model import Job
from seatrial.util import processes
from seatrial.util.files import atomic_write
from seatrial.util.secrets import PRIVATE

# Without an interface name gloo resolves the host name, which may fail; loopback always works on one host
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
# Replace the variables of another job, which the calling shell may have
_SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
_REMOVE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class LocalJob(StartedJob):
    """A job in child processes of this process. ``runtime``: docker or podman if one of them runs it, else empty."""

    child: processes.Child
    runtime: str = ""

    def poll(self) -> int | None:
        return self.child.poll()

    def run_on_nodes(self, script: str, attempt: Path, limit_s: float) -> processes.CommandResult:
        return processes.run_command(["bash", "-c", script, str(attempt)], limit_s)

    def cancel(self, *, node_lost: bool = False) -> str:
        del node_lost
        remaining = processes.stop(self.child)
        if self.runtime:  # the processes of a container outlive a killed client
            filters = ["--filter", f"label={container.LABEL}={self.child.tag}"]
            listed = processes.run_command([self.runtime, "ps", "--quiet", *filters], _REMOVE_TIMEOUT_S)
            if ids := listed.out.split():
                processes.run_command([self.runtime, "rm", "--force", *ids], _REMOVE_TIMEOUT_S)
        return remaining


class LocalLauncher(Launcher):
    """Runs jobs on this host, as children of this process."""

    name, runtimes = "local", ("apptainer", "docker", "podman")

    def unavailable_reason(self) -> str | None:
        if (nodes := self._settings.cluster.nodes) != 1:
            return f"cluster.nodes is {nodes}, but the launcher local runs on this host only: use --launcher slurm"
        return super().unavailable_reason()

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        folder = run_dir / "jobs" / job.name
        rank_env = {} if job.placement == "ranks" else _SINGLE_PROCESS
        env = {**(_LOOPBACK if job.device == "cpu" else {}), **rank_env, **job.env}
        job = job.model_copy(update={"env": env})
        text = script.job_script("local.sh.j2", self._settings, job, attempt, run_dir=str(run_dir))
        return RenderedJob(argv=("bash", str(folder / f"attempt{attempt}" / "job.sh")), text=text)

    def start(self, rendered: RenderedJob, folder: Path) -> LocalJob:
        atomic_write(Path(rendered.argv[-1]), rendered.text.encode(errors="surrogateescape"), mode=PRIVATE)
        child = processes.start(rendered.argv, env={}, stdout=folder / "launcher.out", stderr=folder / "launcher.err")
        runtime = self._settings.container.runtime
        return LocalJob(child, runtime if runtime in ("docker", "podman") and shutil.which(runtime) else "")
