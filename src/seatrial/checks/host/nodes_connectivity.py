"""Do the nodes know each other by name, reach each other by TCP, agree on the time, and run the same software?

Also: over which interface, and by which variables of NCCL and Gloo, does each of them talk?
"""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.checks.base import Check, Context, Options, metric
from seatrial.discover import fabric, host, software
from seatrial.discover.file_readers import FieldReader, printable, read_line, read_text
from seatrial.model import Fact, Observation, Outcome, Phase, Rule, Scope

if TYPE_CHECKING:
    from seatrial.bench.connectivity import ConnectivityResult

Versions = dict[str, str | None]  # component → version; None where it is not there, or could not be read

VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
EACH_ITS_OWN = ("NCCL_DEBUG_FILE", "NCCL_HOSTID")
SAID_ONLY = ("rendezvous", "interface")  # may be called otherwise on each node


def measure(context: Context, options: Options) -> Iterator[Observation]:
    from seatrial.bench import connectivity as links
    from seatrial.bench import one_rank_per_node

    actors = one_rank_per_node.select_participants(context.node)
    if context.rank == 0:
        yield Fact(name="several_nodes", value="yes" if actors.several_nodes else "no")
    if not actors.several_nodes:
        return
    context.progress("comparing versions")
    nccl = one_rank_per_node.nccl_version()
    versions = actors.run_on_all(lambda: read_versions(context.root, nccl))
    networks = actors.run_on_all(lambda: read_network(context.root, links.local_address()))
    context.progress("connecting all pairs")
    found = links.measure_connectivity(actors, host.resolve)
    if context.rank == 0:
        yield from _names(actors.names, found)
        yield from _pairs(actors.names, found)
        yield from _clocks(actors.names, found)
        yield from compare_versions(dict(zip(actors.names, versions, strict=True)))
        yield from compare_networks(dict(zip(actors.names, networks, strict=True)))


