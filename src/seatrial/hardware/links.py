"""The links that carry collectives, from discovered facts, and the ratio of link bandwidth to bus bandwidth.

nccl-tests defines bus bandwidth so that it can be compared with the bandwidth of one link. The comparison is correct
only for Ring inside one node. For other algorithms and for several nodes, the ratios below convert bus bandwidth to
link bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from seatrial.hardware import networks
from seatrial.model import GPUS_USED, Measurement

T = TypeVar("T")
# Values of ``bounds.MetricLookup.bounded_by`` that are no key of a SKU's spec (bf16, hbm, pcie, nvlink).
# BIDIRECTIONAL: both directions of a GPU's links. COLLECTIVE: the bandwidth of a collective over the GPU's links,
# switches and the network.
BIDIRECTIONAL, COLLECTIVE = "bidirectional", "collective"
# Algorithms in which the network's switches compute the sums (SHARP), so that a node sends its data once. NVLS is one
# of them, since between nodes NCCL uses NVLS only with SHARP
IN_NETWORK_ALGORITHMS = ("NVLS", "CollNetChain", "CollNetDirect")
# Algorithms that reduce inside a node before they send between nodes; NVLSTree is Tree between nodes
HIERARCHICAL_ALGORITHMS = ("Tree", "NVLSTree", *IN_NETWORK_ALGORITHMS)
# Name in NCCL's log → value of NCCL_ALGO
NCCL_ALGO_NAMES = {
    "RING": "Ring",
    "TREE": "Tree",
    "NVLS_TREE": "NVLSTree",
    "COLLNET_CHAIN": "CollNetChain",
    "COLLNET_DIRECT": "CollNetDirect",
}
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_FABRIC = re.compile(r"(?P<kind>ib|roce)-(?P<ports>\d+)x(?P<gbps>[\d.]+)")  # Links.fabric of RDMA
_KIND_BY_LINK_LAYER = {"InfiniBand": "ib", "Ethernet": "roce", "Unspecified": "efa"}
# The rate that the EFA driver reports if it does not know the rate of the port (efa_query_port of Linux before 6.13)
_EFA_UNKNOWN_GBPS = 100.0

# What a fact about links or NCCL contains
FactRole = Literal[
    "gpus",  # the GPUs of a node
    "gpu_processes",  # the foreign processes that compute on the GPUs of a node
    "rdma_devices",  # the RDMA devices of a node
    "nics",  # the network interfaces of a node
    "stated_ports",  # the RDMA ports of a node, as RdmaPorts: stated by the user, not discovered
    "transports",  # the transports that NCCL uses
    "connections",  # the transports of a measured collective; read if there is no fact of the role "transports"
    "hcas",  # the RDMA ports that NCCL uses
    "socket_interfaces",  # the TCP interfaces that NCCL uses
    "algorithms",  # NCCL's algorithms by operation
    "nvls_channels",  # the number of NCCL's channels that reduce in the NVLink switches
    "algorithms_by_setting",  # NCCL's algorithms of the all-reduce under several settings
    "variables",  # environment variable → value
    "node_settings",  # node → network setting or variable → value
    "setting_differences",  # the settings of nodes that differ from the majority: node → name → value
    "version_differences",  # the versions of nodes that differ from the majority: node → name → value
    "job_failures",  # known causes why pods that the check creates do not start
    "fault_places",  # metric → the node or pair at fault → names or settings there
]


class HasFactRoles(Protocol):
    @property
    def fact_roles(self) -> Mapping[FactRole, str]: ...


@dataclass(frozen=True)
class RdmaPorts:
    """The fastest RDMA ports of a node among those that NCCL uses; ``kind`` is ib, roce or efa.

    ``gbps`` is the rate of each port in Gbit/s. If NCCL's log does not list the ports that NCCL uses, all active ports
    count, including ports used for storage.
    """

    kind: str
    count: int
    gbps: float


@dataclass(frozen=True)
class TcpInterfaces:
    """The interfaces of a node that NCCL's sockets use; ``gbps`` is their total rate in Gbit/s, None if unknown."""

    names: tuple[str, ...]
    gbps: float | None


