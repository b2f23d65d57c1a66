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

from seatrial.checks.base import Check, Comparison, Location, Needs, Options, Place, facts, metric
from seatrial.checks.fabric import _transports
from seatrial.checks.fabric._results import BANDWIDTHS, carrier, intact, pair_data_check
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
    from seatrial.bench.pairs import Figures, Line

# Some 5 ms at the 50 GB/s of a 400 Gb/s card: starting it does not count. On a CPU: a rehearsal.
GPU_SIZE, CPU_SIZE = parse_bytes("256MiB"), parse_bytes("256KiB")
ALL_PAIRS_UP_TO = 8  # nodes
ROUNDS = 4  # of more nodes: three bad ones are told apart, in the same time however many nodes there are
AGAIN = 4  # slow paths that are tried again: each takes as long as a round
LEAST = 0.90  # of what the others reach; the judge's own limit for a shortfall


class PairOptions(Options):
    """``rounds``: by default all that there are up to 8 nodes, and 4 of more. ``seconds`` cap each of them.

    ``size``: bytes that each rank sends and receives at a time; by default what suits the device. ``again``: how many
    slow paths are tried once more, alone; by default none on CPUs, whose paths are not judged.
    """

    rounds: int | None = Field(default=None, ge=1)
    again: int | None = Field(default=None, ge=0)
    size: ByteSize | None = Field(default=None, ge=4)
    seconds: float = Field(default=0.2, gt=0, allow_inf_nan=False)


def measure(place: Place, options: PairOptions) -> Iterator[Observation]:
    """Yield the cluster's figures on rank 0. Raises NotApplicable on a single node."""
    from seatrial.bench import collectives, pairs, rank, subgroups

    nodes = subgroups.ranks_by_node(place.node)
    if len(nodes) < 2:
        raise NotApplicable("one node has no other to exchange data with")
    subjects, path = rank.gather(place.subject), collectives.describe_group()
    size = options.size or (GPU_SIZE if place.on_gpu else CPU_SIZE)
    most = options.rounds or (len(nodes) if len(nodes) <= ALL_PAIRS_UP_TO else ROUNDS)
    rounds, members = pairs.circle(len(nodes), most), list(nodes.values())
    lines: list[Line] = []
    alone: list[Line] = []
    for number, paired in enumerate(rounds, 1):
        place.note(f"round {number} of {len(rounds)}")
        lines += pairs.exchange(pairs.partners(paired, members), size, place.device, options.seconds)
    figures = pairs.Figures(tuple(lines), size, nodes, tuple(subjects))
    again = (AGAIN if place.on_gpu else 0) if options.again is None else options.again
    for a, b in figures.slow_paths(LEAST)[:again]:  # the same on all ranks: they all know all times
        place.note(f"{a}->{b} alone")
        partners = pairs.partners([(0, 1)], [nodes[a], nodes[b]])
        alone += pairs.exchange(partners, size, place.device, options.seconds)
    path["transports"] = _transports.transports(place.device)
    if place.rank == 0:
        yield from facts({**path, "nodes": len(nodes), "size": size, "rounds": len(rounds)})
        figures = pairs.Figures(tuple(lines), size, nodes, tuple(subjects), tuple(alone))
        yield from _figures(figures, len(rounds), carrier(path))


def _figures(figures: Figures, rounds: int, carried: str) -> Iterator[Observation]:
    count = len(figures.nodes)
    told_apart = _told_apart(count, rounds)
    guarantee = f"up to {told_apart} bad {'node is' if told_apart == 1 else 'nodes are'} told apart exactly"
    if count == 2:
        guarantee = "two nodes cannot outvote each other: slow, either may be at fault, or the path between them"
    comparable = "yes" if count > 2 else "no"
    yield from facts({"comparable": comparable, "told_apart": told_apart, "guarantee": guarantee})
    yield Fact(name="pair_matrix", value={"nodes": [*figures.nodes], "gb_s": figures.grid(figures.pairs)})
    if figures.alone:
        yield Fact(name="alone", value={f"{a}->{b}": rates for (a, b), rates in figures.again().items()})
    for (a, b), lines in figures.pairs.items():
        yield metric("pair_busbw", figures.pair_rates(lines), "GB/s", f"{a}->{b}")
        if shares := figures.pair_shares(figures.judged[a, b]):
            yield metric("pair_share", shares, "of the best", f"{a}->{b}")
    for rank, rates in figures.best.items():
        yield metric("best_busbw", rates, "GB/s", figures.subjects[rank])
        if figures.usual:
            shares = tuple(rate / figures.usual for rate in rates)
            yield metric("best_share", shares, "of the median", figures.subjects[rank])
    shared = sum(median(figures.pair_shares(lines)) >= LEAST for lines in figures.pairs_alone.values())
    yield metric("shared_paths", shared, "pairs")
    yield from pair_data_check(figures)
    yield Fact(
        name="how",
        value=f"{carried}: {len(figures.pairs)} pairs of {count} nodes in {rounds} rounds of the circle method; each "
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
            expect=f">= {LEAST} of the median",
            where=_WHERE,
            why="this GPU's way out of its node is slow with every partner, so that it is this node's own: its network "
            "card, cable, switch port, PCIe slot or driver settings",
            fix="On that node: ibstat and mlxlink -d DEVICE (rate, width, errors); lspci -vv -s ADDRESS | grep "
            "LnkSta (speed and width of the card's slot); nvidia-smi topo -m (GPU and card should share a switch); "
            "compare with a good node",
        ),
        Rule(
            metric="pair_share",
            expect=f">= {LEAST} of the best",
            where=_WHERE,
            shows=("alone",),
            why="both nodes are faster with others: it is the path between these two that is slow",
            fix="ibtracert or traceroute between the two; look for errors on the switch ports on the way "
            "(ibqueryerrors, or the switch's own counters), and for links of an uplink that are down",
        ),
        Rule(
            metric="shared_paths",
            expect="== 0 pairs",
            where=_WHERE,
            breach=Outcome.WARN,
            shows=("alone",),
            why="these paths are slow among others and good alone: they share an uplink that cannot carry all of them",
            fix="Compare the uplinks of these nodes' leaf switches with their ports to nodes: are some down, or "
            "is the fabric oversubscribed by design? Adaptive routing may be off; ibdiagnet tells",
        ),
        intact(
            "The fact wrong_data names sender, receiver, offset and flipped bits; who is in all of its entries is at "
            "fault",
        ),
    ),
    measure=measure,
    performance=("pair_*", "best_*"),
    per={"best_*": "place"},
    bounds=BANDWIDTHS,
    comparisons={
        "best_share": Comparison(part="a GPU's way out of its node", network=True),
        "pair_share": Comparison(part="the path between two nodes", network=True),
    },
    locations={
        "best_share": Location(
            what="GPUs of a node are slow to every other node",
            whole_node="A node is slow to every other node",
            first_command="on {node}: ibstat; nvidia-smi topo -m",
            distinguishable="told_apart",
        ),
        "pair_share": Location(what="The path between two nodes is slow", first_command="ibtracert between {pair}"),
    },
    limit_s=600.0,
    needs=Needs(ranks=2),
    options=PairOptions,
)
