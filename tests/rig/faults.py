"""Faults of a test cluster, and the commands that cause them."""

from __future__ import annotations

import abc
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.rig import files


class Faults(abc.ABC):
    """The faults of a cluster; they end with the cluster."""

    folder: Path

    @abc.abstractmethod
    def run(self, argv: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]: ...

    @abc.abstractmethod
    def run_on(self, node: str, argv: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]: ...

    @abc.abstractmethod
    def link(self, node: str) -> str: ...

    # The network

    def slow_link(self, node: str, rate: str, burst: str = "256kbit") -> None:
        """Limits a node's link in both directions to ``rate`` in the format of tc(8): ``200mbit``.

        ``burst``: sent at once. Above 1 Gb/s it must hold many packets of 64 KiB, else the shaper splits each of them.
        """
        shape = ["root", "tbf", "rate", rate, "burst", burst, "latency", "100ms"]
        require_success(self.run(["tc", "qdisc", "replace", "dev", self.link(node), *shape]))
        require_success(self.run_on(node, ["tc", "qdisc", "replace", "dev", "eth0", *shape]))

    def drop_packets(self, node: str, probability: float) -> None:
        """Drops incoming packets of a node with this probability."""
        rule = ["-m", "statistic", "--mode", "random", "--probability", str(probability), "-j", "DROP"]
        require_success(self.run_on(node, ["iptables", "--append", "INPUT", "-i", "eth0", *rule]))

    def unplug(self, node: str) -> None:
        """Sets a node's link down."""
        require_success(self.run(["ip", "link", "set", self.link(node), "down"]))

    def restore_link(self, node: str) -> None:
        """Restores the node's link: up, no rate limit, no packet loss."""
        require_success(self.run(["ip", "link", "set", self.link(node), "up"]))
        require_success(self.run(["tc", "qdisc", "replace", "dev", self.link(node), "root", "noqueue"]))
        require_success(self.run_on(node, ["tc", "qdisc", "replace", "dev", "eth0", "root", "noqueue"]))
        require_success(self.run_on(node, ["iptables", "--flush", "INPUT"]))

    # The scheduler

    def drain(self, node: str, reason: str) -> None:
        require_success(self.run(["scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}"]))

    def undrain(self, node: str) -> None:
        require_success(self.run(["scontrol", "update", f"nodename={node}", "state=resume"]))

    def kill_slurmd(self, node: str) -> None:
        """Kills slurmd with SIGKILL; jobs on the node continue, and the controller detects it after SlurmdTimeout."""
        require_success(self.run_on(node, ["sh", "-c", f"kill -KILL $(cat {self.folder}/run/slurmd-{node}.pid)"]))

    def kill_node(self, node: str) -> None:
        """Kills slurmd and all other processes of a node with SIGKILL, except its init, which keeps its network."""
        self.run_on(node, ["sh", "-c", "kill -KILL -1"])

    def wrong_munge_key(self, node: str) -> None:
        """Gives the node another munge key, so that credentials between it and other nodes are rejected."""
        run = self.folder / "run"
        files.write_key(run / f"munge-{node}.key")
        require_success(self.run_on(node, munged_command(self.folder, f"munge-{node}")))
        require_success(self.run_on(node, ["mount", "--bind", f"{run}/munge-{node}.socket", f"{run}/munge.socket"]))

    # The filesystem

    def private_dir(self, path: Path, node: str, options: str = "size=64m") -> None:
        """Mounts an empty tmpfs at ``path`` on one node; other nodes still share the directory.

        ``options`` are those of tmpfs(5), for example ``size=64k`` or ``ro``.
        """
        require_success(self.run_on(node, ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]))

    def unmount_private_dir(self, path: Path, node: str) -> None:
        require_success(self.run_on(node, ["umount", "--lazy", str(path)]))


def require_success(done: subprocess.CompletedProcess[str]) -> None:
    """Raises RuntimeError if the command failed."""
    if done.returncode:
        raise RuntimeError(f"{done.args} ended with {done.returncode}: {done.stderr or done.stdout}")


def munged_command(folder: Path, name: str) -> list[str]:
    """Returns the command line of a munged with key ``NAME.key`` and socket ``NAME.socket``."""
    run = f"{folder}/run/{name}"
    paths = [f"--socket={run}.socket", f"--key-file={run}.key", f"--pid-file={run}.pid", f"--seed-file={run}.seed"]
    return ["munged", "--force", *paths, f"--log-file={folder}/log/{name}d.log"]
