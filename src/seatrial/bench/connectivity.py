"""Name resolution, TCP connections, round trips and clock offsets between all pairs of nodes of a job."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from threading import Thread

from seatrial.bench.one_rank_per_node import STEP_TIMEOUT_S, Participants
from seatrial.bench.tcp import (
    CONNECT_TIMEOUT_S,
    TOKEN_BYTES,
    Endpoint,
    Lookup,
    connection_error,
    is_routable,
    listen,
    open_connection,
    resolve_names,
)
from seatrial.util.resolver import RESOLVE_TIMEOUT_S
from seatrial.util.text import error_text

MAX_PARALLEL_CONNECTS = 32  # threads per node
PINGS = 10  # exchanges per pair; the shortest one is probably not delayed by a queue
_TIMESTAMPS = struct.Struct("!dd")


@dataclass(frozen=True)
class Connection:
    """Median round-trip time and clock offset of a connection in seconds, measured at one end.

    ``clock_offset`` is the remote clock minus the local clock, ± ``clock_uncertainty``, from the exchange with the
    shortest round trip: ((t2 - t1) + (t3 - t4)) / 2, with an error of at most half that round trip (RFC 5905,
    section 8).
    """

    round_trip: float
    clock_offset: float
    clock_uncertainty: float


@dataclass(frozen=True)
class ConnectivityResult:
    """``lookups``: node → DNS name of each node → its Lookup on the first node.

    ``connections``: node → name of each other node → Connection from the first node, or the error.
    """

    lookups: dict[str, dict[str, Lookup]]
    connections: dict[str, dict[str, Connection | str]]


def measure_connectivity(
    participants: Participants, dns_name: str, resolve: Callable[[str], Sequence[str]]
) -> ConnectivityResult:
    """On every node, resolve all names, connect to all other nodes by TCP and exchange time stamps with them.

    ``dns_name``: the name by which other nodes resolve this one. Raises ParticipantError if a node cannot listen.
    """
    names, index = participants.names, participants.index
    probe = ConnectivityProbe(index, names)
    try:
        endpoints = participants.run_on_all(probe.listen)
        dns_names = participants.run_on_all(lambda: dns_name)
        lookups = participants.run_on_all(lambda: resolve_names(dns_names, resolve), RESOLVE_TIMEOUT_S + STEP_TIMEOUT_S)
        lookups_here = [lookups[index][name] for name in dns_names]
        # A node that does not answer costs two timeouts: one to connect, one to receive the token
        timeout_s = STEP_TIMEOUT_S + 2 * CONNECT_TIMEOUT_S * len(names)
        errors = participants.run_on_all(lambda: probe.connect_all(endpoints, lookups_here), timeout_s)
        connections = participants.run_on_all(probe.measure, timeout_s)
    finally:
        probe.close()
    merged = {name: {**failed, **connected} for name, failed, connected in zip(names, errors, connections, strict=True)}
    return ConnectivityResult(dict(zip(names, lookups, strict=True)), merged)


class ConnectivityProbe:
    """Listens on this node, connects to all other participants, and measures the connections."""

    def __init__(self, index: int, names: Sequence[str]) -> None:
        # Starting with the next node, so that not all nodes connect to the same one at once
        self._other_indices = [(index + step) % len(names) for step in range(1, len(names))]
        self._names = names
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._sockets: dict[str, socket.socket] = {}

    def listen(self) -> Endpoint:
        """Listen on a free port on all interfaces. Raises OSError."""
        self._listener = listen()
        Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return Endpoint(self._listener.getsockname()[1], self._token, local_address())

    def connect_all(self, endpoints: Sequence[Endpoint], lookups: Sequence[Lookup]) -> dict[str, str]:
        """Connect to all other participants, and return the errors by name.

        ``endpoints``, ``lookups``: one per participant.
        """
        errors: dict[str, str] = {}

        def connect(other: int) -> None:
            name, endpoint = self._names[other], endpoints[other]
            try:
                addresses = lookups[other].addresses
                if not addresses and endpoint.address is None:
                    raise OSError("the name of the node does not resolve, and the node has no routable address")
                addresses = addresses or (str(endpoint.address),)
                self._sockets[name] = open_connection(addresses, endpoint)
            except OSError as error:
                errors[name] = error_text(error)

        with ThreadPoolExecutor(MAX_PARALLEL_CONNECTS) as pool:
            list(pool.map(connect, self._other_indices))
        return errors

    def measure(self) -> dict[str, Connection | str]:
        """Exchange time stamps over one connection after the other, and return Connection or error by name."""
        names = [self._names[other] for other in self._other_indices]
        return {name: _measure_connection(self._sockets[name]) for name in names if name in self._sockets}

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        if self._listener:
            with suppress(OSError):  # wakes the thread in accept(); some kernels report ENOTCONN
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the measurement has ended
                return
            Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the connecting end reports a broken connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._token)
            while connection.recv(1):
                received = wall_clock()
                connection.sendall(_TIMESTAMPS.pack(received, wall_clock()))


def wall_clock() -> float:
    """Unix seconds by this node's clock."""
    return time.time()


def local_address() -> str | None:
    """This node's source address towards MASTER_ADDR; None if it is not routable or cannot be determined."""
    try:
        any_port = 9
        addresses = socket.getaddrinfo(os.environ.get("MASTER_ADDR"), any_port, type=socket.SOCK_DGRAM)
        family, kind, *_, target = addresses[0]
        with socket.socket(family, kind) as datagram:  # connect() sends nothing here; it only looks up the route
            datagram.connect(target)
            address = str(datagram.getsockname()[0])
    except OSError:
        return None
    return address if is_routable(address) else None


def _measure_connection(connection: socket.socket) -> Connection | str:
    """The measured connection, or the error as text."""
    try:
        pings = [_ping(connection) for _ in range(PINGS)]
    except (OSError, struct.error) as error:
        reason = connection_error(error) if isinstance(error, OSError) else "the other end closed the connection"
        return f"failed after connecting: {reason}"
    shortest, clock_offset = min(pings)
    return Connection(median(round_trip for round_trip, _ in pings), clock_offset, shortest / 2)


def _ping(connection: socket.socket) -> tuple[float, float]:
    """(round trip without the remote processing time, remote clock minus local clock) in seconds."""
    sent = wall_clock()
    connection.sendall(b"?")
    received, answered = _TIMESTAMPS.unpack(connection.recv(_TIMESTAMPS.size, socket.MSG_WAITALL))
    returned = wall_clock()
    return max(0.0, (returned - sent) - (answered - received)), ((received - sent) + (answered - returned)) / 2
