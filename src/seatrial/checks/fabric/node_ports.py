"""The RDMA ports of one node, compared with each other: fabric.ports for a single node, without torch."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Context, Options, SkipIf, facts
from seatrial.checks.fabric import ports
from seatrial.checks.fabric._compute_ports import read_node_ports, select_compute_ports
from seatrial.model import NotApplicable, Observation, Phase, Scope


def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Yield the comparison of the node's compute ports. Raises NotApplicable without a compute port."""
    context.progress("reading RDMA ports")
    node_ports = read_node_ports(context.root)
    compute = select_compute_ports({context.node: node_ports})
    if compute.absence_reason:
        raise NotApplicable(compute.absence_reason)
    yield from facts({"not_compute_ports": dict(compute.others)})
    yield from ports.compare_ports(compute, {context.node: node_ports.gid_index})


CHECK = Check(
    name="fabric.node_ports",
    title="RDMA ports of one node compared with each other",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    metrics=ports.CHECK.metrics,
    rules=ports.RULES,
    rule_facts=ports.CHECK.rule_facts,
    measure=measure,
    may_exceed_100=ports.CHECK.may_exceed_100,
    skip_if=(SkipIf.UNVERIFIED,),
    limit_s=60,
)
