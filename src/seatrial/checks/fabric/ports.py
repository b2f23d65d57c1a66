"""The RDMA ports of all nodes: rate, state, GID, MTU, firmware. Each is compared with other ports and its capabilities.

Only compute ports are judged: the ports that NCCL should use (_compute_ports.py selects them). A port is compared with
the port of the same name on other nodes, and with the other compute ports of its node. Its rate is compared with the
fastest link mode that ethtool lists, and with the rate of its PCI link. A port that is not ACTIVE counts with a rate of
0, since its sysfs file ``rate`` then contains only the lowest rate of the link, such as 10 Gb/sec (4X SDR).

fabric.node_ports compares the ports of a single node, without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options, SkipIf, facts
from seatrial.checks.declare import Answers, FindingTemplate, absent, fact, metric, rule, value, warning
from seatrial.checks.fabric._compute_ports import ComputePorts, NodePorts, read_node_ports, select_compute_ports
from seatrial.model import PORTS_USED, Outcome, Phase, Scope
from seatrial.util.grouping import grouped

if TYPE_CHECKING:
    from seatrial.discover.rdma_ports import PortDetails


def measure(context: Context, options: Options) -> Answers:
    """Yield on one rank per node the ports of its node, and on rank 0 the comparison of the compute ports of all nodes.

    Raises NotApplicable without a compute port, and ParticipantError if the ports of a node cannot be read.
    """
    from seatrial.bench import one_rank_per_node

    participants = one_rank_per_node.select_participants(context.node)
    context.progress("reading RDMA ports")
    by_node = dict(zip(participants.names, participants.run_on_all(lambda: read_node_ports(context.root)), strict=True))
    if participants.index >= 0:  # this rank has read the ports of its node
        yield fact("ports", [port.model_dump(mode="json") for port in by_node[context.node].ports])
    compute = select_compute_ports(by_node)
    if context.rank == 0:
        yield from compare_ports(compute, by_node)


def measure_node(context: Context, options: Options) -> Answers:
    """Yield the comparison of the node's compute ports. Raises NotApplicable without a compute port."""
    context.progress("reading RDMA ports")
    by_node = {context.node: read_node_ports(context.root)}
    yield from compare_ports(select_compute_ports(by_node), by_node)


def compare_ports(compute: ComputePorts, nodes: Mapping[str, NodePorts]) -> Answers:
    """Yield rates, states and settings of the compute ports, and their comparison over nodes and on each node."""
    by_node = compute.by_node
    yield from facts(
        {
            "not_compute_ports": dict(compute.others),
            PORTS_USED: {node: [port.name for port in ports] for node, ports in by_node.items()},
            "several_nodes": "yes" if len(by_node) > 1 else "no",
            "three_or_more_ports": "yes" if min(map(len, by_node.values())) > 2 else "no",
        }
    )
    yield from _states(compute)
    yield from _rates(compute)
    yield from _setting_differences(compute)
    for node, port in compute:
        if port.link_layer == "Ethernet":
            index = nodes[node].gid_index
            setting = "NCCL_IB_GID_INDEX is not set" if index is None else f"NCCL_IB_GID_INDEX={index}"
            gids = ", ".join(f"{gid.index}: {gid.type} {gid.address}" for gid in port.gids) or "no GID"
            is_usable = port.roce_gid(index) is not None
            yield value("gid_usable", is_usable, f"{node}/{port.name}", evidence=f"{setting}; {gids}")
    # patterns stand for metrics without a value on any port
    yield absent("gid_usable*", "no RoCE port: others need no RoCE v2 GID")


def _states(compute: ComputePorts) -> Answers:
    """Yield the number of active, missing and unreadable ports of each node, and the number of NIC models."""
    # node → NIC model → number of the model's ports; the model is the first part of a port's kind
    counts_by_node = {node: Counter(port.kind[0] for port in ports) for node, ports in compute.by_node.items()}
    max_counts = reduce(or_, counts_by_node.values())  # NIC model → largest number of its ports on one node
    for node, ports in compute.by_node.items():
        active = sum(port.is_active for port in ports)
        yield value("active_ports", active, node, evidence={"ports": {port.name: _state(port) for port in ports}})
        counts = counts_by_node[node]
        # a node without any port should have the ports of the model that has the most ports on one node
        models = counts or dict(max_counts.most_common(1))
        missing = sum(max_counts[model] - counts[model] for model in models)
        yield value("ports_missing", missing, node, evidence={"ports": dict(counts), "most": dict(max_counts)})
        unreadable = {port.name: dict(port.unreadable) for port in ports if port.rate_gbps is None}
        yield value("ports_unreadable", len(unreadable), node, evidence={"unreadable": unreadable})
    compute_ports = {node: dict(counts) for node, counts in counts_by_node.items()}
    yield value("nic_models", len(max_counts), evidence={"compute_ports": compute_ports})


