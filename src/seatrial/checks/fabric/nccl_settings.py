"""What limits an all-reduce? The same one again, with one thing changed in NCCL at a time: that by which it changes.

NCCL reads its variables once a process, so that each contrast is measured by new processes, one beside every rank. What
they write of it proves what was measured: algorithm, protocol, channels and transport of every size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import Field

from seatrial.checks.base import Check, Comparison, Context, Needs, Options, facts, metric
from seatrial.checks.fabric._nccl_log import logging_environment
from seatrial.checks.fabric._results import BANDWIDTH_BOUNDS, wrong_data_rule
from seatrial.discover import gpu, nccl_log
from seatrial.discover.nccl_log import NcclLog
from seatrial.model import (
    CLUSTER,
    ByteSize,
    Fact,
    Metric,
    NotApplicable,
    Observation,
    Outcome,
    Phase,
    Rule,
    Scope,
    SeatrialError,
    format_bytes,
    parse_bytes,
)

if TYPE_CHECKING:
    from seatrial.bench.child_ranks import ChildResult

SIZE = parse_bytes("1GiB")  # where links are saturated
# Of collectives.all_reduce: beside each of its figures stands the way that it took
PATH_SIZES = tuple(map(parse_bytes, ("1MiB", "10MiB", "100MiB", "1GiB", "8GiB")))
ALL_RANKS, PER_NODE = "all", "inside"


@dataclass(frozen=True)
class NcclSetting:
    """``meaning``: what a difference from NCCL's own choice says."""

    env: Mapping[str, str]
    meaning: str


SETTINGS = {
    "default": NcclSetting({}, "NCCL's own choice in the environment of the trial: what the others are compared with"),
    "ring": NcclSetting(
        {"NCCL_ALGO": "Ring"},
        "much slower: trees or NVLS carry the default, whose figure then says little of a network of more nodes; "
        "faster: NCCL's choice is wrong here (a topology file, a tuner plugin, NCCL_ALGO)",
    ),
    "no_p2p": NcclSetting(
        {"NCCL_P2P_DISABLE": "1"},
        "no slower: the default does not go by NVLink or PCIe peer-to-peer, or something else is slower than both",
    ),
    "no_nvls": NcclSetting(
        {"NCCL_NVLS_ENABLE": "0"},
        "slower: the switches sum for the default (NVLink SHARP), whose figure may then be beyond the links' own rate",
    ),
}


class NcclSettingsOptions(Options):
    """``size``: bytes of the all-reduce that is timed. ``path_sizes``: of these the way is told, too.

    ``seconds`` cap the timed part of each contrast; ``limit_s`` is for each start of processes.
    """

    size: ByteSize = Field(default=SIZE, ge=4)
    path_sizes: tuple[ByteSize, ...] = PATH_SIZES
    seconds: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    limit_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)


def measure(context: Context, options: NcclSettingsOptions) -> Iterator[Observation]:
    """Yield the cluster's figures on rank 0. Raises SeatrialError where a contrast could not be measured."""
    if not context.on_gpu:
        raise NotApplicable("the contrasts are NCCL's, and gloo knows none of them")
    from seatrial.bench import collectives, rank, subgroups

    nodes = subgroups.ranks_by_node(context.node)
    chosen, left_out = applicable_settings(nodes, os.environ)
    path = {**collectives.describe_group(), "nodes": len(nodes), "nvlink": _nvlink(context), "size": options.size}
    path |= {"peers": "no" if "no_p2p" in left_out else "yes", "left_out": left_out}
    path |= {"meaning": {name: SETTINGS[name].meaning for name in chosen}}
    answers, logged = {}, {}
    for name in chosen:
        context.progress(name)
        answers[name] = measure_setting(name, nodes, context, options)
        logged[name] = rank.gather(_path(answers[name][context.rank]))
    failed = {}
    for name, by_rank in answers.items():
        if problems := {f"rank {rank}": answer.error for rank, answer in enumerate(by_rank) if answer.error}:
            failed[name] = problems
    if context.rank == 0:
        yield from facts(path)
        good = {name: by_rank[0].value for name, by_rank in answers.items() if name not in failed}
        yield from _figures(good, list(nodes), options.size)
        yield from _paths(good, logged, options)
    if failed:
        raise SeatrialError(f"not measured: {failed}")


