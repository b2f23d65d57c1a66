"""How the nodes of a job reach each other: names, TCP connections between all pairs, round trips and clocks."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from threading import Thread

from seatrial.bench.one_rank_per_node import STEP_TIMEOUT_S, Participants, error_text, start_in_thread

RESOLVE_TIMEOUT_S = 10.0  # a resolver's own default is 5 s a server: longer than two of them no rendezvous waits gladly
CONNECT_TIMEOUT_S = 2.0  # within a cluster a connection takes less than 1 ms; Linux repeats a lost SYN after 1 s
DIALS_AT_ONCE = 32
EXCHANGES = 10  # a pair, so that one of them meets no queue
_TIMES = struct.Struct("!dd")


@dataclass(frozen=True)
class Lookup:
    """What a name resolves to on one node: addresses that another machine can use, or why there are none."""

    addresses: tuple[str, ...]
    problem: str | None = None


def resolve_names(names: Sequence[str], resolve: Callable[[str], Sequence[str]]) -> dict[str, Lookup]:
    """Resolve all names at once, here. A name that has no answer within 10 s counts as unresolved."""
    pending = {name: start_in_thread(partial(resolve, name)) for name in names}
    wait(pending.values(), timeout=RESOLVE_TIMEOUT_S)
    return {name: _lookup(future) for name, future in pending.items()}


def _lookup(pending: Future[Sequence[str]]) -> Lookup:
    if not pending.done():
        return Lookup((), f"not resolved within {RESOLVE_TIMEOUT_S:g} s")
    try:
        found = pending.result()
    except OSError as error:
        return Lookup((), error_text(error))
    usable = tuple(address for address in found if _reaches_out(address))
    return Lookup(usable, None if usable else f"resolves to {', '.join(found)}, which no other node can reach")


def _reaches_out(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


@dataclass(frozen=True)
class Endpoint:
    """Where an actor can be reached. ``address`` is for those who cannot resolve its name; None: it knows none."""

    port: int
    token: bytes
    address: str | None


@dataclass(frozen=True)
class Connection:
    """A connection as one end of it saw it, in seconds.

    ``offset`` is the other's clock minus ours, true to ± ``uncertainty`` (RFC 5905, section 8: the offset is
    ((t2 - t1) + (t3 - t4)) / 2, and its error at most half the round trip, of the exchange with the shortest one).
    """

    round_trip: float
    clock_offset: float
    clock_uncertainty: float


@dataclass(frozen=True)
class ConnectivityResult:
    """What actor ``i`` found: ``lookups[i][name]``, and ``links[i][name]``: a Link, or why there is none."""

    lookups: list[dict[str, Lookup]]
    connections: list[dict[str, Connection | str]]


def measure_connectivity(actors: Participants, resolve: Callable[[str], Sequence[str]]) -> ConnectivityResult:
    """Let every node resolve the names of all, connect to all others by TCP and exchange time stamps with them.

    Raises Trouble when a node cannot listen.
    """
    station = ConnectivityProbe(actors.index, actors.names)
    try:
        cards = actors.run_on_all(station.listen)
        lookups = actors.run_on_all(lambda: resolve_names(actors.names, resolve), RESOLVE_TIMEOUT_S + STEP_TIMEOUT_S)
        patience = STEP_TIMEOUT_S + 2 * CONNECT_TIMEOUT_S * len(actors.names)
        failures = actors.run_on_all(lambda: station.connect_all(cards, lookups[actors.index]), patience)
        links = actors.run_on_all(station.measure, patience)
    finally:
        station.close()
    merged: list[dict[str, Connection | str]] = [
        {**failed, **good} for failed, good in zip(failures, links, strict=True)
    ]
    return ConnectivityResult(lookups, merged)


class ConnectivityProbe:
    """One actor's end of the lines to all others: it listens, dials and measures."""

    def __init__(self, me: int, names: Sequence[str]) -> None:
        # Each begins with the node after it, so that they do not all turn to the same one at once.
        self._others = [(me + step) % len(names) for step in range(1, len(names))]
        self._names = names
        self._token = secrets.token_bytes(16)
        self._socket: socket.socket | None = None
        self._lines: dict[str, socket.socket] = {}

    def listen(self) -> Endpoint:
        """Listen on a free port of all addresses. Raises OSError."""
        self._socket = _listen()
        Thread(target=self._serve, args=(self._socket,), daemon=True).start()
        return Endpoint(self._socket.getsockname()[1], self._token, local_address())

    def connect_all(self, cards: Sequence[Endpoint], lookups: Mapping[str, Lookup]) -> dict[str, str]:
        """Connect to all others; why it failed, by name."""
        failures: dict[str, str] = {}

        def one(other: int) -> None:
            name, card = self._names[other], cards[other]
            try:
                self._lines[name] = open_connection(lookups[name].addresses or _known(card), card)
            except OSError as error:
                failures[name] = error_text(error)

        with ThreadPoolExecutor(DIALS_AT_ONCE) as pool:
            list(pool.map(one, self._others))
        return failures

    def measure(self) -> dict[str, Connection | str]:
        """Exchange time stamps over every line, one after the other; by name."""
        names = [self._names[other] for other in self._others if self._names[other] in self._lines]
        return {name: _measure(self._lines[name]) for name in names}

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        if self._socket:
            with suppress(OSError):  # wakes the thread that waits in accept(); some kernels call it not connected
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                line, _ = listening.accept()
            except OSError:  # closed: the survey is over
                return
            Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line, suppress(OSError):  # a line that breaks is told by the end that dialled
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(self._token)
            while line.recv(1):
                received = wall_clock()
                line.sendall(_TIMES.pack(received, wall_clock()))


