"""Name resolution and TCP connections of one node. Imports no torch: job scripts use it before the ranks start."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from seatrial.util.resolver import RESOLVE_TIMEOUT_S
from seatrial.util.text import error_text
from seatrial.util.threads import start_in_thread

CONNECT_TIMEOUT_S = 2.0  # within a cluster a connection takes less than 1 ms; Linux repeats a lost SYN after 1 s
TOKEN_BYTES = 16  # length of Endpoint.token


@dataclass(frozen=True)
class Lookup:
    """Routable addresses to which one node resolves a name, or ``problem`` if there are none."""

    addresses: tuple[str, ...]
    problem: str | None = None


def segment_counters() -> tuple[int, int]:
    """The TCP segments that this node has sent, and those of them that it sent again (proc(5), /proc/net/snmp)."""
    lines = Path("/proc/net/snmp").read_text(encoding="utf-8").splitlines()
    names, values = (line.split()[1:] for line in lines if line.startswith("Tcp:"))
    counters = dict(zip(names, map(int, values), strict=True))
    return counters["OutSegs"] + counters["RetransSegs"], counters["RetransSegs"]


def resolve_names(names: Sequence[str], resolve: Callable[[str], Sequence[str]]) -> dict[str, Lookup]:
    """Resolve all names in parallel on this node; a name without an answer within RESOLVE_TIMEOUT_S is unresolved."""
    pending = {name: start_in_thread(partial(resolve, name)) for name in names}
    wait(pending.values(), timeout=RESOLVE_TIMEOUT_S)
    return {name: _lookup(future) for name, future in pending.items()}


def _lookup(pending: Future[Sequence[str]]) -> Lookup:
    if not pending.done():
        return Lookup((), f"not resolved within {RESOLVE_TIMEOUT_S:g} s")
    try:
        addresses = pending.result()
    except OSError as error:
        return Lookup((), error_text(error))
    routable = tuple(address for address in addresses if is_routable(address))
    return Lookup(routable, None if routable else f"resolves to {', '.join(addresses)}; other nodes cannot reach that")


def is_routable(address: str) -> bool:
    """Whether other nodes can reach this address: not loopback, link-local or unspecified."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


@dataclass(frozen=True)
class Endpoint:
    """A TCP listener of a process on one node.

    ``token``: TOKEN_BYTES bytes that identify the process, which sends them on every connection. ``address``: for nodes
    that cannot resolve the name of the listening node; None if unknown.
    """

    port: int
    token: bytes
    address: str | None


def listen(port: int = 0) -> socket.socket:
    """Listen on ``port`` on all interfaces; 0 selects a free port. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def open_connection(addresses: Sequence[str], endpoint: Endpoint) -> socket.socket:
    """Connect to the first address where a listener sends the endpoint's token. Raises ConnectionError."""
    errors = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, endpoint.port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            errors.append(f"{address}: {connection_error(error)}")
            continue
        token = b""
        with suppress(OSError):  # no data, or a closed connection: not the expected listener
            token = connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        if token == endpoint.token:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection.close()
        errors.append(f"{address}: connected, but {'another program answers' if token else 'received no answer'}")
    raise ConnectionError("; ".join(errors))


def connection_error(error: OSError) -> str:
    """The error of a connection as one line; for a timeout, with CONNECT_TIMEOUT_S."""
    return f"no answer within {CONNECT_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else error_text(error)