@dataclass(frozen=True)
class Links:
    """Links between the GPUs of a trial; unknown values are None, 0 or empty.

    ``nvlinks`` (number of active links) and ``nvlink_gb_s`` (their total unidirectional GB/s) are those of the GPU with
    the lowest rate.
    ``network`` is the kind of network that NCCL uses between nodes, see data/networks.yaml. ``unknown_network``: its
    name, if it has no row there. ``mig_models``: GPU models in MIG mode.
    ``algorithms``: NCCL's algorithm by operation and size label, as logged; on several nodes, that between them.
    ``nvls``: whether NCCL can reduce in the NVLink switches of a node; None if its log does not say.
    """

    nvlinks: int = 0
    nvlink_gb_s: float | None = None
    ports: RdmaPorts | None = None  # None: unknown, or not the same on all nodes
    network: str = ""
    unknown_network: str = ""
    intra_node_transports: tuple[str, ...] = ()
    mig_models: frozenset[str] = field(default=frozenset())
    tcp: TcpInterfaces | None = None  # None: unknown, or different rates on different nodes
    algorithms: Mapping[tuple[str, str], str] = field(default_factory=dict, hash=False)
    nvls: bool | None = None

    @property
    def fabric(self) -> str:
        """The class of the network between nodes, such as roce-8x400, efa or tcp; empty if unknown."""
        if self.network == "rdma" and self.ports:
            return f"{self.ports.kind}-{self.ports.count}x{self.ports.gbps:g}"
        return "" if self.network == "rdma" else self.network

    @classmethod
    def of_fabric(cls, fabric: str) -> Links:
        """The links between nodes of a class such as roce-8x400, efa or tcp."""
        if match := _FABRIC.fullmatch(fabric):
            return cls(network="rdma", ports=RdmaPorts(match["kind"], int(match["ports"]), float(match["gbps"])))
        return cls(network=fabric)

    def with_algorithm(self, operation: str, size: str, algorithm: str) -> Links:
        """The links with another algorithm for an operation at a size."""
        return replace(self, algorithms={**self.algorithms, (operation, size): algorithm})


def read(measurements: Sequence[Measurement], checks: Mapping[str, HasFactRoles]) -> Links:
    """The links according to the facts for which ``checks`` declare a role."""
    facts = partial(role_facts, measurements=measurements, checks=checks)
    inventories = facts("gpus")
    gpus = [gpu for measurement, value in inventories for gpu in _used_gpus(value, measurement.facts.get(GPUS_USED))]
    slowest = min(all_known(map(active_nvlinks, gpus)), key=lambda each: each.gb_s, default=None)
    used_ports = _names_by_node(facts("hcas"))
    rdma = facts("rdma_devices")
    ports_of_nodes = {_fastest_ports(value, used_ports.get(measurement.subject)) for measurement, value in rdma}
    stated = [RdmaPorts(**ports) for _, ports in facts("stated_ports") if ports]
    nics = {measurement.subject: value for measurement, value in facts("nics")}
    sockets = _names_by_node(facts("socket_interfaces"))
    tcp_of_nodes = {_tcp_interfaces(nics.get(node), names) for node, names in sockets.items()}
    nvls_channels = [value for _, value in facts("nvls_channels") if isinstance(value, int)]
    transports = _transport_names(facts("transports"))
    connections = _transport_names(facts("connections"))
    network, unknown = networks.slowest(transports)
    # Only sockets are read from "connections": the bound of RDMA needs the ports that NCCL uses, and the log of a
    # collective does not list them
    if not transports and networks.slowest(connections)[0] == "tcp":
        network = "tcp"
    return Links(
        nvlinks=slowest.active if slowest else 0,
        nvlink_gb_s=slowest.gb_s if slowest else None,
        ports=stated[0] if stated else _common_ports(ports_of_nodes),
        network=network,
        unknown_network=unknown,
        intra_node_transports=tuple(name for name in transports if not name.startswith(networks.PREFIX)),
        mig_models=frozenset(str(gpu.get("name")) for gpu in gpus if gpu.get("mig_mode")),
        tcp=tcp_of_nodes.pop() if len(tcp_of_nodes) == 1 else None,
        algorithms=_algorithms(value for _, value in facts("algorithms")),
        nvls=min(nvls_channels) > 0 if nvls_channels else None,
    )


