"""Bandwidth between pairs of nodes, to locate slow nodes, GPUs and inter-node paths.

Nodes are paired in rounds; in each round all pairs run concurrently. GPU i of a node sends to and receives from GPU i
of the other node, so that all NICs carry load and NVLink carries none.

A single slow pair does not locate the fault. A node that is slow with every partner is at fault. If two good nodes are
slow with each other, their path is at fault. If each node has r partners, up to r−1 bad nodes are located exactly,
provided that more than half of all nodes are good. With two nodes nothing is compared: each GPU is judged by the rate
of its ports. A path may be slow only because other pairs use the same uplink. Slow paths are therefore measured again
without concurrent pairs.

The rounds are those of a round robin. If they do not cover all pairs and the switches of the nodes are known
(``cluster.topology``, Slurm), rounds of pairs inside leaf switches and rounds of pairs across leaf switches alternate.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.check import Context, Seconds, SkipIf, facts
from seatrial.checks.declare import Answers, Comparison, FindingTemplate, fact, metric, value, warning
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import GroupOptions, bandwidth, group_check, several_nodes, transport_text
from seatrial.checks.fabric._wrong_data import in_pairs, wrong_data, wrong_data_metric
from seatrial.model import (
    Fact,
    SeatrialError,
    Topology,
    format_bytes,
    parse_bytes,
)
from seatrial.model.topology import switch_path
from seatrial.util.text import plural

if TYPE_CHECKING:
    from seatrial.bench.pairs import PairResults, PairTiming

# GPU_SIZE takes about 5 ms at the 50 GB/s of a 400 Gb/s NIC, so that launch latency is negligible. CPU_SIZE is for
# CPU-only runs.
GPU_SIZE, CPU_SIZE = parse_bytes("256MiB"), parse_bytes("256KiB")
MAX_NODES_ALL_PAIRS = 8  # up to this number of nodes the rounds cover all pairs
MAX_ROUNDS = 4  # default number of rounds with more nodes: enough to locate two or three bad nodes
MAX_RETRIES = 4  # slow paths to retry; each takes as long as a round
# Threshold of gpu_share and path_share, equal to the judge's default for FAIL; a path below this share is retried
MIN_SHARE = 0.90


class PairOptions(GroupOptions):
    """Options of collectives.pairs, in addition to those of GroupOptions.

    ``rounds``: number of rounds; by default as many as cover all pairs on up to 8 nodes, and 4 on more nodes.
    ``max_retries``: maximum number of slow paths that are measured again without concurrent pairs; 0 by default on
    CPUs, where no rule applies to paths. ``seconds`` is for each round.
    """

    rounds: int | None = Field(default=None, ge=1)
    max_retries: int | None = Field(default=None, ge=0)
    seconds: Seconds = 0.2


def measure(context: Context, options: PairOptions) -> Answers:
    """Yield the cluster's metrics on rank 0."""
    from seatrial.bench import pairs, rank
    from seatrial.hardware.pair_search import round_robin

    ranks_by_node = several_nodes(context, "no pairs of nodes")
    node_count, subjects = len(ranks_by_node), rank.gather(context.subject)
    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    max_rounds = options.rounds or (node_count if node_count <= MAX_NODES_ALL_PAIRS else MAX_ROUNDS)
    switches_by_node = _switches_by_node(context, list(ranks_by_node))
    leaf_switches = [switches[:1] for switches in switches_by_node.values()]  # one per node; empty without a topology
    # Not all pairs are measured, there are several leaf switches, and one of them has several nodes
    if max_rounds < node_count - 1 and 1 < len(set(leaf_switches)) < len(leaf_switches):
        rounds = pairs.rounds_by_group(leaf_switches, max_rounds)
    else:
        rounds = round_robin(node_count, max_rounds)
    measure_pairs = partial(pairs.measure_pairs, size=size, device=context.device, seconds=options.seconds)
    members = list(ranks_by_node.values())
    timings: list[PairTiming] = []
    retries: list[PairTiming] = []
    for number, paired in enumerate(rounds, 1):
        context.progress(f"round {number} of {len(rounds)}")
        timings += measure_pairs(pairs.partner_map(paired, members))
    results = pairs.PairResults(tuple(timings), size, ranks_by_node, subjects)
    max_retries = (MAX_RETRIES if context.on_gpu else 0) if options.max_retries is None else options.max_retries
    slow_pairs = results.pairs_below(MIN_SHARE, results.pair_shares)  # equal on all ranks, as each has all timings
    for a, b in slow_pairs[:max_retries]:
        context.progress(f"retry {a}->{b}")
        retries += measure_pairs(pairs.partner_map([(a, b)], ranks_by_node))
    group_facts = _nccl_log.group_facts()
    if context.rank == 0:
        yield from facts({**group_facts, "nodes": node_count, "size": size, "rounds": len(rounds)})
        results = replace(results, retries=tuple(retries))
        if context.topology:
            yield _pairs_by_switch(results, switches_by_node, context.topology)
        yield from _answers(results, len(rounds), transport_text(group_facts), switches_by_node)


