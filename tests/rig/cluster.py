"""The rig: a real Slurm test cluster of N nodes on one Linux machine, as root.

Each node is a set of namespaces (PID, mount, UTS, network, IPC) with its init process, and a veth pair to a bridge of
the host. The controller runs on the host. When the init process of a node exits, the kernel removes all processes,
mounts and links of the node; init exits with the process that created the cluster. After a SIGKILL, the next rig
removes the rest (``host.py``).

All nodes share all directories of the host, except /proc, /sys, /dev/shm and those of ``private_dir``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
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
_DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]
_SOCKET_PATH_MAX = 107  # sun_path of unix(7)

# A new sysfs shows the network of the node; slurmd needs the cgroups of the host in it.
# Device minors of the fake GPUs: /dev/full, kmsg, random, urandom, then /dev/null, to which every job needs access.
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
{own_gpu}mount --bind {folder}/hosts /etc/hosts
hostname {name}
ip link set lo up
echo ready
sleep infinity &
while :; do wait; done
"""


# As a container does it: /dev has one GPU, and the driver's libraries do not create the files of the others.
_OWN_GPU = """\
mount -t tmpfs tmpfs {folder}/own-dev
for path in /dev/*; do
  case $path in
    /dev/nvidia[0-9]*) ;;
    /dev/shm | /dev/pts | /dev/mqueue | /dev/hugepages)
      mkdir {folder}/own-dev/${{path#/dev/}}
      mount --rbind $path {folder}/own-dev/${{path#/dev/}} ;;
    *) cp -a $path {folder}/own-dev/ ;;
  esac
done
cp -a /dev/nvidia{gpu} {folder}/own-dev/
mount --move {folder}/own-dev /dev
if [ -e /proc/driver/nvidia/params ]; then
  sed 's/^ModifyDeviceFiles: 1/ModifyDeviceFiles: 0/' /proc/driver/nvidia/params > {folder}/run/params-{gpu}
  mount --bind {folder}/run/params-{gpu} /proc/driver/nvidia/params
fi
"""


@dataclass(frozen=True)
class Node:
    """A node of the cluster: host side of its link, and PID of its init process."""

    name: str
    link: str
    init: int

    def enter(self, argv: Sequence[str]) -> list[str]:
        namespaces = ["--pid", "--mount", "--uts", "--net", "--ipc"]
        return ["nsenter", "--target", str(self.init), *namespaces, "--", *argv]


