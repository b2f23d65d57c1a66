"""Locates slow nodes, GPUs, rails and paths between nodes by transfers between pairs of nodes.

A run starts this check automatically when a multi-node check violates a threshold (``localize`` in the trial). The
search has steps (hardware.pair_search): first rounds of pairs, then suspected nodes with good partners, then suspected
paths again, then single directions. All pairs of a step run concurrently in one job, so that a search over a thousand
nodes takes minutes.

Rates are compared only with those of other pairs, so that no reference value is needed. With GPUs, GPU i of a node
sends to GPU i of the other node. Without GPUs one process of each node sends over TCP (gloo), and the fastest time
counts: a busy CPU slows some transfers, a slow link slows all of them. A link that loses packets slows some transfers
too, by TCP's timeouts: the kernel's counter of retransmitted segments shows it. With two nodes there is only one pair;
its rails and its directions are compared with each other (hardware.two_nodes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from seatrial.checks.check import Context, Seconds, SkipIf, facts
from seatrial.checks.declare import Answers, fact, metric, value
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import GroupOptions, group_check, several_nodes, transport_text
from seatrial.checks.fabric._wrong_data import in_pairs, wrong_data, wrong_data_metric
from seatrial.hardware.network_time import TcpNetwork
from seatrial.hardware.pair_rates import (
    CPU_LIMITS,
    GPU_LIMITS,
    PAIR_RATES,
    RANKS_BY_NODE,
    Conclusion,
    PairRate,
    PairStep,
)
from seatrial.hardware.pair_search import pair_search
from seatrial.model import format_bytes, parse_bytes

if TYPE_CHECKING:
    from seatrial.bench.pairs import PairTiming

# GPU_SIZE takes about 5 ms at the 50 GB/s of a 400 Gb/s NIC, CPU_SIZE 0.2 s at 200 Mbit/s. Traffic shapers, such as
# those of the tests, do not limit a first burst; CPU_SIZE is 128 times this burst, so that the link is measured.
GPU_SIZE, CPU_SIZE = parse_bytes("256MiB"), parse_bytes("4MiB")
# For GPUs on a slow TCP network ``default_size`` halves GPU_SIZE, at most to CPU_SIZE, until one operation takes at
# most this many seconds. Each step of a search has at least five operations.
MAX_OPERATION_S = 0.1
# A pair loses packets if its nodes retransmit at least this share of their TCP segments. Over links without losses
# (4 nodes on 2 loaded CPU cores) it was at most 0.6 %, with a node that loses 20 % of what it receives 9 % to 20 %.
MAX_RETRANSMITTED = 0.02
# Linux's shortest wait before it sends a segment again (TCP_RTO_MIN). It counts as the time of a transfer over a link
# with losses that had no timeout by chance.
TCP_TIMEOUT_S = 0.2


class LocalizationOptions(GroupOptions):
    """Options of collectives.localization: those of GroupOptions; ``seconds`` is for each step."""

    seconds: Seconds = 0.3


def measure(context: Context, options: LocalizationOptions) -> Answers:
    """Yield the rates of all steps on rank 0, and the number of slow ranks, paths and rails."""
    from seatrial.bench import pairs, rank, tcp

    all_ranks, subjects = several_nodes(context, "there are no pairs of nodes"), rank.gather(context.subject)
    rail_count = min(map(len, all_ranks.values())) if context.on_gpu else 1
    members = {node: node_ranks[:rail_count] for node, node_ranks in all_ranks.items()}  # node → ranks that send
    subjects_by_node = {node: [subjects[member] for member in node_ranks] for node, node_ranks in members.items()}
    limits = GPU_LIMITS if context.on_gpu else CPU_LIMITS
    size = options.size or default_size(context.on_gpu, context.tcp_network)
    rates: list[PairRate] = []
    timings: list[PairTiming] = []
    # all ranks have the rates of all ranks, so that all choose the same steps
    search = pair_search(list(members), limits)
    step, step_number = next(search), 1
    while True:
        context.progress(f"{step.stage}, step {step_number}: {len(step.pairs)} pairs")
        partners = pairs.partner_map(step.pairs, members)
        receivers = {member for _, node in step.pairs for member in members[node]} if step.unidirectional else ()
        sent, sent_again = tcp.segment_counters()
        step_timings = pairs.measure_pairs(partners, size, context.device, options.seconds, receivers=receivers)
        timings += step_timings
        sent_after, sent_again_after = tcp.segment_counters()
        segments = rank.gather((sent_after - sent, sent_again_after - sent_again))
        step_rates = _rates(step, members, step_timings, size, None if context.on_gpu else segments)
        rates += step_rates
        try:
            step, step_number = search.send(step_rates), step_number + 1
        except StopIteration as search_end:
            conclusion: Conclusion = search_end.value
            break
    group_facts = _nccl_log.group_facts()
    if context.rank != 0:
        return
    yield from facts({**group_facts, "nodes": len(members), "size": size, "steps": step_number})
    yield fact(RANKS_BY_NODE, subjects_by_node)
    yield fact(PAIR_RATES, [rate.model_dump(mode="json") for rate in rates])
    slow_parts = {
        "slow_ranks": [subjects_by_node[slow_rank.node][slow_rank.rail] for slow_rank in conclusion.ranks],
        "slow_paths": list(dict.fromkeys("->".join(path.pair) for path in conclusion.paths)),
        "slow_rails": [f"rail {rail}" for rail in conclusion.slow_rails],
    }
    for name, parts in slow_parts.items():
        yield value(name, len(parts), evidence=parts)
    yield wrong_data(in_pairs(timings, subjects))
    statistic = "median" if context.on_gpu else "fastest"
    yield fact(
        "method",
        f"{transport_text(group_facts)}: {format_bytes(size)} between pairs of {len(members)} nodes in "
        f"{step_number} steps, {rail_count} ranks per node; the {statistic} window of each pair; slow: at least "
        f"{limits.min_deficit:.1%} below "
        f"{'the other rails or direction' if len(members) == 2 else 'the pairs of good nodes in the same step'}, and "
        "beyond the noise",
    )


def default_size(on_gpu: bool, network: TcpNetwork | None) -> int:
    """Bytes that a rank sends at a time: on a slow TCP network less than GPU_SIZE, but at least CPU_SIZE."""
    size = GPU_SIZE if on_gpu else CPU_SIZE
    while network and size > CPU_SIZE and network.operation_s("send_receive", size) > MAX_OPERATION_S:
        size //= 2
    return size


def _rates(
    step: PairStep,
    members: Mapping[str, Sequence[int]],
    timings: Sequence[PairTiming],
    size: int,
    segments: Sequence[tuple[int, int]] | None,
) -> list[PairRate]:
    """The rates of the pairs of a step in GB/s, from their median window; with ``segments`` from their fastest one.

    In a window, the time of the slower one of the two ranks counts. ``segments``: bench.tcp.segment_counters of
    the step, by rank. A transfer of a pair that loses packets takes at least TCP_TIMEOUT_S.
    """
    seconds_by_rank = {timing.rank: timing.seconds for timing in timings}
    rates = []
    for first, second in step.pairs:
        rails = list(zip(members[first], members[second], strict=True))
        of_pair = [segments[rank] for rank in rails[0]] if segments else []
        retransmitted = sum(again for _, again in of_pair) / max(1, sum(sent for sent, _ in of_pair))
        least_s = TCP_TIMEOUT_S if retransmitted >= MAX_RETRANSMITTED else 0.0
        gb_s = []
        for rail in rails:
            windows = [max(times) for times in zip(*(seconds_by_rank[rank] for rank in rail), strict=True)]
            gb_s.append(size / max(least_s, min(windows) if segments else median(windows)) / 1e9)
        rates.append(
            PairRate(
                stage=step.stage,
                first=first,
                second=second,
                gb_s=tuple(gb_s),
                unidirectional=step.unidirectional,
                retransmitted=retransmitted,
            )
        )
    return rates


CHECK = group_check(
    name="collectives.localization",
    title="Search for slow nodes, GPUs, rails and paths",
    declared=(
        metric(
            "slow_ranks",
            "== 0 ranks",
            "These ranks are slow with every partner: the node, its cable or its switch port is slow.",
            "On the node: ibstat, ip -s link and ethtool DEV (rate, errors), lspci -vv (width of the NIC's slot); then "
            "cable and switch port. Compare with a good node.",
        ),
        metric(
            "slow_paths",
            "== 0 paths",
            "Two nodes are slow with each other and not with others: the path between them is slow.",
            "Run ibtracert or traceroute between the two nodes, and check the switch ports on the path.",
        ),
        metric(
            "slow_rails",
            "== 0 rails",
            "The ranks with this index are slower than the others on all nodes: one network rail is slow.",
            "Compare the leaf switch of the rail, and the NICs of this rail, with those of the other rails.",
        ),
        wrong_data_metric("The evidence names sender, receiver, offset and flipped bits."),
    ),
    measure=measure,
    options=LocalizationOptions,
    skip_if=(SkipIf.UNVERIFIED,),
    localizes=True,
)
