"""Bandwidth between every two GPUs of a node through NCCL, to locate slow GPUs and slow paths.

The GPUs of a pair send to and receive from each other at the same time, as in pipeline and expert parallelism. Pairs
are scheduled in rounds (round robin). In a round every GPU has at most one partner, and all pairs of all nodes run
concurrently.

A fault is located as in pairs.py. GPUs are compared only within their node. On PCIe, concurrent pairs share links; a
slow pair is therefore retried without other pairs of its node, and the rate of the retry replaces the first one. The
check ``transfer.peers`` measures each direction separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from statistics import median
from typing import TYPE_CHECKING

from seatrial.checks.check import Context, Seconds, SkipIf, facts
from seatrial.checks.declare import (
    Answers,
    Comparison,
    FindingTemplate,
    absent,
    fact,
    metric,
    not_requested,
    value,
    warning,
)
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import GroupOptions, bandwidth, group_check, transport_text
from seatrial.checks.fabric._wrong_data import in_pairs, wrong_data, wrong_data_metric
from seatrial.discover import gpu
from seatrial.discover.nvlinks import NVLINK, UNKNOWN_LINK, link_types
from seatrial.hardware.links import COLLECTIVE
from seatrial.model import (
    NotApplicable,
    format_bytes,
    parse_bytes,
    size_label,
)
from seatrial.util.grouping import grouped
from seatrial.util.text import plural

if TYPE_CHECKING:
    from seatrial.bench.pairs import PairResults, PairTiming

# An operation of GPU_SIZE takes 3 ms on an H200, so that a window of 50 ms has 17 operations. Two runs of send_receive
# on two H200s (docs/results) gave 359.8 and 360.0 GB/s at 1 GiB, close to the 369 GB/s without launch latency. At 64
# MiB they gave 263 and 266 GB/s, with windows that differed by 2 %. CPU_SIZE is for CPU-only runs.
GPU_SIZE, CPU_SIZE = parse_bytes("1GiB"), parse_bytes("256KiB")
# Threshold of path_share and gpu_share. A pair below this share of the median of the GPUs' best rates is retried.
MIN_SHARE = 0.90

Partners = dict[int, int]  # rank → its partner; has both ranks of each pair


class GpuPairOptions(GroupOptions):
    """Options of collectives.gpu_pairs, in addition to those of GroupOptions; ``seconds`` is for each round.

    ``retry_slow_pairs``: measure slow pairs again without other pairs; off by default on CPUs, where no rule applies to
    pairs.
    """

    seconds: Seconds = 0.4  # 8 windows: a confidence interval needs six
    retry_slow_pairs: bool | None = None


def measure(context: Context, options: GpuPairOptions) -> Answers:
    """Yield the metrics of each node on its first rank.

    Raises NotApplicable if no node has two ranks, and SeatrialError if the buffers do not fit.
    """
    from seatrial.bench import group, rank, subgroups

    ranks_by_node = subgroups.ranks_by_node(context.node)
    node_ranks = ranks_by_node[context.node]
    if max(map(len, ranks_by_node.values())) < 2:
        raise NotApplicable("one GPU per node: no pairs within a node")
    models = subgroups.gpu_models(node_ranks, context.device)
    subjects, nvml_indices = rank.gather(context.subject), rank.gather(context.nvml_index)
    # Connections are read from this byte of the log on. With several nodes, the group of each node is opened below,
    # and NCCL logs its connections then; earlier lines are of other groups. On one node NCCL may reuse connections of
    # earlier checks, so that the whole log is read.
    log_offset = group.nccl_log_size() if len(ranks_by_node) > 1 else 0
    retry = context.on_gpu if options.retry_slow_pairs is None else options.retry_slow_pairs
    all_results = _measure_rounds(context, options, ranks_by_node, subjects, retry=retry)
    group_facts = _nccl_log.group_facts(log_offset)
    results = all_results.get(context.node)
    if results and context.rank == node_ranks[0]:
        link = ""
        if context.on_gpu:
            node_indices = [nvml_indices[node_rank] for node_rank in node_ranks]
            link = " + ".join(sorted(link_types(gpu.read(context.root), node_indices)))
        # world_size 2: SKU data has reference values for two GPUs of one node
        yield from facts({**group_facts, "gpu": models, "world_size": 2, "nodes": 1, "size": results.size})
        yield from facts({"link": link} if link else {})
        yield from _answers(context.node, results, link, retry=retry)
        yield fact("method", _method_text(transport_text(group_facts), results, len(all_results)))
        if context.on_gpu and results.size != GPU_SIZE:
            reason = f"the trial's options set size {size_label(results.size)}"
            yield not_requested(f"busbw.{size_label(GPU_SIZE)}", reason)


def _measure_rounds(
    context: Context,
    options: GpuPairOptions,
    ranks_by_node: Mapping[str, Sequence[int]],
    subjects: Sequence[str],
    *,
    retry: bool,
) -> dict[str, PairResults]:
    """The results of all rounds and retries by node, the same on all ranks.

    Each node has its own group. In a group of several nodes, NCCL would use the few channels and small chunks of
    inter-node transfers inside a node too (ncclTopoComputeP2pChannels and computeBuffSizes in NCCL's src). The rates
    would then differ from the rates of a single node.
    """
    from seatrial.bench import pairs, subgroups
    from seatrial.hardware.pair_search import round_robin

    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    timings: list[PairTiming] = []
    retries: list[PairTiming] = []
    with subgroups.open_subgroups(list(ranks_by_node.values()), context.device) as (group, _):
        measure_pairs = partial(
            pairs.measure_pairs, size=size, device=context.device, seconds=options.seconds, group=group
        )
        rounds = merge_steps(
            [pairs.partner_map(paired, [(rank,) for rank in ranks]) for paired in round_robin(len(ranks), len(ranks))]
            for ranks in ranks_by_node.values()
        )
        for number, partners in enumerate(rounds, 1):
            context.progress(f"round {number} of {len(rounds)}")
            timings += measure_pairs(partners)
        first_results = results_by_node(ranks_by_node, subjects, size, timings) if retry else {}
        retry_steps = merge_steps([_retry_steps(results) for results in first_results.values()])
        for number, partners in enumerate(retry_steps, 1):  # all ranks have all timings, and so the same steps
            context.progress(f"retry {number} of {len(retry_steps)}")
            retries += measure_pairs(partners)
    return results_by_node(ranks_by_node, subjects, size, timings, retries)


def _retry_steps(results: PairResults) -> list[Partners]:
    """The slow pairs of a node, one per step; empty if no two pairs of the node ever ran concurrently."""
    from seatrial.bench import pairs

    if not _has_concurrent_pairs(results):
        return []
    slow_pairs = results.pairs_below(MIN_SHARE * results.median_best_rate, results.pair_rates)
    return [pairs.partner_map([pair], results.members) for pair in slow_pairs]


def _has_concurrent_pairs(results: PairResults) -> bool:
    """Whether more than one pair of the node ran at a time."""
    return len(results.members) > 3


def merge_steps(steps_by_node: Iterable[Sequence[Partners]]) -> list[Partners]:
    """The first steps of all nodes as one step, then the second steps, and so on."""
    merged = zip_longest(*steps_by_node, fillvalue=Partners())
    return [dict(chain.from_iterable(map(dict.items, steps))) for steps in merged]


def results_by_node(
    ranks_by_node: Mapping[str, Sequence[int]],
    subjects: Sequence[str],
    size: int,
    timings: Iterable[PairTiming],
    retries: Iterable[PairTiming] = (),
) -> dict[str, PairResults]:
    """The results of each node with two or more ranks, from its own timings only."""
    from seatrial.bench.pairs import PairResults

    node_of_rank = {rank: node for node, ranks in ranks_by_node.items() for rank in ranks}
    timings_by_node, retries_by_node = (
        grouped((node_of_rank[timing.rank], timing) for timing in given) for given in (timings, retries)
    )
    results: dict[str, PairResults] = {}
    for node, ranks in ranks_by_node.items():
        if len(ranks) > 1:
            # Sorted by subject: if the whole check is measured again, ranks get the GPUs in reverse order, but a pair
            # must keep its name
            ordered = sorted(ranks, key=lambda rank: (len(subjects[rank]), subjects[rank]))
            members = {subjects[rank]: (rank,) for rank in ordered}
            retries_of_node = tuple(retries_by_node.get(node, ()))
            results[node] = PairResults(tuple(timings_by_node[node]), size, members, subjects, retries_of_node)
    return results


def _not_comparable_reason(results: PairResults, link: str) -> str:
    """Why the GPUs of a node cannot be compared with each other; empty if they can.

    ``link``: the link types between the GPUs, joined by " + "; empty on CPUs.
    """
    if len(results.members) < 3:
        return "a comparison needs 3 ranks per node, this node has 2"
    if " + " in link or link == UNKNOWN_LINK:
        return f"comparing GPUs requires one link type in the node, found {link}"
    return ""


def _answers(node: str, results: PairResults, link: str, *, retry: bool) -> Answers:
    """Yield the rates in GB/s of every pair, and of every GPU with its fastest partner, and the wrong data.

    A pair that was retried has the rate of its retry; the best rate of a GPU is the highest of all its measurements,
    including retries. ``retry``: whether slow pairs were measured again if other pairs had run concurrently.
    """
    gpus = [name.rpartition("/")[2] for name in results.members]
    matrix = results.rate_matrix(results.final_by_pair)
    yield fact("matrix", {"gpus": gpus, "gb_s": matrix})
    retried = {_pair_subject(*pair): rates for pair, rates in results.retry_rates().items()}
    evidence = {"single_pair": retried} if retried else None
    if reason := _not_comparable_reason(results, link):
        yield absent("path_share", reason)
    for (a, b), timings in results.final_by_pair.items():
        pair = _pair_subject(a, b)
        of_pair = {"single_pair": retried[pair]} if pair in retried else None
        yield value(f"busbw.{size_label(results.size)}", results.pair_rates(timings), pair, evidence=of_pair)
        if not reason and (shares := results.pair_shares(timings)):
            yield value("path_share", shares, pair, evidence=of_pair)
    for rank, rates in results.best_of(results.all_timings).items():
        subject = results.subjects[rank]
        yield value("best_busbw", rates, subject)
        if reason:
            yield absent("gpu_share", reason, subject)
        elif results.median_best_rate:
            shares = tuple(rate / results.median_best_rate for rate in rates)
            yield value("gpu_share", shares, subject, evidence=evidence)
    if retry and _has_concurrent_pairs(results):
        required_rate = MIN_SHARE * results.median_best_rate
        fast_in_retry_count = sum(
            all(median(results.rates(timing)) >= required_rate for timing in timings)
            for timings in results.retries_by_pair.values()
        )
        yield value("shared_links", fast_in_retry_count, node, evidence=evidence)
    else:
        yield absent("shared_links", "no pair was measured without concurrent pairs, which shows shared links")
    yield fact("max_locatable_gpus", results.max_locatable)
    yield wrong_data(in_pairs(results.all_timings, results.subjects), node)


def _pair_subject(a: str, b: str) -> str:
    """``node/gpu0->gpu1`` for both directions, which run in one operation and have the same time."""
    return f"{a}->{b.rpartition('/')[2]}"


def _method_text(transport: str, results: PairResults, node_count: int) -> str:
    rank_count = len(results.members)
    rounds = plural(rank_count - 1 + rank_count % 2, "round")  # of a round robin of all ranks
    fewest_windows = min(len(timing.seconds) for timing in results.timings)
    concurrent = f"all pairs of a round on {node_count} nodes" if node_count > 1 else "all pairs of a round"
    return (
        f"{transport}: {plural(len(results.by_pair), 'pair')} of the {rank_count} ranks of this node in {rounds} of a "
        f"round-robin schedule, {concurrent} concurrently; each rank sends {format_bytes(results.size)} to its partner "
        f"and receives as much at the same time; GB/s per direction, median of at least {fewest_windows} windows; at "
        f"most {plural(results.max_locatable, 'slow rank')} can be located"
    )


_LINK_COMMANDS = (
    "Run transfer.peers to find the slow direction; nvidia-smi nvlink -s -i INDEX and nvidia-smi nvlink -e -i INDEX "
    "(links down, errors, replays); nvidia-smi topo -p2p r; dmesg | grep -E 'Xid.*(74|145)|SXid'"
)

CHECK = group_check(
    name="collectives.gpu_pairs",
    title="GPU-to-GPU bandwidth through NCCL within each node",
    declared=(
        bandwidth(
            f"busbw.{size_label(GPU_SIZE)}",
            (">= 0.90 reference", ">= 0.60 bound"),
            "The pair is slower than the reference value of its GPU model. The slowest link limits every collective.",
            _LINK_COMMANDS,
            when="backend == nccl",
            warn=">= 0.95 reference",
            reference=f"gpu_pairs.busbw.{size_label(GPU_SIZE)}",
            reference_optional=True,  # on PCIe the rate also depends on the board
            per="pair",
        ),
        bandwidth(
            "busbw.*",
            meaning="bandwidth per direction between two GPUs of a node",
            per="pair",
        ),
        metric(
            "gpu_share",
            f">= {MIN_SHARE} of the median",
            "The GPU is slow with every other GPU of its node: check its links, clocks, memory and process.",
            f"{_LINK_COMMANDS}; nvidia-smi -q -d PERFORMANCE,CLOCK -i INDEX",
            when="backend == nccl",
            per="rank",
            speed=True,
            comparison=Comparison(part="one GPU to all others of its node"),
            finding=FindingTemplate(
                title="A GPU is slow with every other GPU of its node",
                first_command="on {node}: nvidia-smi nvlink -s; nvidia-smi -q -d PERFORMANCE,CLOCK",
                max_locatable_fact="max_locatable_gpus",
            ),
        ),
        metric(
            "path_share",
            f">= {MIN_SHARE} of the best",
            "Both GPUs are faster with other GPUs, and the pair is slow without concurrent pairs too: the path between "
            "them is slow.",
            _LINK_COMMANDS,
            when="backend == nccl",
            per="pair",
            speed=True,
            comparison=Comparison(part="the path between two GPUs of a node"),
            finding=FindingTemplate(
                title="The path between two GPUs of a node is slow",
                first_command="on {node}: nvidia-smi nvlink -e; nvidia-smi topo -p2p r",
            ),
        ),
        metric(
            "best_busbw",
            unit="GB/s",
            meaning="bandwidth of this GPU with its fastest partner",
            per="rank",
            bound=COLLECTIVE,
        ),
        warning(
            "shared_links",
            "== 0 pairs",
            "These pairs are slow when other pairs run concurrently and fast otherwise, so they share a link. With "
            "NVLink between all GPUs, no two pairs share a link by design.",
            f"{_LINK_COMMANDS}; for the switches: systemctl status nvidia-fabricmanager; dmesg | grep SXid",
            when=f"backend == nccl and link == {NVLINK}",
        ),
        wrong_data_metric(
            "The evidence names sender, receiver, offset and flipped bits; a GPU in all entries is at fault. On its "
            "node run nvidia-smi -q -d ECC,ROW_REMAPPER; nvidia-smi nvlink -e; dmesg | grep -i xid"
        ),
    ),
    measure=measure,
    operation="send_receive",
    per_node=True,
    limit_s=300.0,
    options=GpuPairOptions,
    skip_if=(SkipIf.ONE_RANK_PER_NODE,),
)
