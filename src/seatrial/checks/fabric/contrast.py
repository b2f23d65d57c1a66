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

from seatrial.checks.base import Check, Comparison, Needs, Options, Place, facts, metric
from seatrial.checks.fabric._results import BANDWIDTHS, intact
from seatrial.checks.fabric._transports import log_choices
from seatrial.discover import gpu, nccl
from seatrial.discover.nccl import NcclPath
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
    from seatrial.bench.fresh_ranks import Answer

SIZE = parse_bytes("1GiB")  # where links are saturated
# Of collectives.all_reduce: beside each of its figures stands the way that it took
PATH_SIZES = tuple(map(parse_bytes, ("1MiB", "10MiB", "100MiB", "1GiB", "8GiB")))
ALL, INSIDE = "all", "inside"


@dataclass(frozen=True)
class Contrast:
    """``meaning``: what a difference from NCCL's own choice says."""

    env: Mapping[str, str]
    meaning: str


CONTRASTS = {
    "default": Contrast({}, "NCCL's own choice in the environment of the trial: what the others are compared with"),
    "ring": Contrast(
        {"NCCL_ALGO": "Ring"},
        "much slower: trees or NVLS carry the default, whose figure then says little of a network of more nodes; "
        "faster: NCCL's choice is wrong here (a topology file, a tuner plugin, NCCL_ALGO)",
    ),
    "no_p2p": Contrast(
        {"NCCL_P2P_DISABLE": "1"},
        "no slower: the default does not go by NVLink or PCIe peer-to-peer, or something else is slower than both",
    ),
    "no_nvls": Contrast(
        {"NCCL_NVLS_ENABLE": "0"},
        "slower: the switches sum for the default (NVLink SHARP), whose figure may then be beyond the links' own rate",
    ),
}


class ContrastOptions(Options):
    """``size``: bytes of the all-reduce that is timed. ``path_sizes``: of these the way is told, too.

    ``seconds`` cap the timed part of each contrast; ``limit_s`` is for each start of processes.
    """

    size: ByteSize = Field(default=SIZE, ge=4)
    path_sizes: tuple[ByteSize, ...] = PATH_SIZES
    seconds: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    limit_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)


def measure(place: Place, options: ContrastOptions) -> Iterator[Observation]:
    """Yield the cluster's figures on rank 0. Raises SeatrialError where a contrast could not be measured."""
    if not place.on_gpu:
        raise NotApplicable("the contrasts are NCCL's, and gloo knows none of them")
    from seatrial.bench import collectives, rank, subgroups

    nodes = subgroups.ranks_by_node(place.node)
    chosen, left_out = choose(nodes, os.environ)
    path = {**collectives.describe_group(), "nodes": len(nodes), "nvlink": _nvlink(place), "size": options.size}
    path |= {"peers": "no" if "no_p2p" in left_out else "yes", "left_out": left_out}
    path |= {"meaning": {name: CONTRASTS[name].meaning for name in chosen}}
    answers, logged = {}, {}
    for name in chosen:
        place.note(name)
        answers[name] = ask(name, nodes, place, options)
        logged[name] = rank.gather(_path(answers[name][place.rank]))
    failed = {}
    for name, by_rank in answers.items():
        if problems := {f"rank {rank}": answer.problem for rank, answer in enumerate(by_rank) if answer.problem}:
            failed[name] = problems
    if place.rank == 0:
        yield from facts(path)
        good = {name: by_rank[0].value for name, by_rank in answers.items() if name not in failed}
        yield from _figures(good, list(nodes), options.size)
        yield from _paths(good, logged, options)
    if failed:
        raise SeatrialError(f"not measured: {failed}")


