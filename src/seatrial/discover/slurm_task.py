"""The CPUs, GPUs and memory that each task of a job may use, from the output of a shell script.

srun passes the script as an argument and collects its standard output, so the nodes need neither Python nor a shared
directory. The script opens device files for reading, and changes nothing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from seatrial.discover.file_readers import parse_id_list
from seatrial.discover.nvml import pci_address
from seatrial.model import Frozen
from seatrial.util.grouping import grouped

# A device cgroup does not remove device files, but denies access to them. So the script tries to open each file.
# ``test -c`` skips a pattern without match, which the shell leaves unexpanded, and other kinds of files, since opening
# them can block.
_SCRIPT = r"""
echo "node=$SLURMD_NODENAME"
test -z "${CUDA_VISIBLE_DEVICES+set}" || echo "cuda=$CUDA_VISIBLE_DEVICES"
while read -r key value; do
  case $key in Cpus_allowed_list:) echo "cpus=$value" ;; esac
done </proc/self/status
for device in $1; do
  test -c "$device" && (: <"$device") 2>/dev/null && echo "opened=$device"
done
if output=$(timeout 30 nvidia-smi --query-gpu=index,uuid,pci.bus_id --format=csv,noheader 2>&1); then
  echo "$output" | while read -r line; do echo "gpu=$line"; done
else
  echo "unlisted=${output:-nvidia-smi did not answer within 30 s}" | tr '\n' ' '
  echo
fi
while IFS=: read -r _ controllers path; do
  case ,$controllers, in
    ,,) base=/sys/fs/cgroup file=memory.max ;;
    *,memory,*) base=/sys/fs/cgroup/memory file=memory.limit_in_bytes ;;
    *) continue ;;
  esac
  while test -n "$path" && test "$path" != /; do
    test -r "$base$path/$file" && read -r limit <"$base$path/$file" && echo "memory=$limit"
    path=${path%/*}
  done
done </proc/self/cgroup
for device in /sys/bus/pci/devices/*; do
  test -r "$device/numa_node" || continue
  read -r vendor <"$device/vendor"
  read -r node <"$device/numa_node"
  test "$vendor" != 0x10de || echo "pci=${device##*/} $node"
done
test ! -r /sys/devices/system/cpu/cpu0/topology/thread_siblings_list ||
  echo "siblings=$(cat /sys/devices/system/cpu/cpu0/topology/thread_siblings_list)"
for node in /sys/devices/system/node/node[0-9]*; do
  test -r "$node/distance" || continue
  echo "numa=${node##*/node}|$(cat "$node/cpulist")|$(cat "$node/distance")"
done
echo end=
"""
_LABELLED_LINE = re.compile(r"\s*(\d+): (\w+)=(.*)")
_NO_DEVICES = "No devices were found"  # output of nvidia-smi if there is no GPU; it fails in this case
_NO_GPU = {"", "-1", "NoDevFiles"}  # values of CUDA_VISIBLE_DEVICES; Slurm sets NoDevFiles for a job without GPUs


class ListedGpu(Frozen):
    """A GPU in the output of ``nvidia-smi`` in the task; ``pci_bus_id`` is in the format of /sys."""

    index: str
    uuid: str
    pci_bus_id: str


class NumaDistances(NamedTuple):
    """One NUMA node. ``distances``: to all NUMA nodes in the order of their numbers, 10 to itself (ACPI SLIT)."""

    number: int
    cpus: tuple[int, ...]
    distances: tuple[int, ...]


class Task(Frozen):
    """One task of a job step.

    ``listed_gpus``: the GPUs that nvidia-smi lists; None if nvidia-smi failed. ``listing_error``: the output of
    nvidia-smi if it failed or found no GPU.
    """

    rank: int
    node: str
    cpus: tuple[int, ...]  # the kernel's CPU numbers: sched_getaffinity(2)
    cuda_visible_devices: str | None  # None: CUDA_VISIBLE_DEVICES is unset
    listed_gpus: tuple[ListedGpu, ...] | None
    listing_error: str
    accessible_devices: tuple[str, ...]  # device files of GPUs that the task could open
    memory_limits: tuple[int | None, ...]  # bytes, of the task's cgroup and all parents; None: no limit
    pci_numa: dict[str, int]  # PCI address of an NVIDIA device → NUMA node; -1 if unknown
    numa: tuple[NumaDistances, ...]
    threads_per_core: int  # 1 if unknown

    @property
    def name(self) -> str:
        """Node and rank: ``node0/rank1``."""
        return f"{self.node}/rank{self.rank}"

    def gpus(self, constrained: bool) -> tuple[str, ...] | None:
        """The GPUs that CUDA uses in the task: UUIDs from nvidia-smi, and MIG instances in CUDA_VISIBLE_DEVICES.

        If nvidia-smi failed and a device cgroup constrains the task (``constrained``): the accessible device files.
        If nvidia-smi failed without such a cgroup: the entries of CUDA_VISIBLE_DEVICES, None if this variable is unset.
        """
        if self.listed_gpus is not None:
            mig_instances = [entry for entry in _entries(self.cuda_visible_devices or "") if entry.startswith("MIG-")]
            return (*(gpu.uuid for gpu in self._cuda_visible(self.listed_gpus)), *mig_instances)
        if constrained:
            return self.accessible_devices
        return None if self.cuda_visible_devices is None else tuple(_entries(self.cuda_visible_devices))

    def _cuda_visible(self, listed: tuple[ListedGpu, ...]) -> tuple[ListedGpu, ...]:
        """Of ``listed``, the GPUs in CUDA_VISIBLE_DEVICES (index or start of the UUID); all if it is unset."""
        if self.cuda_visible_devices is None:
            return listed
        entries = _entries(self.cuda_visible_devices)
        uuids = tuple(entry for entry in entries if entry.startswith("GPU-"))
        return tuple(gpu for gpu in listed if gpu.index in entries or gpu.uuid.startswith(uuids))

    def threads_per_slurm_cpu(self, node_cpus: int | None) -> int:
        """The number of the kernel's CPUs (hardware threads) per CPU of Slurm.

        ``node_cpus``: the node's ``CPUs=`` in slurm.conf. If it is the number of cores, the result is the number of
        threads per core; else 1.
        """
        thread_count = sum(len(node.cpus) for node in self.numa)
        slurm_cpu_is_core = node_cpus is not None and thread_count == node_cpus * self.threads_per_core
        return self.threads_per_core if slurm_cpu_is_core else 1

    @property
    def accessible_gpus(self) -> int:
        """The number of GPUs that the task could use if CUDA_VISIBLE_DEVICES were unset."""
        return max(len(self.accessible_devices), len(self.listed_gpus or ()))

    @property
    def memory_limit(self) -> int | None:
        """The lowest memory limit in bytes; None without a limit."""
        return min((limit for limit in self.memory_limits if limit is not None), default=None)

    def numa_distance(self) -> int | str:
        """The largest NUMA distance from the task's CPUs to its GPUs, or the reason why it is unknown."""
        gpus = self._cuda_visible(self.listed_gpus or ())
        if not gpus:
            return f"nvidia-smi lists no GPU in the task: {self.listing_error}".rstrip(": ")
        position_by_number = {node.number: position for position, node in enumerate(self.numa)}
        gpu_nodes = {self.pci_numa.get(gpu.pci_bus_id, -1) for gpu in gpus}
        if not gpu_nodes <= set(position_by_number):
            return f"/sys has no NUMA node for GPU {', '.join(gpu.pci_bus_id for gpu in gpus)}"
        cpu_nodes = [node for node in self.numa if set(node.cpus) & set(self.cpus)]
        if not cpu_nodes:
            return "/sys has no NUMA node for the task's CPUs"
        gpu_positions = [position_by_number[number] for number in gpu_nodes]
        return max(node.distances[position] for node in cpu_nodes for position in gpu_positions)


