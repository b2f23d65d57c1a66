"""Faults of names, connections, clocks and interfaces; see tests.bench.cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from seatrial.bench import connectivity, tcp
from seatrial.discover import fabric
from seatrial.util import resolver
from tests.bench import cluster

SKEW_S = 7.0


def _resolve_without_node2(name: str) -> tuple[str, ...]:
    if name in ("node2", "job-2.job"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return _resolve_pods(name) if name.endswith(".job") else cluster.resolve(name)


def _resolve_pods(name: str) -> tuple[str, ...]:
    """Resolve as cluster DNS, which has no names of nodes."""
    if not name.endswith(".job"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return (cluster.outside_address(),)


def _resolve_node1_to_loopback(name: str) -> tuple[str, ...]:
    return ("127.0.1.1",) if name == "node1" else cluster.resolve(name)


class ClosedPort(connectivity.ConnectivityProbe):
    """Publishes a port and closes it."""

    def listen(self) -> tcp.Endpoint:
        endpoint = super().listen()
        assert self._listener
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = None
        return endpoint


class WrongToken(connectivity.ConnectivityProbe):
    """Sends another token than it published, as another program on the port would."""

    def listen(self) -> tcp.Endpoint:
        endpoint = super().listen()
        self._token = b"SSH-2.0-OpenSSH\r"
        return endpoint


class NoAnswer(connectivity.ConnectivityProbe):
    """Sends its token, and closes the connection without an answer."""

    def _answer(self, connection: socket.socket) -> None:
        connection.sendall(self._token)
        connection.recv(1)
        connection.close()


def _no_port(*arguments: Any) -> socket.socket:
    raise OSError(98, "Address already in use")


def _hang(name: str) -> Sequence[str]:
    time.sleep(60)
    return ()


def _nics(mtu: int, speed_mbit_s: int | None) -> Callable[[Path], fabric.NicFacts]:
    """Return a fake of read_nics with one interface that has all addresses of this machine."""
    unset = dict.fromkeys(("state", "mac", "driver", "numa_node"))
    addresses = tuple(address for row in fabric.interface_addresses().values() for address in row)
    nic = fabric.Nic.model_validate(
        {**unset, "name": "eth0", "mtu": mtu, "speed_mbit_s": speed_mbit_s, "addresses": addresses}
    )
    return lambda _: fabric.NicFacts(interfaces=(nic,), omitted_virtual=0)


def _other_nccl_variables(rank: int) -> AbstractContextManager[Any] | None:
    return patch.dict(os.environ, {"NCCL_NET": "Socket", "NCCL_HOSTID": "2"}) if rank == 2 else None


FAULTS: dict[str, cluster.Fault] = {
    "unknown_name": cluster.on(1, resolver, "resolve", _resolve_without_node2),
    "loopback_name": cluster.everywhere(resolver, "resolve", _resolve_node1_to_loopback),
    "in_pods": lambda rank: patch.dict(os.environ, {"SEATRIAL_DNS_NAME": f"job-{rank}.job"}),
    "cluster_dns": cluster.everywhere(resolver, "resolve", _resolve_pods),
    "resolver_hangs": cluster.everywhere(resolver, "resolve", _hang),
    "short_resolve_timeout": cluster.everywhere(tcp, "RESOLVE_TIMEOUT_S", 0.2),
    "known_local_address": cluster.everywhere(connectivity, "local_address", cluster.outside_address),
    "mtu_9000": cluster.everywhere(fabric, "read_nics", _nics(9000, 25_000)),
    "mtu_1500_on_one": cluster.on(1, fabric, "read_nics", _nics(1500, None)),
    "other_nccl_variables": _other_nccl_variables,
    "closed_port": cluster.on(2, connectivity, "ConnectivityProbe", ClosedPort),
    "closed_port_on_first": cluster.on(1, connectivity, "ConnectivityProbe", ClosedPort),
    "wrong_token": cluster.on(2, connectivity, "ConnectivityProbe", WrongToken),
    "no_answer": cluster.on(2, connectivity, "ConnectivityProbe", NoAnswer),
    "no_port": cluster.on(1, connectivity, "listen", _no_port),
    "skewed_clock": cluster.on(1, connectivity, "wall_clock", lambda: time.time() + SKEW_S),
    "clock_1000_s_behind": cluster.on(1, connectivity, "wall_clock", lambda: time.time() - 1000),
}