def _switches_by_node(context: Context, nodes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Node → its switches from the leaf to the top; empty without a topology. All ranks call this together.

    A topology that Slurm reports may lack nodes: their switches are (). Raises SeatrialError if a topology file lacks
    one of ``nodes``.
    """
    from seatrial.bench import rank

    if (topology := context.topology) is None:
        return {}
    names = (context.node, os.environ.get("SLURMD_NODENAME", ""))  # Slurm's name may differ from the host name
    switches = next((topology.switches_above(name) for name in names if topology.knows(name)), ())
    switches_by_node = dict(rank.gather((context.node, switches)))
    missing = [node for node in nodes if not switches_by_node[node]]
    if missing and topology.is_file:
        raise SeatrialError(f"topology {topology.source} lacks {', '.join(missing)}: add all nodes of the trial to it")
    return {node: switches_by_node[node] for node in nodes}


def _pairs_by_switch(results: PairResults, switches_by_node: Mapping[str, tuple[str, ...]], topology: Topology) -> Fact:
    """The number of pairs inside and across leaf switches."""
    in_leaf = sum(switches_by_node[a][:1] == switches_by_node[b][:1] for a, b in results.by_pair)
    counts = {"source": topology.source, "inside a leaf switch": in_leaf, "across": len(results.by_pair) - in_leaf}
    return fact("pairs_by_switch", counts)


def _answers(
    results: PairResults, round_count: int, transport: str, switches_by_node: Mapping[str, tuple[str, ...]]
) -> Answers:
    """Yield the rate of each pair and the best rate of each rank (GB/s), their shares, wrong data and method.

    Evidence: the rates of pairs that were retried, and the switches between the nodes of slow pairs if these are known.
    """
    node_count, max_located = len(results.members), results.max_locatable
    yield from facts({"comparable": "yes" if node_count > 2 else "no", "max_locatable_nodes": max_located})
    yield fact("pair_matrix", {"nodes": [*results.members], "gb_s": results.rate_matrix(results.by_pair)})
    slow_paths: dict[str, str] = {}  # pair → the switches between its nodes
    for a, b in results.pairs_below(MIN_SHARE, results.pair_shares) if switches_by_node else ():
        slow_paths[f"{a}->{b}"] = " – ".join(switch_path(switches_by_node[a], switches_by_node[b])) or "unknown"
    retried = {f"{a}->{b}": rates for (a, b), rates in results.retry_rates().items()}
    for (a, b), timings in results.by_pair.items():
        pair = f"{a}->{b}"
        yield value("pair_busbw", results.pair_rates(timings), pair)
        if shares := results.pair_shares(results.final_by_pair[a, b]):
            evidence = {"switches": slow_paths.get(pair), "single_pair": retried.get(pair)}
            yield value("path_share", shares, pair, evidence=evidence if any(evidence.values()) else None)
    for rank, rates in results.best_rates.items():
        yield value("best_busbw", rates, results.subjects[rank])
        if results.median_best_rate:
            yield value("gpu_share", [rate / results.median_best_rate for rate in rates], results.subjects[rank])
    shares_in_retry = [results.pair_shares(timings) for timings in results.retries_by_pair.values()]
    # No shares: every rank of the pair received wrong data
    fast_in_retry_count = sum(bool(shares) and median(shares) >= MIN_SHARE for shares in shares_in_retry)
    yield value("shared_paths", fast_in_retry_count, evidence={"slow_paths": slow_paths, "single_pair": retried})
    yield wrong_data(in_pairs(results.all_timings, results.subjects))
    guarantee = f"at most {plural(max_located, 'bad node')} can be located"
    if node_count == 2:
        guarantee = "with two nodes a slow node cannot be distinguished from the other or from the path"
    yield fact(
        "method",
        f"{transport}: {len(results.by_pair)} pairs of {node_count} nodes in {round_count} rounds; each rank "
        f"sends {format_bytes(results.size)} to the same rank of the other node and receives as much at the same time; "
        f"GB/s per direction and rank; {guarantee}",
    )


_FIX = (
    "On that node run ibstat and mlxlink -d DEVICE (rate, width, errors); lspci -vv -s ADDRESS | grep LnkSta (speed "
    "and width of the NIC's slot) and nvidia-smi topo -m (GPU and NIC should share a switch). Compare with a good node."
)
_WHEN = "backend == nccl and comparable == yes"

CHECK = group_check(
    name="collectives.pairs",
    title="Node-to-node bandwidth in pairs",
    declared=(
        bandwidth(
            "pair_busbw",
            meaning="bandwidth per rank and direction between two nodes",
        ),
        bandwidth(
            "best_busbw",
            ">= 0.90 reference",
            "Bandwidth of this GPU with its fastest partner is far below the rate of its ports.",
            _FIX,
            warn=">= 0.95 reference",
            when="backend == nccl and size is the default",
            reference="pairs.busbw.256MiB",
            reference_optional=True,
            per="rank",
        ),
        metric(
            "gpu_share",
            f">= {MIN_SHARE} of the median",
            "The GPU is slow with every partner, so the cause is in or next to its node: NIC, cable, switch port, PCIe "
            "slot or driver settings.",
            _FIX,
            when=_WHEN,
            per="rank",
            speed=True,
            comparison=Comparison(part="the inter-node path of one GPU", inter_node=True),
            finding=FindingTemplate(
                title="GPUs of a node are slow to every other node",
                whole_node_title="A node is slow to every other node",
                first_command="on {node}: ibstat; nvidia-smi topo -m",
                max_locatable_fact="max_locatable_nodes",
            ),
        ),
        metric(
            "path_share",
            f">= {MIN_SHARE} of the best",
            "Both nodes are faster with other nodes: the path between them is slow.",
            "Run ibtracert or traceroute between the two nodes. Check the switch ports on the path for errors "
            "(ibqueryerrors, or the switch's counters) and the uplinks for links that are down.",
            when=_WHEN,
            speed=True,
            comparison=Comparison(part="the path between two nodes", inter_node=True),
            finding=FindingTemplate(
                title="The path between two nodes is slow", first_command="ibtracert between {pair}"
            ),
        ),
        warning(
            "shared_paths",
            "== 0 pairs",
            "These paths are slow when other pairs run concurrently and fast otherwise: they share an oversubscribed "
            "uplink.",
            "Compare the uplinks of the nodes' leaf switches with their ports to nodes: uplinks may be down, or the "
            "fabric may be oversubscribed by design. Check with ibdiagnet whether adaptive routing is on.",
            when=_WHEN,
        ),
        wrong_data_metric("The evidence names sender, receiver, offset and flipped bits; a rank in all is at fault."),
    ),
    measure=measure,
    options=PairOptions,
    skip_if=(SkipIf.ONE_NODE,),
)
