"""Which node, GPU or path between two nodes is slower than the others? Every node exchanges data with several others.

Nodes are paired in rounds by the circle method; in a round all pairs work at once. GPU i of one node sends to and
receives from GPU i of the other, so that all network cards carry load and NVLink none. One slow exchange does not tell
who is at fault. What is slow with every partner is at fault itself; where two good ones meet slowly, it is their path.
With r partners each, up to r−1 bad nodes are told apart exactly, as long as more than half of all nodes are good. Two
nodes never outvote each other: of them only the data is judged. A path that is slow among others is tried again with no
other pair at work: it may share an uplink.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Comparison, Context, FindingTemplate, Needs, Options, facts, metric
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import BANDWIDTH_BOUNDS, pair_wrong_data_results, transport_text, wrong_data_rule
from seatrial.model import (
    ByteSize,
    Fact,
    NotApplicable,
    Observation,
    Outcome,
    Phase,
    Rule,
    Scope,
    format_bytes,
    parse_bytes,
)

if TYPE_CHECKING:
    from seatrial.bench.pairs import PairResults, PairTiming

# Some 5 ms at the 50 GB/s of a 400 Gb/s card: starting it does not count. On a CPU: a rehearsal.
GPU_SIZE, CPU_SIZE = parse_bytes("256MiB"), parse_bytes("256KiB")
MAX_NODES_ALL_PAIRS = 8  # nodes
MAX_ROUNDS = 4  # of more nodes: three bad ones are told apart, in the same time however many nodes there are
MAX_RETRIES = 4  # slow paths that are tried again: each takes as long as a round
MIN_SHARE = 0.90  # of what the others reach; the judge's own limit for a shortfall


class PairOptions(Options):
    """``rounds``: by default all that there are up to 8 nodes, and 4 of more. ``seconds`` cap each of them.

    ``size``: bytes that each rank sends and receives at a time; by default what suits the device. ``again``: how many
    slow paths are tried once more, alone; by default none on CPUs, whose paths are not judged.
    """

    rounds: int | None = Field(default=None, ge=1)
    again: int | None = Field(default=None, ge=0)
    size: ByteSize | None = Field(default=None, ge=4)
    seconds: float = Field(default=0.2, gt=0, allow_inf_nan=False)


def measure(context: Context, options: PairOptions) -> Iterator[Observation]:
    """Yield the cluster's figures on rank 0. Raises NotApplicable on a single node."""
    from seatrial.bench import collectives, pairs, rank, subgroups

    nodes = subgroups.ranks_by_node(context.node)
    if len(nodes) < 2:
        raise NotApplicable("one node has no other to exchange data with")
    subjects, path = rank.gather(context.subject), collectives.describe_group()
    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    most = options.rounds or (len(nodes) if len(nodes) <= MAX_NODES_ALL_PAIRS else MAX_ROUNDS)
    rounds, members = pairs.round_robin(len(nodes), most), list(nodes.values())
    lines: list[PairTiming] = []
    alone: list[PairTiming] = []
    for number, paired in enumerate(rounds, 1):
        context.progress(f"round {number} of {len(rounds)}")
        lines += pairs.measure_pairs(pairs.partner_map(paired, members), size, context.device, options.seconds)
    figures = pairs.PairResults(tuple(lines), size, nodes, tuple(subjects))
    again = (MAX_RETRIES if context.on_gpu else 0) if options.again is None else options.again
    for a, b in figures.slow_paths(MIN_SHARE)[:again]:  # the same on all ranks: they all know all times
        context.progress(f"{a}->{b} alone")
        partners = pairs.partner_map([(0, 1)], [nodes[a], nodes[b]])
        alone += pairs.measure_pairs(partners, size, context.device, options.seconds)
    path["transports"] = _nccl_log.connections_by_transport(context.device)
    if context.rank == 0:
        yield from facts({**path, "nodes": len(nodes), "size": size, "rounds": len(rounds)})
        figures = pairs.PairResults(tuple(lines), size, nodes, tuple(subjects), tuple(alone))
        yield from _figures(figures, len(rounds), transport_text(path))


