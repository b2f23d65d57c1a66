"""What a rig changes on its host: it takes a slot, whose number its links, /etc/hosts lines and processes carry.

A slot is held by an abstract Unix socket, whose name the kernel frees the moment its process is gone, however that
died. So two rigs never share a slot, and what carries the number of a free slot is a dead rig's and can go.
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
    """A slot of our own and the socket that holds it until it is closed. Removes what dead rigs left."""
    for slot in _named():
        with suppress(OSError), closing(_hold(slot)):
            clean_up_slot(slot)
    for slot in range(_SLOTS):
        with suppress(OSError):
            return slot, _hold(slot)
    raise RuntimeError(f"all {_SLOTS} slots for rigs are taken")


def bridge(slot: int) -> str:
    return f"seatrial{slot}"


def link(slot: int, node: int) -> str:
    """The host's end of a node's cable."""
    return f"{bridge(slot)}n{node}"


def clean_up_slot(slot: int) -> None:
    """Remove a slot's processes, links and /etc/hosts lines."""
    processes = [process for process in psutil.process_iter() if _tag(process) == str(slot)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
    for name in _links(slot):
        # A link may go by itself just now: the kernel takes it down with the network namespace of its other end.
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
    if left := _links(slot):
        raise RuntimeError(f"cannot remove network links {left}")
    write_hosts(slot, [])


def write_hosts(slot: int, lines: Iterable[str]) -> None:
    """Make these the slot's lines in /etc/hosts.

    In place, since the file may be a bind mount. Ours come first, so that without them the rest is as it was.
    """
    with _HOSTS.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mark = f" # seatrial rig {slot}\n"
        text = "".join([*(line + mark for line in lines), *(line for line in file if not line.endswith(mark))])
        file.seek(0)
        file.write(text)
        file.truncate()


def cgroups_unavailable() -> str | None:
    """Why jobs cannot be confined here; None when they can."""
    missing = [name for name in _CONTROLLERS if not (_CGROUPS / name / "cgroup.procs").exists()]
    return f"no cgroup v1 here for {', '.join(missing)}" if missing else None


def lock_cgroups(seconds: float = 120) -> socket.socket:
    """What holds the cgroups of nodes until it is closed. Raises TimeoutError when another rig does not let go."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            return _hold("cgroups")
        time.sleep(0.1)
    raise TimeoutError("another rig holds the cgroups")


def remove_cgroups() -> None:
    """Remove the cgroups that Slurm made for nodes, innermost first: it leaves the outermost there."""
    for controller in _CONTROLLERS:
        for top in (_CGROUPS / controller).glob("slurm_node*"):
            folders = [top, *(path for path in top.rglob("*") if path.is_dir())]
            for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
                folder.rmdir()


def _hold(slot: int | str) -> socket.socket:
    """Raises OSError when another process holds the slot."""
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0seatrial-rig-{slot}")
    except OSError:
        held.close()
        raise
    return held


def _named() -> set[int]:
    """The slots whose number anything on this host carries."""
    links = (match[1] for _, name in socket.if_nameindex() if (match := _LINK.fullmatch(name)))
    lines = _MARK.findall(_HOSTS.read_text(encoding="utf-8"))
    processes = (_tag(process) for process in psutil.process_iter())
    return {int(slot) for slot in [*links, *lines, *processes] if slot}


def _tag(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(TAG)
    except psutil.Error:  # gone
        return None


def _links(slot: int) -> list[str]:
    found = [(_LINK.fullmatch(name), name) for _, name in socket.if_nameindex()]
    return [name for match, name in found if match and int(match[1]) == slot]