def choose(nodes: Mapping[str, Sequence[int]], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The contrasts to measure, and why not the others."""
    left_out = {}
    if environ.get("NCCL_NVLS_ENABLE") == "0":
        left_out["no_nvls"] = "NCCL_NVLS_ENABLE is 0 in the environment: the default has no NVLS to switch off"
    if max(map(len, nodes.values())) == 1:
        left_out["no_p2p"] = "one rank a node: no two that could be peers"
    return [name for name in CONTRASTS if name not in left_out], left_out


def ask(name: str, nodes: Mapping[str, Sequence[int]], place: Place, options: ContrastOptions) -> list[Answer]:
    """What the processes of one contrast answer, by rank."""
    from seatrial.bench import fresh_ranks

    groups = {ALL: [[rank for ranks in nodes.values() for rank in ranks]]}
    if len(nodes) > 1 and min(map(len, nodes.values())) > 1:
        groups[INSIDE] = [list(ranks) for ranks in nodes.values()]
    task = {
        "groups": {kind: [sorted(ranks) for ranks in found] for kind, found in groups.items()},
        "size": options.size,
        "seconds": options.seconds,
        "path_sizes": list(options.path_sizes),
    }
    return fresh_ranks.ask_anew(
        "seatrial.bench.contrast",
        task,
        {**log_choices(place.out, name), **CONTRASTS[name].env},
        device=place.device,
        local_rank=place.local_rank,
        out=place.out / name,
        limit_s=options.limit_s,
    )


def _path(answer: Answer) -> NcclPath:
    """By the log of our own child; nothing where it is not to be read."""
    if answer.problem:
        return NcclPath()
    return nccl.read(Path(answer.value["log"]), answer.value["log_bytes"])


def _nvlink(place: Place) -> str:
    """Whether any GPU of every node has active NVLinks: yes, no, or unknown."""
    from seatrial.bench import rank

    gpus = gpu.read(place.root).gpus if place.local_rank == 0 else ()
    told = "unknown" if not gpus or not all(one.links_known for one in gpus) else ""
    own = told or ("yes" if any(one.links_up for one in gpus) else "no")
    found = [answer for answer, leads in rank.gather((own, place.local_rank == 0)) if leads]
    return next((answer for answer in ("unknown", "no") if answer in found), "yes")


def _figures(answers: Mapping[str, Any], nodes: Sequence[str], size: int) -> Iterator[Metric]:
    """GB/s by contrast, over all ranks and inside each node, and what each contrast changes. By rank 0's answers."""
    rates: dict[str, dict[str, Sequence[float]]] = {}
    for name, answer in answers.items():
        busbw = answer["busbw"]
        rates[name] = {
            CLUSTER: busbw[ALL][0],
            **(dict(zip(nodes, busbw[INSIDE], strict=True)) if INSIDE in busbw else {}),
        }
        for subject, samples in rates[name].items():
            yield metric(f"busbw_{name}.{format_bytes(size)}", samples, "GB/s", subject)
    default, no_p2p, ring = (rates.get(name, {}) for name in ("default", "no_p2p", "ring"))
    ratios = [("p2p_gain", no_p2p, subject) for subject in (nodes if len(nodes) > 1 else [CLUSTER])]
    for name, other, subject in (*ratios, ("default_over_ring", ring, CLUSTER)):
        if subject in default and subject in other:
            base = median(other[subject])
            yield metric(name, [rate / base for rate in default[subject]], "x", subject)
    yield metric("wrong_elements", sum(answer["wrong"] for answer in answers.values()), "count")


def _paths(
    answers: Mapping[str, Any], logged: Mapping[str, Sequence[NcclPath]], options: ContrastOptions
) -> Iterator[Fact]:
    """The path of every size, by NCCL's own log, of every contrast."""
    by_size = {
        name: {
            format_bytes(size): "not measured: no memory" if size in answer["not_fitting"] else way(logged[name], size)
            for size in sorted({options.size, *options.path_sizes})
        }
        for name, answer in answers.items()
    }
    yield Fact(name="path_by_size", value=by_size)
    if "default" in answers:
        ranks = logged["default"]
        algorithm, protocol, channels, transport = way(ranks, options.size).values()
        tree = "" if len(ranks) > 2 else "; two ranks have no tree: a ring is all there is to choose"
        yield Fact(
            name="how",
            value=f"NCCL {ranks[0].version}, {len(ranks)} ranks on {ranks[0].nodes} nodes, all-reduce of "
            f"{format_bytes(options.size)} in new processes for every contrast; by default {algorithm}, {protocol}, "
            f"{channels} channels, over {transport}{tree}",
        )


def way(ranks: Sequence[NcclPath], size: int) -> dict[str, object]:
    """Algorithm, protocol and channels, which the first rank tells, and the transports of all ranks together."""
    choice = ranks[0].chosen("AllReduce", size)
    transports = sorted({name for one in ranks for name in one.transports})
    sums_in_switch = choice is not None and choice.algorithm.startswith("NVLS")
    return {
        "algorithm": choice.algorithm if choice else "not told",
        "protocol": (choice.protocol if choice else None) or "not told",
        "channels": (choice.channels if choice else None) or "not told",
        "transport": " + ".join([*(["NVLS"] if sums_in_switch else []), *transports]) or "not told",
    }


CHECK = Check(
    name="collectives.contrast",
    title="What limits the all-reduce",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={
        "busbw_default.*": "GB/s",
        "busbw_ring.*": "GB/s",
        "busbw_no_p2p.*": "GB/s",
        "busbw_no_nvls.*": "GB/s",
        "p2p_gain": "x",
        "default_over_ring": "x",
        "wrong_elements": "count",
    },
    rules=(
        Rule(
            metric="p2p_gain",
            # The narrowest NVLink bridge, of an RTX A6000, carries 56 GB/s each way (NVIDIA's data sheet: 112.5 GB/s
            # both ways), 1.8 times the 31.5 GB/s of PCIe 4.0 x16 that is left without it
            expect=">= 1.5 x",
            where={"nvlink": "yes", "peers": "yes"},
            shows=("path_by_size",),
            why="NVLinks are active, and NCCL is hardly faster with peer-to-peer than without: it does not use them",
            fix="env | grep NCCL (NCCL_P2P_DISABLE, NCCL_P2P_LEVEL); nvidia-smi topo -p2p r; in a container all "
            "GPUs must be visible to each process; in a virtual machine look for ACS and IOMMU settings",
        ),
        Rule(
            metric="default_over_ring",
            expect=">= 0.90 x",
            breach=Outcome.WARN,
            shows=("path_by_size",),
            why="NCCL takes what it expects to be fastest, and a ring is faster: its picture of this machine is wrong",
            fix="env | grep NCCL (NCCL_ALGO, NCCL_TOPO_FILE, NCCL_TUNER_PLUGIN); unset them, or report it with "
            "NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING",
        ),
        intact("collectives.all_reduce names rank, offset and flipped bits"),
    ),
    measure=measure,
    fact_roles={"contrast_algorithms": "path_by_size"},
    bounds=BANDWIDTHS,
    comparisons={"p2p_gain": Comparison(part="peer-to-peer", gain=True)},
    performance=("busbw_*", "p2p_gain", "default_over_ring"),
    per={"p2p_gain": "node"},
    limit_s=600.0,
    needs=Needs(gpus=True, ranks=2),
    options=ContrastOptions,
)