def applicable_settings(
    nodes: Mapping[str, Sequence[int]], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The contrasts to measure, and why not the others."""
    left_out = {}
    if environ.get("NCCL_NVLS_ENABLE") == "0":
        left_out["no_nvls"] = "NCCL_NVLS_ENABLE is 0 in the environment: the default has no NVLS to switch off"
    if max(map(len, nodes.values())) == 1:
        left_out["no_p2p"] = "one rank a node: no two that could be peers"
    return [name for name in SETTINGS if name not in left_out], left_out


def measure_setting(
    name: str, nodes: Mapping[str, Sequence[int]], context: Context, options: NcclSettingsOptions
) -> list[ChildResult]:
    """What the processes of one contrast answer, by rank."""
    from seatrial.bench import child_ranks

    groups = {ALL_RANKS: [[rank for ranks in nodes.values() for rank in ranks]]}
    if len(nodes) > 1 and min(map(len, nodes.values())) > 1:
        groups[PER_NODE] = [list(ranks) for ranks in nodes.values()]
    task = {
        "groups": {kind: [sorted(ranks) for ranks in found] for kind, found in groups.items()},
        "size": options.size,
        "seconds": options.seconds,
        "path_sizes": list(options.path_sizes),
    }
    return child_ranks.run_child_ranks(
        "seatrial.bench.nccl_settings",
        task,
        {**logging_environment(context.artifacts_dir, name), **SETTINGS[name].env},
        device=context.device,
        local_rank=context.local_rank,
        file_prefix=context.artifacts_dir / name,
        limit_s=options.limit_s,
    )


def _path(answer: ChildResult) -> NcclLog:
    """By the log of our own child; nothing where it is not to be read."""
    if answer.error:
        return NcclLog()
    return nccl_log.read(Path(answer.value["log"]), answer.value["log_bytes"])


def _nvlink(context: Context) -> str:
    """Whether any GPU of every node has active NVLinks: yes, no, or unknown."""
    from seatrial.bench import rank

    gpus = gpu.read(context.root).gpus if context.local_rank == 0 else ()
    told = "unknown" if not gpus or not all(one.nvlink_states_readable for one in gpus) else ""
    own = told or ("yes" if any(one.active_nvlinks for one in gpus) else "no")
    found = [answer for answer, leads in rank.gather((own, context.local_rank == 0)) if leads]
    return next((answer for answer in ("unknown", "no") if answer in found), "yes")


def _figures(answers: Mapping[str, Any], nodes: Sequence[str], size: int) -> Iterator[Metric]:
    """GB/s by contrast, over all ranks and inside each node, and what each contrast changes. By rank 0's answers."""
    rates: dict[str, dict[str, Sequence[float]]] = {}
    for name, answer in answers.items():
        busbw = answer["busbw"]
        rates[name] = {
            CLUSTER: busbw[ALL_RANKS][0],
            **(dict(zip(nodes, busbw[PER_NODE], strict=True)) if PER_NODE in busbw else {}),
        }
        for subject, samples in rates[name].items():
            yield metric(f"busbw_{name}.{format_bytes(size)}", samples, "GB/s", subject)
    default, no_p2p, ring = (rates.get(name, {}) for name in ("default", "no_p2p", "ring"))
    ratios = [("p2p_gain", no_p2p, subject) for subject in (nodes if len(nodes) > 1 else [CLUSTER])]
    for name, other, subject in (*ratios, ("default_vs_ring", ring, CLUSTER)):
        if subject in default and subject in other:
            base = median(other[subject])
            yield metric(name, [rate / base for rate in default[subject]], "x", subject)
    yield metric("wrong_elements", sum(answer["wrong"] for answer in answers.values()), "count")


def _paths(
    answers: Mapping[str, Any], logged: Mapping[str, Sequence[NcclLog]], options: NcclSettingsOptions
) -> Iterator[Fact]:
    """The path of every size, by NCCL's own log, of every contrast."""
    by_size = {
        name: {
            format_bytes(size): "not measured: no memory"
            if size in answer["not_allocated"]
            else path_at_size(logged[name], size)
            for size in sorted({options.size, *options.path_sizes})
        }
        for name, answer in answers.items()
    }
    yield Fact(name="path_by_size", value=by_size)
    if "default" in answers:
        ranks = logged["default"]
        algorithm, protocol, channels, transport = path_at_size(ranks, options.size).values()
        tree = "" if len(ranks) > 2 else "; two ranks have no tree: a ring is all there is to choose"
        yield Fact(
            name="how",
            value=f"NCCL {ranks[0].version}, {len(ranks)} ranks on {ranks[0].nodes} nodes, all-reduce of "
            f"{format_bytes(options.size)} in new processes for every contrast; by default {algorithm}, {protocol}, "
            f"{channels} channels, over {transport}{tree}",
        )


def path_at_size(ranks: Sequence[NcclLog], size: int) -> dict[str, object]:
    """Algorithm, protocol and channels, which the first rank tells, and the transports of all ranks together."""
    choice = ranks[0].choice_for("AllReduce", size)
    transports = sorted({name for one in ranks for name in one.transports})
    sums_in_switch = choice is not None and choice.algorithm.startswith("NVLS")
    return {
        "algorithm": choice.algorithm if choice else "not told",
        "protocol": (choice.protocol if choice else None) or "not told",
        "channels": (choice.channels if choice else None) or "not told",
        "transport": " + ".join([*(["NVLS"] if sums_in_switch else []), *transports]) or "not told",
    }


CHECK = Check(
    name="collectives.nccl_settings",
    title="What limits the all-reduce",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={
        "busbw_default.*": "GB/s",
        "busbw_ring.*": "GB/s",
        "busbw_no_p2p.*": "GB/s",
        "busbw_no_nvls.*": "GB/s",
        "p2p_gain": "x",
        "default_vs_ring": "x",
        "wrong_elements": "count",
    },
    rules=(
        Rule(
            metric="p2p_gain",
            # The narrowest NVLink bridge, of an RTX A6000, carries 56 GB/s each way (NVIDIA's data sheet: 112.5 GB/s
            # both ways), 1.8 times the 31.5 GB/s of PCIe 4.0 x16 that is left without it
            expect=">= 1.5 x",
            applies_if={"nvlink": "yes", "peers": "yes"},
            evidence_facts=("path_by_size",),
            meaning="NVLinks are active, and NCCL is hardly faster with peer-to-peer than without: it does not use them",
            fix="env | grep NCCL (NCCL_P2P_DISABLE, NCCL_P2P_LEVEL); nvidia-smi topo -p2p r; in a container all "
            "GPUs must be visible to each process; in a virtual machine look for ACS and IOMMU settings",
        ),
        Rule(
            metric="default_vs_ring",
            expect=">= 0.90 x",
            outcome_if_violated=Outcome.WARN,
            evidence_facts=("path_by_size",),
            meaning="NCCL takes what it expects to be fastest, and a ring is faster: its picture of this machine is wrong",
            fix="env | grep NCCL (NCCL_ALGO, NCCL_TOPO_FILE, NCCL_TUNER_PLUGIN); unset them, or report it with "
            "NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING",
        ),
        wrong_data_rule("collectives.all_reduce names rank, offset and flipped bits"),
    ),
    measure=measure,
    fact_roles={"algorithms_by_setting": "path_by_size"},
    bounds=BANDWIDTH_BOUNDS,
    comparisons={"p2p_gain": Comparison(part="peer-to-peer", is_speedup=True)},
    performance_metrics=("busbw_*", "p2p_gain", "default_vs_ring"),
    required_per={"p2p_gain": "node"},
    limit_s=600.0,
    needs=Needs(gpus=True, min_ranks=2),
    options=NcclSettingsOptions,
)
