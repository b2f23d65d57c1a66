"""Faults between nodes, put in for real; see tests.bench.cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from seatrial.bench import connectivity
from seatrial.discover import fabric, host
from tests.bench import cluster

SKEW_S = 7.0


def _unknown(name: str) -> tuple[str, ...]:
    if name == "node2":
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return cluster.resolve(name)


def _loopback(name: str) -> tuple[str, ...]:
    return ("127.0.1.1",) if name == "node1" else cluster.resolve(name)


class Deaf(connectivity.ConnectivityProbe):
    """Gives out the number of a port, and closes it."""

    def open(self) -> connectivity.Endpoint:
        card = super().listen()
        assert self._socket
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._socket = None
        return card


class Impostor(connectivity.ConnectivityProbe):
    """Greets with another token than it gave out, as another program on that port would."""

    def open(self) -> connectivity.Endpoint:
        card = super().listen()
        self._token = b"SSH-2.0-OpenSSH\r"
        return card


class Mute(connectivity.ConnectivityProbe):
    """Greets, and then does not answer."""

    def _answer(self, line: socket.socket) -> None:
        line.sendall(self._token)
        line.recv(1)
        line.close()


def _no_port(*arguments: Any) -> socket.socket:
    raise OSError(98, "Address already in use")


def _hang(name: str) -> Sequence[str]:
    time.sleep(60)
    return ()


def _nics(mtu: int, speed_mbps: int | None) -> Callable[[Path], fabric.NicFacts]:
    """One interface, with all addresses of this machine."""
    unknown = dict.fromkeys(("state", "mac", "driver", "numa_node"))
    here = tuple(address for those in fabric.interface_addresses().values() for address in those)
    nic = fabric.Nic.model_validate(
        {**unknown, "name": "eth0", "mtu": mtu, "speed_mbps": speed_mbps, "addresses": here}
    )
    return lambda _: fabric.NicFacts(interfaces=(nic,), omitted_virtual=0)


def _told_otherwise(rank: int) -> AbstractContextManager[Any] | None:
    return patch.dict(os.environ, {"NCCL_NET": "Socket", "NCCL_HOSTID": "2"}) if rank == 2 else None


FAULTS: dict[str, cluster.Fault] = {
    "unknown_name": cluster.on(1, host, "resolve", _unknown),
    "loopback_name": cluster.everywhere(host, "resolve", _loopback),
    "silent_names": cluster.everywhere(host, "resolve", _hang),
    "brief_patience": cluster.everywhere(connectivity, "RESOLVE_S", 0.2),
    "knows_itself": cluster.everywhere(connectivity, "own_address", cluster.outside_address),
    "jumbo_frames": cluster.everywhere(fabric, "read_nics", _nics(9000, 25_000)),
    "small_frames_on_one": cluster.on(1, fabric, "read_nics", _nics(1500, None)),
    "told_otherwise": _told_otherwise,
    "closed_port": cluster.on(2, connectivity, "Station", Deaf),
    "first_is_deaf": cluster.on(1, connectivity, "Station", Deaf),
    "impostor": cluster.on(2, connectivity, "Station", Impostor),
    "mute": cluster.on(2, connectivity, "Station", Mute),
    "no_port": cluster.on(1, connectivity, "_listen", _no_port),
    "skewed_clock": cluster.on(1, connectivity, "wall_clock", lambda: time.time() + SKEW_S),
    "lost_clock": cluster.on(1, connectivity, "wall_clock", lambda: time.time() - 1000),
}
