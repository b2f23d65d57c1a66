"""Launchers: each starts the same worker, on this host, through Slurm, through Kubernetes or through torchrun.

A launcher is imported when a trial uses it: `seatrial render` starts faster without the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from seatrial.config import kubernetes_pod
from seatrial.config.schema import Config, Container, Environment
from seatrial.config.slurm_options import srun_command
from seatrial.launch.base import Launcher
from seatrial.model import NodeShortage, UsageError


def runs_remotely(settings: Config) -> bool:
    """Return whether jobs run, or may run, on other machines, so that the tested GPUs are not those of this host."""
    return settings.uses_slurm or settings.launcher in ("torchrun", "kubernetes")


def runs_as_root(settings: Config) -> bool:
    """Return whether jobs are known to run as root: on this host, without a container, by root."""
    return not runs_remotely(settings) and settings.container.runtime == "none" and os.geteuid() == 0


def node_prefix(settings: Config) -> str:
    """Return the prefix that makes a command run on a node of the trial; empty if jobs run on this host.

    ``{node}`` stands for the node's name.
    """
    if settings.uses_slurm:
        gpus = settings.cluster.gpus_per_node
        return srun_command(settings.slurm, "{node}") + (f" --gpus-per-node={gpus}" if gpus else "")
    if settings.launcher == "kubernetes":
        from seatrial.discover.kubectl import Kubectl

        # kube-system: a privileged pod, which Pod Security may refuse in the trial's namespace
        image = kubernetes_pod.image(settings.kubernetes)
        debug = ("debug", "--quiet", "--stdin", "--profile=sysadmin", f"--image={image}")
        command = Kubectl("kube-system", settings.kubernetes.context).command_text(*debug)
        return f"as an administrator: {command} node/{{node}} -- chroot /host"
    return "ssh {node}" if runs_remotely(settings) else ""


def select_launcher(settings: Config, placement: str) -> Launcher:
    """Return the launcher for jobs of this placement; ``control`` jobs always run on this host.

    Raises UsageError if the launcher is not available here.
    """
    if placement == "control":
        # Control checks submit jobs from this host, so they do not use the environment or container of the trial
        defaults = {"environment": Environment(), "container": Container()}
        nodes, launcher = 1, _launcher("local", settings.model_copy(update=defaults))
    else:
        nodes = settings.cluster.nodes
        launcher = _launcher("slurm" if settings.uses_slurm else settings.launcher, settings)
    reason = launcher.unavailable_reason(nodes)
    if reason:
        raise UsageError(f"launcher {launcher.name} is not available: {reason}")
    return launcher


def _launcher(name: str, settings: Config) -> Launcher:
    if name == "slurm":
        from seatrial.launch.slurm import SlurmLauncher

        return SlurmLauncher(settings)
    if name == "kubernetes":
        from seatrial.launch.kubernetes import KubernetesLauncher

        return KubernetesLauncher(settings)
    if name == "torchrun":
        from seatrial.launch.torchrun import TorchrunLauncher

        return TorchrunLauncher(settings)
    from seatrial.launch.local import LocalLauncher

    return LocalLauncher(settings)


def check_access(settings: Config) -> None:
    """Raise UsageError if the trial's jobs cannot be started: no kubectl, permission or operator, or no slurm.conf."""
    if settings.launcher == "kubernetes":
        from seatrial.launch.kubernetes import require_access

        require_access(settings)
    elif settings.uses_slurm:
        from seatrial.launch.slurm import require_client

        try:
            require_client()
        except UsageError as error:
            if settings.launcher != "auto":
                raise
            raise UsageError(
                f"--nodes {settings.cluster.nodes} needs a launcher for several nodes: --launcher slurm, torchrun or "
                f"kubernetes. auto has chosen slurm, but {error}"
            ) from error


def node_shortage(settings: Config) -> NodeShortage | None:
    """Return the nodes that need an administrator or are reserved for others; None if enough other nodes are left.

    Without Slurm always None. Raises SeatrialError if the scheduler cannot be queried, ValueError on unexpected output.
    """
    if not settings.uses_slurm:
        return None
    from seatrial.discover.slurm_nodes import candidate_nodes

    return candidate_nodes(settings.slurm).shortage(settings.cluster.nodes)


def cancel_earlier_jobs(settings: Config, run_dir: Path) -> Iterator[str]:
    """Cancel the jobs that a killed run in this directory left in the scheduler; yield a message before each job.

    A local job ends with the run that started it (``processes.die_with_parent``). Raises SeatrialError if a job
    cannot be cancelled.
    """
    if settings.uses_slurm:
        from seatrial.launch.slurm_job import cancel_remaining_jobs

        yield from cancel_remaining_jobs(run_dir, settings)
    elif settings.launcher == "kubernetes":
        from seatrial.launch.kubernetes_job import delete_remaining_jobs

        yield from delete_remaining_jobs(run_dir, settings)