def _state(port: PortDetails) -> str:
    return f"{port.state}, {port.physical_state}, {port.rate}"


def _rates(compute: ComputePorts) -> Answers:
    """Yield each port's rate in Gb/s, and the ratios rate / fastest port, rate / capability and PCI link / rate.

    The fastest port can be the port itself.
    """
    any_active = any(port.rate_gbps for _, port in compute)
    if not any_active:
        yield absent(("rate_vs_nodes", "rate_vs_node_ports"), "no compute port is ACTIVE")
    rates_by_name = grouped((port.name, port.rate_gbps or 0.0) for _, port in compute)
    rates_by_node = grouped((node, port.rate_gbps or 0.0) for node, port in compute)
    for node, port in compute:
        subject, rate = f"{node}/{port.name}", port.rate_gbps
        if rate is None:  # counted by ports_unreadable
            continue
        yield value("port_rate", rate, subject)
        for name, rates in (("rate_vs_nodes", rates_by_name[port.name]), ("rate_vs_node_ports", rates_by_node[node])):
            if any_active:
                yield value(name, rate / max(rates) if any(rates) else 0.0, subject, evidence=_state(port))
        if rate and port.capability_gbps:
            yield value("rate_vs_maximum", 100 * rate / port.capability_gbps, subject)
        if rate and port.pci_gbps:
            yield value("pci_bandwidth", 100 * port.pci_gbps / rate, subject)
    # patterns stand for metrics without a value on any port
    yield absent(
        "rate_vs_maximum*",
        "unknown: no active port, or ethtool gave no value (it lists the modes of Ethernet ports only). On the node, "
        "as root: mlxlink -d DEVICE",
    )
    yield absent("pci_bandwidth*", "unknown: no active port, or sysfs gave no PCI link of a NIC")


def _setting_differences(compute: ComputePorts) -> Answers:
    """Yield for each port the number of settings (MTU, firmware) that differ from most ports of its kind."""
    differences: dict[str, dict[str, str]] = {f"{node}/{port.name}": {} for node, port in compute}
    for ports in grouped((port.kind, (f"{node}/{port.name}", port)) for node, port in compute).values():
        for name in ("mtu", "active_mtu", "firmware"):
            settings = {subject: getattr(port, name) for subject, port in ports if getattr(port, name) is not None}
            common, count = next(iter(Counter(settings.values()).most_common(1)), (None, 0))
            for subject, setting in settings.items():
                if setting != common:
                    differences[subject][name] = f"{setting}; {count} of {len(settings)} ports have {common}"
    for subject, differing in differences.items():
        yield value("settings_differing", len(differing), subject, evidence=differing)


