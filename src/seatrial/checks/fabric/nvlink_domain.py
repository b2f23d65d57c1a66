"""Tests that the GPUs of all nodes are in the expected NVLink domains, on systems with NVLink between nodes (NVL72).

The GPUs of a domain reach each other over NVLink; NVML identifies a domain by a cluster UUID and a clique. On systems
without NVLink between nodes, GPUs have no cluster UUID.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from seatrial.checks.base import Check, Context, Needs, Options, RuleFact, facts, metric
from seatrial.discover import nvml
from seatrial.model import Observation, Outcome, Phase, Rule, Scope

MAX_GPUS = 72  # largest NVLink domain: GB200 and GB300 NVL72 (nvidia.com/en-us/data-center/gb200-nvl72)


def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Yield from rank 0 the NVLink domains of all GPUs, and the metrics of ``compare``."""
    from seatrial.bench import rank

    fabric = None if context.nvml_index is None else nvml.read_fabric(context.nvml_index)
    domains = dict(rank.gather((context.subject, fabric.domain if fabric else "")))
    if context.rank == 0:
        yield from compare(domains)


def compare(domains: Mapping[str, str]) -> Iterator[Observation]:
    """Yield the domains as facts, and three counts: GPUs in no domain, nodes in several domains, domains too many.

    ``domains``: subject of the GPU → its domain; an empty text if the GPU is in no domain.
    """
    nodes_by_domain: dict[str, list[str]] = {}
    domains_by_node: dict[str, set[str]] = {}
    for subject, domain in domains.items():
        node = subject.partition("/")[0]
        domains_by_node.setdefault(node, set()).add(domain)
        if domain and node not in nodes_by_domain.setdefault(domain, []):
            nodes_by_domain[domain].append(node)
    without_domain = [subject for subject, domain in domains.items() if not domain]
    split_nodes = [node for node, node_domains in domains_by_node.items() if len(node_domains - {""}) > 1]
    # The rules apply if a domain spans nodes. GPUs in no domain (HGX boards) or in domains of one node have no NVLink
    # between nodes. On a trial of a single node, the rules check whether its GPUs are in one domain.
    spans_nodes = any(len(nodes) > 1 for nodes in nodes_by_domain.values())
    rules_apply = spans_nodes or (len(domains_by_node) == 1 and bool(nodes_by_domain))
    yield from facts(
        {
            "nvlink_across_nodes": "yes" if rules_apply else "no",
            "domains": nodes_by_domain,
            "without_domain": without_domain,
            "split_nodes": split_nodes,
        }
    )
    if rules_apply:
        yield metric("gpus_without_domain", len(without_domain), "GPUs")
        yield metric("split_nodes", len(split_nodes), "nodes")
        required_domains = math.ceil(len(domains) / MAX_GPUS)
        yield metric("additional_domains", max(0, len(nodes_by_domain) - required_domains), "count")


_APPLIES_IF = {"nvlink_across_nodes": "yes"}
_FIX = (
    "nvidia-smi -q -i INDEX | grep -A8 Fabric on the nodes: CliqueId and ClusterUUID; on the NVLink switches: nv show "
    "sdn partition; systemctl status nvidia-imex"
)

CHECK = Check(
    name="fabric.nvlink_domain",
    title="NVLink domains across nodes: cluster UUID and clique of all GPUs",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    needs=Needs(gpus=True),
    metrics={"gpus_without_domain": "GPUs", "split_nodes": "nodes", "additional_domains": "count"},
    rules=(
        Rule(
            metric="gpus_without_domain",
            expect="== 0 GPUs",
            outcome_if_violated=Outcome.WARN,
            applies_if=_APPLIES_IF,
            evidence_facts=("without_domain",),
            meaning="These GPUs are in no NVLink domain although others are: they reach other nodes over RDMA only.",
            fix=_FIX,
        ),
        Rule(
            metric="split_nodes",
            expect="== 0 nodes",
            outcome_if_violated=Outcome.WARN,
            applies_if=_APPLIES_IF,
            evidence_facts=("split_nodes", "domains"),
            meaning="GPUs of one node are in different NVLink domains and have no NVLink between them.",
            fix=_FIX,
        ),
        Rule(
            metric="additional_domains",
            expect="== 0",
            outcome_if_violated=Outcome.WARN,
            applies_if=_APPLIES_IF,
            evidence_facts=("domains",),
            meaning=f"The nodes are in more NVLink domains than their number of GPUs needs ({MAX_GPUS} fit into one): "
            "traffic between domains uses RDMA. A node alone in its domain is misconfigured or in another rack.",
            fix=f"{_FIX}. If the nodes are in several racks on purpose, ignore this",
        ),
    ),
    rule_facts={
        "nvlink_across_nodes": RuleFact(
            reason="the GPUs are in no NVLink domain (cluster UUID and clique) across nodes"
        )
    },
    measure=measure,
    limit_s=60,
)
