"""What NCCL tells of itself in its log: which way the data of a collective goes.

The lines are those of NCCL 2.18 to 2.28 under NCCL_DEBUG=INFO with the subsystems INIT, NET, P2P and ENV; with TUNING
the first rank of a communicator also writes what it chose for each operation.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from seatrial.model import Frozen

_READ = 2**23  # bytes from the start: connections are told of when they are made, and there are some 100 B for each
_VIA = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (.+)")
_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"Using network (.+)")
_PLUGIN = re.compile(r"(?:NET/Plugin: Loaded net plugin|Loaded net plugin|Using external network plugin) (.+)")
# What a plugin says of itself, where NCCL tells its interface only: aws-ofi-nccl, Google's gIB, nccl-rdma-sharp-plugins
_PLUGIN_VERSION = re.compile(
    r"NET/OFI Initializing (aws-ofi-nccl \S+)|NET/\w+ : Initializing (\w+ v\S+)|NCCL INFO (P2P plugin v\d+ \S+)"
)
# src/transport/net_ib of NCCL: [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:…; two as one: [0]={[0] mlx5_0:1/RoCE, …}
_HCAS = re.compile(r"NET/IB : Using (.*?); OOB")
_HCA = re.compile(r"([\w.-]+):(\d+)/(?:IB|RoCE)")
_CHANNELS = re.compile(r"(\d+) coll channels, .*?(\d+) nvls channels")
_NODES = re.compile(r"nRanks \d+ nNodes (\d+)")
# src/enqueue.cc of NCCL 2.23 and later; before that, from 2.20 on, by number, and at first without the operation
_CHOICE = re.compile(
    r"NCCL INFO (?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?"
)
# src/enqueue.cc of NCCL 2.27 and later: a kernel for buffers that are registered symmetrically
_SYMMETRIC = re.compile(r"NCCL INFO (\w+) \[Symmetric\]: (\d+) Bytes -> Kernel (\w+) nchannels (\d+)")
# By the numbers of NCCL's src/include/nccl_common.h
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_SETTING = re.compile(r"(NCCL_\w+) set by environment to (.+?)\.?$", re.MULTILINE)


class AlgorithmChoice(Frozen):
    """What NCCL chose for an operation of ``size`` bytes. None: the log does not say."""

    operation: str | None
    size: int
    algorithm: str
    protocol: str | None = None
    channels: int | None = None


class NcclLog(Frozen):
    """``transports`` counts the connections of this rank by kind: ``P2P/CUMEM``, ``SHM``, ``NET/IB/GDRDMA`` …

    ``network`` is what it would use between nodes, ``nodes`` how many it sees, ``hcas`` which ports (``mlx5_0/1``) its
    own RDMA transport uses of those that there are, by NCCL_IB_HCA among others. None: the log does not say.
    """

    version: str | None = None
    network: str | None = None
    plugin: str | None = None
    plugin_version: str | None = None
    hcas: tuple[str, ...] | None = None
    nodes: int | None = None
    channels: int | None = None
    nvls_channels: int | None = None
    transports: dict[str, int] = {}
    settings: dict[str, str] = {}
    choices: tuple[AlgorithmChoice, ...] = ()

    def choice_for(self, operation: str, size: int) -> AlgorithmChoice | None:
        """What it chose for this operation, such as ``AllReduce``; the last word if there are several."""
        told = [one for one in self.choices if one.size == size and one.operation in (operation, None)]
        return told[-1] if told else None

    @property
    def uses_sockets(self) -> bool:
        return any(name.startswith("NET/Socket") for name in self.transports)

    @property
    def rdma_without_gpudirect(self) -> bool:
        """Whether it uses a network other than sockets, and on some connection without GPUDirect RDMA."""
        return any(re.fullmatch(r"NET/(?!Socket)[^/]+", name) for name in self.transports)


def read(path: Path, size: int = _READ, start: int = 0) -> NcclLog:
    """What ``size`` bytes from ``start`` on tell.

    Raises OSError when there is no such log, and for a pipe or terminal (/dev/stderr), from which nothing would come.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no plain file", str(path))
    with path.open("rb") as file:
        file.seek(start)
        return parse(file.read(min(size, _READ)).decode(errors="replace"))


def parse(text: str) -> NcclLog:
    """What the lines of one rank's log say. What none of them says stays unknown."""
    channels, hcas = _CHANNELS.search(text), _first(_HCAS, text)
    return NcclLog(
        version=_first(_VERSION, text),
        network=_first(_NETWORK, text),
        plugin=_first(_PLUGIN, text),
        plugin_version=_first(_PLUGIN_VERSION, text),
        hcas=None if hcas is None else tuple("/".join(hca.groups()) for hca in _HCA.finditer(hcas)),
        nodes=int(nodes) if (nodes := _first(_NODES, text)) else None,
        channels=int(channels[1]) if channels else None,
        nvls_channels=int(channels[2]) if channels else None,
        transports=dict(Counter(_transports(text))),
        settings={match[1]: match[2] for match in _SETTING.finditer(text)},
        choices=tuple(dict.fromkeys(_choices(text))),
    )


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return next(filter(None, match.groups()), "").strip() if match else None


def _choices(text: str) -> Iterator[AlgorithmChoice]:
    for match in _CHOICE.finditer(text):
        operation, size, algorithm, protocol, low, high = match.groups()
        yield AlgorithmChoice(
            operation=operation,
            size=int(size),
            algorithm=_named(algorithm, _ALGORITHMS),
            protocol=_named(protocol, _PROTOCOLS),
            channels=int(high) - int(low) + 1 if high else None,
        )
    for match in _SYMMETRIC.finditer(text):
        yield AlgorithmChoice(
            operation=match[1], size=int(match[2]), algorithm=f"symmetric {match[3]}", channels=int(match[4])
        )


def _named(text: str, names: Sequence[str]) -> str:
    """A name as NCCL writes it, in capitals; a number it has no name for here stays a number."""
    if text.isdecimal():
        return names[int(text)] if int(text) < len(names) else text
    return text.upper()


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
