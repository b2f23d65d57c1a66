"""One machine: torchrun with one process a GPU, or a plain process for what needs no torch."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from seatrial.launch.base import Allocation, Rendered
from seatrial.model import Job
from seatrial.util import processes

# gloo looks up this host's name unless told an interface; on one host the loopback always works
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
# what the shell that we were started in may hold of another job; torchrun takes its options from PET_* too
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
_STRANGERS = "PET_"
# a folder called seatrial where the trial was started must not stand in for the package
_ONLY_INSTALLED = {"PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class LocalJob:
    child: processes.Child

    def waiting(self) -> None:
        return None

    def allocation(self) -> Allocation:
        return Allocation()

    def exit_reason(self) -> str:
        return ""

    def poll(self) -> int | None:
        return self.child.poll()

    def cancel(self) -> str:
        return processes.stop(self.child)


class LocalLauncher:
    """Runs the job on this machine, as children of this process."""

    name = "local"

    def available(self, nodes: int) -> str | None:
        return None if nodes == 1 else f"it has one node, this one, and {nodes} were promised"

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> Rendered:
        folder = run_dir / "jobs" / job.name
        worker = ("-m", "seatrial.worker", str(folder / "job.json"), str(attempt))
        agent = _torchrun(job, folder / f"attempt{attempt}") if job.placement == "ranks" else ()
        argv = (sys.executable, *agent, *worker)
        alone = {} if job.placement == "ranks" else _ALONE
        env = {**_ONLY_INSTALLED, **(_LOOPBACK if job.device == "cpu" else {}), **alone, **job.env}
        settings = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
        text = f'unset "${{!{_STRANGERS}@}}"\n' + " \\\n    ".join([*settings, shlex.join(argv)])
        return Rendered(argv=argv, env=env, text=text)

    def start(self, rendered: Rendered, folder: Path) -> LocalJob:
        out, err = folder / "launcher.out", folder / "launcher.err"
        return LocalJob(processes.start(rendered.argv, env=rendered.env, stdout=out, stderr=err, without=_STRANGERS))


def _torchrun(job: Job, folder: Path) -> tuple[str, ...]:
    return (
        "-m",
        "torch.distributed.run",
        "--standalone",  # a free port of its own choice, so that two trials never meet
        "--local-addr=127.0.0.1",  # this host's name need not resolve for a trial on this host
        f"--nproc-per-node={job.ranks_per_node}",
        "--max-restarts=0",  # a restart would hide the fault
        "--redirects=3",  # stdout and stderr of each rank in files of its own
        f"--log-dir={folder / 'logs'}",
    )
