"""How fast does data go between host memory and each GPU: one GPU at a time, and all of a node together?

Alone, a GPU shows its own PCIe link; together they show what they share: a switch, a root port, the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Context, Needs, Options, facts
from seatrial.model import Fact, Observation, Phase, Rule, Scope, format_bytes

if TYPE_CHECKING:
    from seatrial.bench.timing import DeviceTiming

# way → how many buffers move in one operation
WAYS = {"h2d": 1, "d2h": 1, "both": 2}
TOGETHER = 2  # times as long: GPUs that share something take turns at it, unevenly
# Of its siblings' median. Together, GPUs share the host's memory, which has been seen to give 17 % less in the next run
# and to favour one of four GPUs by 5 %; one that shares its root port gets half.
TOGETHER_LEAST = 0.75


class TransferOptions(Options):
    """``seconds`` for each way alone, twice as many together."""

    seconds: float = Field(default=0.5, gt=0, allow_inf_nan=False)


def measure(context: Context, options: TransferOptions) -> Iterator[Observation]:
    """Yield GB/s of every way, alone and together. All nodes work at the same time: they share nothing here."""
    from seatrial.bench import rank, transfer
    from seatrial.bench.timing import ran_concurrently, time_on_device

    yield from facts(rank.describe_devices(context.device))
    turns = max(rank.gather(context.local_rank)) + 1
    pinned = transfer.PinnedBuffers(context.device)
    yield Fact(name="host_memory", value=pinned.host_placement)
    time = partial(time_on_device, device=context.device, seconds=options.seconds, window_context=pinned.concurrent)
    ways = {"h2d": pinned.h2d, "d2h": pinned.d2h, "both": pinned.bidirectional}
    timed: dict[str, DeviceTiming] = {}
    for turn in range(turns):
        if turn == context.local_rank:
            context.progress("alone")
            timed |= {f"{way}_alone": time(ways[way], warmup_s=transfer.WARMUP_S) for way in WAYS}
        rank.store_barrier()
    # as long as everybody else, before and after as well: who is at work alone has more
    time_together = partial(
        time, least_s=TOGETHER * options.seconds, warmup_s=transfer.OVERLAP_S, run_on_s=transfer.OVERLAP_S
    )
    for way in WAYS:
        context.progress(f"{way}, all together")
        rank.store_barrier()
        timed[f"{way}_together"] = time_together(ways[way])
    for name, one in timed.items():
        moved = pinned.size * WAYS[name.partition("_")[0]]
        yield one.metric(name, moved / 1e9, "GB/s", context.subject)
    yield Fact(name="timing", value={name: one.describe() for name, one in timed.items()})
    everybody = [found for node, found in rank.gather((context.node, timed)) if node == context.node]
    overlap = {way: ran_concurrently([found[f"{way}_together"] for found in everybody]) for way in WAYS}
    yield Fact(name="concurrent", value=overlap)
    yield Fact(
        name="how",
        value=f"pinned memory, copies of {format_bytes(pinned.size)} by the copy engines, between CUDA events; alone: "
        f"one GPU of the node after the other; together: all of the node, each at work before and after its windows "
        "too, so that all of them share what there is; both: copies each way at once, summed",
    )


CHECK = Check(
    name="transfer.host",
    title="Host memory to GPU and back",
    phase=Phase.DEVICE,
    scope=Scope.CLUSTER,
    metrics={f"{way}_{when}": "GB/s" for way in WAYS for when in ("alone", "together")},
    rules=(
        *(
            Rule(
                metric=f"{way}_alone",
                reference=f"transfer.{way}_alone",
                meaning="batches, checkpoints and offloaded weights go this way",
                fix="nvidia-smi -q -i INDEX | grep -A4 'Link Width'; lspci -vv -s PCI | grep LnkSta; nvidia-smi "
                "topo -m (is the process on the GPU's NUMA node?); compare with a good GPU in the same slot",
            )
            for way in ("h2d", "d2h")
        ),
        *(
            Rule(
                metric=f"{way}_together",
                compare_with_peers=True,
                warn_below=TOGETHER_LEAST,
                meaning="while all of a node copy, this GPU gets far less than its siblings: it shares a root port or a "
                "switch with another, or its host memory is far from it",
                fix="lspci -tv and nvidia-smi topo -m: which GPUs hang on one root port or switch, on which NUMA "
                "node? If it is slow alone as well, its own link is at fault: see h2d_single and d2h_single",
            )
            for way in WAYS
        ),
    ),
    measure=measure,
    limit_s=300.0,
    needs=Needs(gpus=True),
    options=TransferOptions,
    performance_metrics=("*_alone", "*_together"),
    bounds={"h2d_*": "pcie", "d2h_*": "pcie"},
    required_per={"*": "rank"},
)
