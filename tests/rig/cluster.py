"""A real Slurm cluster of N nodes on one Linux machine, as root.

Each node is a set of namespaces (processes, mounts, host name, network, IPC) around an init of its own, with a cable
(a veth pair) to the host's bridge. The controller is the host. When a node's init dies, the kernel takes with it
every process, mount and link of the node; and init dies with the process that made the cluster. So even after a
SIGKILL little is left, and the next rig removes that (``host.py``).

Every directory of the host is shared by all nodes, except /proc, /sys, /dev/shm and what ``private_dir`` takes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.rig import files, host
from tests.rig.faults import Faults, munged_command, require_success

_COMMANDS = ("slurmctld", "slurmd", "srun", "munged", "ip", "tc", "iptables", "unshare", "nsenter", "setpriv")
_PACKAGES = "slurm-wlm munge iproute2 iptables"
_DIE_WITH_US = ["setpriv", "--pdeathsig", "KILL"]
_SOCKET_PATH_MAX = 107  # sun_path of unix(7)

# A fresh sysfs shows the node's own network; slurmd wants the host's cgroups in it.
# What a GPU is in truth: /dev/full, kmsg, random, urandom, and then /dev/null, which every job must be able to open.
_GPU_MINORS = (7, 11, 8, 9)
_NULL = 3
_INIT = """
set -e
mount --rbind /sys/fs/cgroup {folder}/cgroup
mount -t sysfs sysfs /sys
mount --move {folder}/cgroup /sys/fs/cgroup
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs {folder}/dev
gpu=0
for minor in {gpus}; do mknod {folder}/dev/gpu$gpu c 1 $minor; gpu=$((gpu + 1)); done
mount --bind {folder}/hosts /etc/hosts
hostname {name}
ip link set lo up
echo ready
sleep infinity &
while :; do wait; done
"""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, and how to get into it."""

    name: str
    link: str
    init: int

    def enter(self, argv: Sequence[str]) -> list[str]:
        spaces = ["--pid", "--mount", "--uts", "--net", "--ipc"]
        return ["nsenter", "--target", str(self.init), *spaces, "--", *argv]


