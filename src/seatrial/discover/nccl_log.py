"""Parses NCCL's log: transports, networks, RDMA ports, algorithms.

Supports NCCL 2.18 to 2.31 with NCCL_DEBUG=INFO and the subsystems INIT, NET, P2P and ENV. With TUNING the first rank of
a communicator also logs algorithm and protocol of each operation. NCCL 2.30 may put a time before each line.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from seatrial.hardware import networks
from seatrial.model import Frozen

_MAX_BYTES = 2**23  # enough for all connections: NCCL logs them first, in about 100 bytes each
_VIA = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (.+)")
_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"Using network (.+)")
_PLUGIN = re.compile(r"(?:NET/Plugin: Loaded net plugin|Loaded net plugin|Using external network plugin) (.+)")
# Lines that the plugins themselves log (aws-ofi-nccl, Google's gIB, nccl-rdma-sharp-plugins). NCCL logs only the
# version of the plugin interface.
_PLUGIN_VERSION = re.compile(
    r"NET/OFI Initializing (aws-ofi-nccl \S+)|NET/\w+ : Initializing (\w+ v\S+)|NCCL INFO (P2P plugin v\d+ \S+)"
)
# aws-ofi-nccl src/nccl_ofi_net.cpp: "Selected Provider is verbs;ofi_rxm (found 4 nics)", or since 1.14 with the fabric
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^\s,]+)")
# NCCL src/transport/net_ib: [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:…; merged ports: [0]={[0] mlx5_0:1/RoCE, …}
_HCAS = re.compile(r"NET/IB : Using (.*?); OOB")
# NCCL src/transport/net_socket.cc: [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>
_SOCKET_INTERFACES = re.compile(r"NET/Socket : Using (.+)")
_SOCKET_INTERFACE = re.compile(r"\[\d+\]([^\s:]+):\S+")
_HCA = re.compile(r"([\w.-]+):(\d+)/(?:IB|RoCE)")
_CHANNELS = re.compile(r"(\d+) coll channels, .*?(\d+) nvls channels")
# NCCL src/init.cc, 2.24 and later. The captured digit is 1 if all ranks use GPUDirect RDMA.
_RINGS = re.compile(r"Connected all rings, use ring PXN \d GDR (\d)")
_NODES = re.compile(r"nRanks \d+ nNodes (\d+)")
# NCCL src/enqueue.cc. 2.23 and later log names; 2.20 to 2.22 log numbers and no operation
_CHOICE = re.compile(
    r"NCCL INFO (?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?"
)
# NCCL src/enqueue.cc, 2.27 and later: kernels for symmetrically registered buffers
_SYMMETRIC = re.compile(r"NCCL INFO (\w+) \[Symmetric\]: (\d+) Bytes -> Kernel (\w+) nchannels (\d+)")
# In the order of NCCL src/include/nccl_common.h
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_SETTING = re.compile(r"(NCCL_\w+) set by environment to (.+?)\.?$", re.MULTILINE)


class AlgorithmChoice(NamedTuple):
    """NCCL's choice for an operation of ``size`` bytes. A field is None if NCCL did not log it."""

    operation: str | None
    size: int
    algorithm: str
    protocol: str | None = None
    channels: int | None = None


class NcclLog(Frozen):
    """The content of one rank's log; a field is None or empty if NCCL did not log it.

    ``network``: the network between nodes; of libfabric with its provider, unless that is EFA: ``Libfabric (tcp)``.
    ``nodes``: the number of nodes.
    ``transports``: transport (``P2P/CUMEM``, ``SHM``, ``NET/IB/GDRDMA``) → number of this rank's connections; 1 for the
    network between nodes if NCCL does not log its connections.
    ``hcas``: the RDMA ports (``mlx5_0/1``) of NCCL's IB transport. ``socket_interfaces``: the interfaces of its socket
    transport.
    ``choices``: the different choices of NCCL, each once.
    """

    version: str | None = None
    network: str | None = None
    plugin: str | None = None
    plugin_version: str | None = None
    hcas: tuple[str, ...] | None = None
    socket_interfaces: tuple[str, ...] = ()
    nodes: int | None = None
    channels: int | None = None
    nvls_channels: int | None = None
    transports: dict[str, int] = {}
    settings: dict[str, str] = {}
    choices: tuple[AlgorithmChoice, ...] = ()

    def find_choice(self, operation: str, size: int) -> AlgorithmChoice | None:
        """NCCL's choice for an operation, such as ``AllReduce``, and a size in bytes; None if not logged.

        If the log has several different choices: the last one, by the order of their first lines.
        """
        matching = [choice for choice in self.choices if choice.size == size and choice.operation in (operation, None)]
        return matching[-1] if matching else None

    @property
    def uses_sockets(self) -> bool:
        return any(networks.kind(name) == "tcp" for name in self._networks)

    @property
    def rdma_without_gpudirect(self) -> bool:
        return any(networks.kind(name) in networks.RDMA and name.count("/") == 1 for name in self._networks)

    @property
    def _networks(self) -> tuple[str, ...]:
        return tuple(name for name in self.transports if name.startswith(networks.PREFIX))


