"""CPUs, NUMA nodes and memory, and the cgroup limits of this process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

from seatrial.discover.file_readers import (
    FieldReader,
    FileFacts,
    list_names,
    parse_id_list,
    read_line,
    read_number,
    read_text,
)
from seatrial.util.text import printable

Number = TypeVar("Number", int, float)

_CPUS = "sys/devices/system/cpu"
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as a number just below 2^63


class NumaNode(FileFacts):
    """One NUMA node. ``cpus``: ranges such as 0-3,8, empty for a node without CPUs."""

    name: str
    cpus: str | None
    memory_bytes: int | None


class CpuFacts(FileFacts):
    """Numbers of CPUs. ``threads``: online logical CPUs. ``usable_threads``: logical CPUs that this process may use.

    ``cores``: physical cores. ``smt``: whether a core has several logical CPUs.
    ``quota_cores``: CPU time that the cgroups allow, in cores; None: no quota.
    """

    model: str | None
    threads: int | None
    cores: int | None
    sockets: int | None
    usable_threads: int | None
    quota_cores: float | None
    smt: bool | None
    numa: tuple[NumaNode, ...]


class MemoryFacts(FileFacts):
    """Memory in bytes. ``limit_bytes``: the lowest limit of the cgroups; None: no limit."""

    total_bytes: int | None
    available_bytes: int | None
    swap_bytes: int | None
    limit_bytes: int | None


def read_cpu(root: Path = Path("/")) -> CpuFacts:
    """CPUs and NUMA nodes from /proc and /sys under ``root``."""
    reader = FieldReader()
    online_cpus = reader("threads", lambda: parse_id_list(read_line(root / _CPUS / "online")))
    cores = reader("cores", lambda: _distinct_values(root, online_cpus, "thread_siblings_list"))
    return CpuFacts(
        model=reader("model", lambda: _model(root / "proc/cpuinfo")),
        threads=None if online_cpus is None else len(online_cpus),
        cores=cores,
        sockets=reader("sockets", lambda: _distinct_values(root, online_cpus, "physical_package_id")),
        usable_threads=reader(
            "usable_threads", lambda: len(parse_id_list(_read_field(root / "proc/self/status", "Cpus_allowed_list")))
        ),
        quota_cores=reader("quota_cores", lambda: _min_limit(map(_cpu_quota, _cgroups(root, "cpu")))),
        smt=None if online_cpus is None or cores is None else len(online_cpus) > cores,
        numa=tuple(_numa_node(folder) for folder in reader("numa", lambda: _numa_folders(root)) or ()),
        unreadable=reader.unreadable,
    )


def read_memory(root: Path = Path("/")) -> MemoryFacts:
    """Memory from /proc/meminfo, and the cgroup limit, under ``root``."""
    reader = FieldReader()
    meminfo = root / "proc/meminfo"
    return MemoryFacts(
        total_bytes=reader("total_bytes", lambda: _read_kib(meminfo, "MemTotal")),
        available_bytes=reader("available_bytes", lambda: _read_kib(meminfo, "MemAvailable")),
        swap_bytes=reader("swap_bytes", lambda: _read_kib(meminfo, "SwapTotal")),
        limit_bytes=reader("limit_bytes", lambda: _min_limit(map(_memory_limit, _cgroups(root, "memory")))),
        unreadable=reader.unreadable,
    )


def _read_field(path: Path, key: str) -> str:
    """The value of the first line ``key: value`` or ``Node 0 key: value``."""
    match = re.search(rf"^(?:Node \d+ )?{re.escape(key)}\s*:[ \t]*(\S.*?)[ \t]*$", read_text(path), re.MULTILINE)
    if not match:
        raise ValueError(f"{path}: no line {key!r}")
    return printable(match[1])


def _model(cpuinfo: Path) -> str:
    """The model name. On Arm the kernel reports none; there, implementer and part number."""
    try:
        return _read_field(cpuinfo, "model name")
    except ValueError:
        return f"Arm {_read_field(cpuinfo, 'CPU implementer')} {_read_field(cpuinfo, 'CPU part')}"


def _read_kib(path: Path, key: str) -> int:
    value = _read_field(path, key)
    if not re.fullmatch(r"\d+ kB", value):
        raise ValueError(f"{path}: expected {key} in kB, read {value[:60]!r}")
    return int(value.split()[0]) * 1024


def _distinct_values(root: Path, cpus: list[int] | None, file: str) -> int:
    """The number of different values of the topology file ``file`` over ``cpus``.

    physical_package_id has one value for each socket, thread_siblings_list one for each core.
    """
    if cpus is None:
        raise ValueError("the list of online CPUs could not be read")
    return len({read_line(root / _CPUS / f"cpu{cpu}" / "topology" / file) for cpu in cpus})


def _numa_folders(root: Path) -> list[Path]:
    folder = root / "sys/devices/system/node"
    nodes = [name for name in list_names(folder) if re.fullmatch(r"node\d+", name)]
    return [folder / name for name in sorted(nodes, key=lambda name: int(name[4:]))]


def _numa_node(folder: Path) -> NumaNode:
    reader = FieldReader()
    return NumaNode(
        name=folder.name,
        # The list is empty for a NUMA node without CPUs, such as the GPU memory of a Grace machine
        cpus=reader("cpus", lambda: printable(read_text(folder / "cpulist").strip())),
        memory_bytes=reader("memory_bytes", lambda: _read_kib(folder / "meminfo", "MemTotal")),
        unreadable=reader.unreadable,
    )


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The cgroups of this process for ``controller``, from its own up to the root.

    In a container, /proc/self/cgroup can have a path of the host that is not mounted: then only the root exists.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)  # cgroup v2: no controllers
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = PurePosixPath(path).parts[1:]
        yield from (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _memory_limit(group: Path) -> int | None:
    """Bytes, None for no limit, from ``memory.max`` (cgroup v2) or ``memory.limit_in_bytes`` (v1)."""
    for path in (group / "memory.max", group / "memory.limit_in_bytes"):
        if path.is_file() and read_line(path) != "max":
            value = read_number(path)
            return value if value < _UNLIMITED else None
    return None


def _cpu_quota(group: Path) -> float | None:
    """Cores, None for no quota, from ``cpu.max`` (cgroup v2) or ``cpu.cfs_quota_us`` (v1)."""
    if (group / "cpu.max").is_file():
        quota, period = read_line(group / "cpu.max").split()
        return None if quota == "max" else int(quota) / int(period)
    if (group / "cpu.cfs_quota_us").is_file():
        quota_us = read_number(group / "cpu.cfs_quota_us")  # -1: no quota
        return quota_us / read_number(group / "cpu.cfs_period_us") if quota_us > 0 else None
    return None


def _min_limit(limits: Iterable[Number | None]) -> Number | None:
    return min((limit for limit in limits if limit is not None), default=None)
