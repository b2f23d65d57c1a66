"""What can go wrong in a cluster, and how it is made to."""

from __future__ import annotations

import abc
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.rig import files


class Faults(abc.ABC):
    """The faults of a cluster. All of them end with it."""

    folder: Path

    @abc.abstractmethod
    def run(self, argv: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]: ...

    @abc.abstractmethod
    def run_on(self, node: str, argv: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]: ...

    @abc.abstractmethod
    def link(self, node: str) -> str: ...

    # The network

    def slow_link(self, node: str, rate: str) -> None:
        """Limit a node's link, each way, to ``rate`` as tc(8) writes it: ``200mbit``."""
        shape = ["root", "tbf", "rate", rate, "burst", "256kbit", "latency", "100ms"]
        require_success(self.run(["tc", "qdisc", "replace", "dev", self.link(node), *shape]))
        require_success(self.run_on(node, ["tc", "qdisc", "replace", "dev", "eth0", *shape]))

    def drop_packets(self, node: str, probability: float) -> None:
        """Lose this share of the packets that come to a node."""
        lost = ["-m", "statistic", "--mode", "random", "--probability", str(probability), "-j", "DROP"]
        require_success(self.run_on(node, ["iptables", "--append", "INPUT", "-i", "eth0", *lost]))

    def unplug(self, node: str) -> None:
        """Pull a node's cable."""
        require_success(self.run(["ip", "link", "set", self.link(node), "down"]))

    def restore_link(self, node: str) -> None:
        """The node's link as it was: plugged in, at full speed, without losses."""
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
        """SIGKILL. Jobs on the node go on, and the controller finds out after SlurmdTimeout."""
        require_success(self.run_on(node, ["sh", "-c", f"kill -KILL $(cat {self.folder}/run/slurmd-{node}.pid)"]))

    def wrong_munge_key(self, node: str) -> None:
        """From now on this node's credentials are refused by the others, and theirs by it."""
        run = self.folder / "run"
        files.write_key(run / f"munge-{node}.key")
        require_success(self.run_on(node, munged_command(self.folder, f"munge-{node}")))
        require_success(self.run_on(node, ["mount", "--bind", f"{run}/munge-{node}.socket", f"{run}/munge.socket"]))

    # The filesystem

    def private_dir(self, path: Path, node: str, options: str = "size=64m") -> None:
        """Give a node an empty filesystem of its own at ``path``, which is shared everywhere else.

        ``options`` are those of tmpfs(5): ``size=64k`` is soon full, ``ro`` refuses writes.
        """
        require_success(self.run_on(node, ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]))

    def unmount_private_dir(self, path: Path, node: str) -> None:
        require_success(self.run_on(node, ["umount", "--lazy", str(path)]))


def require_success(done: subprocess.CompletedProcess[str]) -> None:
    """Raise when a command failed that cannot fail in a healthy rig."""
    if done.returncode:
        raise RuntimeError(f"{done.args} ended with {done.returncode}: {done.stderr or done.stdout}")


def munged_command(folder: Path, name: str) -> list[str]:
    """The command of an authentication daemon with the key ``NAME.key`` and the socket ``NAME.socket``."""
    run = f"{folder}/run/{name}"
    paths = [f"--socket={run}.socket", f"--key-file={run}.key", f"--pid-file={run}.pid", f"--seed-file={run}.seed"]
    return ["munged", "--force", *paths, f"--log-file={folder}/log/{name}d.log"]
