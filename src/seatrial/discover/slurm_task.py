"""What a task of a job has around it: its CPUs, its GPUs, its memory. A shell script tells, and this module reads it.

The script goes to the nodes as an argument of srun and answers on its standard output, so that neither Python nor a
shared directory has to be there. It opens device files for reading, and changes nothing.
"""

from __future__ import annotations

import re

from seatrial.discover.file_readers import parse_id_list
from seatrial.discover.nvml import pci_address
from seatrial.model import Frozen

# Only what the task may open counts as in its reach: a device cgroup leaves the file there, and forbids to open it.
# -c first: a pattern that matches nothing stays as it is, and other files may block whoever opens them.
_SCRIPT = r"""
echo "node=$SLURMD_NODENAME"
test -z "${CUDA_VISIBLE_DEVICES+set}" || echo "cuda=$CUDA_VISIBLE_DEVICES"
while read -r key value; do
  case $key in Cpus_allowed_list:) echo "cpus=$value" ;; esac
done </proc/self/status
for device in $1; do
  test -c "$device" && (: <"$device") 2>/dev/null && echo "opened=$device"
done
if said=$(timeout 30 nvidia-smi --query-gpu=index,uuid,pci.bus_id --format=csv,noheader 2>&1); then
  echo "$said" | while read -r line; do echo "gpu=$line"; done
else
  echo "unlisted=${said:-nvidia-smi did not answer within 30 s}" | tr '\n' ' '
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
_LABELLED = re.compile(r"\s*(\d+): (\w+)=(.*)")
_NONE_LISTED = "No devices were found"  # nvidia-smi, which fails then
_NO_GPU = {"", "-1", "NoDevFiles"}  # of CUDA_VISIBLE_DEVICES; the last is what Slurm writes for a job without GPUs


class ListedGpu(Frozen):
    """A GPU as ``nvidia-smi``, which asks NVML, lists it in the task. ``pci`` is as /sys writes it."""

    index: str
    uuid: str
    pci_bus_id: str


class NumaNode(Frozen):
    """``distances``: to each NUMA node in the order of their numbers, by the firmware (ACPI SLIT: 10 is itself)."""

    number: int
    cpus: tuple[int, ...]
    distances: tuple[int, ...]


class Task(Frozen):
    """One task of a step. ``listed`` is None where NVML could not be asked; ``unlisted`` says why."""

    rank: int
    node: str
    cpus: tuple[int, ...]  # the kernel's numbers: sched_getaffinity(2)
    cuda_visible_devices: str | None  # CUDA_VISIBLE_DEVICES
    listed_gpus: tuple[ListedGpu, ...] | None
    listing_error: str
    accessible_devices: tuple[str, ...]  # device files of GPUs that it could open
    memory_limits: tuple[int | None, ...]  # bytes, of its cgroup and those around it; None is no limit
    pci_numa: dict[str, int]  # NUMA node of NVIDIA's PCI devices; -1 where the firmware does not say
    numa: tuple[NumaNode, ...]
    threads_per_core: int  # 1 where /sys does not say

    @property
    def name(self) -> str:
        return f"{self.node}/rank{self.rank}"

    def gpus(self, confined: bool) -> tuple[str, ...] | None:
        """What names the GPUs that CUDA uses in the task: UUIDs, where NVML lists them.

        Where it does not: the files that it can open in a device cgroup (``confined``), else CUDA's numbers.
        """
        if self.listed_gpus is not None:
            slices = [word for word in _entries(self.cuda_visible_devices or "") if word.startswith("MIG-")]
            return (*(gpu.uuid for gpu in self._used(self.listed_gpus)), *slices)
        if confined:
            return self.accessible_devices
        return None if self.cuda_visible_devices is None else tuple(_entries(self.cuda_visible_devices))

    def _used(self, listed: tuple[ListedGpu, ...]) -> tuple[ListedGpu, ...]:
        """Those of CUDA_VISIBLE_DEVICES, by index or by the beginning of the UUID; all without it."""
        if self.cuda_visible_devices is None:
            return listed
        wanted = _entries(self.cuda_visible_devices)
        uuids = tuple(word for word in wanted if word.startswith("GPU-"))
        return tuple(gpu for gpu in listed if gpu.index in wanted or gpu.uuid.startswith(uuids))

    def threads_per_slurm_cpu(self, node_cpus: int | None) -> int:
        """How many of the kernel's CPUs are one of Slurm's: a core's threads, where ``CPUs=`` counts cores."""
        online = sum(len(node.cpus) for node in self.numa)
        counts_cores = node_cpus is not None and online == node_cpus * self.threads_per_core
        return self.threads_per_core if counts_cores else 1

    @property
    def accessible_gpus(self) -> int:
        """How many GPUs it could use, if it ignored CUDA_VISIBLE_DEVICES."""
        return max(len(self.accessible_devices), len(self.listed_gpus or ()))

    @property
    def memory_limit(self) -> int | None:
        """The smallest of its limits in bytes; None where there is none."""
        return min((limit for limit in self.memory_limits if limit is not None), default=None)

    def numa_distance(self) -> int | str:
        """From its CPUs to its GPUs, the farthest of each; a text says why it is not known."""
        gpus = self._used(self.listed_gpus or ())
        if not gpus:
            return f"no GPU is listed in the task: {self.listing_error}".rstrip(": ")
        nodes = {node.number: position for position, node in enumerate(self.numa)}
        homes = {self.pci_numa.get(gpu.pci_bus_id, -1) for gpu in gpus}
        if not homes <= set(nodes):
            return f"/sys does not say to which NUMA node {', '.join(gpu.pci_bus_id for gpu in gpus)} belong"
        own = [node for node in self.numa if set(node.cpus) & set(self.cpus)]
        if not own:
            return "/sys does not say to which NUMA node the task's CPUs belong"
        return max(node.distances[nodes[home]] for node in own for home in homes)


