"""Tests name resolution, TCP connections, clock skew and software versions between all nodes.

Also compares the network interface and the NCCL and Gloo environment variables of the nodes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options
from seatrial.checks.declare import Answers, absent, fact, metric, rule, value, warning
from seatrial.discover.file_readers import read_line, read_or_none
from seatrial.model import Fact, Outcome, Phase, Scope
from seatrial.util import resolver
from seatrial.util.grouping import grouped, majority
from seatrial.util.node_name import dns_name
from seatrial.util.text import printable

if TYPE_CHECKING:
    from seatrial.bench.connectivity import ConnectivityResult

Versions = dict[str, str | None]  # component → version; None: not installed or not readable

VARIABLE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
PER_NODE_VARIABLES = ("NCCL_DEBUG_FILE", "NCCL_HOSTID")  # not compared: different on each node by design
NOT_COMPARED = ("rendezvous", "interface")  # components of the fact network that differ between nodes by design


def measure(context: Context, _options: Options) -> Answers:
    """Yield from rank 0 unresolved names, unreachable pairs, clock skews in s, and differences between nodes."""
    from seatrial.bench import connectivity, group, one_rank_per_node

    participants = one_rank_per_node.select_participants(context.node)
    if not participants.several_nodes:
        if context.rank == 0:
            yield absent("*", "single node")
        return
    context.progress("comparing versions")
    nccl = group.nccl_version()
    versions = participants.run_on_all(lambda: read_versions(context.root, nccl))
    networks = participants.run_on_all(lambda: read_network(context.root, connectivity.local_address()))
    context.progress("connecting all pairs")
    result = connectivity.measure_connectivity(participants, dns_name(context.node), resolver.resolve)
    if context.rank == 0:
        nodes = participants.names
        answers = [
            *_unresolved_names(result),
            *_connections(result),
            *_clock_skews(result),
            *compare_versions(dict(zip(nodes, versions, strict=True))),
            *compare_networks(dict(zip(nodes, networks, strict=True))),
        ]
        yield from answers
        facts_by_name: dict[str, Any] = {each.name: each.value for each in answers if isinstance(each, Fact)}
        yield fact("fault_places", fault_places(result, facts_by_name))


def read_network(root: Path, address: str | None) -> dict[str, str]:
    """Component → value: the rendezvous address, the interface with ``address``, its MTU and its speed.

    NCCL's and Gloo's environment variables are components too.
    """
    from seatrial.discover import fabric

    network = {"rendezvous": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"}
    nic = next((nic for nic in fabric.read_nics(root).interfaces if address in nic.addresses), None)
    if nic:
        network["interface"] = f"{nic.name} ({address})"
        network |= {"MTU": f"{nic.mtu} B"} if nic.mtu else {}
        network |= {"speed": f"{nic.speed_mbit_s} Mb/s"} if nic.speed_mbit_s else {}
    for name, text in sorted(os.environ.items()):
        if name.startswith(VARIABLE_PREFIXES) and name not in PER_NODE_VARIABLES:
            network[name] = printable(text)
    return network


def read_versions(root: Path, nccl: str | None) -> Versions:
    """Component → version. ``nccl``: the version in use; NCCL libraries of the system are listed by path."""
    from seatrial.discover import host, software

    installed = software.read(root)
    return {
        "OS": read_or_none(lambda: host.release_name(root)),
        "kernel": read_or_none(lambda: read_line(root / "proc/sys/kernel/osrelease")),
        "architecture": platform.machine(),
        "driver": installed.driver,
        "CUDA of torch": installed.cuda,
        "NCCL in use": nccl,
        "Python": installed.python,
        "seatrial": installed.seatrial,
        **{name: version for name, version in installed.nccl.items() if name.startswith("/")},
        **installed.packages,
    }


def _unresolved_names(result: ConnectivityResult) -> Answers:
    from seatrial.bench.one_rank_per_node import group_by_text

    problems: dict[str, dict[str, str]] = {}  # name → node that cannot resolve it → reason
    for node, lookups in result.lookups.items():
        for name, lookup in lookups.items():
            if lookup.problem:
                problems.setdefault(name, {})[f"on {node}"] = lookup.problem
    unresolved = {name: group_by_text(by_node) for name, by_node in problems.items()}
    yield value("names_unresolved", len(problems), evidence={"unresolved": unresolved})


def _connections(result: ConnectivityResult) -> Answers:
    unreachable: dict[str, str] = {}  # pair → error
    round_trips: dict[str, dict[str, float]] = {}  # source → target → us
    for source, connections in result.connections.items():
        for target, connection in connections.items():
            if isinstance(connection, str):
                unreachable[f"{source}->{target}"] = connection
            else:
                round_trips.setdefault(source, {})[target] = round(connection.round_trip * 1e6, 1)
    yield fact("rtt_us", round_trips)
    yield value("pairs_unreachable", len(unreachable), evidence={"unreachable": unreachable})
    for source, by_target in round_trips.items():
        yield value("rtt", list(by_target.values()), source)


def _clock_skews(result: ConnectivityResult) -> Answers:
    """Yield the smallest possible skew between each clock and that of the first node, in seconds.

    This is the measured offset minus its uncertainty, at least 0.
    """
    from seatrial.bench.connectivity import Connection

    first_node, *other_nodes = result.connections
    for node in other_nodes:
        forward, backward = result.connections[first_node][node], result.connections[node][first_node]
        connection, sign = (forward, 1) if isinstance(forward, Connection) else (backward, -1)
        if isinstance(connection, Connection):
            offset, uncertainty = sign * connection.clock_offset, connection.clock_uncertainty
            text = f"{offset:+.6f} s relative to {first_node}, ± {uncertainty:.6f} s"
            yield value("clock_skew", max(0.0, abs(offset) - uncertainty), node, evidence=text)
        else:
            yield absent("clock_skew", f"no connection to {first_node}, which is a fault of its own", node)


def compare_versions(by_node: Mapping[str, Versions]) -> Answers:
    """Yield the components whose versions differ, and the nodes without the version of the majority.

    A majority is more than half of all nodes.
    """
    components = dict.fromkeys(component for versions in by_node.values() for component in versions)
    differing, minority = _differences(
        {
            component: {node: versions.get(component) or "none" for node, versions in by_node.items()}
            for component in components
        }
    )
    first = next(iter(by_node.values()))
    yield fact("versions", {name: first.get(name) for name in components if name not in differing})
    yield fact("nodes_differing", minority)
    yield value("versions_differing", len(differing), evidence={"version_differences": differing})
    yield value("nodes_differing", len(minority), evidence={"nodes_differing": minority})


def compare_networks(by_node: Mapping[str, Mapping[str, str]]) -> Answers:
    """Yield the components whose values differ between nodes; a missing MTU or speed is not a difference.

    Also yields the nodes without the value of the majority (more than half of the nodes that have a value), and the
    nodes whose interface could not be read. ``by_node``: node → result of ``read_network``.
    """
    components = dict.fromkeys(component for network in by_node.values() for component in network)
    differing, minority = _differences(
        {
            component: {
                node: network.get(component, "not set")
                for node, network in by_node.items()
                if component in network or component.startswith(VARIABLE_PREFIXES)
            }
            for component in components
            if component not in NOT_COMPARED
        }
    )
    yield fact("network", by_node)
    yield fact("network_minority", minority)
    yield value("network_differing", len(differing), evidence={"network_differing": differing})
    unreadable = [node for node, network in by_node.items() if "MTU" not in network]
    yield value("interfaces_unreadable", len(unreadable), evidence=unreadable)


def _differences(
    values: Mapping[str, Mapping[str, str]],
) -> tuple[dict[str, JsonValue], dict[str, dict[str, str]]]:
    """The components with different values: component → value → nodes, and node → component → "value, majority: value".

    ``values``: component → node → value. The second result has the nodes without the value of the majority.
    """
    differing: dict[str, JsonValue] = {}
    minority: dict[str, dict[str, str]] = {}
    for component, by_node in values.items():
        most_common = majority(by_node.values())
        if len(set(by_node.values())) > 1:
            differing[component] = dict(grouped((text, node) for node, text in by_node.items()))
        for node, text in by_node.items():
            if most_common is not None and text != most_common:
                minority.setdefault(node, {})[component] = f"{text}, majority: {most_common}"
    return differing, minority


def fault_places(
    result: ConnectivityResult, facts_by_name: Mapping[str, Mapping[str, Mapping[str, str]]]
) -> dict[str, dict[str, list[str]]]:
    """Metric → node or pair at fault → the names, nodes or components that are wrong there.

    Metrics whose fault cannot be located are left out. A node is not at fault for a name that no node resolves, unless
    it fails to resolve another name too. ``facts_by_name`` has ``nodes_differing`` and ``network_minority``.
    """
    unresolved_by_node = {
        node: [name for name, lookup in lookups.items() if lookup.problem] for node, lookups in result.lookups.items()
    }
    unresolved_everywhere = set.intersection(*map(set, unresolved_by_node.values()))
    unreachable_pairs = [
        (source, target)
        for source, connections in result.connections.items()
        for target, error in connections.items()
        if isinstance(error, str)
    ]
    components_by_node = {node: list(versions) for node, versions in facts_by_name["nodes_differing"].items()}
    places = {
        "names_unresolved": {
            node: names for node, names in unresolved_by_node.items() if set(names) - unresolved_everywhere
        },
        "pairs_unreachable": _place_of_pairs(unreachable_pairs),
        "versions_differing": components_by_node,
        "nodes_differing": components_by_node,
        "network_differing": {node: list(settings) for node, settings in facts_by_name["network_minority"].items()},
    }
    return {name: by_place for name, by_place in places.items() if by_place}


def _place_of_pairs(pairs: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Place → unreachable nodes; empty if the fault has no single place.

    The place is the only unreachable pair, or the node that is in all ``pairs``.
    """
    if len({frozenset(pair) for pair in pairs}) == 1:
        return {f"{pairs[0][0]}->{pairs[0][1]}": [pairs[0][1]]}
    common = set.intersection(*map(set, pairs)) if pairs else set[str]()
    return {node: sorted({*chain(*pairs)} - {node}) for node in common}