def read_network(root: Path, address: str | None) -> dict[str, str]:
    """How this node talks: where it meets the others, by the interface with which address, and told what."""
    met = {"rendezvous": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"}
    if way := next((nic for nic in fabric.read_nics(root).interfaces if address in nic.addresses), None):
        known = {"MTU": way.mtu and f"{way.mtu} B", "speed": way.speed_mbps and f"{way.speed_mbps} Mb/s"}
        met |= {"interface": f"{way.name} ({address})", **{name: value for name, value in known.items() if value}}
    told = {name: printable(value) for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return met | {name: value for name, value in told.items() if name not in EACH_ITS_OWN}


def read_versions(root: Path, nccl: str | None) -> Versions:
    """What this node runs. ``nccl`` is the version that carries the group; libraries of the system go by their path."""
    attempt, found = FieldReader(), software.read(root)
    return {
        "OS": attempt("OS", lambda: _os_name(root)),
        "kernel": attempt("kernel", lambda: read_line(root / "proc/sys/kernel/osrelease")),
        "architecture": platform.machine(),
        "driver": found.driver,
        "CUDA of torch": found.cuda,
        "NCCL in use": nccl,
        "Python": found.python,
        "seatrial": found.seatrial,
        **{name: version for name, version in found.nccl.items() if name.startswith("/")},
        **found.packages,
    }


def _os_name(root: Path) -> str:
    found = re.search(r"^PRETTY_NAME=[\"']?(.*?)[\"']?$", read_text(root / "etc/os-release"), re.MULTILINE)
    if not found:
        raise ValueError("/etc/os-release has no PRETTY_NAME")
    return printable(found[1])


def _names(names: Sequence[str], found: ConnectivityResult) -> Iterator[Observation]:
    from seatrial.bench.one_rank_per_node import group_by_reason

    problems: dict[str, dict[str, str]] = {}
    for asker, lookups in zip(names, found.lookups, strict=True):
        for name, lookup in lookups.items():
            if lookup.problem:
                problems.setdefault(name, {})[f"on {asker}"] = lookup.problem
    yield Fact(name="unresolved", value={name: group_by_reason(where) for name, where in problems.items()})
    yield metric("names_unresolved", len(problems), "names")


def _pairs(names: Sequence[str], found: ConnectivityResult) -> Iterator[Observation]:
    unreachable: dict[str, str] = {}
    round_trips: dict[str, dict[str, float]] = {}
    for source, links in zip(names, found.connections, strict=True):
        for target, link in links.items():
            if isinstance(link, str):
                unreachable[f"{source}->{target}"] = link
            else:
                round_trips.setdefault(source, {})[target] = round(link.round_trip * 1e6, 1)
    yield Fact(name="unreachable", value=dict(unreachable))
    yield Fact(name="rtt_us", value={source: dict(those) for source, those in round_trips.items()})
    yield metric("pairs_unreachable", len(unreachable), "pairs")
    for source, those in round_trips.items():
        yield metric("rtt", list(those.values()), "us", source)


def _clocks(names: Sequence[str], found: ConnectivityResult) -> Iterator[Observation]:
    """How far each clock is from the first node's beyond doubt: a slow link makes doubt, not skew."""
    from seatrial.bench.connectivity import Connection

    first, clocks = names[0], dict[str, str]()
    for index, name in enumerate(names[1:], 1):
        there, back = found.connections[0][name], found.connections[index][first]
        link, sign = (there, 1) if isinstance(there, Connection) else (back, -1)
        if isinstance(link, Connection):
            clocks[name] = f"{sign * link.clock_offset:+.6f} s against {first}, to ± {link.clock_uncertainty:.6f} s"
            yield metric("clock_skew", max(0.0, abs(link.clock_offset) - link.clock_uncertainty), "s", name)
    yield Fact(name="clocks", value=dict(clocks))


def compare_versions(by_node: Mapping[str, Versions]) -> Iterator[Observation]:
    """What differs, with all its versions, and who is odd where most agree. Two nodes cannot outvote each other."""
    components = dict.fromkeys(component for versions in by_node.values() for component in versions)
    common, differing = dict[str, str | None](), dict[str, dict[str, list[str]]]()
    odd: dict[str, dict[str, str]] = {}
    for component in components:
        values = {node: versions.get(component) for node, versions in by_node.items()}
        most, count = Counter(values.values()).most_common(1)[0]
        if count == len(values):
            common[component] = most
            continue
        shown = {node: value or "none" for node, value in values.items()}
        differing[component] = by_value(shown)
        if 2 * count > len(values):
            for node in (node for node, value in values.items() if value != most):
                odd.setdefault(node, {})[component] = f"{shown[node]}, most have {most or 'none'}"
    yield Fact(name="versions", value=dict(common))
    yield Fact(name="differing", value={name: dict(those) for name, those in differing.items()})
    yield Fact(name="nodes_differing", value={node: dict(those) for node, those in odd.items()})
    yield metric("versions_differing", len(differing), "components")
    yield metric("nodes_differing", len(odd), "nodes")


def compare_networks(by_node: Mapping[str, Mapping[str, str]]) -> Iterator[Observation]:
    """What differs, with all its values. An MTU or a speed that some node does not tell is no difference."""
    components = dict.fromkeys(component for said in by_node.values() for component in said)
    differing: dict[str, dict[str, list[str]]] = {}
    for component in (one for one in components if one not in SAID_ONLY):
        if component.startswith(VARIABLES):
            values = {node: said.get(component, "not set") for node, said in by_node.items()}
        else:
            values = {node: said[component] for node, said in by_node.items() if component in said}
        if len(set(values.values())) > 1:
            differing[component] = by_value(values)
    yield Fact(name="network", value={node: dict(said) for node, said in by_node.items()})
    yield Fact(name="network_differing", value={name: dict(those) for name, those in differing.items()})
    yield metric("network_differing", len(differing), "components")
    unknown = [node for node, said in by_node.items() if "MTU" not in said]
    yield Fact(name="interfaces_unreadable", value=list(unknown))
    yield metric("interfaces_unreadable", len(unknown), "nodes")


def by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Each value with its nodes."""
    return {value: [node for node in values if values[node] == value] for value in values.values()}


SEVERAL = {"several_nodes": "yes"}
CLOCK_FIX = (
    "The fact clocks says by how much, against the first node. On that node: chronyc tracking (or timedatectl timesync-"
    "status); then: timedatectl set-ntp true, or systemctl enable --now chrony, with the same servers on all nodes."
)

RULES = (
    Rule(
        metric="names_unresolved",
        evidence_facts=("unresolved",),
        expect="== 0 names",
        applies_if=SEVERAL,
        meaning="Rendezvous, Gloo, MPI and ssh find other nodes by name: a name that resolves nowhere, or to a loopback "
        "address, leads to no node.",
        fix="The fact unresolved says which name, on which node. There: getent ahosts NAME; put it in DNS or in "
        "/etc/hosts of every node, and take it off the line of 127.0.0.1 or 127.0.1.1.",
    ),
    Rule(
        metric="pairs_unreachable",
        evidence_facts=("unreachable",),
        expect="== 0 pairs",
        applies_if=SEVERAL,
        meaning="NCCL and Gloo open TCP connections between all nodes, on ports that the system chooses.",
        fix="The fact unreachable says from where, to where and how it failed. Connection refused, or no answer: "
        "look for a firewall (iptables -L -n; nft list ruleset), which must let nodes talk on all ports. No route: "
        "ip route get ADDRESS.",
    ),
    # Two rules on one number. Beyond 300 s nothing authenticates: that is the life of a credential of munge
    # (munge(1), --ttl) and the skew that Kerberos allows (krb5.conf(5), clockskew). A node that is kept in time by NTP
    # is milliseconds off; Ceph warns from 0.05 s on (mon_clock_drift_allowed), and so do we.
    Rule(
        metric="clock_skew",
        evidence_facts=("clocks",),
        expect="< 300 s",
        applies_if=SEVERAL,
        meaning="Munge, and with it Slurm, and Kerberos refuse credentials that seem to be of another time.",
        fix=CLOCK_FIX,
    ),
    Rule(
        metric="clock_skew",
        evidence_facts=("clocks",),
        expect="< 0.05 s",
        outcome_if_violated=Outcome.WARN,
        applies_if=SEVERAL,
        meaning="Clocks that time servers keep differ by milliseconds. With more, logs of several nodes cannot be put in "
        "order, and files seem to be written in the future.",
        fix=CLOCK_FIX,
    ),
    Rule(
        metric="versions_differing",
        evidence_facts=("differing",),
        expect="== 0 components",
        outcome_if_violated=Outcome.WARN,
        applies_if=SEVERAL,
        meaning="A job runs on all nodes alike: with other libraries on some of them it computes something else there, "
        "or dies of a message of a version that it does not know.",
        fix="The fact differing names the component, its versions and their nodes: install one image, container or "
        "environment on all nodes.",
    ),
    Rule(
        metric="nodes_differing",
        evidence_facts=("nodes_differing",),
        expect="== 0 nodes",
        applies_if=SEVERAL,
        meaning="These nodes run something else than the majority: they were not set up like the others.",
        fix="The fact nodes_differing says what each has, and what most have: set these nodes up anew.",
    ),
    Rule(
        metric="network_differing",
        evidence_facts=("network_differing",),
        expect="== 0 components",
        outcome_if_violated=Outcome.WARN,
        applies_if=SEVERAL,
        meaning="Where some nodes send larger frames than others take, large messages hang while ping answers; a slower "
        "port slows all; and a rank with other variables of NCCL or Gloo looks for its peers on another interface or "
        "transport.",
        fix="The fact network_differing says what differs, and where; network has the interface of each node. MTU "
        "and speed: ip link show DEV; ethtool DEV; then the port of the switch. A variable: set it once, for the whole "
        "job (environment.source), and look for it in the nodes' profiles and in the TaskProlog.",
    ),
    Rule(
        metric="interfaces_unreadable",
        evidence_facts=("interfaces_unreadable",),
        expect="== 0 nodes",
        outcome_if_violated=Outcome.WARN,
        applies_if=SEVERAL,
        meaning="Of these nodes nobody can say over which interface, and with which MTU, they talk to the first one.",
        fix="On the node: ip route get MASTER_ADDR (the fact network has it); a name that resolves to a loopback "
        "address there is told as names_unresolved. In a container /sys/class/net may be hidden.",
    ),
)


CHECK = Check(
    name="nodes.connectivity",
    title="Names, connections, clocks, versions and interfaces across nodes",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    metrics={
        "names_unresolved": "names",
        "pairs_unreachable": "pairs",
        "rtt": "us",
        "clock_skew": "s",
        "versions_differing": "components",
        "nodes_differing": "nodes",
        "network_differing": "components",
        "interfaces_unreadable": "nodes",
    },
    rules=RULES,
    measure=measure,
    limit_s=120,
)