def wall_clock() -> float:
    """Unix seconds, by this node's own clock."""
    return time.time()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def local_address() -> str | None:
    """The address from which this node speaks to the first one (MASTER_ADDR); None where that is a loopback one."""
    try:
        family, kind, *_, target = socket.getaddrinfo(os.environ.get("MASTER_ADDR"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as unsent:  # connecting a datagram socket sends nothing, it only asks routing
            unsent.connect(target)
            address = str(unsent.getsockname()[0])
    except OSError:
        return None
    return address if _reaches_out(address) else None


def _known(card: Endpoint) -> tuple[str, ...]:
    if card.address is None:
        raise OSError("its name does not resolve, and it knows no address of its own")
    return (card.address,)


def open_connection(addresses: Sequence[str], card: Endpoint) -> socket.socket:
    """A line to whoever holds the card's token, by the first address that leads there. Raises ConnectionError."""
    failures = []
    for address in addresses:
        try:
            line = socket.create_connection((address, card.port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            failures.append(f"{address}: {_how(error)}")
            continue
        greeting = _greeting(line)
        if greeting == card.token:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return line
        line.close()
        failures.append(f"{address}: connected, and {'something else' if greeting else 'nobody'} answers")
    raise ConnectionError("; ".join(failures))


def _greeting(line: socket.socket) -> bytes:
    with suppress(OSError):  # an end that says nothing, or hangs up, is not the one we look for
        return line.recv(16, socket.MSG_WAITALL)
    return b""


def _how(error: OSError) -> str:
    return f"no answer within {CONNECT_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else error_text(error)


def _measure(line: socket.socket) -> Connection | str:
    try:
        samples = [_exchange(line) for _ in range(EXCHANGES)]
    except (OSError, struct.error) as error:
        return f"connected, then: {_how(error) if isinstance(error, OSError) else 'hung up'}"
    round_trip, offset = min(samples)
    return Connection(median(sample[0] for sample in samples), offset, round_trip / 2)


def _exchange(line: socket.socket) -> tuple[float, float]:
    """(round trip without the other's time, the other's clock minus ours) in seconds."""
    sent = wall_clock()
    line.sendall(b"?")
    received, answered = _TIMES.unpack(line.recv(_TIMES.size, socket.MSG_WAITALL))
    back = wall_clock()
    return max(0.0, (back - sent) - (answered - received)), ((received - sent) + (answered - back)) / 2
