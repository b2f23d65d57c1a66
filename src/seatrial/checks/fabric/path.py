"""Which way does the data of collectives go: NVLink, shared memory, RDMA with or without the CPU's memory, or sockets?

NCCL chooses by itself, and falls back without a word: a figure is worth little without its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from seatrial.checks.base import Check, Needs, Options, Place, facts, metric
from seatrial.checks.fabric import _algorithms
from seatrial.discover import fabric, nccl
from seatrial.discover.fabric import RdmaFacts
from seatrial.discover.nccl import NcclPath
from seatrial.model import Fact, Observation, Outcome, Phase, Rule, Scope, SeatrialError


class PathOptions(Options):
    """``sockets``: that nodes talk over sockets is meant so, though they have RDMA ports."""

    sockets: bool = False


@dataclass(frozen=True)
class Way:
    """What one rank's NCCL told, and the RDMA ports of its node that are up, as far as that can be read."""

    path: NcclPath
    active_ports: tuple[str, ...]
    unread_ports: str  # what of them could not be read
    unknown: str  # why its log could not be read

    @property
    def perhaps_past_rdma(self) -> bool:
        """Whether it talks over sockets, and nobody knows of a port for RDMA, nor that there is none."""
        return self.path.over_sockets and not self.active_ports and bool(self.unread_ports)


def measure(place: Place, options: PathOptions) -> Iterator[Observation]:
    """Let all ranks connect, then read what each one's NCCL wrote.

    Raises SeatrialError where a log tells nothing, and where sockets are in use and the ports for RDMA cannot be read.
    """
    from seatrial.bench import group, rank

    group.connect(place.device)
    ways = dict(rank.gather((place.subject, _way(place))))
    unknown = {subject: way.unknown for subject, way in ways.items() if way.unknown}
    if unknown:
        raise SeatrialError(f"NCCL's own log does not tell its path: {unknown}")
    chosen = _algorithms.choices(place)
    if place.rank == 0:
        yield from facts(_paths(ways, options))
        yield Fact(name="choices", value=chosen)
    doubtful = {subject: way.unread_ports for subject, way in ways.items() if way.perhaps_past_rdma}
    if doubtful and not options.sockets:
        raise SeatrialError(
            f"NCCL talks over sockets, and whether a port for RDMA is active cannot be read: {doubtful}"
        )
    if place.rank == 0:
        every = ways.values()
        yield metric("past_rdma", sum(way.path.over_sockets and bool(way.active_ports) for way in every), "ranks")
        yield metric("over_sockets", sum(way.path.over_sockets for way in every), "ranks")
        yield metric("without_gdr", sum(way.path.without_gdr for way in every), "ranks")


def _way(place: Place) -> Way:
    from seatrial.bench import group

    rdma = fabric.read_rdma(place.root)
    active = tuple(
        f"{device.name}/{port.port}" for device in rdma.devices for port in device.ports if port.state == "ACTIVE"
    )
    unread = "" if rdma.known else _unread(rdma) or "not told why"
    try:
        path = nccl.read(group.nccl_log())
    except OSError as error:
        return Way(NcclPath(), active, unread, f"{error.strerror}: {error.filename}")
    silent = "" if path.transports else "no line on how it connected (NCCL_DEBUG, NCCL_DEBUG_SUBSYS?)"
    return Way(path, active, unread, silent)


def _unread(rdma: RdmaFacts) -> str:
    """What RdmaFacts.known asks for and could not be read, with the reasons."""
    found = {"": rdma.unread, **{device.name: device.unread for device in rdma.devices}}
    found |= {f"{device.name}/{port.port}": port.unread for device in rdma.devices for port in device.ports}
    reasons = (
        f"{where} {what}: {why}".lstrip()
        for where, unread in found.items()
        for what, why in unread.items()
        if what in ("devices", "verbs", "ports", "state")
    )
    return "; ".join(reasons)