def read(path: Path, size: int = _MAX_BYTES, start: int = 0) -> NcclLog:
    """The content of at most ``size`` bytes of a log, from byte ``start``.

    Raises OSError if the log does not exist or is not a regular file (such as /dev/stderr).
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        file.seek(start)
        return parse(file.read(min(size, _MAX_BYTES)).decode(errors="replace"))


def parse(text: str) -> NcclLog:
    channels, hcas, network = _CHANNELS.search(text), _first_match(_HCAS, text), _first_match(_NETWORK, text)
    provider = _first_match(_PROVIDER, text) or "provider not logged"
    interfaces = _SOCKET_INTERFACE.findall(_first_match(_SOCKET_INTERFACES, text) or "")
    return NcclLog(
        version=_first_match(_VERSION, text),
        network=_with_provider(network, provider) if network else None,
        plugin=_first_match(_PLUGIN, text),
        plugin_version=_first_match(_PLUGIN_VERSION, text),
        hcas=None if hcas is None else tuple("/".join(hca.groups()) for hca in _HCA.finditer(hcas)),
        socket_interfaces=tuple(interfaces),
        nodes=int(nodes) if (nodes := _first_match(_NODES, text)) else None,
        channels=int(channels[1]) if channels else None,
        nvls_channels=int(channels[2]) if channels else None,
        transports=dict(Counter(_transports(text, provider)) or Counter(_network_transport(text, provider))),
        settings={match[1]: match[2] for match in _SETTING.finditer(text)},
        choices=tuple(dict.fromkeys(_choices(text))),
    )


def _first_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group with text in the first match, stripped; None without a match."""
    match = pattern.search(text)
    return next(filter(None, match.groups()), "").strip() if match else None


def _with_provider(network: str, provider: str) -> str:
    """The name of a network; of libfabric with its provider, unless that is EFA."""
    return f"{network} ({provider})" if networks.kind(network) == "efa" and provider != "efa" else network


def _choices(text: str) -> Iterator[AlgorithmChoice]:
    for match in _CHOICE.finditer(text):
        operation, size, algorithm, protocol, low, high = match.groups()
        names = _upper_name(algorithm, _ALGORITHMS), _upper_name(protocol, _PROTOCOLS)
        yield AlgorithmChoice(operation, int(size), *names, int(high) - int(low) + 1 if high else None)
    for operation, size, kernel, channels in _SYMMETRIC.findall(text):
        yield AlgorithmChoice(operation, int(size), f"symmetric {kernel}", channels=int(channels))


def _upper_name(text: str, names: Sequence[str]) -> str:
    """``text`` in upper case; a number is replaced by the name at this position of ``names``, if there is one."""
    if text.isdecimal():
        return names[int(text)] if int(text) < len(names) else text
    return text.upper()


def _transports(text: str, provider: str) -> Iterator[str]:
    """The transport of each connection, without further details: ``NET/IB/2/GDRDMA/Shared`` → ``NET/IB/GDRDMA``."""
    for match in _VIA.finditer(text):
        kind, *details = match[1].strip().split("/")
        if kind == "NET":
            # The detail can have a suffix: GDRDMA(PCI) is over PCIe instead of the data-direct path of the NIC
            uses_gpudirect = any(detail.startswith("GDRDMA") for detail in details)
            names = [_with_provider(name, provider) for name in details[:1]]
            yield "/".join([kind, *names, *(["GDRDMA"] if uses_gpudirect else [])])
        elif kind == "P2P":
            yield "/".join([kind, *details[:1]])
        else:
            yield kind


def _network_transport(text: str, provider: str) -> Iterator[str]:
    """The transport between nodes, for a log without connections.

    Yields nothing if the job has one node, and nothing for RDMA if NCCL does not log whether it uses GPUDirect.
    """
    network, nodes = _first_match(_NETWORK, text), _first_match(_NODES, text)
    if network and nodes and int(nodes) > 1:
        network, gpudirect_flag = _with_provider(network, provider), _first_match(_RINGS, text)
        kind = networks.kind(network)
        if gpudirect_flag or kind not in networks.RDMA:
            yield f"NET/{network}{'/GDRDMA' if gpudirect_flag == '1' and kind != 'tcp' else ''}"