_LINK_FIX = (
    "run mlxlink -d DEVICE -m -c on the node (speed, width, errors, cable), then compare the cable and the switch port "
    "with those of a good port. If the port is Polling, check the cable and the switch port. If the port is LinkUp but "
    "INIT, no subnet manager answers: run sminfo. If the port is not for compute, list the compute ports in "
    "NCCL_IB_HCA (env of the trial)"
)
_EXPLAINS = ("fabric.rdma", "collectives.*", "train.*")
# WARN on a single node: a training run on one node does not use the network
_SEVERAL_NODES, _ONE_NODE = "several_nodes == yes", "several_nodes == no"
_DECLARED = (
    metric("port_rate", unit="Gb/s", meaning="rate of the port; 0 if it is not ACTIVE"),
    metric(
        "rate_vs_nodes",
        ">= 0.99 of the best",
        "the port is slower than the same port of other nodes, or down: every collective runs at the rate of the "
        "slowest port",
        _LINK_FIX,
        when=_SEVERAL_NODES,
        finding=FindingTemplate(
            title="RDMA ports of a node are slow or down", first_command="on {node}: ibstat; mlxlink -d DEVICE -m -c"
        ),
    ),
    # FAIL only in a trial of one node with three or more ports. With several nodes, the rule on rate_vs_nodes FAILs
    # instead. With two ports, a difference does not show which one is at fault
    metric(
        "rate_vs_node_ports",
        ">= 0.99 of the best",
        "the port is slower than the other compute ports of its node, or down",
        _LINK_FIX,
        when=f"{_ONE_NODE} and three_or_more_ports == yes",
        also=(rule(">= 0.99 of the best", outcome=Outcome.WARN),),
    ),
    metric(
        "active_ports",
        ">= 1 ports",
        "no compute port of the node is ACTIVE: NCCL has only TCP sockets between nodes",
        "run ibstat and ibdev2netdev. All ports Polling: cables or switch; INIT: no subnet manager (sminfo); no "
        "device: lspci | grep -i mellanox, modprobe mlx5_ib, dmesg | grep mlx5",
        when=_SEVERAL_NODES,
        also=(rule(">= 1 ports", outcome=Outcome.WARN, when=_ONE_NODE),),
    ),
    metric(
        "ports_missing",
        "== 0 ports",
        "the node has fewer compute ports than other nodes with the same NIC model: a NIC is not on the PCI bus, its "
        "driver is not loaded, or its link layer is another one",
        "compare lspci | grep -i mellanox and ibstat with those of a good node; dmesg | grep mlx5; mlxconfig -d DEVICE "
        "query LINK_TYPE_P1",
        when=_SEVERAL_NODES,
    ),
    metric(
        "ports_unreadable",
        "== 0 ports",
        "state or rate of a compute port could not be read",
        "compare with ibstat on the node; in a container /sys/class/infiniband may be masked",
        outcome=Outcome.ERROR,
    ),
    warning(
        "nic_models",
        "<= 1 models",
        "the compute ports are of different NIC models: the slowest one limits all nodes",
        "test the nodes of each model on their own, or list the compute ports in NCCL_IB_HCA",
        when=_SEVERAL_NODES,
    ),
    warning(
        "rate_vs_maximum",
        ">= 99 %",
        "the link runs below the fastest mode that the NIC supports",
        "ethtool INTERFACE (supported and advertised modes); then the cable or transceiver and the switch port",
        # a NIC on a switch of the next lower rate may be intended
    ),
    warning(
        "pci_bandwidth",
        ">= 100 %",
        "the PCIe link of the NIC is slower than its port",
        "lspci -vv -s ADDRESS | grep -e LnkCap -e LnkSta on the NIC and on its slot: reseat the NIC or its riser if "
        "the link is narrower or slower than both support. If it stays so, replace the riser, then the NIC",
        may_exceed_100=True,
        cause=Cause(
            id="port_pci_slow",
            place="port",
            explains=_EXPLAINS,
            first_command="cat /sys/class/infiniband/{port}/device/current_link_speed "
            "/sys/class/infiniband/{port}/device/current_link_width",
            action="replace-hardware",
        ),
    ),
    metric(
        "gid_usable",
        "yes",
        "the RoCE port has no routable RoCE v2 GID at the index that NCCL uses: connections fail or time out",
        "run show_gids on the node. If the interface has no IP address (ip addr), assign one. If the index is wrong, "
        "set NCCL_IB_GID_INDEX to the index of the RoCE v2 GID with an IPv4 address, or unset this variable (NCCL 2.21 "
        "and newer choose the index themselves). If NCCL should use TCP, set NCCL_NET=Socket",
        when=_SEVERAL_NODES,
        also=(rule("yes", outcome=Outcome.WARN, when=_ONE_NODE),),
        cause=Cause(
            id="gid_unusable",
            place="port",
            explains=_EXPLAINS,
            wrong_results=True,
            first_command="grep -H . /sys/class/infiniband/{port}/ports/1/gid_attrs/types/* 2>/dev/null; "
            "env | grep NCCL_IB_GID_INDEX; ip -br address",
            action="fix-config",
        ),
    ),
    warning(
        "settings_differing",
        "== 0 components",
        "MTU or firmware of the RDMA port differs from most ports of its kind",
        "give all ports of this kind the same MTU (ip link show INTERFACE, and the switch port) and the same firmware "
        "(mlxfwmanager on the node)",
        per="port",
        cause=Cause(
            id="port_settings_differ",
            place="port",
            explains=_EXPLAINS,
            first_command="cat /sys/class/infiniband/{port}/fw_ver; "
            "ibv_devinfo -d {port} | grep -E 'fw_ver|active_mtu'",
            action="fix-config",
        ),
    ),
)
_check = partial(
    Check,
    phase=Phase.ENVIRONMENT,
    declared=_DECLARED,
    skip_if=(SkipIf.UNVERIFIED,),  # the record cannot show that there is no compute port
    limit_s=60,
)
CHECKS = (
    _check(
        name="fabric.ports",
        title="RDMA ports compared with each other and with their capabilities",
        scope=Scope.CLUSTER,
        measure=measure,
    ),
    _check(
        name="fabric.node_ports",
        title="RDMA ports of one node compared with each other",
        scope=Scope.NODE,
        measure=measure_node,
    ),
)
