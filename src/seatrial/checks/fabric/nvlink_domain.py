"""Tests that the GPUs of all nodes are in the expected NVLink domains, on systems with NVLink between nodes (NVL72).

The GPUs of a domain reach each other over NVLink; NVML identifies a domain by a cluster UUID and a clique. On systems
without NVLink between nodes, GPUs have no cluster UUID.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from seatrial.checks.check import Check, Context, Needs, Options
from seatrial.checks.declare import Answers, absent, fact, value, warning
from seatrial.discover import nvml
from seatrial.model import Phase, Scope
from seatrial.util.grouping import grouped

MAX_GPUS = 72  # largest NVLink domain: GB200 and GB300 NVL72 (nvidia.com/en-us/data-center/gb200-nvl72)


def measure(context: Context, _options: Options) -> Answers:
    """Yield from rank 0 the NVLink domains of all GPUs, and the metrics of ``compare``."""
    from seatrial.bench import rank

    fabric = None if context.nvml_index is None else nvml.read_fabric(context.nvml_index)
    domains = dict(rank.gather((context.subject, fabric.domain if fabric else "")))
    if context.rank == 0:
        yield from compare(domains)


def compare(domains: Mapping[str, str]) -> Answers:
    """Yield the domains as a fact, and three counts: GPUs in no domain, nodes in several domains, domains too many.

    ``domains``: subject of the GPU → its domain; an empty text if the GPU is in no domain.
    """
    # a dict of domains and nodes: each pair once
    pairs = dict.fromkeys((domain, subject.partition("/")[0]) for subject, domain in domains.items())
    nodes_by_domain = grouped(pair for pair in pairs if pair[0])
    domains_by_node = grouped((node, domain) for domain, node in pairs)
    without_domain = [subject for subject, domain in domains.items() if not domain]
    split_nodes = [node for node, node_domains in domains_by_node.items() if len({*node_domains} - {""}) > 1]
    # The rules apply if a domain spans nodes. GPUs in no domain (HGX boards) or in domains of one node have no NVLink
    # between nodes. On a trial of a single node, the rules check whether its GPUs are in one domain.
    spans_nodes = any(len(nodes) > 1 for nodes in nodes_by_domain.values())
    rules_apply = spans_nodes or (len(domains_by_node) == 1 and bool(nodes_by_domain))
    yield fact("domains", nodes_by_domain)
    if not rules_apply:
        yield absent("*", "the GPUs are in no NVLink domain (cluster UUID and clique) across nodes")
        return
    yield value("gpus_without_domain", len(without_domain), evidence=without_domain)
    yield value("split_nodes", len(split_nodes), evidence={"nodes": split_nodes, "domains": nodes_by_domain})
    required_domains = math.ceil(len(domains) / MAX_GPUS)
    yield value("additional_domains", max(0, len(nodes_by_domain) - required_domains), evidence=nodes_by_domain)


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
    declared=(
        warning(
            "gpus_without_domain",
            "== 0 GPUs",
            "These GPUs are in no NVLink domain although others are: they reach other nodes over RDMA only.",
            _FIX,
        ),
        warning(
            "split_nodes",
            "== 0 nodes",
            "GPUs of one node are in different NVLink domains and have no NVLink between them.",
            _FIX,
        ),
        warning(
            "additional_domains",
            "== 0",
            f"The nodes are in more NVLink domains than their number of GPUs needs ({MAX_GPUS} fit into one): traffic "
            "between domains uses RDMA. A node alone in its domain is misconfigured or in another rack.",
            f"{_FIX}. If the nodes are in several racks on purpose, ignore this",
            unit="count",
        ),
    ),
    measure=measure,
    limit_s=60,
)
