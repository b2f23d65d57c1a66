"""Launchers: each starts the same worker, on this host, through Slurm, through Kubernetes or through torchrun.

A launcher is imported when a trial uses it: `seatrial render` starts faster without the others.
"""

from __future__ import annotations

import os

from seatrial.config import kubernetes_pod
from seatrial.config.schema import Cluster, Config, Container, Environment
from seatrial.config.slurm_options import srun_command
from seatrial.launch.base import Launcher
from seatrial.model import UsageError


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
        # Control checks submit jobs from this host, so they use neither nodes, environment nor container of the trial
        defaults = {"cluster": Cluster(), "environment": Environment(), "container": Container()}
        launcher = _launcher("local", settings.model_copy(update=defaults))
    else:
        launcher = trial_launcher(settings)
    if reason := launcher.unavailable_reason():
        raise UsageError(f"launcher {launcher.name} is not available: {reason}")
    return launcher


def trial_launcher(settings: Config) -> Launcher:
    """Return the launcher for the jobs of a trial on nodes, whether it is available here or not."""
    return _launcher("slurm" if settings.uses_slurm else settings.launcher, settings)


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