class Cluster(Faults):
    """``with Cluster(nodes=4, folder=tmp_path) as cluster: cluster.run(["srun", "-N4", "hostname"])``.

    ``folder`` keeps its configuration and logs. ``extra`` are further lines of slurm.conf. To be used from the main
    thread: while it is up, SIGTERM counts as Ctrl-C, so that it is taken down then too.

    ``confined``: jobs are held to their CPUs, memory and devices by affinity and cgroups. A node has two CPUs then,
    since they must be there, and at most four GPUs. One such rig at a time: nodes of one name share their cgroups.

    On a node, names are those of its own cluster. On the host, they are also those of the newest rig.
    """

    def __init__(
        self, *, nodes: int, folder: Path, gpus_per_node: int = 0, extra: str = "", confined: bool = False
    ) -> None:
        self.folder = folder.resolve()
        self.nodes = [f"node{number}" for number in range(nodes)]
        self.env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._gpus = gpus_per_node
        self._extra = extra
        self._confined = confined
        self._machines: dict[str, Node] = {}

    @classmethod
    def reason_unavailable(cls) -> str | None:
        """Why there can be no cluster here; None when there can."""
        if os.geteuid() != 0:
            return "needs root, for network namespaces"
        if missing := [command for command in _COMMANDS if not shutil.which(command)]:
            return f"needs {', '.join(missing)}: apt-get install {_PACKAGES}"
        probe = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "true"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        return f"cannot make namespaces: {done.stderr.strip()}" if done.returncode else None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
            self._make(stack)
            self._down = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._down.close()

    def run(self, argv: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller, in the cluster's folder."""
        return subprocess.run(
            argv, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False
        )

    def run_on(self, node: str, argv: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, past Slurm."""
        return self.run(self._machines[node].enter(argv), timeout)

    def link(self, node: str) -> str:
        return self._machines[node].link

    def wait_for(self, nodes: Sequence[str], *states: str, seconds: float = 60) -> None:
        """Wait until ``sinfo`` says that the nodes are in one of these states: ``idle``, ``down*`` (no answer)…"""
        deadline = time.monotonic() + seconds
        query = ["sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%T"]
        while not (seen := set((said := self.run(query)).stdout.split())) or not seen <= set(states):
            if time.monotonic() > deadline or self._controller.poll() is not None:
                raise TimeoutError(f"{','.join(nodes)} not {states}: {said.stdout}{said.stderr}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self, lines: int = 10) -> str:
        """The end of each daemon's log."""
        texts = {path.name: path.read_text(errors="replace") for path in sorted((self.folder / "log").iterdir())}
        ends = {name: text.splitlines()[-lines:] for name, text in texts.items() if text}
        return "\n".join(f"--- {name}\n" + "\n".join(end) for name, end in ends.items())

    def start_munge(self) -> None:
        """The authentication daemon of all nodes and the controller, which share its socket."""
        socket = self.folder / "run/munge.socket"
        if len(os.fsencode(socket)) > _SOCKET_PATH_MAX:
            raise ValueError(f"the folder's path is too long: {socket} has more than {_SOCKET_PATH_MAX} bytes")
        self._munge = self._daemon("munged", [*munged_command(self.folder, "munge"), "--foreground"])
        while not socket.exists() and self._munge.poll() is None:
            time.sleep(0.02)

    def stop_munge(self) -> None:
        _end(self._munge)

    def start_controller(self) -> None:
        argv = ["unshare", "--uts", "sh", "-c", 'hostname ctl; exec slurmctld -D -f "$SLURM_CONF"']
        self._controller = self._daemon("slurmctld", argv)

    def stop_controller(self) -> None:
        _end(self._controller)

    def start_slurmd(self, node: str) -> None:
        require_success(self.run_on(node, ["slurmd", "-f", self.env["SLURM_CONF"], "-N", node]))

    # How it is made, in this order

    def _make(self, stack: ExitStack) -> None:
        slot, held = host.claim_slot()
        stack.callback(held.close)
        stack.callback(host.clean_up_slot, slot)
        self.env[host.TAG] = str(slot)
        network = f"10.77.{slot}"
        files.write(self.folder, network, 7000 + slot, self.nodes, self._gpus, self._extra, self._confined)
        if self._confined:
            stack.callback(host.lock_cgroups().close)
            stack.callback(host.remove_cgroups)
        host.write_hosts(slot, files.names(network, self.nodes))
        self._make_bridge(host.bridge(slot), f"{network}.1/24")
        self.start_munge()
        stack.callback(self.stop_munge)
        for number, name in enumerate(self.nodes):
            init = self._boot(name)
            self._machines[name] = Node(name, host.link(slot, number), _child(init))
            stack.callback(self._power_off, self._machines[name], init)
            self._plug_in(self._machines[name], host.bridge(slot), f"{files.address(network, number)}/24")
        self.start_controller()
        stack.callback(self.stop_controller)
        for name in self.nodes:
            self.start_slurmd(name)
        self.wait_for(self.nodes, "idle")

    def _make_bridge(self, bridge: str, address: str) -> None:
        require_success(self.run(["ip", "link", "add", bridge, "type", "bridge"]))
        require_success(self.run(["ip", "address", "add", address, "dev", bridge]))
        require_success(self.run(["ip", "link", "set", bridge, "up"]))

    def _boot(self, name: str) -> subprocess.Popen[bytes]:
        """Start a node's init and wait until it has set up its namespaces."""
        minors = [*_GPU_MINORS, *[_NULL] * self._gpus][: self._gpus]
        script = _INIT.format(folder=self.folder, name=name, gpus=" ".join(map(str, minors)))
        spaces = ["--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts", "--net", "--ipc"]
        init = self._daemon(f"init-{name}", ["unshare", *spaces, "sh", "-c", script], subprocess.PIPE)
        assert init.stdout
        if init.stdout.readline() != b"ready\n":
            raise RuntimeError(f"cannot set up {name}: its init ended with {init.wait()}\n{self.logs()}")
        return init

    def _plug_in(self, node: Node, bridge: str, address: str) -> None:
        cable = ["ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", str(node.init)]
        require_success(self.run(cable))
        require_success(self.run(["ip", "link", "set", node.link, "master", bridge, "up"]))
        require_success(self.run_on(node.name, ["ip", "address", "add", address, "dev", "eth0"]))
        require_success(self.run_on(node.name, ["ip", "link", "set", "eth0", "up"]))

    def _power_off(self, node: Node, init: subprocess.Popen[bytes]) -> None:
        """Returns when no process of the node is left: only then does its init end, and unshare, which waits for it."""
        if init.poll() is None:
            os.kill(node.init, signal.SIGKILL)
        init.wait()

    def _daemon(self, name: str, argv: Sequence[str], stdout: int | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            return subprocess.Popen(
                [*_DIE_WITH_US, *argv], env=self.env, stdin=subprocess.DEVNULL, stdout=stdout or log, stderr=log
            )


def _child(init: subprocess.Popen[bytes]) -> int:
    """The pid, as the host sees it, of the process that unshare started as the first of the new namespace."""
    return psutil.Process(init.pid).children()[0].pid


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(5)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