def _paths(ways: Mapping[str, Way], options: PathOptions) -> Mapping[str, object]:
    """The facts of all ranks' paths, by subject; where they agree, those of the first rank."""
    from seatrial.bench import group

    paths = {subject: way.path for subject, way in ways.items()}
    first = next(iter(paths.values()))
    total = sum((Counter(path.transports) for path in paths.values()), Counter[str]())
    hcas: dict[str, list[str]] = {}  # the ports that NCCL's own RDMA transport uses, by node, where its log says so
    unlike: dict[str, dict[str, object]] = {}
    for subject, path in paths.items():
        if path.hcas:
            node = subject.partition("/")[0]
            hcas[node] = sorted({*hcas.get(node, ()), *path.hcas})
        chosen: dict[str, object] = {"network": path.network, "net_plugin": path.plugin, "settings": path.settings}
        same = {"network": first.network, "net_plugin": first.plugin, "settings": first.settings}
        if differs := {name: value for name, value in chosen.items() if value != same[name]}:
            unlike[subject] = differs
    ours = " (set by seatrial)"  # which variables those are NCCL cannot know
    settings = {name: f"{value}{ours if name in group.set_here else ''}" for name, value in first.settings.items()}
    shares = ", ".join(f"{count} connections by {name}" for name, count in total.most_common())
    network = "the network that there would be between nodes" if first.nodes == 1 else "the network between nodes"
    return {
        "backend": "nccl",
        "nccl_version": first.version,
        "network": first.network,
        "net_plugin": first.plugin or "none loaded",
        "net_plugin_version": first.plugin_version or "not told",
        "hcas": hcas,
        "channels": first.channels,
        "nvls_channels": first.nvls_channels,
        "settings": settings,
        "transports": dict(total),
        "transports_by_rank": {subject: path.transports for subject, path in paths.items()},
        "active_rdma_ports": {subject: list(way.active_ports) for subject, way in ways.items() if way.active_ports},
        "sockets_meant": "yes" if options.sockets else "no",
        "how": f"{shares}, as NCCL {first.version} wrote in the logs of {len(ways)} ranks on {first.nodes} nodes, "
        f"after an all-reduce and an all-to-all; by the first rank's log {network} is {first.network or 'not told'}, "
        f"its plugin {first.plugin or 'none'}",
        **({"unlike_the_first_rank": unlike} if unlike else {}),
    }


CHECK = Check(
    name="collectives.path",
    title="The way that collectives take",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"past_rdma": "ranks", "over_sockets": "ranks", "without_gdr": "ranks"},
    rules=(
        Rule(
            metric="past_rdma",
            expect="== 0 ranks",
            where={"sockets_meant": "no"},
            shows=("transports_by_rank", "active_rdma_ports", "settings"),
            why="NCCL talks over TCP sockets although its node has an active RDMA port: a tenth of the speed, or less",
            fix="ibstat; ls -l /dev/infiniband (in the container too); ulimit -l must be unlimited; then look for "
            "NET/IB in the rank's nccl.*.log, and for NCCL_IB_DISABLE, NCCL_NET or NCCL_IB_HCA in the settings. Where "
            "it is meant so: --set checks.collectives.path.options.sockets=true",
        ),
        Rule(
            metric="without_gdr",
            expect="== 0 ranks",
            breach=Outcome.WARN,
            shows=("transports_by_rank",),
            why="RDMA goes by way of host memory (no GDRDMA): each byte crosses PCIe twice, and the CPU's memory",
            fix="lsmod | grep nvidia_peermem (or a kernel with dma-buf and an open driver); nvidia-smi topo -m: NIC "
            "and GPU should share a switch (PIX, PXB); NCCL_NET_GDR_LEVEL",
        ),
    ),
    measure=measure,
    fact_roles={"transports": "transports", "hcas": "hcas", "algorithms": "choices"},
    limit_s=120.0,
    needs=Needs(gpus=True, ranks=2),
    options=PathOptions,
)
