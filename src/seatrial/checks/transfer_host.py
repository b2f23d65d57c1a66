"""How fast does data go between host memory and each GPU: one GPU at a time, and all of a node together?

Alone, a GPU shows its own PCIe link; together they show what they share: a switch, a root port, the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Needs, Options, Place
from seatrial.model import Fact, Metric, Observation, Phase, Rule, Scope, format_bytes

if TYPE_CHECKING:
    from seatrial.bench.alone import Timed

# way → how many buffers move in one operation
WAYS = {"h2d": 1, "d2h": 1, "both": 2}


class TransferOptions(Options):
    """``seconds`` for each way, alone and together."""

    seconds: float = Field(default=0.5, gt=0, allow_inf_nan=False)


def measure(place: Place, options: TransferOptions) -> Iterator[Observation]:
    """Yield GB/s of every way, alone and together. All nodes work at the same time: they share nothing here."""
    from seatrial.bench import rank, transfer
    from seatrial.bench.alone import time_alone

    yield from (Fact(name=name, value=value) for name, value in rank.describe_devices(place.device).items())
    turns = max(rank.gather(place.local_rank)) + 1
    pinned = transfer.Pinned(place.device)
    time = partial(time_alone, device=place.device, seconds=options.seconds, heat_up_s=transfer.HEAT_UP_S)
    ways = {"h2d": pinned.h2d, "d2h": pinned.d2h, "both": pinned.both}
    timed: dict[str, Timed] = {}
    for turn in range(turns):
        if turn == place.local_rank:
            place.note("alone")
            timed |= {f"{way}_alone": time(ways[way]) for way in WAYS}
        rank.wait_for_all()
    for way in WAYS:
        place.note(f"{way}, all together")
        rank.wait_for_all()
        # as long as everybody else: who ended before would leave the others more
        timed[f"{way}_together"] = time(ways[way], least_s=options.seconds)
    for name, one in timed.items():
        yield _metric(place, name, one, pinned.size * WAYS[name.partition("_")[0]])
    yield Fact(name="timing", value={name: one.describe() for name, one in timed.items()})
    yield Fact(
        name="how",
        value=f"pinned memory, copies of {format_bytes(pinned.size)} by the copy engines, between CUDA events; alone: "
        f"one GPU of the node after the other; together: all of the node; both: one copy each way at once, summed",
    )


def _metric(place: Place, name: str, timed: Timed, moved: int) -> Metric:
    rate, rates = timed.rate(moved / 1e9), timed.rates(moved / 1e9)
    return Metric(name=name, value=rate, unit="GB/s", subject=place.subject, samples=rates)


CHECK = Check(
    name="transfer.host",
    title="Host memory to GPU and back",
    phase=Phase.DEVICE,
    scope=Scope.CLUSTER,
    metrics={f"{way}_{when}": "GB/s" for way in WAYS for when in ("alone", "together")},
    rules=tuple(
        Rule(
            metric=f"{way}_alone",
            baseline=f"transfer.{way}_alone",
            why="batches, checkpoints and offloaded weights go this way",
            remedy="nvidia-smi -q -i INDEX | grep -A4 'Link Width'; lspci -vv -s PCI | grep LnkSta; nvidia-smi topo -m "
            "(is the process on the GPU's NUMA node?); compare with a good GPU in the same slot",
        )
        for way in ("h2d", "d2h")
    ),
    measure=measure,
    limit_s=300.0,
    needs=Needs(gpus=True),
    options=TransferOptions,
    performance=("*_alone", "*_together"),
)