CHECK = Check(
    name="nodes.connectivity",
    title="Name resolution, connections, clocks, versions and interfaces of all nodes",
    fact_roles={
        "node_settings": "network",
        "setting_differences": "network_minority",
        "version_differences": "nodes_differing",
        "fault_places": "fault_places",
    },
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    measure=measure,
    limit_s=120,
    declared=(
        metric(
            "names_unresolved",
            "== 0 names",
            "The name of a node or of its pod does not resolve, or resolves to a loopback address: rendezvous, Gloo, "
            "MPI and ssh cannot reach the node.",
            "On the node that is named: getent ahosts NAME; add the name to DNS or to /etc/hosts of every node, and "
            "remove it from the line of 127.0.0.1 or 127.0.1.1. Names of pods: kubectl get pods -n kube-system -l "
            "k8s-app=kube-dns; kubectl get networkpolicies (DNS, port 53).",
            cause=Cause(
                id="names_unresolved",
                title="nodes cannot resolve each other's names",
                place="cluster",
                wrong_results=True,
                explains=("nodes.*", "collectives.*", "train.*"),
                signatures=("host.name_resolution",),
                first_command="getent ahosts {names}; cat /etc/hosts /etc/resolv.conf",
                action="fix-config",
            ),
        ),
        metric(
            "pairs_unreachable",
            "== 0 pairs",
            "TCP connections between nodes fail; NCCL and Gloo need them between all nodes, on ephemeral ports.",
            "Connection refused or no answer: check the firewall (iptables -L -n; nft list ruleset), and security "
            "groups, which must allow all ports between nodes. No route: ip route get ADDRESS.",
            cause=Cause(
                id="pairs_unreachable",
                title="nodes cannot open TCP connections to each other",
                place="cluster",
                wrong_results=True,
                explains=("nodes.*", "collectives.*", "train.*"),
                signatures=("host.unreachable",),
                first_command="ip -br address; ip route; iptables -S | head",
                action="fix-config",
            ),
        ),
        metric("rtt", unit="us", meaning="round-trip time of TCP to other nodes"),
        metric(
            "clock_skew",
            # Lifetime of a munge credential (munge(1), --ttl) and maximum skew of Kerberos (krb5.conf(5), clockskew)
            "< 300 s",
            "Munge, and with it Slurm, and Kerberos reject credentials from a node with this skew to the first node.",
            "On the node: chronyc tracking (or timedatectl timesync-status); then: timedatectl set-ntp true, or "
            "systemctl enable --now chrony, with the same time servers on all nodes.",
            also=(
                # As Ceph does (mon_clock_drift_allowed): NTP keeps clocks within milliseconds
                rule(
                    "< 0.05 s",
                    "Clock not synchronized (NTP keeps clocks within milliseconds): logs of several nodes cannot be "
                    "ordered, and files have modification times in the future.",
                    outcome=Outcome.WARN,
                ),
            ),
            per="other node",
            cause=Cause(
                id="clock_skew",
                title="the clocks of nodes differ",
                place="node",
                wrong_results=True,
                report_warning=True,
                explains=("slurm.*", "nodes.*"),
                signatures=("host.clock",),
                first_command="timedatectl; chronyc tracking",
                action="fix-config",
            ),
        ),
        warning(
            "versions_differing",
            "== 0 components",
            "Software versions differ between nodes: results may differ, or processes fail on incompatible protocols.",
            "Install the same image, container or environment on all nodes.",
        ),
        metric(
            "nodes_differing",
            "== 0 nodes",
            "These nodes have other software versions than the majority of nodes.",
            "Reinstall these nodes.",
        ),
        warning(
            "network_differing",
            "== 0 components",
            "Network settings differ between nodes. MTU: large messages hang although ping works. Speed: the slowest "
            "port limits all nodes. NCCL or Gloo variables: ranks choose different interfaces or transports.",
            "Fact network has the interface of each node. MTU and speed: ip link show DEV; ethtool DEV; then the "
            "switch port. Variable: set it once for the whole job (environment.source), and search for it in shell "
            "profiles and in the TaskProlog.",
        ),
        warning(
            "interfaces_unreadable",
            "== 0 nodes",
            "Interface and MTU of the connection to the first node could not be read on these nodes.",
            "On the node: ip route get MASTER_ADDR (see fact network). If its name resolves to a loopback address, see "
            "names_unresolved. In a container /sys/class/net may be hidden.",
        ),
    ),
)