def srun_command(devices: str) -> list[str]:
    return ["/bin/sh", "-c", _SCRIPT, "sh", devices]


def parse_tasks(text: str) -> tuple[Task, ...]:
    """The tasks in the order of their ranks, from the output of the script with srun's labels.

    Raises ValueError if the output of a task is truncated.
    """
    matches = filter(None, map(_LABELLED_LINE.fullmatch, text.splitlines()))
    pairs_by_rank = grouped((int(match[1]), (match[2], match[3])) for match in matches)
    return tuple(_task(rank, pairs) for rank, pairs in sorted(pairs_by_rank.items()))


def _task(rank: int, pairs: list[tuple[str, str]]) -> Task:
    def values(key: str) -> list[str]:
        return [value.strip() for name, value in pairs if name == key]

    nodes, cpus, listing_error = values("node"), values("cpus"), " ".join(values("unlisted"))
    if not values("end") or len(nodes) != 1 or len(cpus) != 1:
        raise ValueError(f"the output of task {rank} is truncated: it ends with {pairs[-1]}")
    is_listed = listing_error.startswith(_NO_DEVICES) or not listing_error
    rows = [[field.strip() for field in line.split(",")] for line in values("gpu")] if is_listed else []
    gpus = [ListedGpu(index=index, uuid=uuid, pci_bus_id=pci_address(bus_id)) for index, uuid, bus_id in rows]
    return Task(
        rank=rank,
        node=nodes[0],
        cpus=tuple(parse_id_list(cpus[0])),
        cuda_visible_devices=next(iter(values("cuda")), None),
        listed_gpus=tuple(gpus) if is_listed else None,
        listing_error=listing_error,
        accessible_devices=tuple(values("opened")),
        memory_limits=tuple(_limit(limit) for limit in values("memory")),
        pci_numa={address: int(node) for address, node in map(str.split, values("pci"))},
        threads_per_core=len(parse_id_list(next(iter(values("siblings")), "0"))),
        numa=tuple(sorted(map(_numa_node, values("numa")), key=lambda node: node.number)),
    )


def _limit(text: str) -> int | None:
    """The limit in bytes; None for no limit: ``max`` in cgroup v2, a number just below 2^63 in v1."""
    return None if text == "max" or int(text) >= 2**62 else int(text)


def _numa_node(line: str) -> NumaDistances:
    number, cpus, distances = line.split("|")
    cpu_numbers = tuple(parse_id_list(cpus)) if cpus else ()
    return NumaDistances(int(number), cpu_numbers, tuple(map(int, distances.split())))


def _entries(cuda_visible_devices: str) -> list[str]:
    return [entry.strip() for entry in cuda_visible_devices.split(",") if entry.strip() not in _NO_GPU]
