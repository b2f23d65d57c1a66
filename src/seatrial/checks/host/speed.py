"""host.speed: CPU, memory and local disk of every node, compared with nodes of the same CPU model and CPU count."""

from __future__ import annotations

import errno
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answers, absent, metric, value
from seatrial.discover.file_readers import parse_id_list
from seatrial.model import ByteSize, Phase, Scope
from seatrial.util.text import error_text

if TYPE_CHECKING:
    from seatrial.discover.cpu_memory import CpuFacts

# Filesystems on a disk of the node; `overlay` is the root of a container. Others are shared, or in memory.
_LOCAL_FILESYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay")
_MEMORY_DIVISOR = 8  # at most one eighth of the memory of the job is used


class SpeedOptions(Options):
    """``seconds``: duration of each test (all CPUs, memory, write, read); the test of one CPU takes half of it.

    ``disk_size``: maximum size of the test file in bytes.
    """

    seconds: float = Field(default=0.8, gt=0, le=60)
    disk_size: Annotated[ByteSize, Field(ge=2**22)] = 2**30


def measure(context: Context, options: SpeedOptions) -> Answers:
    """Yield the rates of the node. The disk is measured in the run directory, if this directory is on a local disk."""
    from seatrial.bench import host_speed
    from seatrial.discover import cpu_memory

    cpu = cpu_memory.read_cpu(context.root)
    cpus = sorted(os.sched_getaffinity(0))
    if cpu.quota_cores:
        cpus = cpus[: math.ceil(cpu.quota_cores)]
    cpus_by_numa_node = _cpus_by_numa_node(cpu, cpus)
    host = f"{cpu.model}; CPUs: {len(cpus)}; NUMA nodes: {len(cpus_by_numa_node)}"
    yield from facts({"host": host, "cpu_known": "yes" if cpu.model else "no"})
    context.progress("CPU")
    yield value("hash_single", host_speed.hash_rate(cpus[:1], options.seconds / 2))
    yield value("hash_all", host_speed.hash_rate(cpus, options.seconds))
    context.progress("memory")
    memory = cpu_memory.read_memory(context.root)
    usable_bytes = min(filter(None, (memory.available_bytes, memory.limit_bytes)))
    block_bytes = min(host_speed.COPY_BYTES, usable_bytes // _MEMORY_DIVISOR // len(cpus) // 2)  # 2: source, target
    rates = host_speed.copy_rates(list(cpus_by_numa_node.values()), options.seconds, block_bytes)
    yield value("memory_copy", sum(rates), evidence={"by_numa_node": dict(zip(cpus_by_numa_node, rates, strict=True))})
    context.progress("local disk")
    yield from _disk_speed(context, options)


def _cpus_by_numa_node(cpu: CpuFacts, cpus: list[int]) -> dict[str, list[int]]:
    """NUMA node → its CPUs among ``cpus``; {"all": cpus} if the NUMA nodes of some CPUs are unknown."""
    usable = {node.name: sorted({*parse_id_list(node.cpus)} & {*cpus}) for node in cpu.numa if node.cpus}
    cpus_by_node = {name: node_cpus for name, node_cpus in usable.items() if node_cpus}
    return cpus_by_node if sum(map(len, cpus_by_node.values())) == len(cpus) else {"all": cpus}


def _disk_speed(context: Context, options: SpeedOptions) -> Answers:
    from seatrial.bench import host_speed
    from seatrial.discover import filesystem

    folder = context.artifacts_dir  # in the run directory
    kind = filesystem.filesystem_type(folder)
    if kind not in _LOCAL_FILESYSTEMS:
        yield absent("disk_*", f"the run directory is on {kind or 'an unknown filesystem'}, not local")
        return
    if filesystem.usage(Path("/"), str(folder)).free < 2 * options.disk_size:
        yield absent("disk_*", "too little free space in the run directory")
        return
    path = folder / f"{context.node}-{secrets.token_hex(4)}"
    try:
        speed = host_speed.disk_speed(path, options.disk_size, options.seconds)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        yield absent("disk_*", f"{kind} does not support O_DIRECT here ({error_text(error)})")
        return
    yield from facts({"disk_filesystem": kind, "disk_bytes": speed.size})
    yield value("disk_write", speed.write)
    yield value("disk_read", speed.read)


def _speed(name: str, unit: str, warn_share: float, meaning: str, fix: str) -> metric:
    """A speed: WARN for a low outlier among the nodes with the same fact ``host``; SKIP with fewer than three of them.

    ``warn_share``: share of the median of these nodes.
    """
    warn = f">= {warn_share:.2f} peers"
    return metric(name, "recorded", meaning, fix, warn=warn, unit=unit, when="cpu_known == yes", speed=True)


_CPU_FIX = (
    "On the node: turbostat or cpupower monitor under load; compare power profile of the BIOS, "
    "governor, power limit (RAPL) and temperature (ipmitool sensor) with a good node; look for other processes: top"
)
_DISK_FIX = (
    "On the node: nvme smart-log DEVICE (spare, wear, temperature); lspci -vv | grep LnkSta of the drive; fstrim -v "
    "MOUNT; look for other users of the disk: iostat -x 1"
)

CHECK = Check(
    name="host.speed",
    title="Speed of CPU, memory and local disk, compared with similar nodes",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    measure=measure,
    options=SpeedOptions,
    model_fact="host",
    limit_s=120,
    declared=(
        _speed("hash_single", "iterations/s", 0.9, "One CPU hashes (PBKDF2) slower than on similar nodes.", _CPU_FIX),
        _speed(
            "hash_all",
            "iterations/s",
            0.9,
            "All CPUs together hash (PBKDF2-HMAC-SHA256) slower than on similar nodes.",
            _CPU_FIX,
        ),
        _speed(
            "memory_copy",
            "GB/s",
            0.9,
            "Copies by all CPUs (read + write) are slower than on similar nodes: a missing or slower DIMM, or another "
            "NUMA setting of the BIOS.",
            "by_numa_node shows the NUMA node; dmidecode -t memory: number, size and configured speed of the DIMMs; "
            "ras-mc-ctl --summary; compare the BIOS (NPS, SNC) with a good node",
        ),
        _speed("disk_write", "GB/s", 0.7, "O_DIRECT writes to local disk are slower than on similar nodes.", _DISK_FIX),
        _speed("disk_read", "GB/s", 0.7, "O_DIRECT reads of local disk are slower than on similar nodes.", _DISK_FIX),
    ),
)
