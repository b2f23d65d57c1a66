"""Measures host-to-GPU and GPU-to-host bandwidth: each GPU separately, then all GPUs of a node concurrently.

A single transfer measures the GPU's own PCIe link. Concurrent transfers measure shared resources: PCIe switch, root
port, host memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from seatrial.checks.check import Check, Context, Needs, Options, Seconds, facts
from seatrial.checks.declare import Answers, fact, metric, value
from seatrial.model import Phase, Scope, format_bytes

if TYPE_CHECKING:
    from seatrial.bench.timing import DeviceTiming

BUFFERS_PER_COPY = {"h2d": 1, "d2h": 1, "bidirectional": 2}  # direction → buffers copied per operation
CONCURRENT_TIME_FACTOR = 2  # concurrent copies are timed longer, as GPUs alternate unevenly on a shared link
# Ratios to the median of the node's GPUs. Host memory bandwidth was observed to vary by 17 % between runs, and by 5 %
# between four GPUs; a GPU that shares its root port reaches 0.5.
CONCURRENT_WARN_RATIO = 0.75
CONCURRENT_FAIL_RATIO = 0.40
# FAIL if a GPU's concurrent rate, times the number of GPUs of its node, is below this share of its single rate. Even
# GPUs that all share one PCIe link reach 1.0, and a GPU alone 0.98 to 1.0 (10 nodes). The nodes with 2 and 4 H100 or
# H200 in docs/results, some of them shared with other users, reached 1.87 to 3.6.
CONCURRENT_SINGLE_RATIO = 0.85
# Direction → the single copy with which its concurrent copies are compared. A bidirectional copy, the sum of both
# directions, reaches at least the rate of one direction.
SINGLE_METRICS = {"h2d": "h2d_single", "d2h": "d2h_single", "bidirectional": "h2d_single"}
# FAIL below this share of the opposite direction of the same link. h2d ÷ d2h of 60 copies of H100 and H200 in
# docs/results: 0.944 to 1.018; a GH200 copies to the host about 15 % slower
DIRECTION_RATIO = 0.75
_OPPOSITE = {"h2d": "d2h_single", "d2h": "h2d_single", "bidirectional": ""}
_NVBANDWIDTH = {"h2d": ("nvbandwidth host_to_device_memcpy_ce",), "d2h": ("nvbandwidth device_to_host_memcpy_ce",)}
_BOUNDS = {"h2d": "pcie", "d2h": "pcie", "bidirectional": ""}


class TransferOptions(Options):
    """``seconds``: maximum timed duration per direction of the copies of a single GPU.

    An imprecise median extends it to at most twice. Copies of all GPUs are always timed for twice this duration.
    """

    seconds: Seconds = 0.5


def measure(context: Context, options: TransferOptions) -> Answers:
    """Yield GB/s of each GPU per direction, single and concurrent.

    All nodes run at the same time, as they share no host links.
    """
    from seatrial.bench import rank, transfer
    from seatrial.bench.timing import ran_concurrently, time_on_device

    yield from facts(rank.describe_devices(context.device))
    turn_count = max(rank.gather(context.local_rank)) + 1
    pinned = transfer.PinnedBuffers(context.device)
    yield fact("host_memory", pinned.host_placement)
    time_copy = partial(
        time_on_device, device=context.device, seconds=options.seconds, window_context=pinned.concurrent
    )
    copies = {"h2d": pinned.h2d, "d2h": pinned.d2h, "bidirectional": pinned.bidirectional}
    timings: dict[str, DeviceTiming] = {}
    for turn in range(turn_count):
        if turn == context.local_rank:
            context.progress("single")
            for name, copy in copies.items():
                timings[f"{name}_single"] = time_copy(copy, warmup_s=transfer.WARMUP_S)
        rank.store_barrier()
    # A GPU copies faster while the other GPUs do not copy. So all GPUs copy equally long, with load before and after
    # the timed windows.
    time_concurrent = partial(
        time_copy,
        min_seconds=CONCURRENT_TIME_FACTOR * options.seconds,
        warmup_s=transfer.OVERLAP_S,
        trailing_s=transfer.OVERLAP_S,
    )
    for name, copy in copies.items():
        context.progress(f"{name}, concurrent")
        rank.store_barrier()
        timings[f"{name}_concurrent"] = time_concurrent(copy)
    for name, timing in timings.items():
        copied_bytes = pinned.size * BUFFERS_PER_COPY[name.partition("_")[0]]
        yield value(name, timing.rates(copied_bytes / 1e9))
    yield fact("timing", {name: timing.describe() for name, timing in timings.items()})
    timings_of_node = [
        rank_timings for node, rank_timings in rank.gather((context.node, timings)) if node == context.node
    ]
    was_concurrent = {
        name: ran_concurrently([rank_timings[f"{name}_concurrent"] for rank_timings in timings_of_node])
        for name in copies
    }
    yield fact("concurrent", was_concurrent)
    yield fact(
        "method",
        f"pinned memory, copies of {format_bytes(pinned.size)} by the copy engines, timed with CUDA events; "
        "single: one GPU of the node at a time; concurrent: all GPUs of the node, each under load before and after its "
        "timed windows; bidirectional: both directions at the same time, sum of both",
    )


CHECK = Check(
    name="transfer.host",
    title="Host-to-GPU and GPU-to-host bandwidth",
    phase=Phase.DEVICE,
    scope=Scope.CLUSTER,
    measure=measure,
    declared=(
        *(
            metric(
                f"{name}_single",
                (">= 0.90 reference", ">= 0.70 bound", f"> {DIRECTION_RATIO} {opposite} of the GPU")
                if opposite
                else "recorded",
                "batches, checkpoints and offloaded weights use this link",
                "nvidia-smi -q -i INDEX | grep -A4 'Link Width'; lspci -vv -s PCI | grep LnkSta; nvidia-smi topo -m "
                "(is the process on the GPU's NUMA node?); compare with a good GPU in the same slot",
                unit="GB/s",
                warn=">= 0.95 reference" if opposite else (),
                reference=f"transfer.{name}_single",
                per="rank",
                bound=_BOUNDS[name],
                speed=True,
                also_measured_by=_NVBANDWIDTH.get(name, ()),
            )
            for name, opposite in _OPPOSITE.items()
        ),
        *(
            metric(
                f"{name}_concurrent",
                (f">= {CONCURRENT_FAIL_RATIO} peers", f"> {CONCURRENT_SINGLE_RATIO} {SINGLE_METRICS[name]} / gpus"),
                "concurrent bandwidth far below the other GPUs of the node: this GPU shares a root port or switch with "
                "another GPU, or its host memory is on a remote NUMA node. FAIL below "
                f"{CONCURRENT_FAIL_RATIO:.0%} of their median (two GPUs on one root port reach 50%), or below "
                f"{CONCURRENT_SINGLE_RATIO:.0%} of {SINGLE_METRICS[name]} divided by the number of GPUs (GPUs that all "
                "share one PCIe link reach 100%; healthy H200 nodes reached 187% and more)",
                "lspci -tv and nvidia-smi topo -m: which GPUs share a root port or switch, on which NUMA node? If "
                "h2d_single or d2h_single is low too, the GPU's own link is at fault",
                warn=f">= {CONCURRENT_WARN_RATIO} peers",
                unit="GB/s",
                per="rank",
                bound=_BOUNDS[name],
                speed=True,
            )
            for name in BUFFERS_PER_COPY
        ),
    ),
    limit_s=300.0,
    needs=Needs(gpus=True),
    options=TransferOptions,
)