def _figures(figures: PairResults, rounds: int, carried: str) -> Iterator[Observation]:
    count = len(figures.nodes)
    distinguishable = _told_apart(count, rounds)
    guarantee = f"up to {distinguishable} bad {'node is' if distinguishable == 1 else 'nodes are'} told apart exactly"
    if count == 2:
        guarantee = "two nodes cannot outvote each other: slow, either may be at fault, or the path between them"
    comparable = "yes" if count > 2 else "no"
    yield from facts({"comparable": comparable, "distinguishable": distinguishable, "guarantee": guarantee})
    yield Fact(name="pair_matrix", value={"nodes": [*figures.nodes], "gb_s": figures.rate_matrix(figures.by_pair)})
    if figures.retries:
        yield Fact(name="alone", value={f"{a}->{b}": rates for (a, b), rates in figures.retry_rates().items()})
    for (a, b), lines in figures.by_pair.items():
        yield metric("pair_busbw", figures.pair_rates(lines), "GB/s", f"{a}->{b}")
        if shares := figures.pair_shares(figures.final_by_pair[a, b]):
            yield metric("pair_share", shares, "of the best", f"{a}->{b}")
    for rank, rates in figures.best_rates.items():
        yield metric("best_busbw", rates, "GB/s", figures.subjects[rank])
        if figures.median_best_rate:
            shares = tuple(rate / figures.median_best_rate for rate in rates)
            yield metric("best_share", shares, "of the median", figures.subjects[rank])
    shared = sum(median(figures.pair_shares(lines)) >= MIN_SHARE for lines in figures.retries_by_pair.values())
    yield metric("shared_paths", shared, "pairs")
    yield from pair_wrong_data_results(figures)
    yield Fact(
        name="how",
        value=f"{carried}: {len(figures.by_pair)} pairs of {count} nodes in {rounds} rounds of the circle method; each "
        f"rank sends {format_bytes(figures.size)} to the same rank of the other node and receives as much at the same "
        f"time; GB/s each way and rank; {guarantee}",
    )


def _told_apart(nodes: int, rounds: int) -> int:
    """How many bad nodes are found exactly: a good one then has a good partner, and most nodes are good.

    With an odd number of nodes each may have rested in one round.
    """
    partners = rounds - (nodes % 2)
    return max(0, min(partners - 1, (nodes - 1) // 2))


_WHERE = {"backend": "nccl", "comparable": "yes"}

CHECK = Check(
    name="collectives.pairs",
    title="Node to node, in pairs",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={
        "pair_busbw": "GB/s",
        "pair_share": "of the best",
        "best_busbw": "GB/s",
        "best_share": "of the median",
        "shared_paths": "pairs",
        "wrong_elements": "count",
    },
    rules=(
        Rule(
            metric="best_share",
            expect=f">= {MIN_SHARE} of the median",
            applies_if=_WHERE,
            meaning="this GPU's way out of its node is slow with every partner, so that it is this node's own: its network "
            "card, cable, switch port, PCIe slot or driver settings",
            fix="On that node: ibstat and mlxlink -d DEVICE (rate, width, errors); lspci -vv -s ADDRESS | grep "
            "LnkSta (speed and width of the card's slot); nvidia-smi topo -m (GPU and card should share a switch); "
            "compare with a good node",
        ),
        Rule(
            metric="pair_share",
            expect=f">= {MIN_SHARE} of the best",
            applies_if=_WHERE,
            evidence_facts=("alone",),
            meaning="both nodes are faster with others: it is the path between these two that is slow",
            fix="ibtracert or traceroute between the two; look for errors on the switch ports on the way "
            "(ibqueryerrors, or the switch's own counters), and for links of an uplink that are down",
        ),
        Rule(
            metric="shared_paths",
            expect="== 0 pairs",
            applies_if=_WHERE,
            outcome_if_violated=Outcome.WARN,
            evidence_facts=("alone",),
            meaning="these paths are slow among others and good alone: they share an uplink that cannot carry all of them",
            fix="Compare the uplinks of these nodes' leaf switches with their ports to nodes: are some down, or "
            "is the fabric oversubscribed by design? Adaptive routing may be off; ibdiagnet tells",
        ),
        wrong_data_rule(
            "The fact wrong_data names sender, receiver, offset and flipped bits; who is in all of its entries is at "
            "fault",
        ),
    ),
    measure=measure,
    performance_metrics=("pair_*", "best_*"),
    required_per={"best_*": "rank"},
    bounds=BANDWIDTH_BOUNDS,
    comparisons={
        "best_share": Comparison(part="a GPU's way out of its node", inter_node=True),
        "pair_share": Comparison(part="the path between two nodes", inter_node=True),
    },
    finding_templates={
        "best_share": FindingTemplate(
            title="GPUs of a node are slow to every other node",
            whole_node_title="A node is slow to every other node",
            first_command="on {node}: ibstat; nvidia-smi topo -m",
            max_distinguishable_fact="distinguishable",
        ),
        "pair_share": FindingTemplate(
            title="The path between two nodes is slow", first_command="ibtracert between {pair}"
        ),
    },
    limit_s=600.0,
    needs=Needs(min_ranks=2),
    options=PairOptions,
)
