"""The facts of a machine without its GPUs, read without causing load."""

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
from seatrial.discover.file_readers import FieldReader, FileFacts, read_line, read_text
from seatrial.model import Frozen
from seatrial.util import resolver
from seatrial.util.text import printable
from seatrial.util.threads import start_in_thread

_CAP_IPC_LOCK = 14  # capabilities(7): locks memory regardless of RLIMIT_MEMLOCK

Amount = int | Literal["unlimited"]


class OsFacts(FileFacts):
    """``machine`` is vendor and product name; ``machine_id`` is a digest, since machine-id(5) is confidential."""

    name: str | None
    kernel: str | None
    arch: str
    machine: str | None
    container: str | None
    machine_id: str | None = None


class Ulimit(Frozen):
    """A resource limit of this process: bytes for memlock and stack, else a count."""

    soft: Amount
    hard: Amount


class LimitFacts(FileFacts):
    """Resource limits; with the capability CAP_IPC_LOCK (``ipc_lock``) the memlock limit does not apply."""

    memlock: Ulimit
    nofile: Ulimit
    stack: Ulimit
    nproc: Ulimit
    ipc_lock: bool | None


class HostnameFacts(FileFacts):
    """The name of this host, and the addresses to which it resolves on this host."""

    name: str | None
    addresses: tuple[str, ...]

    @property
    def routable(self) -> bool:
        """Whether the name resolves to an address that other machines can use: neither loopback nor link-local."""
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
        """All fields that could not be read, by their path in this record, with the error."""
        return dict(_errors("", self.model_dump(mode="json")))


def read(root: Path = Path("/")) -> HostFacts:
    """The facts of this machine, with /proc, /sys, /etc, /dev and /usr under ``root``.

    Limits, clock, addresses and name resolution are those of this process, whatever ``root`` is.
    Takes milliseconds; up to 15 s if mounts hang and names do not resolve.
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


def _os(root: Path) -> OsFacts:
    reader, dmi = FieldReader(), root / "sys/class/dmi/id"
    return OsFacts(
        name=reader("name", lambda: release_name(root)),
        kernel=reader("kernel", lambda: read_line(root / "proc/sys/kernel/osrelease")),
        arch=platform.machine(),
        machine=reader("machine", lambda: f"{read_line(dmi / 'sys_vendor')} {read_line(dmi / 'product_name')}"),
        container=_container(root),
        machine_id=reader("machine_id", lambda: _machine_id(root)),
        unreadable=reader.unreadable,
    )


def release_name(root: Path) -> str:
    """The name of the operating system. Raises OSError or ValueError."""
    path = root / "etc/os-release"
    match = re.search(r"^PRETTY_NAME=[\"']?(.*?)[\"']?$", read_text(path), re.MULTILINE)
    if not match:
        raise ValueError(f"{path}: no PRETTY_NAME")
    return printable(match[1])


def _machine_id(root: Path) -> str:
    text = f"seatrial {read_line(root / 'etc/machine-id')}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _container(root: Path) -> str | None:
    """The container runtime, from files and variables that the runtimes set; None if there is none of these."""
    detected = {"docker": os.path.exists(root / ".dockerenv"), "podman": os.path.exists(root / "run/.containerenv")}
    variables = {"APPTAINER_CONTAINER": "apptainer", "SINGULARITY_CONTAINER": "singularity"}
    detected |= {kind: variable in os.environ for variable, kind in variables.items()}
    detected["kubernetes"] = "KUBERNETES_SERVICE_HOST" in os.environ
    return next((runtime for runtime, is_detected in detected.items() if is_detected), None)


def _limits(root: Path) -> LimitFacts:
    reader = FieldReader()
    return LimitFacts(
        memlock=_ulimit(resource.RLIMIT_MEMLOCK),
        nofile=_ulimit(resource.RLIMIT_NOFILE),
        stack=_ulimit(resource.RLIMIT_STACK),
        nproc=_ulimit(resource.RLIMIT_NPROC),
        ipc_lock=reader("ipc_lock", lambda: has_capability(root / "proc/self", _CAP_IPC_LOCK)),
        unreadable=reader.unreadable,
    )


def _ulimit(which: int) -> Ulimit:
    soft, hard = (number if number != resource.RLIM_INFINITY else "unlimited" for number in resource.getrlimit(which))
    return Ulimit(soft=soft, hard=hard)


def has_capability(process: Path, capability: int) -> bool:
    """Whether the process has the capability in the initial user namespace.

    Inside another user namespace (rootless containers, enroot, apptainer) CapEff is full, but drivers ignore it.
    Raises OSError or ValueError.
    """
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_text(process / "status"), re.MULTILINE)
    if not match:
        raise ValueError(f"{process / 'status'}: no CapEff")
    initial_namespace = read_text(process / "uid_map").split() == ["0", "0", str(2**32 - 1)]
    return initial_namespace and bool(int(match[1], 16) >> capability & 1)


def _hostname(root: Path) -> HostnameFacts:
    reader = FieldReader()
    name = reader("name", lambda: read_line(root / "proc/sys/kernel/hostname"))
    addresses = reader("addresses", lambda: _resolve_with_timeout(name)) if name else None
    return HostnameFacts(name=name, addresses=addresses or (), unreadable=reader.unreadable)


def _resolve_with_timeout(name: str) -> tuple[str, ...]:
    future = start_in_thread(lambda: resolver.resolve(name))
    try:
        return future.result(resolver.RESOLVE_TIMEOUT_S)
    except TimeoutError:
        raise TimeoutError(f"{name} did not resolve within {resolver.RESOLVE_TIMEOUT_S:g} s") from None
    except socket.gaierror as error:
        raise ValueError(f"{name}: {error.strerror}") from None


def _errors(path: str, value: JsonValue) -> Iterator[tuple[str, str]]:
    """(path, error) of the entries of ``unreadable`` at any depth; the path has labels instead of list indices."""
    if isinstance(value, list):
        value = {_item_label(item, index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if key == "unreadable" and isinstance(item, dict):
            yield from ((f"{path}.{field}", str(error)) for field, error in item.items())
        else:
            yield from _errors(f"{path}.{key}".lstrip("."), item)


def _item_label(item: JsonValue, index: int) -> str:
    """The item's name, target or port; its index if it has none of them."""
    if isinstance(item, dict):
        for key in ("name", "target", "port"):
            if label := item.get(key):
                return str(label)
    return str(index)
