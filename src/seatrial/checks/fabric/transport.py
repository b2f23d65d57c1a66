"""Which way does the data of collectives go: NVLink, shared memory, RDMA with or without the CPU's memory, or sockets?

NCCL chooses by itself, and falls back without a word: a figure is worth little without its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from seatrial.checks.base import Check, Context, Needs, Options, facts, metric
from seatrial.checks.fabric import _algorithms
from seatrial.discover import fabric, nccl_log
from seatrial.discover.fabric import RdmaFacts
from seatrial.discover.nccl_log import NcclLog
from seatrial.model import Fact, Observation, Outcome, Phase, Rule, Scope, SeatrialError


class TransportOptions(Options):
    """``sockets``: that nodes talk over sockets is meant so, though they have RDMA ports."""

    sockets: bool = False


@dataclass(frozen=True)
class RankTransport:
    """What one rank's NCCL told, and the RDMA ports of its node that are up, as far as that can be read."""

    path: NcclLog
    active_ports: tuple[str, ...]
    unreadable_ports: str  # what of them could not be read
    log_error: str  # why its log could not be read

    @property
    def rdma_state_unknown(self) -> bool:
        """Whether it talks over sockets, and nobody knows of a port for RDMA, nor that there is none."""
        return self.path.uses_sockets and not self.active_ports and bool(self.unreadable_ports)


def measure(context: Context, options: TransportOptions) -> Iterator[Observation]:
    """Let all ranks connect, then read what each one's NCCL wrote.

    Raises SeatrialError where a log tells nothing, and where sockets are in use and the ports for RDMA cannot be read.
    """
    from seatrial.bench import group, rank

    group.connect_all_ranks(context.device)
    ways = dict(rank.gather((context.subject, _way(context))))
    unknown = {subject: way.log_error for subject, way in ways.items() if way.log_error}
    if unknown:
        raise SeatrialError(f"NCCL's own log does not tell its path: {unknown}")
    chosen = _algorithms.logged_choices(context)
    if context.rank == 0:
        yield from facts(_paths(ways, options))
        yield Fact(name="choices", value=chosen)
    doubtful = {subject: way.unreadable_ports for subject, way in ways.items() if way.rdma_state_unknown}
    if doubtful and not options.sockets:
        raise SeatrialError(
            f"NCCL talks over sockets, and whether a port for RDMA is active cannot be read: {doubtful}"
        )
    if context.rank == 0:
        every = ways.values()
        yield metric(
            "socket_despite_rdma", sum(way.path.uses_sockets and bool(way.active_ports) for way in every), "ranks"
        )
        yield metric("over_sockets", sum(way.path.uses_sockets for way in every), "ranks")
        yield metric("rdma_without_gpudirect", sum(way.path.rdma_without_gpudirect for way in every), "ranks")


def _way(context: Context) -> RankTransport:
    from seatrial.bench import group

    rdma = fabric.read_rdma(context.root)
    active = tuple(
        f"{device.name}/{port.port}" for device in rdma.devices for port in device.ports if port.state == "ACTIVE"
    )
    unread = "" if rdma.status_readable else _unread(rdma) or "not told why"
    try:
        path = nccl_log.read(group.nccl_log_path())
    except OSError as error:
        return RankTransport(NcclLog(), active, unread, f"{error.strerror}: {error.filename}")
    silent = "" if path.transports else "no line on how it connected (NCCL_DEBUG, NCCL_DEBUG_SUBSYS?)"
    return RankTransport(path, active, unread, silent)


def _unread(rdma: RdmaFacts) -> str:
    """What RdmaFacts.known asks for and could not be read, with the reasons."""
    found = {"": rdma.unreadable, **{device.name: device.unreadable for device in rdma.devices}}
    found |= {f"{device.name}/{port.port}": port.unreadable for device in rdma.devices for port in device.ports}
    reasons = (
        f"{where} {what}: {why}".lstrip()
        for where, unread in found.items()
        for what, why in unread.items()
        if what in ("devices", "verbs", "ports", "state")
    )
    return "; ".join(reasons)


def _paths(ways: Mapping[str, RankTransport], options: TransportOptions) -> Mapping[str, object]:
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
    settings = {
        name: f"{value}{ours if name in group.set_by_seatrial else ''}" for name, value in first.settings.items()
    }
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
        "sockets_expected": "yes" if options.sockets else "no",
        "how": f"{shares}, as NCCL {first.version} wrote in the logs of {len(ways)} ranks on {first.nodes} nodes, "
        f"after an all-reduce and an all-to-all; by the first rank's log {network} is {first.network or 'not told'}, "
        f"its plugin {first.plugin or 'none'}",
        **({"differs_from_first_rank": unlike} if unlike else {}),
    }


CHECK = Check(
    name="collectives.transport",
    title="The way that collectives take",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"socket_despite_rdma": "ranks", "over_sockets": "ranks", "rdma_without_gpudirect": "ranks"},
    rules=(
        Rule(
            metric="socket_despite_rdma",
            expect="== 0 ranks",
            applies_if={"sockets_expected": "no"},
            evidence_facts=("transports_by_rank", "active_rdma_ports", "settings"),
            meaning="NCCL talks over TCP sockets although its node has an active RDMA port: a tenth of the speed, or less",
            fix="ibstat; ls -l /dev/infiniband (in the container too); ulimit -l must be unlimited; then look for "
            "NET/IB in the rank's nccl.*.log, and for NCCL_IB_DISABLE, NCCL_NET or NCCL_IB_HCA in the settings. Where "
            "it is meant so: --set checks.collectives.transport.options.sockets=true",
        ),
        Rule(
            metric="rdma_without_gpudirect",
            expect="== 0 ranks",
            outcome_if_violated=Outcome.WARN,
            evidence_facts=("transports_by_rank",),
            meaning="RDMA goes by way of host memory (no GDRDMA): each byte crosses PCIe twice, and the CPU's memory",
            fix="lsmod | grep nvidia_peermem (or a kernel with dma-buf and an open driver); nvidia-smi topo -m: NIC "
            "and GPU should share a switch (PIX, PXB); NCCL_NET_GDR_LEVEL",
        ),
    ),
    measure=measure,
    fact_roles={"transports": "transports", "hcas": "hcas", "algorithms": "choices"},
    limit_s=120.0,
    needs=Needs(gpus=True, min_ranks=2),
    options=TransportOptions,
)
