"""The links that carry collectives, as discovered, and how much of a bus bandwidth each of them carries.

nccl-tests' bus bandwidth is made to be compared with one link, and only under Ring inside one node it is what a GPU's
links carry. For anything else it has to be undone, by algorithm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from seatrial.model import GPUS_USED, Measurement

# What the rails of a hierarchical algorithm carry between nodes, and what all others do; NVLSTree is Tree over nodes
HIERARCHICAL_ALGORITHMS = ("Tree", "NVLSTree", "NVLS", "CollNetChain", "CollNetDirect")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_KINDS = {"InfiniBand": "ib", "Ethernet": "roce"}

# What facts tell of links and of NCCL's choices: the GPUs of a node, its RDMA devices, the transports and the ports
# that NCCL uses, its algorithms by operation, and those of the all-reduce of a contrast
FactRole = Literal["gpus", "rdma_devices", "transports", "hcas", "algorithms", "contrast_algorithms"]


class HasFactRoles(Protocol):
    """A check, as far as it declares which of its facts play which role."""

    @property
    def fact_roles(self) -> Mapping[FactRole, str]: ...


@dataclass(frozen=True)
class RdmaPorts:
    """The RDMA ports of one node that NCCL uses, of those the fastest: ``kind`` is ib or roce, ``gbps`` Gbit/s each.

    All that are up, where NCCL's log does not say which: storage may have some of them.
    """

    kind: str
    count: int
    gbps: float


@dataclass(frozen=True)
class Links:
    """What joins the GPUs of this trial; what is None or empty is not known.

    ``nvlinks`` and ``nvlink_gbps`` (GB/s one way, all active links of a GPU) are those of the GPU that has least.
    ``network`` is what NCCL used between nodes: rdma, efa or tcp. ``sliced``: models that MIG has cut into parts.
    ``carriers`` are the transports inside a node.
    """

    nvlinks: int = 0
    nvlink_gbps: float | None = None
    ports: RdmaPorts | None = None
    network: str = ""
    intra_node_transports: tuple[str, ...] = ()
    mig_models: frozenset[str] = field(default=frozenset())

    @property
    def fabric(self) -> str:
        """The class of the network between nodes, such as roce-8x400, efa or tcp. Empty: not known."""
        if self.network == "rdma" and self.ports:
            return f"{self.ports.kind}-{self.ports.count}x{self.ports.gbps:g}"
        return "" if self.network == "rdma" else self.network


def read(measurements: Sequence[Measurement], checks: Mapping[str, HasFactRoles]) -> Links:
    """The links by the facts of those ``checks`` that declare what they tell of them."""
    telling = measurements_with_roles(measurements, checks)
    inventories = role_facts("gpus", telling, checks)
    gpus = [gpu for one, value in inventories for gpu in _used(value, one.facts.get(GPUS_USED))]
    rates = [_nvlink(gpu) for gpu in gpus]
    known = [rate for rate in rates if rate]
    least = min(known, key=lambda rate: rate[1]) if known and len(known) == len(rates) else (0, None)
    hcas = role_facts("hcas", telling, checks)
    used = {node: ports for _, value in hcas for node, ports in _hcas(value).items()}
    hosts = role_facts("rdma_devices", telling, checks)
    found = {_ports(value, used.get(one.subject)) for one, value in hosts}
    transports = role_facts("transports", telling, checks)
    names = sorted({name for _, value in transports if isinstance(value, Mapping) for name in value})
    return Links(
        nvlinks=least[0],
        nvlink_gbps=least[1],
        ports=found.pop() if len(found) == 1 else None,
        network=_network([name for name in names if name.startswith("NET/")]),
        intra_node_transports=tuple(name for name in names if not name.startswith("NET/")),
        mig_models=frozenset(str(gpu.get("name")) for gpu in gpus if gpu.get("mig_mode")),
    )


def measurements_with_roles(
    measurements: Sequence[Measurement], checks: Mapping[str, HasFactRoles]
) -> list[Measurement]:
    """The measurements whose facts play any role: few of very many, so that these are looked through once."""
    names = {name for name, check in checks.items() if check.fact_roles}
    return [one for one in measurements if one.check in names and one.facts and not one.skipped]


def role_facts(
    role: FactRole, measurements: Sequence[Measurement], checks: Mapping[str, HasFactRoles]
) -> Iterator[tuple[Measurement, Any]]:
    """Of ``measurements`` ``with_roles``, those that declare this ``role``, with the fact; None where it is missing."""
    names = {name: check.fact_roles[role] for name, check in checks.items() if role in check.fact_roles}
    return ((one, one.facts.get(names[one.check])) for one in measurements if one.check in names)


def nvlink_to_busbw_ratio(operation: str, algorithm: str, ranks: int, nodes: int = 1) -> float:
    """What a GPU's links carry one way, over the bus bandwidth.

    Ring, and any operation that only moves data: 1, which is how nccl-tests chose its factors (doc/PERFORMANCE.md).
    Tree sends each byte up and down again: 2S, for a bus bandwidth of 2(n−1)/n · S. In the switch (NVLS) a GPU sends
    S for the sum and, of the h GPUs of its node, S/h of the result: (h+1)/h · S, by the semantics of
    multimem.ld_reduce and multimem.st (PTX ISA).
    """
    if operation != "all_reduce" or algorithm not in ("Tree", "NVLSTree", "NVLS"):
        return 1.0
    here = ranks / nodes
    sent = 2.0 if algorithm == "Tree" else (here + 1) / here
    return sent * ranks / (2 * (ranks - 1))


def network_to_busbw_ratio(operation: str, algorithm: str, ranks: int, nodes: int) -> float | None:
    """What leaves a node one way, over the bus bandwidth; None for an operation whose way is not modelled.

    Ring: every byte that a GPU passes on leaves the node once, by its last GPU: 1. Tree and its kin first sum inside
    the node, so that 2(N−1)/N · S leave it, for a bus bandwidth of 2(n−1)/n · S (stas00/ml-engineering,
    network/README.md, has the same for a rail). All-to-all: each of n/N GPUs sends S/n to each GPU elsewhere.
    """
    if operation == "all_to_all":
        here = ranks / nodes
        return here * (ranks - here) / (ranks - 1)
    if operation not in ("all_reduce", "all_gather", "reduce_scatter"):
        return None
    hierarchical = operation == "all_reduce" and algorithm in HIERARCHICAL_ALGORITHMS
    return (nodes - 1) / nodes * ranks / (ranks - 1) if hierarchical else 1.0


def _used(gpus: Any, used: Any) -> list[Mapping[str, Any]]:
    return [gpu for gpu in _maps(gpus) if isinstance(used, list) and gpu.get("index") in used]


def _nvlink(gpu: Mapping[str, Any]) -> tuple[int, float] | None:
    """How many links of a GPU are active, and their GB/s together, one way."""
    speeds = [link.get("speed_mbps") for link in _maps(gpu.get("nvlinks")) if link.get("active")]
    known = [speed for speed in speeds if isinstance(speed, int | float) and speed > 0]
    return (len(known), sum(known) / 1e3) if known and len(known) == len(speeds) else None


def _hcas(hcas: Any) -> dict[str, frozenset[str]]:
    """The ports that NCCL uses, such as mlx5_0/1, by node."""
    lists = hcas.items() if isinstance(hcas, Mapping) else ()
    return {node: frozenset(map(str, ports)) for node, ports in lists if isinstance(ports, list) and ports}


def _ports(rdma: Any, used: frozenset[str] | None) -> RdmaPorts | None:
    devices = _maps(rdma.get("devices")) if isinstance(rdma, Mapping) else []
    ports = [
        (f"{device.get('name')}/{port.get('port')}", port) for device in devices for port in _maps(device.get("ports"))
    ]
    if used:
        ports = [(name, port) for name, port in ports if name in used]
        if {name for name, _ in ports} != used:  # of one that nobody discovered the rate is not known
            return None
    up: dict[tuple[float, str], int] = {}
    for _, port in ports:
        rate, kind = _RATE.match(str(port.get("rate") or "")), _KINDS.get(str(port.get("link_layer")))
        if port.get("state") == "ACTIVE" and rate and kind:
            up[float(rate[1]), kind] = up.get((float(rate[1]), kind), 0) + 1
    if not up:
        return None
    (gbps, kind), count = max(up.items())
    return RdmaPorts(kind, count, gbps)


def _maps(value: Any) -> list[Mapping[str, Any]]:
    """The mappings that a fact lists; none where it is of another shape, as in a record that was edited: not known."""
    return value if isinstance(value, list) and all(type(one) is dict for one in value) else []


def _network(names: Sequence[str]) -> str:
    """The slowest of what was used: one rank on sockets holds up all."""
    if any(name.startswith("NET/Socket") for name in names):
        return "tcp"
    if any("libfabric" in name.lower() for name in names):
        return "efa"
    return "rdma" if names and all(name.startswith("NET/IB") for name in names) else ""
