"""Which GPU of a node, or which path between two of them, is slower than the others through NCCL?

Every two GPUs of a node send to and receive from each other at the same time, as pipelines and experts do. They are
paired in rounds by the circle method; in a round all pairs of all nodes work at once, and all rounds are run. What is
slow with every partner is at fault itself; where two good ones meet slowly, it is their path. Two GPUs never outvote
each other, and none is compared with another node's. A pair that is slow among others is tried again with no other pair
of its node at work, and judged by that: on PCIe pairs share links, which is no fault of any path. Which of the two ways
is slow only ``transfer.peers`` tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue

from seatrial.checks.base import Check, Comparison, Context, FindingTemplate, Needs, Options, facts, metric
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import (
    BANDWIDTH_BOUNDS,
    pair_wrong_data_results,
    size_label,
    transport_text,
    wrong_data_rule,
)
from seatrial.discover import gpu
from seatrial.discover.nvlinks import NVLINK, UNKNOWN_LINK, link_types
from seatrial.model import (
    NOT_REQUESTED,
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

# 3 ms on an H200: 17 fill a window. By send_receive on two of them (docs/results) 1 GiB comes to 359.8 and 360.0 GB/s,
# of the 369 that its time over size has without the start; 64 MiB to 263 and 266, its windows 2 % apart. On a CPU: a
# rehearsal.
GPU_SIZE, CPU_SIZE = parse_bytes("1GiB"), parse_bytes("256KiB")
MIN_SHARE = 0.90  # of what the others reach; the judge's own limit for a shortfall

Partners = dict[int, int]  # rank → rank, both ways


class GpuPairOptions(Options):
    """``size``: bytes that each GPU sends and receives at a time; by default what suits the device.

    ``seconds`` cap the timed part of each round. ``again``: whether slow pairs are tried once more, alone; by default
    not on CPUs, whose pairs are not judged.
    """

    size: ByteSize | None = Field(default=None, ge=4, multiple_of=4)
    seconds: float = Field(default=0.4, gt=0, allow_inf_nan=False)  # 8 windows: an interval takes six
    again: bool | None = None


def measure(context: Context, options: GpuPairOptions) -> Iterator[Observation]:
    """Yield a node's figures on its first rank.

    Raises NotApplicable where no node has two GPUs, SeatrialError where the buffers do not fit.
    """
    from seatrial.bench import collectives, rank, subgroups

    nodes = subgroups.ranks_by_node(context.node)
    if max(map(len, nodes.values())) < 2:
        raise NotApplicable("nodes with one GPU have no pair of them")
    path, models = collectives.describe_group(), subgroups.gpu_models(nodes[context.node], context.device)
    subjects, indices = rank.gather(context.subject), rank.gather(context.nvml_index)
    # Of one node the connections may be there already; several have a group each, which connects anew
    since = _nccl_log.log_size(context.device) if len(nodes) > 1 else 0
    again = context.on_gpu if options.again is None else options.again
    found = _exchanged(context, options, nodes, subjects, again=again)
    path["transports"] = _nccl_log.connections_by_transport(context.device, since)
    figures, ranks = found.get(context.node), nodes[context.node]
    if figures and context.rank == ranks[0]:
        # the figures are of two GPUs of one node, however many there are: SKU data is kept by such counts
        joined = sorted(link_types(gpu.read(context.root), [indices[one] for one in ranks])) if context.on_gpu else []
        yield from facts({**path, "gpu": models, "world_size": 2, "nodes": 1, "size": figures.size})
        yield from facts(_alike(figures, " + ".join(joined), again=again))
        yield from _figures(context.node, figures, " + ".join(joined))
        yield Fact(name="how", value=_how(transport_text(path), figures, len(found)))
        if context.on_gpu and figures.size != GPU_SIZE:
            why = f"the trial's options ask for {size_label(figures.size)}"
            yield Fact(name=NOT_REQUESTED, value={f"busbw.{size_label(GPU_SIZE)}": why})


def _exchanged(
    context: Context,
    options: GpuPairOptions,
    nodes: Mapping[str, Sequence[int]],
    subjects: Sequence[str],
    *,
    again: bool,
) -> dict[str, PairResults]:
    """What came of all rounds, and of what was slow and tried again, by node: the same on all ranks.

    Each node has a group of its own. In one of several nodes NCCL moves data inside of them by as few channels, and in
    as small pieces, as it does between them (ncclTopoComputeP2pChannels and computeBuffSizes in NCCL's src): the
    figures of a node would be others than those of the same node by itself.
    """
    from seatrial.bench import pairs, subgroups

    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    lines: list[PairTiming] = []
    alone: list[PairTiming] = []
    with subgroups.open_subgroups(list(nodes.values()), context.device) as (group, _):
        exchange = partial(pairs.measure_pairs, size=size, device=context.device, seconds=options.seconds, group=group)
        rounds = merge_steps([_rounds(ranks) for ranks in nodes.values()])
        for number, partners in enumerate(rounds, 1):
            context.progress(f"round {number} of {len(rounds)}")
            lines += exchange(partners)
        first = figures_by_node(nodes, subjects, size, lines) if again else {}
        tries = merge_steps([_tries(figures) for figures in first.values()])
        for number, partners in enumerate(tries, 1):  # the same on all ranks: they all know all times
            context.progress(f"what is slow, alone: {number} of {len(tries)}")
            alone += exchange(partners)
    return figures_by_node(nodes, subjects, size, lines, alone)


def _rounds(ranks: Sequence[int]) -> list[Partners]:
    from seatrial.bench import pairs

    return [
        pairs.partner_map(paired, [(rank,) for rank in ranks]) for paired in pairs.round_robin(len(ranks), len(ranks))
    ]


def _tries(figures: PairResults) -> list[Partners]:
    """One after the other, the pairs of a node that are slow. Of two or three GPUs no other pair was at work."""
    from seatrial.bench import pairs

    slow = figures.slow_pairs(MIN_SHARE) if _crowded(figures) else []
    return [pairs.partner_map([(0, 1)], [figures.nodes[a], figures.nodes[b]]) for a, b in slow]


def _crowded(figures: PairResults) -> bool:
    """Whether more than one pair of the node was at work at a time."""
    return len(figures.nodes) > 3


def merge_steps(plans: Iterable[Sequence[Partners]]) -> list[Partners]:
    """All nodes at once: the first steps of all ``plans`` together, the second ones …"""
    steps = zip_longest(*plans, fillvalue=Partners())
    return [dict(chain.from_iterable(one.items() for one in step)) for step in steps]


def figures_by_node(
    nodes: Mapping[str, Sequence[int]],
    subjects: Sequence[str],
    size: int,
    lines: Iterable[PairTiming],
    alone: Iterable[PairTiming] = (),
) -> dict[str, PairResults]:
    """The figures of each node that has pairs: its GPUs are compared with each other and with no other node's."""
    from seatrial.bench.pairs import PairResults

    home = {rank: node for node, ranks in nodes.items() for rank in ranks}
    own: dict[str, tuple[list[PairTiming], list[PairTiming]]] = {
        node: ([], []) for node, ranks in nodes.items() if len(ranks) > 1
    }
    for kind, every in enumerate((lines, alone)):
        for line in every:
            own[home[line.rank]][kind].append(line)
    # by name: in a second measurement the ranks go the other way round, and a pair is called the same
    named = {node: sorted(nodes[node], key=lambda rank: (len(subjects[rank]), subjects[rank])) for node in own}
    return {
        node: PairResults(
            tuple(all_of), size, {subjects[rank]: (rank,) for rank in named[node]}, subjects, tuple(again)
        )
        for node, (all_of, again) in own.items()
    }


def _unlike(figures: PairResults, joined: str) -> str:
    """Why the GPUs of a node, ``joined`` in these ways, are not to be compared with each other; empty if they are."""
    if len(figures.nodes) < 3:
        return "two GPUs of a node cannot outvote each other"
    if " + " in joined or joined == UNKNOWN_LINK:
        return f"GPUs are compared where all are joined alike, and these are by {joined}"
    return ""


def _alike(figures: PairResults, joined: str, *, again: bool) -> dict[str, JsonValue]:
    """The facts on what can be compared."""
    unlike = _unlike(figures, joined)
    retried = "yes" if again and _crowded(figures) else "no"
    found: dict[str, JsonValue] = {"comparable": f"no: {unlike}" if unlike else "yes", "retried": retried}
    return found | ({"joined": joined} if joined else {})


def _figures(node: str, figures: PairResults, joined: str) -> Iterator[Observation]:
    """Every pair, as it was alone where it was tried again; every GPU with its fastest partner.

    Where all GPUs of the node are joined alike, each stands beside what the others reach.
    """
    gpus: list[JsonValue] = [name.rpartition("/")[2] for name in figures.nodes]
    yield Fact(
        name="matrix", value={"gpus": gpus, "gb_s": [[*row] for row in figures.rate_matrix(figures.final_by_pair)]}
    )
    comparable = not _unlike(figures, joined)
    for (a, b), lines in figures.final_by_pair.items():
        yield metric(f"busbw.{size_label(figures.size)}", figures.pair_rates(lines), "GB/s", _pair(a, b))
        if comparable and (shares := figures.pair_shares(lines)):
            yield metric("path_share", shares, "of the best", _pair(a, b))
    for rank, rates in figures.best_rates_with_retries.items():
        yield metric("best_busbw", rates, "GB/s", figures.subjects[rank])
        if comparable and figures.median_best_rate:
            shares = tuple(rate / figures.median_best_rate for rate in rates)
            yield metric("gpu_share", shares, "of the median", figures.subjects[rank])
    if _crowded(figures):
        alone = ([median(figures.rates(line)) for line in lines] for lines in figures.retries_by_pair.values())
        good = sum(all(rate >= MIN_SHARE * figures.median_best_rate for rate in rates) for rates in alone)
        yield metric("shared_links", good, "pairs", node)
    if figures.retries:
        yield Fact(name="alone", value={_pair(*pair): rates for pair, rates in figures.retry_rates().items()})
    yield Fact(name="distinguishable", value=max_distinguishable(len(figures.nodes)))
    yield from pair_wrong_data_results(figures, node)


def _pair(a: str, b: str) -> str:
    """``node/gpu0->gpu1``: once for both ways, which one operation carries and nobody can time apart."""
    return f"{a}->{b.rpartition('/')[2]}"


def max_distinguishable(gpus: int) -> int:
    """How many bad GPUs of a node are found exactly, in all rounds: most are good, and so each good one meets one."""
    return (gpus - 1) // 2 if gpus > 2 else 0


def _how(carried: str, figures: PairResults, nodes: int) -> str:
    pairs, ranks = len(figures.by_pair), len(figures.nodes)
    windows = sorted({len(line.seconds) for line in figures.timings})
    counted = f"{windows[0]} to {windows[-1]}" if len(windows) > 1 else f"{windows[0]}"
    rounds, least = ranks - 1 + ranks % 2, max_distinguishable(ranks)
    few = f"up to {least} slow {'rank is' if least == 1 else 'ranks are'} told apart"
    together = f"all disjoint pairs of {nodes} nodes" if nodes > 1 else "all disjoint pairs"
    return (
        f"{carried}: {pairs} {'pair' if pairs == 1 else 'pairs'} of the {ranks} ranks of this node in {rounds} "
        f"{'round' if rounds == 1 else 'rounds'} of the circle method, {together} at once; each rank sends "
        f"{format_bytes(figures.size)} to its partner and receives as much at the same time; GB/s each way, medians of "
        f"{counted} windows; {few if least else 'two of a node cannot outvote each other'}"
    )


_WHERE = {"backend": "nccl", "comparable": "yes"}
_LOOK = (
    "transfer.peers tells which way is slow; nvidia-smi nvlink -s -i INDEX, nvidia-smi nvlink -e -i INDEX (links that "
    "are down, errors, replays); nvidia-smi topo -p2p r; dmesg | grep -E 'Xid.*(74|145)|SXid'"
)

CHECK = Check(
    name="collectives.gpu_pairs",
    title="GPU to GPU through NCCL, every pair of a node",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={
        "busbw.*": "GB/s",
        "path_share": "of the best",
        "best_busbw": "GB/s",
        "gpu_share": "of the median",
        "shared_links": "pairs",
        "wrong_elements": "count",
    },
    rules=(
        Rule(
            metric=f"busbw.{size_label(GPU_SIZE)}",
            reference=f"gpu_pairs.busbw.{size_label(GPU_SIZE)}",
            applies_if={"backend": "nccl"},
            evidence_facts=("alone",),
            reference_optional=True,  # of GPUs on PCIe it depends on the board as well
            meaning="these two exchange less than two GPUs of their model do: a collective goes at the pace of its slowest "
            "link",
            fix=_LOOK,
        ),
        Rule(
            metric="gpu_share",
            expect=f">= {MIN_SHARE} of the median",
            applies_if=_WHERE,
            evidence_facts=("alone",),
            meaning="this GPU is slow with every other GPU of its node, so that it is its own: its links, its clocks, its "
            "memory or the process that drives it",
            fix=f"{_LOOK}; nvidia-smi -q -d PERFORMANCE,CLOCK -i INDEX",
        ),
        Rule(
            metric="path_share",
            expect=f">= {MIN_SHARE} of the best",
            applies_if=_WHERE,
            evidence_facts=("alone",),
            meaning="both GPUs are faster with others: it is the path between these two that is slow, alone too",
            fix=_LOOK,
        ),
        Rule(
            metric="shared_links",
            expect="== 0 pairs",
            applies_if={"backend": "nccl", "joined": NVLINK, "retried": "yes"},
            outcome_if_violated=Outcome.WARN,
            evidence_facts=("alone",),
            meaning="these pairs are slow among others and good alone: they share a link, and by design no two pairs do "
            "where NVLinks join all GPUs",
            fix=f"{_LOOK}; look at the switches: systemctl status nvidia-fabricmanager, dmesg | grep SXid",
        ),
        wrong_data_rule(
            "The fact wrong_data names sender, receiver, offset and flipped bits; who is in all of its entries is at "
            "fault. On its node: nvidia-smi -q -d ECC,ROW_REMAPPER; nvidia-smi nvlink -e; dmesg | grep -i xid",
        ),
    ),
    measure=measure,
    performance_metrics=("busbw.*", "gpu_share", "path_share"),
    operation="send_receive",
    bounds=BANDWIDTH_BOUNDS,
    comparisons={
        "gpu_share": Comparison(part="a GPU's way to all others of its node"),
        "path_share": Comparison(part="the path between two GPUs of a node"),
    },
    finding_templates={
        "gpu_share": FindingTemplate(
            title="A GPU is slow with every other GPU of its node",
            first_command="on {node}: nvidia-smi nvlink -s; nvidia-smi -q -d PERFORMANCE,CLOCK",
            max_distinguishable_fact="distinguishable",
        ),
        "path_share": FindingTemplate(
            title="The path between two GPUs of a node is slow",
            first_command="on {node}: nvidia-smi nvlink -e; nvidia-smi topo -p2p r",
        ),
    },
    required_per={"busbw.*": "pair", "path_share": "pair", "best_busbw": "rank", "gpu_share": "rank"},
    per_node=True,
    limit_s=300.0,
    needs=Needs(min_ranks=2),
    options=GpuPairOptions,
)
