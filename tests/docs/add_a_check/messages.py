"""Small messages between pairs of nodes: their time, and whether they arrive unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.check import Check, Context, Needs, Options, SkipIf, facts
from seatrial.checks.declare import Answers, metric, value
from seatrial.model import Fact, NotApplicable, Outcome, Phase, Scope

if TYPE_CHECKING:
    from seatrial.bench.pairs import PairTiming

MESSAGE_BYTES = 8


class MessageOptions(Options):
    """``rounds``: rounds of disjoint pairs of nodes. ``seconds``: longest timed duration of a round."""

    rounds: int = Field(default=3, ge=1)
    seconds: float = Field(default=0.2, gt=0, allow_inf_nan=False)


def measure(context: Context, options: MessageOptions) -> Answers:
    """Yield the values of all pairs on rank 0. Raises NotApplicable on one node."""
    from seatrial.bench import collectives, pairs, subgroups
    from seatrial.hardware.pair_search import round_robin

    ranks = subgroups.ranks_by_node(context.node)
    if len(ranks) < 2:
        raise NotApplicable("one node: no pairs of nodes")
    group_facts, nodes = collectives.describe_group(), list(ranks)
    by_pair: dict[str, list[PairTiming]] = {}
    for number, paired in enumerate(round_robin(len(nodes), options.rounds), 1):
        context.progress(f"round {number}")
        partners = pairs.partner_map(paired, list(ranks.values()))
        timings = pairs.measure_pairs(partners, MESSAGE_BYTES, context.device, options.seconds)  # on all ranks
        for a, b in paired:
            of_pair = [timing for timing in timings if timing.rank in (*ranks[nodes[a]], *ranks[nodes[b]])]
            by_pair[f"{nodes[a]}->{nodes[b]}"] = of_pair
    if context.rank == 0:
        yield from facts(group_facts)
        yield from compare(by_pair)


def compare(by_pair: Mapping[str, Sequence[PairTiming]]) -> Answers:
    """Yield the values of all pairs; ``by_pair``: NODE->NODE → the timings of its ranks."""
    seconds = {pair: max((timing.seconds for timing in timings), key=median) for pair, timings in by_pair.items()}
    middle = median(map(median, seconds.values()))
    yield Fact(name="comparable", value="yes" if len(seconds) > 2 else "no")
    for pair, timings in by_pair.items():
        wrong = {f"rank {timing.rank}": str(timing.mismatch) for timing in timings if timing.mismatch}
        yield value("wrong_messages", len(wrong), pair, evidence=dict(wrong))
        yield value("message_time", [1e6 * each for each in seconds[pair]], pair)
        yield value("time_vs_median", median(seconds[pair]) / middle, pair)


CHECK = Check(
    name="nodes.messages",
    title="Small messages between nodes",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    declared=(
        metric(
            "wrong_messages",
            "== 0 count",
            "messages between these nodes arrive changed",
            "do not train on these nodes; compare the error counters of their NICs (ethtool -S, perfquery)",
        ),
        metric("message_time", unit="us", meaning="time to send and to receive 8 bytes", speed=True),
        metric(
            "time_vs_median",
            "<= 1.5 x",  # two more switches on the path add less than half
            "messages between these nodes take much longer than between others",
            "run traceroute or ibtracert between the nodes",
            outcome=Outcome.WARN,
            when="backend == nccl and comparable == yes",
            speed=True,
        ),
    ),
    measure=measure,
    options=MessageOptions,
    needs=Needs(min_ranks=2),
    skip_if=(SkipIf.ONE_NODE,),
    limit_s=300,
)