def srun_command(devices: str) -> list[str]:
    """What srun is to run in each task, with ``--label``. ``devices``: a pattern of the GPUs' device files."""
    return ["/bin/sh", "-c", _SCRIPT, "sh", devices]


def parse_tasks(text: str) -> tuple[Task, ...]:
    """The tasks in the order of their ranks. Raises ValueError where what one said is cut off."""
    said: dict[int, list[tuple[str, str]]] = {}
    for rank, key, value in (match.groups() for line in text.splitlines() if (match := _LABELLED.fullmatch(line))):
        said.setdefault(int(rank), []).append((key, value))
    return tuple(_task(rank, lines) for rank, lines in sorted(said.items()))


def _task(rank: int, lines: list[tuple[str, str]]) -> Task:
    def all_of(key: str) -> list[str]:
        return [value.strip() for name, value in lines if name == key]

    nodes, cpus, unlisted = all_of("node"), all_of("cpus"), " ".join(all_of("unlisted"))
    if not all_of("end") or len(nodes) != 1 or len(cpus) != 1:
        raise ValueError(f"what task {rank} said is cut off: it ends with {lines[-1]}")
    listed = unlisted.startswith(_NONE_LISTED) or not unlisted
    rows = [[word.strip() for word in line.split(",")] for line in all_of("gpu")] if listed else []
    gpus = [ListedGpu(index=index, uuid=uuid, pci_bus_id=pci_address(bus)) for index, uuid, bus in rows]
    return Task(
        rank=rank,
        node=nodes[0],
        cpus=tuple(parse_id_list(cpus[0])),
        cuda_visible_devices=next(iter(all_of("cuda")), None),
        listed_gpus=tuple(gpus) if listed else None,
        listing_error=unlisted,
        accessible_devices=tuple(all_of("opened")),
        memory_limits=tuple(_limit(limit) for limit in all_of("memory")),
        pci_numa={pci: int(node) for pci, node in (line.split() for line in all_of("pci"))},
        threads_per_core=len(parse_id_list(next(iter(all_of("siblings")), "0"))),
        numa=tuple(sorted(map(_numa, all_of("numa")), key=lambda node: node.number)),
    )


def _limit(text: str) -> int | None:
    """cgroup v2 writes ``max`` for none, v1 the largest number of whole pages that a signed 64-bit number holds."""
    return None if text == "max" or int(text) >= 2**62 else int(text)


def _numa(line: str) -> NumaNode:
    number, cpus, distances = line.split("|")
    return NumaNode(
        number=int(number),
        cpus=tuple(parse_id_list(cpus)) if cpus else (),
        distances=tuple(map(int, distances.split())),
    )


def _entries(cuda: str) -> list[str]:
    return [word.strip() for word in cuda.split(",") if word.strip() not in _NO_GPU]