def role_facts(
    role: FactRole, measurements: Sequence[Measurement], checks: Mapping[str, HasFactRoles]
) -> Iterator[tuple[Measurement, Any]]:
    """Each measurement whose check declares ``role``, with the value of that fact; None if the fact is missing.

    Measurements that were skipped or have no facts are left out.
    """
    names = {name: check.fact_roles[role] for name, check in checks.items() if role in check.fact_roles}
    return (
        (measurement, measurement.facts.get(names[measurement.check]))
        for measurement in measurements
        if measurement.check in names and measurement.facts and not measurement.skipped
    )


def all_known(values: Iterable[T | None]) -> list[T]:
    """The values; none if one of them is None."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return known if len(known) == len(listed) else []


class ActiveNvlinks(NamedTuple):
    """The active links of a GPU: number, total unidirectional rate in GB/s, and whether all lead to a switch."""

    active: int
    gb_s: float
    all_to_switches: bool


def active_nvlinks(gpu: Mapping[str, Any]) -> ActiveNvlinks | None:
    """The active links of a GPU; None if there are none, or if the speed of one of them is unknown or 0."""
    links = [link for link in _mappings(gpu.get("nvlinks")) if link.get("active")]
    speeds: list[Any] = [link.get("speed_gb_s") for link in links]
    if not speeds or not all(isinstance(speed, int | float) and speed > 0 for speed in speeds):
        return None
    return ActiveNvlinks(len(speeds), sum(speeds), all(link.get("remote") == "switch" for link in links))


def nvlink_to_busbw_ratio(operation: str, algorithm: str, ranks: int, nodes: int = 1) -> float:
    """Unidirectional bandwidth of a GPU's links divided by the bus bandwidth, for n ranks and buffers of S bytes.

    - Ring, and operations that only move data: 1, the definition of nccl-tests (doc/PERFORMANCE.md).
    - Tree sends each byte up and down: 2S for a bus bandwidth of 2(n−1)/n · S.
    - NVLS (NVLink SHARP) and NVLSTree: a GPU sends S for the reduction and S/h of the result, where h is the number of
      GPUs of its node: (h+1)/h · S, from the semantics of multimem.ld_reduce and multimem.st (PTX ISA).
    """
    if operation != "all_reduce" or algorithm not in ("Tree", "NVLSTree", "NVLS"):
        return 1.0
    gpus_per_node = ranks / nodes
    sent = 2.0 if algorithm == "Tree" else (gpus_per_node + 1) / gpus_per_node
    return sent * ranks / (2 * (ranks - 1))


def network_to_busbw_ratio(operation: str, algorithm: str, ranks: int, nodes: int) -> float | None:
    """Unidirectional bandwidth out of a node divided by the bus bandwidth; None for operations without a model.

    For n ranks on N nodes and buffers of S bytes:

    - Ring, and operations along a chain: 1, since each byte leaves the node once, from its last GPU.
    - Tree and NVLSTree reduce inside the node first. With S/2 on each of NCCL's two trees, the node with the most links
      sends S on two nodes, 1.5 S on three and 2 S on more (NVIDIA/nccl src/graph/trees.cc, ncclGetDtree).
    - Sums in the network's switches (SHARP): a node sends S.
    - All-to-all: each of the n/N GPUs of a node sends S/n to each GPU of other nodes.
    """
    if operation == "all_to_all":
        gpus_per_node = ranks / nodes
        return gpus_per_node * (ranks - gpus_per_node) / (ranks - 1)
    if operation != "all_reduce":
        return 1.0 if operation in ("all_gather", "reduce_scatter", "broadcast", "reduce") else None
    if algorithm not in HIERARCHICAL_ALGORITHMS:
        return 1.0
    sent = 1.0 if algorithm in IN_NETWORK_ALGORITHMS else min(nodes, 4) / 2
    return sent * ranks / (2 * (ranks - 1))


def _used_gpus(gpus: Any, used: Any) -> list[Mapping[str, Any]]:
    return [gpu for gpu in _mappings(gpus) if isinstance(used, list) and gpu.get("index") in used]


def _names_by_node(facts: Iterable[tuple[Measurement, Any]]) -> dict[str, frozenset[str]]:
    """Node → the ports or interfaces that NCCL uses, such as mlx5_0/1 or eth0."""
    lists = chain.from_iterable(mapping(fact).items() for _, fact in facts)
    return {node: frozenset(map(str, names)) for node, names in lists if isinstance(names, list) and names}


@dataclass(frozen=True)
class _NodePorts:
    """The fastest active ports of a node, and the number of active ports of the same kind at any rate."""

    fastest: RdmaPorts
    active: int


def _common_ports(ports_of_nodes: Collection[_NodePorts | None]) -> RdmaPorts | None:
    """The ports that all nodes have; None if they are unknown on a node, or differ.

    If all nodes have the same number of ports, but some nodes have slower ports, the result is that of the node with
    the most fast ports: a slow port is a fault, and the expected bandwidth is the bandwidth of healthy nodes.
    """
    known = all_known(ports_of_nodes)
    kinds = {(ports.fastest.kind, ports.fastest.gbps) for ports in known}
    counts = {ports.fastest.count for ports in known}
    if len(kinds) != 1 or (len(counts) > 1 and len({ports.active for ports in known}) > 1):
        return None
    return max((ports.fastest for ports in known), key=lambda ports: ports.count)


def _fastest_ports(rdma: Any, used: frozenset[str] | None) -> _NodePorts | None:
    """The fastest active ports of a node, only those in ``used`` if given.

    None if no port is active, or if a port in ``used`` was not discovered.
    """
    ports = [
        (f"{device.get('name')}/{port.get('port')}", port)
        for device in _mappings(mapping(rdma).get("devices"))
        for port in _mappings(device.get("ports"))
    ]
    if used and not used <= {name for name, _ in ports}:
        return None
    active: list[tuple[float, str]] = []  # (Gbit/s, kind) of each active port
    for name, port in ports:
        rate, kind = _RATE.match(str(port.get("rate") or "")), _KIND_BY_LINK_LAYER.get(str(port.get("link_layer")))
        is_used = port.get("state") == "ACTIVE" and (not used or name in used)
        if is_used and rate and kind and (kind, float(rate[1])) != ("efa", _EFA_UNKNOWN_GBPS):
            active.append((float(rate[1]), kind))
    if not active:
        return None
    gbps, kind = max(active)
    same_kind = sum(other_kind == kind for _, other_kind in active)
    return _NodePorts(RdmaPorts(kind, active.count((gbps, kind)), gbps), same_kind)


def _tcp_interfaces(nics: Any, names: frozenset[str]) -> TcpInterfaces:
    """The interfaces ``names`` of a node, with their total rate if the rate of each is known."""
    interfaces = _mappings(mapping(nics).get("interfaces"))
    speeds = [nic.get("speed_mbit_s") for nic in interfaces if nic.get("name") in names]
    readable = [speed for speed in speeds if isinstance(speed, int) and speed > 0]
    gbps = sum(readable) / 1e3 if len(readable) == len(names) else None
    return TcpInterfaces(tuple(sorted(names)), gbps)


def _algorithms(facts: Iterable[Any]) -> dict[tuple[str, str], str]:
    """NCCL's algorithm by operation and size label, from facts of the role ``algorithms``."""
    algorithms: dict[tuple[str, str], str] = {}
    for fact in facts:
        for operation, choice in mapping(fact).items():
            for label, chosen in mapping(mapping(choice).get("by_size")).items():
                name = mapping(chosen).get("algorithm")
                if isinstance(name, str) and name.isupper():  # other texts are the reason why there is none
                    algorithms.setdefault((operation, label), NCCL_ALGO_NAMES.get(name, name))
    return algorithms


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping; else an empty mapping, since a record may have been edited by hand."""
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a fact that is a list of mappings; empty for any other shape, such as in an edited record."""
    return value if isinstance(value, list) and all(type(item) is dict for item in value) else []


def _transport_names(transports: Iterable[tuple[Measurement, Any]]) -> list[str]:
    return sorted({name for _, value in transports for name in mapping(value)})
