"""Changes of a rig to its host: links, /etc/hosts lines and processes, all marked with the number of a slot.

A rig holds its slot with an abstract Unix socket, whose name the kernel releases when the process ends. Links, lines
and processes with the number of a free slot are leftovers of an ended rig and are removed.
"""

from __future__ import annotations

import fcntl
import re
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

import psutil

TAG = "SEATRIAL_RIG"  # in the environment of a rig's processes
_HOSTS = Path("/etc/hosts")
_LINK = re.compile(r"seatrial(\d+)(?:n\d+)?")
_MARK = re.compile(r" # seatrial rig (\d+)\n")
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpuset", "devices", "memory")
_SLOTS = 200  # each takes a network 10.77.SLOT.0/24


def claim_slot() -> tuple[int, socket.socket]:
    """Returns a free slot and the socket that holds it until closed; removes leftovers of ended rigs first."""
    for slot in _marked_slots():
        with suppress(OSError), closing(_lock(slot)):
            clean_up_slot(slot)
    for slot in range(_SLOTS):
        with suppress(OSError):
            return slot, _lock(slot)
    raise RuntimeError(f"all {_SLOTS} slots for rigs are in use")


def bridge(slot: int) -> str:
    return f"seatrial{slot}"


def link(slot: int, node: int) -> str:
    """Returns the host side of a node's veth pair."""
    return f"{bridge(slot)}n{node}"


def clean_up_slot(slot: int) -> None:
    """Removes the processes, links and /etc/hosts lines of a slot."""
    processes = [process for process in psutil.process_iter() if _tag(process) == str(slot)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
    for name in _links(slot):
        # May fail: the kernel removes the link with the network namespace of its other end.
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
    if remaining := _links(slot):
        raise RuntimeError(f"cannot remove network links {remaining}")
    write_hosts(slot, [])


def write_hosts(slot: int, lines: Iterable[str]) -> None:
    """Replaces the slot's lines in /etc/hosts; in place, as the file may be a bind mount."""
    with _HOSTS.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mark = f" # seatrial rig {slot}\n"
        text = "".join([*(line + mark for line in lines), *(line for line in file if not line.endswith(mark))])
        file.seek(0)
        file.write(text)
        file.truncate()


def cgroups_unavailable() -> str | None:
    """Returns why jobs cannot be confined on this machine; None if they can."""
    missing = [name for name in _CONTROLLERS if not (_CGROUPS / name / "cgroup.procs").exists()]
    return f"no cgroup v1 for {', '.join(missing)}" if missing else None


def lock_cgroups(seconds: float = 120) -> socket.socket:
    """Returns a socket that locks the cgroups of nodes until closed. Raises TimeoutError if another rig holds them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            return _lock("cgroups")
        time.sleep(0.1)
    raise TimeoutError("another rig holds the cgroups")


def remove_cgroups() -> None:
    """Removes the cgroups that Slurm created for nodes, innermost first."""
    for controller in _CONTROLLERS:
        for top in (_CGROUPS / controller).glob("slurm_node*"):
            folders = [top, *(path for path in top.rglob("*") if path.is_dir())]
            for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
                folder.rmdir()


def _lock(slot: int | str) -> socket.socket:
    """Returns a socket that holds the slot. Raises OSError if another process holds it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0seatrial-rig-{slot}")
    except OSError:
        lock.close()
        raise
    return lock


def _marked_slots() -> set[int]:
    """Returns the slots of all marked links, /etc/hosts lines and processes on this host."""
    links = (match[1] for _, name in socket.if_nameindex() if (match := _LINK.fullmatch(name)))
    lines = _MARK.findall(_HOSTS.read_text(encoding="utf-8"))
    processes = (_tag(process) for process in psutil.process_iter())
    return {int(slot) for slot in [*links, *lines, *processes] if slot}


def _tag(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(TAG)
    except psutil.Error:  # ended
        return None


def _links(slot: int) -> list[str]:
    matches = [(_LINK.fullmatch(name), name) for _, name in socket.if_nameindex()]
    return [name for match, name in matches if match and int(match[1]) == slot]
