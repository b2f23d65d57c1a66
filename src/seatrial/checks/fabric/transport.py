"""The transports that NCCL uses: NVLink, shared memory, RDMA with or without GPUDirect, or sockets.

NCCL selects transports itself and falls back to slower ones without an error. To interpret a bandwidth, its transport
must be known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seatrial.checks.base import Check, Context, Needs, Options, RuleFact, facts, metric
from seatrial.checks.fabric import _algorithms
from seatrial.checks.fabric._nccl_log import NOT_LOGGED
from seatrial.model import Fact, Observation, Outcome, Phase, Rule, Scope, SeatrialError
from seatrial.util.text import and_more

if TYPE_CHECKING:
    from seatrial.discover.fabric import RdmaFacts
    from seatrial.discover.nccl_log import NcclLog

# NCCL uses NVLink SHARP on nodes with more GPUs than this; recent versions also with 2 GPUs (nvls.cc, ncclNvlsInit)
_GPUS_WITHOUT_NVLS = 2
_MAX_NAMED = 4  # ranks listed in one message


class TransportOptions(Options):
    """``sockets_expected``: sockets between nodes are intended, although the nodes have RDMA ports."""

    sockets_expected: bool = False


@dataclass(frozen=True)
class RankTransport:
    """The NCCL log of one rank, its GPU model, and the active RDMA ports of its node."""

    log: NcclLog
    active_ports: tuple[str, ...]
    unreadable_ports: str  # port states that could not be read, with reasons
    log_error: str  # why the log could not be read
    gpu: str = ""

    @property
    def rdma_state_unknown(self) -> bool:
        """Whether the rank uses sockets, no active RDMA port is known, and some port states could not be read."""
        return self.log.uses_sockets and not self.active_ports and bool(self.unreadable_ports)


def measure(context: Context, options: TransportOptions) -> Iterator[Observation]:
    """Connect all ranks, then yield transports and algorithms from their NCCL logs on rank 0.

    Raises SeatrialError if a log has no transport. Unless the option sockets_expected is set, also raises SeatrialError
    if NCCL uses sockets and the RDMA ports cannot be read.
    """
    from seatrial.bench import group, rank

    group.connect_all_ranks(context.device)
    ranks = dict(rank.gather((context.subject, _rank_transport(context))))
    log_errors = [f"{subject}: {transport.log_error}" for subject, transport in ranks.items() if transport.log_error]
    if log_errors:
        raise SeatrialError(f"no transports in the NCCL logs: {and_more(log_errors, _MAX_NAMED, '; ')}")
    choices = _algorithms.logged_choices(context)
    if context.rank == 0:
        yield from facts(_transport_facts(ranks, options))
        yield from _nvls_observations(ranks)
        yield Fact(name="nccl_choices", value=choices)
    unreadable = [
        f"{subject}: {transport.unreadable_ports}"
        for subject, transport in ranks.items()
        if transport.rdma_state_unknown
    ]
    if unreadable and not options.sockets_expected:
        texts = and_more(unreadable, _MAX_NAMED, "; ")
        raise SeatrialError(f"NCCL uses sockets, and the state of the RDMA ports could not be read: {texts}")
    if context.rank == 0:
        transports = ranks.values()
        despite_rdma = sum(transport.log.uses_sockets and bool(transport.active_ports) for transport in transports)
        yield metric("socket_despite_rdma", despite_rdma, "ranks")
        yield metric("socket_ranks", sum(transport.log.uses_sockets for transport in transports), "ranks")
        without_gpudirect = sum(transport.log.rdma_without_gpudirect for transport in transports)
        yield metric("rdma_without_gpudirect", without_gpudirect, "ranks")


def _nvls_observations(ranks: Mapping[str, RankTransport]) -> Iterator[Observation]:
    """Yield whether NCCL should use NVLink SHARP (NVLS), and if so, the number of ranks that do not use it."""
    from seatrial.hardware.references import skus

    min_gpus = min(Counter(subject.partition("/")[0] for subject in ranks).values())
    models_with_nvls = {name for sku in skus() if sku.nvls for name in sku.nvml_names}
    not_logged = [subject for subject, transport in ranks.items() if transport.log.nvls_channels is None]
    models_without_nvls = sorted({transport.gpu for transport in ranks.values()} - models_with_nvls)
    reason = ""
    known_models = {name for sku in skus() for name in sku.nvml_names}
    if unknown_models := [name or "a GPU without a name" for name in models_without_nvls if name not in known_models]:
        reason = f"no data on NVLink SHARP of {' and '.join(unknown_models)}"
    elif models_without_nvls:
        reason = f"{' and '.join(models_without_nvls)}: the switches do not reduce"
    elif min_gpus <= _GPUS_WITHOUT_NVLS:
        reason = f"{min_gpus} GPUs on a node"
    elif not_logged:
        reason = f"the log of {not_logged[0]} has no number of NVLS channels"
    yield Fact(name="nvls_expected", value=f"no: {reason}" if reason else "yes")
    if not reason:
        ranks_without_nvls = [subject for subject, transport in ranks.items() if transport.log.nvls_channels == 0]
        yield Fact(name="ranks_without_nvls", value=ranks_without_nvls)
        yield metric("nvls_missing", len(ranks_without_nvls), "ranks")


def _rank_transport(context: Context) -> RankTransport:
    """The NCCL log and the GPU model of this rank, and the RDMA ports of its node."""
    from seatrial.bench import group, rank
    from seatrial.discover import fabric, nccl_log
    from seatrial.discover.nccl_log import NcclLog

    gpu = str(rank.describe_device(context.device)["gpu"] or "")
    rdma = fabric.read_rdma(context.root)
    active = tuple(
        f"{device.name}/{port.port}" for device in rdma.devices for port in device.ports if port.state == "ACTIVE"
    )
    unreadable = "" if rdma.status_readable else _unreadable_states(rdma) or "unknown reason"
    try:
        log = nccl_log.read(group.nccl_log_path())
    except OSError as error:
        return RankTransport(NcclLog(), active, unreadable, f"{error.strerror}: {error.filename}", gpu)
    log_error = "" if log.transports else "no line on a transport (check NCCL_DEBUG and NCCL_DEBUG_SUBSYS)"
    return RankTransport(log, active, unreadable, log_error, gpu)


def _unreadable_states(rdma: RdmaFacts) -> str:
    """The fields that RdmaFacts.status_readable depends on and that could not be read, with the reasons."""
    by_place = {"": rdma.unreadable, **{device.name: device.unreadable for device in rdma.devices}}
    by_place |= {f"{device.name}/{port.port}": port.unreadable for device in rdma.devices for port in device.ports}
    reasons = (
        f"{place} {name}: {reason}".lstrip()
        for place, unreadable in by_place.items()
        for name, reason in unreadable.items()
        if name in ("devices", "verbs_accessible", "ports", "state")
    )
    return "; ".join(reasons)


def _transport_facts(ranks: Mapping[str, RankTransport], options: TransportOptions) -> Mapping[str, object]:
    """The facts from the logs of all ranks; network, plugin and settings of the first rank, and ranks that differ."""
    from seatrial.bench import group

    logs = {subject: transport.log for subject, transport in ranks.items()}
    first = next(iter(logs.values()))
    total = sum((Counter(log.transports) for log in logs.values()), Counter[str]())
    # Node → the ports that NCCL's IB transport uses, and the interfaces of its socket transport, where logged
    rdma_ports: dict[str, list[str]] = {}
    socket_interfaces: dict[str, list[str]] = {}
    deviations: dict[str, dict[str, object]] = {}
    first_values = {"network": first.network, "net_plugin": first.plugin, "settings": first.settings}
    for subject, log in logs.items():
        node = subject.partition("/")[0]
        if log.hcas:
            rdma_ports[node] = sorted({*rdma_ports.get(node, ()), *log.hcas})
        if log.uses_sockets and log.socket_interfaces:
            socket_interfaces[node] = sorted({*socket_interfaces.get(node, ()), *log.socket_interfaces})
        values: dict[str, object] = {"network": log.network, "net_plugin": log.plugin, "settings": log.settings}
        if deviation := {name: value for name, value in values.items() if value != first_values[name]}:
            deviations[subject] = deviation
    suffix = " (set by seatrial)"  # NCCL's log does not say who set a variable
    settings = {
        name: f"{value}{suffix if name in group.set_by_seatrial else ''}" for name, value in first.settings.items()
    }
    connections = ", ".join(f"{count} connections over {name}" for name, count in total.most_common())
    network = "network that NCCL would use between nodes" if first.nodes == 1 else "network between nodes"
    return {
        "backend": "nccl",
        "nccl_version": first.version,
        "network": first.network,
        "net_plugin": first.plugin or "none loaded",
        "net_plugin_version": first.plugin_version or NOT_LOGGED,
        "rdma_ports": rdma_ports,
        "socket_interfaces": socket_interfaces,
        "channels": first.channels,
        "nvls_channels": first.nvls_channels,
        "settings": settings,
        "transports": dict(total),
        "transports_by_rank": {subject: log.transports for subject, log in logs.items()},
        "active_rdma_ports": {
            subject: list(transport.active_ports) for subject, transport in ranks.items() if transport.active_ports
        },
        "sockets_expected": "yes" if options.sockets_expected else "no",
        "method": f"{connections}, from the logs of {len(ranks)} ranks on {first.nodes} nodes with NCCL "
        f"{first.version}, after an all-reduce and an all-to-all; first rank: {network} {first.network or NOT_LOGGED}, "
        f"plugin {first.plugin or 'none'}",
        **({"differs_from_first_rank": deviations} if deviations else {}),
    }


CHECK = Check(
    name="collectives.transport",
    title="NCCL transports and algorithms",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics=dict.fromkeys(("socket_despite_rdma", "socket_ranks", "rdma_without_gpudirect", "nvls_missing"), "ranks"),
    rules=(
        Rule(
            metric="socket_despite_rdma",
            expect="== 0 ranks",
            applies_if={"sockets_expected": "no"},
            evidence_facts=("transports_by_rank", "active_rdma_ports", "settings"),
            meaning="NCCL uses TCP sockets although the node has an active RDMA port: sockets reach a small part of "
            "the port's bandwidth.",
            fix="Run ibstat and ls -l /dev/infiniband (in the container too); ulimit -l must be unlimited. Look for "
            "NET/IB in the rank's nccl.*.log, and for NCCL_IB_DISABLE, NCCL_NET or NCCL_IB_HCA in the settings. If "
            "sockets are intended: --set checks.collectives.transport.options.sockets_expected=true",
        ),
        Rule(
            metric="rdma_without_gpudirect",
            expect="== 0 ranks",
            outcome_if_violated=Outcome.WARN,
            evidence_facts=("transports_by_rank",),
            meaning="RDMA without GPUDirect (no GDRDMA): each byte crosses PCIe twice and passes through host memory.",
            fix="Run lsmod | grep nvidia_peermem (or use a kernel with dma-buf and the open driver), and "
            "nvidia-smi topo -m: NIC and GPU should share a switch (PIX, PXB). Check NCCL_NET_GDR_LEVEL.",
        ),
        Rule(
            metric="nvls_missing",
            expect="== 0 ranks",
            outcome_if_violated=Outcome.WARN,
            applies_if={"nvls_expected": "yes"},
            evidence_facts=("ranks_without_nvls", "settings"),
            meaning="NCCL does not reduce in the NVSwitches (NVLink SHARP): the all-reduce of a node is slower.",
            fix="Unset NCCL_NVLS_ENABLE and NCCL_CUMEM_ENABLE. Check that nvidia-fabricmanager runs in the version of "
            "the driver, and look for NVLS in the rank's nccl.*.log. A virtual machine needs all GPUs of its switches.",
        ),
    ),
    rule_facts={
        "sockets_expected": RuleFact(reason="the option sockets_expected is set"),
        "nvls_expected": RuleFact(reason="NVLink SHARP is not expected here, or it is not known"),
    },
    measure=measure,
    fact_roles={
        "transports": "transports",
        "hcas": "rdma_ports",
        "socket_interfaces": "socket_interfaces",
        "algorithms": "nccl_choices",
        "variables": "settings",
    },
    limit_s=120.0,
    child_tasks=("all",),  # one task on all GPUs runs the operations, with NCCL's log enabled
    needs=Needs(gpus=True, min_ranks=2),
    options=TransportOptions,
)
