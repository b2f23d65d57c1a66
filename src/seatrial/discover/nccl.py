"""What NCCL tells of itself in its log: which way the data of a collective goes.

The lines are those of NCCL 2.18 to 2.28 under NCCL_DEBUG=INFO with the subsystems INIT, NET, P2P and ENV.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from seatrial.model import Frozen

_READ = 2**23  # bytes from the start: connections are told of when they are made, and there are some 100 B for each
_VIA = re.compile(r"Channel \d+/\d+ : \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (.+)")
_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"Using network (.+)")
_PLUGIN = re.compile(r"(?:NET/Plugin: Loaded net plugin|Loaded net plugin|Using external network plugin) (.+)")
_CHANNELS = re.compile(r"(\d+) coll channels, .*?(\d+) nvls channels")
_NODES = re.compile(r"nRanks \d+ nNodes (\d+)")
_SETTING = re.compile(r"(NCCL_\w+) set by environment to (.+?)\.?$", re.MULTILINE)


class NcclPath(Frozen):
    """``transports`` counts the connections of this rank by kind: ``P2P/CUMEM``, ``SHM``, ``NET/IB/GDRDMA`` …

    ``network`` is what it would use between nodes, ``nodes`` how many it sees. None: the log does not say.
    """

    version: str | None = None
    network: str | None = None
    plugin: str | None = None
    nodes: int | None = None
    channels: int | None = None
    nvls_channels: int | None = None
    transports: dict[str, int] = {}
    settings: dict[str, str] = {}

    @property
    def over_sockets(self) -> bool:
        return any(name.startswith("NET/Socket") for name in self.transports)

    @property
    def without_gdr(self) -> bool:
        """Whether it uses a network other than sockets, and on some connection without GPUDirect RDMA."""
        return any(re.fullmatch(r"NET/(?!Socket)[^/]+", name) for name in self.transports)


def read(path: Path) -> NcclPath:
    """Raises OSError when there is no such log."""
    with path.open("rb") as file:
        return parse(file.read(_READ).decode(errors="replace"))


def parse(text: str) -> NcclPath:
    """What the lines of one rank's log say. What none of them says stays unknown."""
    channels = _CHANNELS.search(text)
    return NcclPath(
        version=_first(_VERSION, text),
        network=_first(_NETWORK, text),
        plugin=_first(_PLUGIN, text),
        nodes=int(nodes) if (nodes := _first(_NODES, text)) else None,
        channels=int(channels[1]) if channels else None,
        nvls_channels=int(channels[2]) if channels else None,
        transports=dict(Counter(_transports(text))),
        settings={match[1]: match[2] for match in _SETTING.finditer(text)},
    )


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1].strip() if match else None


def _transports(text: str) -> Iterator[str]:
    """``NET/IB/2(1)/GDRDMA/Shared`` → ``NET/IB/GDRDMA``: which device and how it is shared makes no other path."""
    for match in _VIA.finditer(text):
        kind, *more = match[1].strip().split("/")
        if kind == "NET":
            yield "/".join([kind, *more[:1], *(["GDRDMA"] if "GDRDMA" in more else [])])
        elif kind == "P2P":
            yield "/".join([kind, *more[:1]])
        else:
            yield kind
