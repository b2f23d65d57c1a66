"""Writes the configuration files of a test cluster to one folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

_SLURM_CONF = """\
ClusterName=seatrial
SlurmctldHost=ctl({network}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
TaskProlog={folder}/task-prolog
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
MpiDefault=none
# CPUs and memory of a node as configured, not as detected.
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=1
# Short, as tests wait for these timeouts.
KillWait=2
OverTimeLimit=0
MessageTimeout=5
SlurmdTimeout=10
"""


# Runs FOLDER/environment/NODE before each task on NODE; Slurm applies each line ``export NAME=VALUE`` of its output.
_TASK_PROLOG = """\
#!/bin/sh
[ ! -e {folder}/environment/$SLURMD_NODENAME ] || . {folder}/environment/$SLURMD_NODENAME
"""
_CONFINE = "ConstrainCores=yes\nConstrainDevices=yes\nConstrainRAMSpace=yes\n"


class NodeSize(NamedTuple):
    """The hardware of each node for slurm.conf, and the lines of gres.conf."""

    hardware: str
    gres: list[str]


def fake_node(folder: Path, gpus: int, confined: bool) -> NodeSize:
    """A node with 8 GB and fake GPUs; ``confined``: with two CPUs, which exist."""
    gres = f" Gres=gpu:fake:{gpus}" if gpus else ""
    hardware = f"CPUs={2 if confined else 8} RealMemory=8000{gres}"
    return NodeSize(hardware, [f"Name=gpu Type=fake File={folder}/dev/gpu{number}" for number in range(gpus)])


def gpu_of_node(number: int) -> int:
    """The GPU of node ``number``; with fewer GPUs than nodes, nodes share them."""
    return number % (len(list(Path("/dev").glob("nvidia[0-9]*"))) or 1)


def real_gpu_node(nodes: list[str]) -> NodeSize:
    """A node with one real GPU and an equal part of this machine's CPUs and memory."""
    cpus = (os.cpu_count() or 1) // len(nodes)
    memory_mib = psutil.virtual_memory().total // len(nodes) >> 20
    gres = [f"NodeName={node} Name=gpu File=/dev/nvidia{gpu_of_node(number)}" for number, node in enumerate(nodes)]
    return NodeSize(f"CPUs={cpus} RealMemory={memory_mib} Gres=gpu:1", gres)


def write(
    folder: Path,
    network: str,
    port: int,
    nodes: list[str],
    size: NodeSize,
    extra: str,
    partitions: Mapping[str, str],
    confined: bool = False,
) -> None:
    """Writes all files; FileExistsError if ``folder`` has the state of a cluster.

    ``extra``: lines of slurm.conf. ``partitions``: name → nodes; the first one is the default.
    """
    for name in ("log", "run", "state", "cgroup", "dev", "own-dev", *(f"spool/{node}" for node in nodes)):
        (folder / name).mkdir(parents=True)
    settings = f"Port=6818 {size.hardware} State=UNKNOWN"
    lines = [f"NodeName={n} NodeAddr={address(network, i)} NodeHostname={n} {settings}" for i, n in enumerate(nodes)]
    defaults = ["YES", *["NO"] * (len(partitions) - 1)]
    lines += [
        f"PartitionName={name} Nodes={members} Default={default} MaxTime=60 State=UP"
        for (name, members), default in zip(partitions.items(), defaults, strict=True)
    ]
    lines.append(extra)
    plugin = "task/affinity,task/cgroup" if confined else "task/none"
    conf = _SLURM_CONF.format(folder=folder, network=network, port=port, task_plugin=plugin)
    (folder / "task-prolog").write_text(_TASK_PROLOG.format(folder=folder))
    (folder / "task-prolog").chmod(0o755)
    (folder / "slurm.conf").write_text(conf + "\n".join(lines) + "\n")
    (folder / "gres.conf").write_text("".join(f"{line}\n" for line in size.gres))
    # the v2 plugin needs systemd
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n" + (_CONFINE if confined else ""))
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names(network, nodes), ""]))
    write_key(folder / "run/munge.key")


def write_key(path: Path) -> None:
    path.write_bytes(os.urandom(1024))
    path.chmod(0o400)


def address(network: str, node: int) -> str:
    return f"{network}.{10 + node}"


def names(network: str, nodes: list[str]) -> list[str]:
    """Returns the lines of /etc/hosts."""
    return [f"{network}.1 ctl", *(f"{address(network, number)} {node}" for number, node in enumerate(nodes))]
