"""How fast is every pair of GPUs of a node, one way and both ways at once?

One process of each node copies for all pairs, one after the other, so that a slow pair is that pair's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue

from seatrial.checks.base import Check, Context, Needs, Options, facts, metric
from seatrial.hardware.bounds import BIDIRECTIONAL
from seatrial.model import Fact, NotApplicable, Observation, Phase, Rule, Scope, format_bytes

if TYPE_CHECKING:
    from seatrial.bench.transfer import PeerCopy


class PeerOptions(Options):
    """``seconds`` for each ordered pair and each of one way and both ways."""

    seconds: float = Field(default=0.35, gt=0, allow_inf_nan=False)


def measure(context: Context, options: PeerOptions) -> Iterator[Observation]:
    """Yield GB/s of every ordered pair, from the first process of each node. Raises NotApplicable for a single GPU."""
    from seatrial.bench import rank, transfer

    everywhere = rank.gather((context.node, context.local_rank, context.subject.rpartition("/")[2]))
    if len({node for node, _, _ in everywhere}) == len(everywhere):  # asked of all: all must go one way from here
        raise NotApplicable("nodes with one GPU have no pair of them")
    yield from facts(rank.describe_devices(context.device))
    names = [name for node, _, name in sorted(everywhere) if node == context.node]
    copies: list[PeerCopy] = []
    if context.local_rank == 0:
        copies = transfer.time_peer_copies(len(names), options.seconds, context.progress)
        rank.release_memory(context.device)
    rank.store_barrier()
    gb = transfer.PEER_SIZE / 1e9
    for copy in copies:
        subject = f"{context.node}/{names[copy.source]}->{names[copy.target]}"
        yield copy.unidirectional.metric("unidirectional", gb, "GB/s", subject)
        yield copy.bidirectional.metric("bidirectional", 2 * gb, "GB/s", subject)
        yield metric("direct", copy.peer_access, "bool", subject)
    if copies:
        unidirectional = {(copy.source, copy.target): copy.unidirectional.rate(gb) for copy in copies}
        bidirectional = {(copy.source, copy.target): copy.bidirectional.rate(2 * gb) for copy in copies}
        yield Fact(name="unidirectional_matrix", value=_matrix(names, unidirectional))
        yield Fact(name="bidirectional_matrix", value=_matrix(names, bidirectional))
        yield Fact(
            name="how",
            value=f"copies of {format_bytes(transfer.PEER_SIZE)} from each GPU to each other, one pair at a time, "
            "between CUDA events; both ways: copies each way at once, on two streams that wait for each other only at "
            "a window's ends, summed",
        )


def _matrix(names: list[str], gb_s: Mapping[tuple[int, int], float]) -> dict[str, JsonValue]:
    """GB/s from the GPU of a row to that of a column; None from a GPU to itself."""
    places = range(len(names))
    rows: list[JsonValue] = [[round(gb_s[row, to], 1) if row != to else None for to in places] for row in places]
    return {"gpus": [*names], "gb_s": rows}


_FIX = (
    "nvidia-smi nvlink -s -i INDEX; nvidia-smi nvlink -e -i INDEX (errors and replays); nvidia-smi topo -p2p r; "
    "dmesg | grep -E 'Xid.*(74|145)|SXid'; reset the GPUs, then the fabric manager"
)
CHECK = Check(
    name="transfer.peers",
    title="GPU to GPU, every pair of a node",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"unidirectional": "GB/s", "bidirectional": "GB/s", "direct": "bool"},
    rules=(
        Rule(
            metric="unidirectional",
            reference="transfer.peer_unidirectional",
            meaning="this pair's link is slower than it should be: a collective goes at the pace of its slowest link",
            fix=_FIX,
        ),
        Rule(
            metric="bidirectional",
            reference="transfer.peer_bidirectional",
            fail_below=0.85,  # as the floor in use one way: 335 of the 396 that an H200 reaches
            asymmetry_limit=0.95,
            meaning="this pair's link carries less than it should when both its GPUs send, as they do in every collective",
            fix=_FIX,
        ),
    ),
    measure=measure,
    limit_s=300.0,
    needs=Needs(gpus=True, min_ranks=2),
    options=PeerOptions,
    performance_metrics=("unidirectional", "bidirectional"),
    bounds={"unidirectional": "nvlink", "bidirectional": BIDIRECTIONAL},
    required_per={"*": "ordered pair"},
)
