"""Processors, NUMA nodes and memory, and what of them the control group leaves to this process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

from seatrial.discover.file_readers import (
    FieldReader,
    list_names,
    parse_id_list,
    printable,
    read_line,
    read_number,
    read_text,
)
from seatrial.model import Frozen

N = TypeVar("N", int, float)

_CPUS = "sys/devices/system/cpu"
_NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as a number just under 2^63


class NumaNode(Frozen):
    name: str
    cpus: str | None
    memory_bytes: int | None
    unreadable: dict[str, str] = {}


class CpuFacts(Frozen):
    """``usable`` counts the CPUs that this process may run on; ``quota_cores`` None without a reason is no quota."""

    model: str | None
    threads: int | None
    cores: int | None
    sockets: int | None
    usable_threads: int | None
    quota_cores: float | None
    smt: bool | None
    numa: tuple[NumaNode, ...]
    unreadable: dict[str, str] = {}


class MemoryFacts(Frozen):
    """Bytes. ``limit_bytes`` is the control group's; None without a reason is no limit."""

    total_bytes: int | None
    available_bytes: int | None
    swap_bytes: int | None
    limit_bytes: int | None
    unreadable: dict[str, str] = {}


def read_cpu(root: Path = Path("/")) -> CpuFacts:
    attempt = FieldReader()
    online = attempt("threads", lambda: parse_id_list(read_line(root / _CPUS / "online")))
    cores = attempt("cores", lambda: _distinct(root, online, "thread_siblings_list"))
    return CpuFacts(
        model=attempt("model", lambda: _field(root / "proc/cpuinfo", "model name")),
        threads=None if online is None else len(online),
        cores=cores,
        sockets=attempt("sockets", lambda: _distinct(root, online, "physical_package_id")),
        usable_threads=attempt(
            "usable", lambda: len(parse_id_list(_field(root / "proc/self/status", "Cpus_allowed_list")))
        ),
        quota_cores=attempt("quota_cores", lambda: _least(map(_quota, _cgroup(root, "cpu")))),
        smt=None if online is None or cores is None else len(online) > cores,
        numa=tuple(_numa_node(folder) for folder in attempt("numa", lambda: _numa_folders(root)) or ()),
        unreadable=attempt.unreadable,
    )


def read_memory(root: Path = Path("/")) -> MemoryFacts:
    attempt = FieldReader()
    meminfo = root / "proc/meminfo"
    return MemoryFacts(
        total_bytes=attempt("total_bytes", lambda: _kib(meminfo, "MemTotal")),
        available_bytes=attempt("available_bytes", lambda: _kib(meminfo, "MemAvailable")),
        swap_bytes=attempt("swap_bytes", lambda: _kib(meminfo, "SwapTotal")),
        limit_bytes=attempt("limit_bytes", lambda: _least(map(_memory_limit, _cgroup(root, "memory")))),
        unreadable=attempt.unreadable,
    )


def _field(path: Path, key: str) -> str:
    """The first ``key: value`` of a /proc file."""
    found = re.search(rf"^(?:Node \d+ )?{re.escape(key)}\s*:[ \t]*(\S.*?)[ \t]*$", read_text(path), re.MULTILINE)
    if not found:
        raise ValueError(f"{path} has no {key!r}")
    return printable(found[1])


def _kib(path: Path, key: str) -> int:
    value = _field(path, key)
    if not re.fullmatch(r"\d+ kB", value):
        raise ValueError(f"{path}: expected {key} in kB, found {value[:60]!r}")
    return int(value.split()[0]) * 1024


def _distinct(root: Path, cpus: list[int] | None, what: str) -> int:
    """How many different values the online CPUs have in their topology: packages, or groups of sibling threads."""
    if cpus is None:
        raise ValueError("the list of online CPUs could not be read")
    return len({read_line(root / _CPUS / f"cpu{cpu}" / "topology" / what) for cpu in cpus})


def _numa_folders(root: Path) -> list[Path]:
    folder = root / "sys/devices/system/node"
    nodes = [name for name in list_names(folder) if re.fullmatch(r"node\d+", name)]
    return [folder / name for name in sorted(nodes, key=lambda name: int(name[4:]))]


def _numa_node(folder: Path) -> NumaNode:
    attempt = FieldReader()
    return NumaNode(
        name=folder.name,
        # A node of memory alone (GPU memory of a Grace machine, say) has an empty list: that is known, not unread.
        cpus=attempt("cpus", lambda: printable(read_text(folder / "cpulist").strip())),
        memory_bytes=attempt("memory_bytes", lambda: _kib(folder / "meminfo", "MemTotal")),
        unreadable=attempt.unreadable,
    )


def _cgroup(root: Path, controller: str) -> Iterator[Path]:
    """The control groups that bound this process in ``controller``: its own, then each above it.

    Inside a container the path may be the host's, which is not mounted: then the mount's own root bounds us.
    """
    for entry in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = entry.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = PurePosixPath(path).parts[1:]
        yield from (base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _memory_limit(group: Path) -> int | None:
    """Bytes; None for no limit. Version 2 of cgroups has ``memory.max``, version 1 ``memory.limit_in_bytes``."""
    for path in (group / "memory.max", group / "memory.limit_in_bytes"):
        if path.is_file() and read_line(path) != "max":
            value = read_number(path)
            return value if value < _NO_LIMIT else None
    return None


def _quota(group: Path) -> float | None:
    """Cores; None for no quota. Version 2 of cgroups has ``cpu.max``, version 1 ``cpu.cfs_quota_us``."""
    if (group / "cpu.max").is_file():
        quota, period = read_line(group / "cpu.max").split()
        return None if quota == "max" else int(quota) / int(period)
    if (group / "cpu.cfs_quota_us").is_file():
        micros = read_number(group / "cpu.cfs_quota_us")
        return micros / read_number(group / "cpu.cfs_period_us") if micros > 0 else None
    return None


def _least(limits: Iterable[N | None]) -> N | None:
    return min((limit for limit in limits if limit is not None), default=None)
