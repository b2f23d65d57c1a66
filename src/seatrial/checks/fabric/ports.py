"""The RDMA ports of all nodes: rate, state, GID, MTU, firmware. Each is compared with other ports and its capabilities.

Only compute ports are judged: the ports that NCCL should use (_compute_ports.py selects them). A port is compared with
the port of the same name on other nodes, and with the other compute ports of its node. Its rate is compared with the
fastest link mode that ethtool lists, and with the rate of its PCI link. A port that is not ACTIVE counts with a rate of
0, since its sysfs file ``rate`` then contains only the lowest rate of the link, such as 10 Gb/sec (4X SDR).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from seatrial.checks.base import Check, Context, Options, RuleFact, SkipIf, facts, metric
from seatrial.checks.declare import FindingTemplate
from seatrial.checks.fabric._compute_ports import (
    ComputePorts,
    kind_text,
    port_names,
    read_node_ports,
    select_compute_ports,
)
from seatrial.model import (
    PORTS_USED,
    Fact,
    NotApplicable,
    Observation,
    Outcome,
    Phase,
    Rule,
    Scope,
)


def measure(context: Context, options: Options) -> Iterator[Observation]:
    """Yield on one rank per node the ports of its node, and on rank 0 the comparison of the compute ports of all nodes.

    Raises NotApplicable without a compute port, and ParticipantError if the ports of a node cannot be read.
    """
    from seatrial.bench import one_rank_per_node

    participants = one_rank_per_node.select_participants(context.node)
    context.progress("reading RDMA ports")
    by_node = dict(zip(participants.names, participants.run_on_all(lambda: read_node_ports(context.root)), strict=True))
    if participants.index >= 0:  # this rank has read the ports of its node
        node_ports = by_node[participants.names[participants.index]].ports
        yield Fact(name="ports", value=[port.model_dump(mode="json") for port in node_ports])
    compute = select_compute_ports(by_node)
    if compute.absence_reason:
        raise NotApplicable(compute.absence_reason)
    if context.rank == 0:
        yield from facts({"not_compute_ports": dict(compute.others), PORTS_USED: port_names(compute)})
        yield from compare_ports(compute, {node: node_ports.gid_index for node, node_ports in by_node.items()})


def compare_ports(compute: ComputePorts, gid_index_by_node: Mapping[str, int | None]) -> Iterator[Observation]:
    """Yield rates, states and settings of the compute ports, and their comparison over nodes and on each node.

    ``gid_index_by_node``: node → its NCCL_IB_GID_INDEX; None if this variable is unset or negative.
    """
    by_node = compute.by_node
    ports_with_rate = [port for _, port in compute if port.rate_gbps]
    roce_ports = [(node, port) for node, port in compute if port.link_layer == "Ethernet"]
    yield from facts(
        {
            "several_nodes": "yes" if len(by_node) > 1 else "no",
            "three_or_more_ports": "yes" if min(map(len, by_node.values())) > 2 else "no",
            "any_active": "yes" if ports_with_rate else "no",
            "roce": "yes" if roce_ports else "no",
            "capability_known": "yes" if any(port.capability_gbps is not None for port in ports_with_rate) else "no",
            "pci_link_known": "yes" if any(port.pci_gbps is not None for port in ports_with_rate) else "no",
            "compute_ports": {
                node: dict(Counter(f"{kind_text(port.kind)}, {port.rate}" for port in ports))
                for node, ports in by_node.items()
            },
        }
    )
    yield from _state_observations(compute)
    yield from _rate_observations(compute)
    yield from _setting_differences(compute)
    unusable_gids: dict[str, str] = {}  # NODE/PORT → the setting and the GIDs of the port
    for node, port in roce_ports:
        subject, gid_index = f"{node}/{port.name}", gid_index_by_node[node]
        is_usable = port.roce_gid(gid_index) is not None
        yield metric("gid_usable", is_usable, "bool", subject)
        if not is_usable:
            gids = ", ".join(f"{gid.index}: {gid.type} {gid.address}" for gid in port.gids) or "no GID"
            setting = "NCCL_IB_GID_INDEX is not set" if gid_index is None else f"NCCL_IB_GID_INDEX={gid_index}"
            unusable_gids[subject] = f"{setting}; {gids}"
    yield Fact(name="gids_unusable", value=unusable_gids)


def _state_observations(compute: ComputePorts) -> Iterator[Observation]:
    """Yield the number of active, missing and unreadable ports of each node, and the number of NIC models."""
    # node → NIC model → number of the model's ports; the model is the first part of a port's kind
    counts_by_node = {node: Counter(port.kind[0] for port in ports) for node, ports in compute.by_node.items()}
    max_counts: Counter[str] = Counter()  # NIC model → largest number of its ports on one node
    for counts in counts_by_node.values():
        max_counts |= counts
    for node, ports in compute.by_node.items():
        yield metric("active_ports", sum(port.is_active for port in ports), "ports", node)
        counts = counts_by_node[node]
        # a node without any port should have the ports of the model that has the most ports on one node
        models = counts or dict(max_counts.most_common(1))
        yield metric("ports_missing", sum(max_counts[model] - counts[model] for model in models), "ports", node)
        yield metric("ports_unreadable", sum(port.rate_gbps is None for port in ports), "ports", node)
    yield metric("nic_models", len(max_counts), "models")
    yield Fact(
        name="unreadable",
        value={f"{node}/{port.name}": port.unreadable for node, port in compute if port.rate_gbps is None},
    )


def _rate_observations(compute: ComputePorts) -> Iterator[Observation]:
    """Yield each port's rate in Gb/s, and the ratios rate / fastest port, rate / capability and PCI link / rate.

    The fastest port can be the port itself.
    """
    best_rate_by_name: dict[str, float] = {}
    best_rate_by_node: dict[str, float] = {}
    for node, port in compute:
        best_rate_by_name[port.name] = max(best_rate_by_name.get(port.name, 0.0), port.rate_gbps or 0.0)
        best_rate_by_node[node] = max(best_rate_by_node.get(node, 0.0), port.rate_gbps or 0.0)
    slow_ports: dict[str, str] = {}
    for node, port in compute:
        subject, rate = f"{node}/{port.name}", port.rate_gbps
        if rate is None:  # counted by ports_unreadable
            continue
        yield metric("port_rate", rate, "Gb/s", subject)
        best_of_name, best_of_node = best_rate_by_name[port.name], best_rate_by_node[node]
        yield metric("rate_vs_nodes", rate / best_of_name if best_of_name else 0.0, "of the best", subject)
        yield metric("rate_vs_node_ports", rate / best_of_node if best_of_node else 0.0, "of the best", subject)
        if rate and port.capability_gbps:
            yield metric("rate_vs_maximum", 100 * rate / port.capability_gbps, "%", subject)
        if rate and port.pci_gbps:
            yield metric("pci_bandwidth", 100 * port.pci_gbps / rate, "%", subject)
        if not rate or rate < max(best_of_name, best_of_node):
            slow_ports[subject] = f"{port.state}, {port.physical_state}, {port.rate}"
    yield Fact(name="slow_ports", value=slow_ports)


def _setting_differences(compute: ComputePorts) -> Iterator[Observation]:
    """Yield for each port the number of settings (MTU, firmware) that differ from most ports of its kind."""
    differences: dict[str, dict[str, str]] = {}
    for kind in dict.fromkeys(port.kind for _, port in compute):
        ports_of_kind = {f"{node}/{port.name}": port for node, port in compute if port.kind == kind}
        for name in ("mtu", "active_mtu", "firmware"):
            values = {subject: getattr(port, name) for subject, port in ports_of_kind.items()}
            readable = {subject: value for subject, value in values.items() if value is not None}
            if readable:
                common, count = Counter(readable.values()).most_common(1)[0]
                text = f"{count} of {len(readable)} ports have {common}"
                for subject, value in readable.items():
                    if value != common:
                        differences.setdefault(subject, {})[name] = f"{value}; {text}"
    yield Fact(name="differences", value=dict(differences))
    for node, port in compute:
        subject = f"{node}/{port.name}"
        yield metric("settings_differing", len(differences.get(subject, ())), "components", subject)


SEVERAL_NODES, ONE_NODE = {"several_nodes": "yes"}, {"several_nodes": "no"}
# WARN on a single node: a training run on one node does not use the network
OUTCOMES_BY_CONDITION = ((SEVERAL_NODES, Outcome.FAIL), (ONE_NODE, Outcome.WARN))
LINK_FIX = (
    "Run mlxlink -d DEVICE -m -c on the node (speed, width, errors, cable), then compare the cable and the switch port "
    "with those of a good port. If the port is Polling, check the cable and the switch port. If the port is "
    "LinkUp but INIT, no subnet manager answers: run sminfo. If the port is not for compute, list the compute ports in "
    "NCCL_IB_HCA (env of the trial)."
)


def _rate_rules() -> Iterator[Rule]:
    yield Rule(
        metric="rate_vs_nodes",
        expect=">= 0.99 of the best",
        applies_if={**SEVERAL_NODES, "any_active": "yes"},
        evidence_facts=("slow_ports",),
        meaning="The port is slower than the same port of other nodes, or down. Every collective runs at the rate of "
        "the slowest port.",
        fix=LINK_FIX,
    )
    # This rule FAILs only in a trial of one node with three or more ports. With several nodes, the rule on
    # rate_vs_nodes FAILs instead. With two ports, a difference does not show which one is at fault
    for condition, outcome in (({**ONE_NODE, "three_or_more_ports": "yes"}, Outcome.FAIL), ({}, Outcome.WARN)):
        yield Rule(
            metric="rate_vs_node_ports",
            expect=">= 0.99 of the best",
            outcome_if_violated=outcome,
            applies_if={**condition, "any_active": "yes"},
            evidence_facts=("slow_ports",),
            meaning="The port is slower than the other compute ports of its node, or down.",
            fix=LINK_FIX,
        )


RULES = (
    *_rate_rules(),
    *(
        Rule(
            metric="active_ports",
            expect=">= 1 ports",
            outcome_if_violated=outcome,
            applies_if=condition,
            evidence_facts=("slow_ports",),
            meaning="No compute port of the node is ACTIVE: NCCL has only TCP sockets between nodes.",
            fix="Run ibstat and ibdev2netdev. All ports Polling: cables or switch; INIT: no subnet manager (sminfo); "
            "no device: lspci | grep -i mellanox, modprobe mlx5_ib, dmesg | grep mlx5.",
        )
        for condition, outcome in OUTCOMES_BY_CONDITION
    ),
    Rule(
        metric="ports_missing",
        expect="== 0 ports",
        applies_if=SEVERAL_NODES,
        evidence_facts=("compute_ports",),
        meaning="The node has fewer compute ports than other nodes with the same NIC model: a NIC is not on the PCI "
        "bus, its driver is not loaded, or its link layer is another one.",
        fix="Compare lspci | grep -i mellanox and ibstat with those of a good node; dmesg | grep mlx5; mlxconfig -d "
        "DEVICE query LINK_TYPE_P1",
    ),
    Rule(
        metric="ports_unreadable",
        expect="== 0 ports",
        outcome_if_violated=Outcome.ERROR,
        evidence_facts=("unreadable",),
        meaning="State or rate of a compute port could not be read.",
        fix="Compare with ibstat on the node; in a container /sys/class/infiniband may be masked.",
    ),
    Rule(
        metric="nic_models",
        expect="<= 1 models",
        outcome_if_violated=Outcome.WARN,
        applies_if=SEVERAL_NODES,
        evidence_facts=("compute_ports",),
        meaning="The compute ports are of different NIC models: the slowest one limits all nodes.",
        fix="Test the nodes of each model on their own, or list the compute ports in NCCL_IB_HCA.",
    ),
    Rule(
        metric="rate_vs_maximum",
        expect=">= 99 %",
        outcome_if_violated=Outcome.WARN,  # a NIC on a switch of the next lower rate may be intended
        applies_if={"capability_known": "yes"},
        meaning="The link runs below the fastest mode that the NIC supports.",
        fix="ethtool INTERFACE (supported and advertised modes); then the cable or transceiver and the switch port.",
    ),
    Rule(
        metric="pci_bandwidth",
        expect=">= 100 %",
        outcome_if_violated=Outcome.WARN,
        applies_if={"pci_link_known": "yes"},
        meaning="The PCI link of the NIC is slower than its port.",
        fix="lspci -vv -s ADDRESS | grep -e LnkCap -e LnkSta on the NIC and on its slot: reseat the card if the link "
        "is narrower or slower than both support.",
    ),
    *(
        Rule(
            metric="gid_usable",
            expect="== 1 bool",
            outcome_if_violated=outcome,
            applies_if={"roce": "yes", **condition},
            evidence_facts=("gids_unusable",),
            meaning="NCCL finds no RoCE v2 GID with a routable address at the index that it uses: connections fail or "
            "time out.",
            fix="Run show_gids on the node. If the interface has no IP address (ip addr), assign one. If the index is "
            "wrong, set NCCL_IB_GID_INDEX to the index of the RoCE v2 GID with an IPv4 address, or unset this variable "
            "(NCCL 2.21 and newer choose the index themselves). If NCCL should use TCP, set NCCL_NET=Socket.",
        )
        for condition, outcome in OUTCOMES_BY_CONDITION
    ),
    Rule(
        metric="settings_differing",
        expect="== 0 components",
        outcome_if_violated=Outcome.WARN,
        evidence_facts=("differences",),
        meaning="MTU or firmware differ from those of most ports of this kind.",
        fix="MTU: ip link show INTERFACE, and the switch port. Firmware: mlxfwmanager on the node.",
    ),
)


CHECK = Check(
    name="fabric.ports",
    title="RDMA ports compared with each other and with their capabilities",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    metrics={
        "port_rate": "Gb/s",
        "rate_vs_nodes": "of the best",
        "rate_vs_node_ports": "of the best",
        "active_ports": "ports",
        "ports_missing": "ports",
        "ports_unreadable": "ports",
        "nic_models": "models",
        "rate_vs_maximum": "%",
        "pci_bandwidth": "%",
        "gid_usable": "bool",
        "settings_differing": "components",
    },
    rules=RULES,
    rule_facts={
        "several_nodes": RuleFact(reason="several nodes: {}; this rule is for the other case"),
        "three_or_more_ports": RuleFact(reason="fewer than three ports: a difference does not show which one is slow"),
        "any_active": RuleFact(reason="no compute port is ACTIVE"),
        "roce": RuleFact(reason="InfiniBand ports need no RoCE v2 GID"),
        "capability_known": RuleFact(
            reason="unknown: no active port, or ethtool gave no value (it lists the modes of Ethernet ports only). On "
            "the node, as root: mlxlink -d DEVICE"
        ),
        "pci_link_known": RuleFact(reason="unknown: no active port, or sysfs gave no PCI link of a NIC"),
    },
    measure=measure,
    required_per={"settings_differing": "port"},
    may_exceed_100=("pci_bandwidth",),
    finding_templates={
        "rate_vs_nodes": FindingTemplate(
            title="RDMA ports of a node are slow or down", first_command="on {node}: ibstat; mlxlink -d DEVICE -m -c"
        ),
    },
    skip_if=(SkipIf.UNVERIFIED,),  # the record cannot show that there is no compute port
    limit_s=60,
)
