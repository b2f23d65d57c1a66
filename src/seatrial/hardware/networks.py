"""The networks between nodes that NCCL and its plugins name in their logs, from data/networks.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Literal

from seatrial.model import Frozen
from seatrial.util import data_files

Kind = Literal["rdma", "efa", "tcp", "tcpx", "tcpxo", "mnnvl"]
RDMA: tuple[Kind, ...] = ("rdma", "efa")  # kinds that can have GPUDirect RDMA
PREFIX = "NET/"  # of transports between nodes
MNNVL = "P2P/MNNVL"  # the transport over NVLink between nodes, as NCCL logs it


class _Network(Frozen):
    name: str
    kind: Kind
    source: str


@cache
def _networks() -> tuple[_Network, ...]:
    return tuple(map(_Network.model_validate, data_files.read("networks.yaml")))


@cache
def kind(name: str) -> Kind | None:
    """The kind of a network or of a transport, such as ``IB`` or ``NET/IB/GDRDMA``; None if the name is unknown."""
    name = name.removeprefix(PREFIX).partition("/")[0]
    return next((each.kind for each in _networks() if re.fullmatch(each.name, name, re.IGNORECASE)), None)


def slowest(transports: Iterable[str]) -> tuple[Kind | Literal[""], str]:
    """The kind of the network in use, and the names of networks without a common kind; both may be empty.

    NVLink between nodes counts where it is the only network. If some ranks use sockets, the kind is tcp, since they
    limit all ranks. It is empty if a network is unknown, or if ranks use networks of other different kinds, which are
    named then.
    """
    transports = tuple(transports)
    names = {name.removeprefix(PREFIX).partition("/")[0] for name in transports if name.startswith(PREFIX)}
    if not names and MNNVL in transports:
        return "mnnvl", ""
    kinds = {kind(name) for name in names}
    unknown = sorted(name for name in names if kind(name) is None)
    if "tcp" in kinds:
        return "tcp", ", ".join(unknown)
    if len(kinds) > 1:
        return "", ", ".join(unknown or sorted(names))
    return next(iter(kinds), None) or "", ", ".join(unknown)
