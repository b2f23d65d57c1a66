"""Local launcher: torchrun with one process per GPU on this host, or a plain process for jobs without torch."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from seatrial.launch.base import Allocation, RenderedJob
from seatrial.model import Job
from seatrial.util import processes

# Without an interface name gloo resolves the host name, which may fail; loopback always works on one host
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
# Override variables of another job that the calling shell may have set
_SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
_TORCHRUN_PREFIX = "PET_"  # of variables from which torchrun reads options: not inherited
# Do not import a folder named seatrial in the current directory instead of the package
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class LocalJob:
    """A job in child processes of this process."""

    child: processes.Child

    def wait_state(self) -> None:
        return None

    def allocation(self) -> Allocation:
        return Allocation()

    def exit_reason(self) -> str:
        return ""

    def poll(self) -> int | None:
        return self.child.poll()

    def completing_code(self) -> int | None:
        return self.poll()

    def node_state(self, host: str) -> tuple[str, str]:
        return host, ""

    def node_is_free(self, name: str) -> bool:
        del name
        return False

    def cancel(self, *, node_lost: bool = False) -> str:
        del node_lost
        return processes.stop(self.child)


class LocalLauncher:
    """Runs jobs on this host, as children of this process."""

    name = "local"

    def available(self, nodes: int) -> str | None:
        return None if nodes == 1 else f"cluster.nodes is {nodes}, but it runs on this host only: use --launcher slurm"

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        folder = run_dir / "jobs" / job.name
        worker = ("-m", "seatrial.worker", str(folder / "job.json"), str(attempt))
        agent = _torchrun(job, folder / f"attempt{attempt}") if job.placement == "ranks" else ()
        argv = (sys.executable, *agent, *worker)
        rank_env = {} if job.placement == "ranks" else _SINGLE_PROCESS
        env = {**_SAFE_PATH, **(_LOOPBACK if job.device == "cpu" else {}), **rank_env, **job.env}
        assignments = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
        text = f'unset "${{!{_TORCHRUN_PREFIX}@}}"\n' + " \\\n    ".join([*assignments, shlex.join(argv)])
        return RenderedJob(argv=argv, env=env, text=text)

    def start(self, rendered: RenderedJob, folder: Path) -> LocalJob:
        out, err = folder / "launcher.out", folder / "launcher.err"
        child = processes.start(rendered.argv, env=rendered.env, stdout=out, stderr=err, without=_TORCHRUN_PREFIX)
        return LocalJob(child)


def _torchrun(job: Job, folder: Path) -> tuple[str, ...]:
    return (
        "-m",
        "torch.distributed.run",
        "--standalone",  # picks a free port, so that concurrent trials do not conflict
        "--local-addr=127.0.0.1",  # do not depend on resolving the host name
        f"--nproc-per-node={job.ranks_per_node}",
        "--max-restarts=0",  # a restart would hide the fault
        "--redirects=3",  # stdout and stderr of each rank go to its own files
        f"--log-dir={folder / 'logs'}",
    )
