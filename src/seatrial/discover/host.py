"""What a machine is, without a load on it: every area of it, gathered by one ``read``."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from seatrial.discover import clock, cpu_memory, fabric, filesystem, software
from seatrial.discover.file_readers import FieldReader, printable, read_line, read_text, start_in_thread
from seatrial.model import Frozen

_RESOLVE_S = 10.0  # a resolver's own default is 5 s a server: longer than two of them no rendezvous waits gladly
_CAP_IPC_LOCK = 14  # capabilities(7): memory may be locked without regard to RLIMIT_MEMLOCK

Amount = int | Literal["unlimited"]


class OsFacts(Frozen):
    name: str | None
    kernel: str | None
    arch: str
    machine: str | None
    container: str | None
    machine_id: str | None = None  # a digest of it: the id itself is not to leave the machine (machine-id(5))
    unreadable: dict[str, str] = {}


class Ulimit(Frozen):
    """A resource limit of this process: bytes for memlock and stack, a count for the others."""

    soft: Amount
    hard: Amount


class LimitFacts(Frozen):
    """``ipc_lock`` is the capability CAP_IPC_LOCK, which frees a process from its memlock limit."""

    memlock: Ulimit
    nofile: Ulimit
    stack: Ulimit
    nproc: Ulimit
    ipc_lock: bool | None
    unreadable: dict[str, str] = {}


class HostnameFacts(Frozen):
    """The name of this host, and the addresses that it resolves to here."""

    name: str | None
    addresses: tuple[str, ...]
    unreadable: dict[str, str] = {}

    @property
    def routable(self) -> bool:
        """Whether another machine could use what the name resolves to: an address neither loopback nor link-local."""
        parsed = [ipaddress.ip_address(address) for address in self.addresses]
        return any(not address.is_loopback and not address.is_link_local for address in parsed)


class HostFacts(Frozen):
    os: OsFacts
    cpu: cpu_memory.CpuFacts
    memory: cpu_memory.MemoryFacts
    mounts: filesystem.MountFacts
    nics: fabric.NicFacts
    rdma: fabric.RdmaFacts
    limits: LimitFacts
    hostname: HostnameFacts
    clock: clock.ClockFacts
    software: software.SoftwareFacts

    def unreadable(self) -> dict[str, str]:
        """Everything that could not be read, by its path in this record, with the reason."""
        return dict(_reasons("", self.model_dump(mode="json")))


def read(root: Path = Path("/")) -> HostFacts:
    """All facts of this machine. ``root`` is where /proc, /sys, /etc, /dev and /usr are looked for.

    System calls (limits, clock, addresses, name resolution) speak of this machine whatever ``root`` is.
    Takes up to 15 s where mounts hang and names do not resolve, otherwise milliseconds.
    """
    return HostFacts(
        os=_os(root),
        cpu=cpu_memory.read_cpu(root),
        memory=cpu_memory.read_memory(root),
        mounts=filesystem.read(root),
        nics=fabric.read_nics(root),
        rdma=fabric.read_rdma(root),
        limits=_limits(root),
        hostname=_hostname(root),
        clock=clock.read(root),
        software=software.read(root),
    )


def resolve(name: str) -> tuple[str, ...]:
    """The addresses of a name, by the system's own resolver (/etc/hosts, DNS, …). Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def _os(root: Path) -> OsFacts:
    attempt, dmi = FieldReader(), root / "sys/class/dmi/id"
    return OsFacts(
        name=attempt("name", lambda: _release_name(root / "etc/os-release")),
        kernel=attempt("kernel", lambda: read_line(root / "proc/sys/kernel/osrelease")),
        arch=platform.machine(),
        machine=attempt("machine", lambda: f"{read_line(dmi / 'sys_vendor')} {read_line(dmi / 'product_name')}"),
        container=_container(root),
        machine_id=attempt("machine_id", lambda: _digest(read_line(root / "etc/machine-id"))),
        unreadable=attempt.unreadable,
    )


def _release_name(path: Path) -> str:
    found = re.search(r"^PRETTY_NAME=[\"']?(.*?)[\"']?$", read_text(path), re.MULTILINE)
    if not found:
        raise ValueError(f"{path} has no PRETTY_NAME")
    return printable(found[1])


def _digest(machine_id: str) -> str:
    return hashlib.sha256(f"seatrial {machine_id}".encode()).hexdigest()[:16]


def _container(root: Path) -> str | None:
    """The kind of container around us by the marks that the runtimes leave; None where there is no such mark."""
    marks = {"docker": os.path.exists(root / ".dockerenv"), "podman": os.path.exists(root / "run/.containerenv")}
    variables = {"APPTAINER_CONTAINER": "apptainer", "SINGULARITY_CONTAINER": "singularity"}
    marks |= {kind: variable in os.environ for variable, kind in variables.items()}
    marks["kubernetes"] = "KUBERNETES_SERVICE_HOST" in os.environ
    return next((kind for kind, marked in marks.items() if marked), None)


def _limits(root: Path) -> LimitFacts:
    attempt = FieldReader()
    return LimitFacts(
        memlock=_ulimit(resource.RLIMIT_MEMLOCK),
        nofile=_ulimit(resource.RLIMIT_NOFILE),
        stack=_ulimit(resource.RLIMIT_STACK),
        nproc=_ulimit(resource.RLIMIT_NPROC),
        ipc_lock=attempt("ipc_lock", lambda: _capable(root / "proc/self", _CAP_IPC_LOCK)),
        unreadable=attempt.unreadable,
    )


def _ulimit(which: int) -> Ulimit:
    soft, hard = (number if number != resource.RLIM_INFINITY else "unlimited" for number in resource.getrlimit(which))
    return Ulimit(soft=soft, hard=hard)


def _capable(process: Path, capability: int) -> bool:
    """Whether the kernel grants the capability outright.

    Inside a user namespace (rootless containers, enroot, apptainer) CapEff is full, and worth nothing to the drivers.
    """
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_text(process / "status"), re.MULTILINE)
    if not found:
        raise ValueError(f"{process / 'status'} has no CapEff")
    initial_namespace = read_text(process / "uid_map").split() == ["0", "0", str(2**32 - 1)]
    return initial_namespace and bool(int(found[1], 16) >> capability & 1)


def _hostname(root: Path) -> HostnameFacts:
    attempt = FieldReader()
    name = attempt("name", lambda: read_line(root / "proc/sys/kernel/hostname"))
    found = attempt("addresses", lambda: _resolve_in_time(name)) if name else None
    return HostnameFacts(name=name, addresses=found or (), unreadable=attempt.unreadable)


def _resolve_in_time(name: str) -> tuple[str, ...]:
    pending = start_in_thread(lambda: resolve(name))
    try:
        return pending.result(_RESOLVE_S)
    except TimeoutError:
        raise TimeoutError(f"{name} was not resolved within {_RESOLVE_S:g} s") from None
    except socket.gaierror as error:
        raise ValueError(f"{name}: {error.strerror}") from None


def _reasons(path: str, value: JsonValue) -> Iterator[tuple[str, str]]:
    """Every entry of an ``unread`` in a record, however deep. A record in a list goes by its name."""
    if isinstance(value, list):
        labels = ("name", "target", "port")
        value = {
            next((str(item[key]) for key in labels if isinstance(item, dict) and item.get(key)), str(index)): item
            for index, item in enumerate(value)
        }
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if key == "unread" and isinstance(item, dict):
            yield from ((f"{path}.{field}", str(why)) for field, why in item.items())
        else:
            yield from _reasons(f"{path}.{key}".lstrip("."), item)
