"""Addresses of host names. Imports only the standard library, so that a job script can use it."""

from __future__ import annotations

import socket

RESOLVE_TIMEOUT_S = 10.0  # two DNS servers, with the resolver's default timeout of 5 s each (resolv.conf(5))


def resolve(name: str) -> tuple[str, ...]:
    """The addresses of a name according to the system's resolver (/etc/hosts, DNS, …). Raises OSError."""
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))
