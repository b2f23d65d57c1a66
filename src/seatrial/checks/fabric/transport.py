"""The transports that NCCL uses: NVLink, shared memory, RDMA with or without GPUDirect, or sockets.

NCCL selects transports itself, and uses slower ones without an error if faster ones are not available. The cause of a
low bandwidth may therefore be its transport.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Needs, Options, facts
from seatrial.checks.declare import Answer, Answers, Evidence, absent, fact, forbidden, metric, value, warning
from seatrial.checks.fabric import _algorithms
from seatrial.checks.fabric._nccl_log import NOT_LOGGED
from seatrial.hardware import networks
from seatrial.model import Phase, Scope, SeatrialError
from seatrial.util.text import and_more

if TYPE_CHECKING:
    from seatrial.discover.fabric import RdmaFacts
    from seatrial.discover.nccl_log import NcclLog

# NVLink SHARP is expected only on nodes with more GPUs than this: recent versions of NCCL use it with 2 GPUs too, older
# versions do not (nvls.cc, ncclNvlsInit)
_GPUS_WITHOUT_NVLS = 2
_MAX_NAMED = 4  # ranks named in one message


class TransportOptions(Options):
    """``sockets_expected``: whether sockets between nodes are intended, although the nodes have RDMA ports."""

    sockets_expected: bool = False


@dataclass(frozen=True)
class RankTransport:
    """The NCCL log of one rank, its GPU model, and the active RDMA ports of its node."""

    log: NcclLog
    active_ports: tuple[str, ...]
    unreadable_ports: str  # port states that could not be read, with reasons; empty if all were read
    log_error: str  # why the log has no transport; empty if it has
    gpu_model: str = ""  # empty if unknown


def measure(context: Context, options: TransportOptions) -> Answers:
    """Connect all ranks, then yield transports and algorithms from their NCCL logs on rank 0.

    Raises SeatrialError if a log has no transport. Without the option sockets_expected, it also raises SeatrialError if
    NCCL uses sockets and the RDMA ports cannot be read.
    """
    from seatrial.bench import group, rank

    group.connect_all_ranks(context.device)
    transport_by_rank = dict(rank.gather((context.subject, _rank_transport(context))))
    if log_errors := _listed({subject: each.log_error for subject, each in transport_by_rank.items()}):
        raise SeatrialError(f"no transports in the NCCL logs: {log_errors}")
    choices = _algorithms.logged_choices(context)
    if context.rank == 0:
        transport_facts = _transport_facts(transport_by_rank, options)
        yield from facts(transport_facts)
        yield _nvls_missing(transport_by_rank, transport_facts["settings"])
        yield fact("nccl_choices", choices)
    on_sockets = {subject: each for subject, each in transport_by_rank.items() if each.log.uses_sockets}
    no_ports = {subject: each.unreadable_ports for subject, each in on_sockets.items() if not each.active_ports}
    if (unreadable := _listed(no_ports)) and not options.sockets_expected:
        raise SeatrialError(f"NCCL uses sockets, and the state of the RDMA ports could not be read: {unreadable}")
    if context.rank == 0:
        _, unknown = networks.slowest(transport_facts["transports"])
        active_ports = {subject: [*each.active_ports] for subject, each in on_sockets.items() if each.active_ports}
        evidence = {
            "transports": {subject: on_sockets[subject].log.transports for subject in active_ports},
            "active_rdma_ports": active_ports,
            "settings": transport_facts["settings"],
        }
        yield _rank_count("socket_despite_rdma", active_ports, evidence if active_ports else None, unknown)
        logs = {subject: each.log for subject, each in transport_by_rank.items()}
        without_gpudirect = {subject: log.transports for subject, log in logs.items() if log.rdma_without_gpudirect}
        evidence = {"transports": without_gpudirect}
        yield _rank_count("rdma_without_gpudirect", without_gpudirect, evidence, unknown)


def _listed(texts: Mapping[str, str]) -> str:
    """The texts that are not empty, with their subjects; the first _MAX_NAMED."""
    return and_more([f"{subject}: {text}" for subject, text in texts.items() if text], _MAX_NAMED, "; ")


def _rank_count(name: str, ranks: Collection[str], evidence: Evidence, unknown: str) -> Answer:
    """The number of ranks. If it is 0 and NCCL uses ``unknown`` networks, the metric has no value."""
    if not ranks and unknown:
        reason = f"NCCL uses {unknown}, which is not in the table of networks: it may be RDMA or sockets"
        return forbidden(name, f"{reason}. Run first: grep -hE 'Using network|NET/OFI Selected' nccl.*.log")
    return value(name, len(ranks), evidence=evidence)


def _nvls_missing(transport_by_rank: Mapping[str, RankTransport], settings: Mapping[str, str]) -> Answer:
    """The number of ranks that do not use NVLink SHARP (NVLS), or why NCCL need not use it."""
    from seatrial.hardware.references import skus

    has_nvls = {name: sku.nvls for sku in skus() for name in sku.nvml_names}
    min_gpus = min(Counter(subject.partition("/")[0] for subject in transport_by_rank).values())
    not_logged = [subject for subject, transport in transport_by_rank.items() if transport.log.nvls_channels is None]
    models = sorted({transport.gpu_model for transport in transport_by_rank.values()})
    models_without_nvls = [name for name in models if not has_nvls.get(name)]
    unknown_models = [name or "a GPU without a name" for name in models if name not in has_nvls]
    reason = ""
    if unknown_models:
        reason = f"no data on NVLink SHARP of {' and '.join(unknown_models)}"
    elif models_without_nvls:
        reason = f"{' and '.join(models_without_nvls)}: the switches do not reduce"
    elif min_gpus <= _GPUS_WITHOUT_NVLS:
        reason = f"{min_gpus} GPUs on a node"
    elif not_logged:
        reason = f"the log of {not_logged[0]} has no number of NVLS channels"
    if reason:
        return absent("nvls_missing", reason)
    ranks = [subject for subject, transport in transport_by_rank.items() if transport.log.nvls_channels == 0]
    return value("nvls_missing", len(ranks), evidence={"ranks": ranks, "settings": settings})


def _rank_transport(context: Context) -> RankTransport:
    from seatrial.bench import group, rank
    from seatrial.discover import fabric, nccl_log
    from seatrial.discover.nccl_log import NcclLog

    gpu_model = str(rank.describe_device(context.device)["gpu"] or "")
    rdma = fabric.read_rdma(context.root)
    active = tuple(
        f"{device.name}/{port.port}" for device in rdma.devices for port in device.ports if port.state == "ACTIVE"
    )
    unreadable = "" if rdma.status_readable else _unreadable_states(rdma) or "unknown reason"
    try:
        log = nccl_log.read(group.nccl_log_path())
    except OSError as error:
        return RankTransport(NcclLog(), active, unreadable, f"{error.strerror}: {error.filename}", gpu_model)
    log_error = "" if log.transports else "no line on a transport (check NCCL_DEBUG and NCCL_DEBUG_SUBSYS)"
    return RankTransport(log, active, unreadable, log_error, gpu_model)


def _unreadable_states(rdma: RdmaFacts) -> str:
    """The fields that RdmaFacts.status_readable depends on and that could not be read, with the reasons."""
    places = [("", rdma.unreadable), *((device.name, device.unreadable) for device in rdma.devices)]
    places += [(f"{device.name}/{port.port}", port.unreadable) for device in rdma.devices for port in device.ports]
    fields = ("devices", "verbs_accessible", "ports", "state")
    return "; ".join(
        f"{place} {field}: {reason}".lstrip()
        for place, unreadable in places
        for field, reason in unreadable.items()
        if field in fields
    )


def _transport_facts(transport_by_rank: Mapping[str, RankTransport], options: TransportOptions) -> dict[str, Any]:
    """The facts from the logs of all ranks.

    Network, plugin, channels and settings are those of the first rank; the fact ``differs_from_first_rank`` lists other
    ranks whose network, plugin or settings differ.
    """
    from seatrial.bench import group

    logs = {subject: transport.log for subject, transport in transport_by_rank.items()}
    first_log = next(iter(logs.values()))
    connection_counts = sum((Counter(log.transports) for log in logs.values()), Counter[str]())
    rdma_ports: dict[str, set[str]] = {}  # node → ports of NCCL's IB transport, if logged
    socket_interfaces: dict[str, set[str]] = {}  # node → interfaces of NCCL's socket transport, if logged
    differing_ranks: dict[str, dict[str, object]] = {}
    first_values = {"network": first_log.network, "net_plugin": first_log.plugin, "settings": first_log.settings}
    for subject, log in logs.items():
        node = subject.partition("/")[0]
        if log.hcas:
            rdma_ports.setdefault(node, set()).update(log.hcas)
        if log.uses_sockets and log.socket_interfaces:
            socket_interfaces.setdefault(node, set()).update(log.socket_interfaces)
        values: dict[str, object] = {"network": log.network, "net_plugin": log.plugin, "settings": log.settings}
        if differing := {name: value for name, value in values.items() if value != first_values[name]}:
            differing_ranks[subject] = differing
    suffix = " (set by seatrial)"  # NCCL's log does not say who set a variable
    settings = {
        name: f"{value}{suffix if name in group.set_by_seatrial else ''}" for name, value in first_log.settings.items()
    }
    connections = ", ".join(f"{count} connections over {name}" for name, count in connection_counts.most_common())
    network = "network that NCCL would use between nodes" if first_log.nodes == 1 else "network between nodes"
    return {
        "backend": "nccl",
        "nccl_version": first_log.version,
        "network": first_log.network,
        "net_plugin": first_log.plugin or "none loaded",
        "net_plugin_version": first_log.plugin_version or NOT_LOGGED,
        "rdma_ports": {node: sorted(ports) for node, ports in rdma_ports.items()},
        "socket_interfaces": {node: sorted(interfaces) for node, interfaces in socket_interfaces.items()},
        "channels": first_log.channels,
        "nvls_channels": first_log.nvls_channels,
        "settings": settings,
        "transports": dict(connection_counts),
        "sockets_expected": "yes" if options.sockets_expected else "no",
        "method": f"{connections}, from the logs of {len(logs)} ranks on {first_log.nodes} nodes with NCCL "
        f"{first_log.version}, after an all-reduce and an all-to-all; first rank: {network} "
        f"{first_log.network or NOT_LOGGED}, plugin {first_log.plugin or 'none'}",
        **({"differs_from_first_rank": differing_ranks} if differing_ranks else {}),
    }


CHECK = Check(
    name="collectives.transport",
    title="NCCL transports and algorithms",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    declared=(
        metric(
            "socket_despite_rdma",
            "== 0 ranks",
            "NCCL uses TCP sockets although the node has an active RDMA port: sockets reach a small part of the port's "
            "bandwidth.",
            "Run ibstat and ls -l /dev/infiniband; in containers pass /dev/infiniband and set memlock to unlimited. "
            "Unset NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA, and look for NET/IB in the rank's nccl.*.log; with "
            "libfabric (NET/OFI) run fi_info and unset FI_PROVIDER. If sockets are intended: "
            "--set checks.collectives.transport.options.sockets_expected=true",
            when="sockets_expected == no",
            cause=Cause(
                id="sockets_despite_rdma",
                title="NCCL uses TCP sockets although RDMA ports are active",
                place="cluster",
                explains=("collectives.*", "train.*"),
                consequence_of=(
                    *("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA"),
                    *("rdma_devices_inaccessible", "memlock_limited", "ports_down"),
                ),
                first_command="ibv_devinfo | grep -E 'hca_id|state|link_layer'; env | grep -E '^NCCL_(IB|NET|SOCKET)'",
                action="fix-config",
            ),
        ),
        warning(
            "rdma_without_gpudirect",
            "== 0 ranks",
            "RDMA without GPUDirect (no GDRDMA): each byte crosses PCIe twice and passes through host memory.",
            "Run modprobe nvidia-peermem, or use a kernel of 5.12 or newer with the open kernel modules (dma-buf). "
            "Unset NCCL_NET_GDR_LEVEL. Run nvidia-smi topo -m: NIC and GPU should share a switch (PIX, PXB).",
            cause=Cause(
                id="rdma_without_gpudirect",
                title="NCCL uses RDMA without GPUDirect",
                place="cluster",
                explains=("collectives.*", "train.*"),
                consequence_of=("NCCL_NET_GDR_LEVEL", "NCCL_DMABUF_ENABLE", "gpudirect_unavailable"),
                first_command="lsmod | grep -E 'nvidia_peermem|nv_peer_mem'; uname -r; "
                "nvidia-smi -q | grep -i 'driver version'",
                action="fix-config",
            ),
        ),
        warning(
            "nvls_missing",
            "== 0 ranks",
            "NCCL does not reduce in the NVSwitches (NVLink SHARP): the all-reduce of a node is slower.",
            "Unset NCCL_NVLS_ENABLE and NCCL_CUMEM_ENABLE. Start nvidia-fabricmanager in exactly the version of the "
            "driver and reset the GPUs; then look for NVLS in the rank's nccl.*.log. A virtual machine needs all GPUs "
            "that share its NVSwitches.",
            cause=Cause(
                id="nvls_missing",
                title="NCCL does not reduce in the NVSwitches (NVLS)",
                place="cluster",
                explains=("collectives.all_reduce", "collectives.each_node", "collectives.scaling"),
                consequence_of=(
                    *("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"),
                    *("fabric_not_ready", "nvlinks_down", "mig_enabled"),
                ),
                signatures=("nccl.nvls_bind",),
                first_command="systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A 6 -i fabric; "
                "env | grep -E '^NCCL_(NVLS|CUMEM)'",
                action="restart-service",
            ),
        ),
    ),
    measure=measure,
    fact_roles={
        "transports": "transports",
        "hcas": "rdma_ports",
        "socket_interfaces": "socket_interfaces",
        "algorithms": "nccl_choices",
        "nvls_channels": "nvls_channels",
        "variables": "settings",
    },
    limit_s=120.0,
    child_tasks=("all",),  # one task on all GPUs runs the operations, with NCCL's log enabled
    needs=Needs(gpus=True, min_ranks=2),
    options=TransportOptions,
)