class Cluster(Faults):
    """``with Cluster(nodes=4, folder=tmp_path) as cluster: cluster.run(["srun", "-N4", "hostname"])``.

    ``folder`` contains configuration and logs. ``extra``: further lines of slurm.conf. Use it in the main thread:
    while it runs, SIGTERM raises KeyboardInterrupt, so that the cluster is stopped then too.

    ``confined``: affinity and cgroups limit jobs to their CPUs, memory and devices. A node then has two real CPUs and
    at most four GPUs. Only one confined rig can run at a time, as nodes with the same name share their cgroups.

    ``partitions``: name → nodes, such as ``{"cpu": "node0", "gpu": "node[1-3]"}``; the first one is Slurm's default.

    ``real_gpus``: node N has GPU N of this machine, and an equal part of its CPUs and memory. With fewer GPUs than
    nodes, nodes share them: NCCL then uses sockets between two ranks on one GPU, as their host names differ.

    Node names resolve to the node's own cluster on a node, and to the newest rig on the host.
    """

    def __init__(
        self,
        *,
        nodes: int,
        folder: Path,
        gpus_per_node: int = 0,
        extra: str = "",
        confined: bool = False,
        real_gpus: bool = False,
        partitions: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.nodes = [f"node{number}" for number in range(nodes)]
        self.env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._gpus = gpus_per_node
        self._extra = extra
        self._confined = confined
        self._real_gpus = real_gpus
        self._partitions = partitions or {"gpu": "ALL"}
        self._machines: dict[str, Node] = {}

    @classmethod
    def reason_unavailable(cls) -> str | None:
        """Returns why this machine cannot run a cluster; None if it can."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down.close()

    def run(self, argv: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command on the controller, in the cluster's folder."""
        return subprocess.run(
            argv, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False
        )

    def run_on(self, node: str, argv: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node without Slurm."""
        return self.run([*self.enter(node), *argv], timeout)

    def enter(self, node: str) -> list[str]:
        """Returns the words before a command that runs on a node without Slurm."""
        return self._machines[node].enter([])

    def link(self, node: str) -> str:
        return self._machines[node].link

    def wait_for(self, nodes: Sequence[str], *states: str, seconds: float = 60) -> None:
        """Waits until ``sinfo`` reports one of the states for all nodes: ``idle``, ``down*`` (no answer)…"""
        deadline = time.monotonic() + seconds
        query = ["sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%T"]
        while not (current := set((answer := self.run(query)).stdout.split())) or not current <= set(states):
            if time.monotonic() > deadline or self._controller.poll() is not None:
                raise TimeoutError(f"{','.join(nodes)} not {states}: {answer.stdout}{answer.stderr}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self, lines: int = 10) -> str:
        """Returns the last lines of each daemon's log."""
        texts = {path.name: path.read_text(errors="replace") for path in sorted((self.folder / "log").iterdir())}
        ends = {name: text.splitlines()[-lines:] for name, text in texts.items() if text}
        return "\n".join(f"--- {name}\n" + "\n".join(end) for name, end in ends.items())

    def start_munge(self) -> None:
        """Starts munged, whose socket all nodes and the controller share."""
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

    # Steps of the start, in this order

    def _make(self, stack: ExitStack) -> None:
        slot, slot_socket = host.claim_slot()
        stack.callback(slot_socket.close)
        stack.callback(host.clean_up_slot, slot)
        self.env[host.TAG] = str(slot)
        network = f"10.77.{slot}"
        size = (
            files.real_gpu_node(self.nodes)
            if self._real_gpus
            else files.fake_node(self.folder, self._gpus, self._confined)
        )
        files.write(self.folder, network, 7000 + slot, self.nodes, size, self._extra, self._partitions, self._confined)
        if self._confined:
            stack.callback(host.lock_cgroups().close)
            stack.callback(host.remove_cgroups)
        host.write_hosts(slot, files.names(network, self.nodes))
        self._make_bridge(host.bridge(slot), f"{network}.1/24")
        self.start_munge()
        stack.callback(self.stop_munge)
        for number, name in enumerate(self.nodes):
            init = self._boot(name, number)
            self._machines[name] = Node(name, host.link(slot, number), _child(init))
            stack.callback(self._power_off, self._machines[name], init)
            self._connect(self._machines[name], host.bridge(slot), f"{files.address(network, number)}/24")
        self.start_controller()
        stack.callback(self.stop_controller)
        for name in self.nodes:
            self.start_slurmd(name)
        self.wait_for(self.nodes, "idle")

    def _make_bridge(self, bridge: str, address: str) -> None:
        require_success(self.run(["ip", "link", "add", bridge, "type", "bridge"]))
        require_success(self.run(["ip", "address", "add", address, "dev", bridge]))
        require_success(self.run(["ip", "link", "set", bridge, "up"]))

    def _boot(self, name: str, number: int) -> subprocess.Popen[bytes]:
        """Starts the init process of a node and waits until its namespaces are ready."""
        minors = [*_GPU_MINORS, *[_NULL] * self._gpus][: self._gpus]
        own_gpu = _OWN_GPU.format(folder=self.folder, gpu=files.gpu_of_node(number)) if self._real_gpus else ""
        script = _INIT.format(folder=self.folder, name=name, gpus=" ".join(map(str, minors)), own_gpu=own_gpu)
        namespaces = ["--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts", "--net", "--ipc"]
        init = self._daemon(f"init-{name}", ["unshare", *namespaces, "sh", "-c", script], subprocess.PIPE)
        assert init.stdout
        if init.stdout.readline() != b"ready\n":
            raise RuntimeError(f"cannot set up {name}: its init ended with {init.wait()}\n{self.logs()}")
        return init

    def _connect(self, node: Node, bridge: str, address: str) -> None:
        command = ["ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", str(node.init)]
        require_success(self.run(command))
        require_success(self.run(["ip", "link", "set", node.link, "master", bridge, "up"]))
        require_success(self.run_on(node.name, ["ip", "address", "add", address, "dev", "eth0"]))
        require_success(self.run_on(node.name, ["ip", "link", "set", "eth0", "up"]))

    def _power_off(self, node: Node, init: subprocess.Popen[bytes]) -> None:
        """Kills the init process and waits for unshare, which exits when no process of the node is left."""
        if init.poll() is None:
            os.kill(node.init, signal.SIGKILL)
        init.wait()

    def _daemon(self, name: str, argv: Sequence[str], stdout: int | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            return subprocess.Popen(
                [*_DIE_WITH_PARENT, *argv], env=self.env, stdin=subprocess.DEVNULL, stdout=stdout or log, stderr=log
            )


def _child(init: subprocess.Popen[bytes]) -> int:
    """Returns the host PID of the init process, the child of unshare."""
    return psutil.Process(init.pid).children()[0].pid


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(5)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
