"""host.speed: CPU, memory and local disk of every node, compared with nodes of the same CPU model and CPU count."""

from __future__ import annotations

import errno
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from seatrial.checks.base import Check, Context, Options, RuleFact, facts, metric
from seatrial.discover.file_readers import parse_id_list
from seatrial.model import ByteSize, Fact, Observation, Phase, Rule, Scope
from seatrial.util.text import error_text

if TYPE_CHECKING:
    from seatrial.discover.cpu_memory import CpuFacts

# Filesystems on a disk of the node; `overlay` is the root of a container. Others are shared, or in memory.
_LOCAL_FILESYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay")
_MEMORY_DIVISOR = 8  # at most one eighth of the memory of the job is used
_HASH_UNIT = "iterations/s"
METRICS = {
    "hash_single": _HASH_UNIT,
    "hash_all": _HASH_UNIT,
    "memory_copy": "GB/s",
    "disk_write": "GB/s",
    "disk_read": "GB/s",
}


class SpeedOptions(Options):
    """``seconds``: duration of each test (all CPUs, memory, write, read); the test of one CPU takes half of it.

    ``disk_size``: maximum size of the test file in bytes.
    """

    seconds: float = Field(default=0.8, gt=0, le=60)
    disk_size: Annotated[ByteSize, Field(ge=2**22)] = 2**30


def measure(context: Context, options: SpeedOptions) -> Iterator[Observation]:
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
    yield metric("hash_single", host_speed.hash_rate(cpus[:1], options.seconds / 2), _HASH_UNIT, context.node)
    yield metric("hash_all", host_speed.hash_rate(cpus, options.seconds), _HASH_UNIT, context.node)
    context.progress("memory")
    memory = cpu_memory.read_memory(context.root)
    usable_bytes = min(filter(None, (memory.available_bytes, memory.limit_bytes)))
    block_bytes = min(host_speed.COPY_BYTES, usable_bytes // _MEMORY_DIVISOR // len(cpus) // 2)  # 2: source, target
    rates = host_speed.copy_rates(list(cpus_by_numa_node.values()), options.seconds, block_bytes)
    yield Fact(name="memory_copy_by_numa_node", value=dict(zip(cpus_by_numa_node, rates, strict=True)))
    yield metric("memory_copy", sum(rates), "GB/s", context.node)
    context.progress("local disk")
    yield from _disk_observations(context, options)


def _cpus_by_numa_node(cpu: CpuFacts, cpus: list[int]) -> dict[str, list[int]]:
    """NUMA node → its CPUs among ``cpus``; {"all": cpus} if the NUMA nodes of some CPUs are unknown."""
    cpus_by_node: dict[str, list[int]] = {}
    for node in cpu.numa:
        node_cpus = [number for number in parse_id_list(node.cpus) if number in cpus] if node.cpus else []
        if node_cpus:
            cpus_by_node[node.name] = node_cpus
    return cpus_by_node if sum(map(len, cpus_by_node.values())) == len(cpus) else {"all": cpus}


def _disk_observations(context: Context, options: SpeedOptions) -> Iterator[Observation]:
    """Yield GB/s of the local disk, or the reason why it was not measured."""
    from seatrial.bench import host_speed
    from seatrial.discover import filesystem

    folder = context.artifacts_dir  # in the run directory
    kind = filesystem.filesystem_type(folder)
    yield Fact(name="disk_filesystem", value=kind)
    if kind not in _LOCAL_FILESYSTEMS:
        yield Fact(name="local_disk", value=f"no: the run directory is on {kind or 'an unknown filesystem'}, not local")
        return
    if filesystem.usage(Path("/"), str(folder)).free < 2 * options.disk_size:
        yield Fact(name="local_disk", value="no: too little free space in the run directory")
        return
    path = folder / f"{context.node}-{secrets.token_hex(4)}"
    try:
        speed = host_speed.disk_speed(path, options.disk_size, options.seconds)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        yield Fact(name="local_disk", value=f"no: {kind} does not support O_DIRECT here ({error_text(error)})")
        return
    yield from facts({"local_disk": "yes", "disk_bytes": speed.size})
    yield metric("disk_write", speed.write, "GB/s", context.node)
    yield metric("disk_read", speed.read, "GB/s", context.node)


def _peer_rule(name: str, warn_below: float, meaning: str, fix: str) -> Rule:
    """A rule: WARN for a low outlier among the nodes with the same fact ``host``; SKIP with fewer than three of them.

    ``warn_below``: share of the median of these nodes.
    """
    return Rule(
        metric=name,
        compare_with_peers=True,
        warn_below=warn_below,
        applies_if={"cpu_known": "yes"} | ({"local_disk": "yes"} if name.startswith("disk") else {}),
        meaning=meaning,
        fix=fix,
    )


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
    metrics=METRICS,
    rules=(
        _peer_rule("hash_single", 0.9, "One CPU of this node is slower than those of similar nodes.", _CPU_FIX),
        _peer_rule("hash_all", 0.9, "All CPUs of this node together are slower than those of similar nodes.", _CPU_FIX),
        _peer_rule(
            "memory_copy",
            0.9,
            "Memory of this node is slower than that of similar nodes: a missing or slower DIMM, or another NUMA "
            "setting of the BIOS.",
            "Fact memory_copy_by_numa_node shows the NUMA node; dmidecode -t memory: number, size and configured speed "
            "of the DIMMs; ras-mc-ctl --summary; compare the BIOS (NPS, SNC) with a good node",
        ),
        _peer_rule("disk_write", 0.7, "Writes to the local disk are slower than on similar nodes.", _DISK_FIX),
        _peer_rule("disk_read", 0.7, "Reads from the local disk are slower than on similar nodes.", _DISK_FIX),
    ),
    rule_facts={
        "cpu_known": RuleFact(reason="the CPU model is not readable"),
        "local_disk": RuleFact(reason="the run directory is on no local disk"),
    },
    measure=measure,
    options=SpeedOptions,
    model_fact="host",
    performance_metrics=tuple(METRICS),
    limit_s=120,
)
