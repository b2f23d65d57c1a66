"""Measures unidirectional and bidirectional copy bandwidth between every two GPUs of a node.

One process per node copies for all pairs, one pair at a time, so that pairs do not affect each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seatrial.checks.check import Check, Context, Needs, Options, Seconds, SkipIf, facts
from seatrial.checks.declare import Answers, fact, metric, value
from seatrial.hardware.links import BIDIRECTIONAL
from seatrial.model import NotApplicable, Phase, Scope, format_bytes

if TYPE_CHECKING:
    from seatrial.bench.timing import DeviceTiming
    from seatrial.bench.transfer import PeerCopy


class PeerOptions(Options):
    """``seconds``: maximum timed duration of each measurement, unidirectional and bidirectional, of an ordered pair.

    An imprecise median extends it to at most twice.
    """

    seconds: Seconds = 0.35


def measure(context: Context, options: PeerOptions) -> Answers:
    """Yield GB/s per ordered pair from local rank 0. Raises NotApplicable if every node has a single GPU."""
    from seatrial.bench import rank, transfer

    processes = rank.gather((context.node, context.local_rank, context.subject.rpartition("/")[2]))
    if len({node for node, _, _ in processes}) == len(processes):  # same result on all ranks, so that none waits
        raise NotApplicable("every node has one GPU; transfer.peers needs two GPUs in a node")
    # Names of the node's GPUs by local rank, which is the CUDA index of the rank's GPU
    gpus = [gpu for node, _local_rank, gpu in sorted(processes) if node == context.node]
    yield from facts(rank.describe_devices(context.device) | {"node_gpus": len(gpus)})
    copies: list[PeerCopy] = []
    if context.local_rank == 0:
        copies = transfer.time_peer_copies(len(gpus), options.seconds, context.progress)
        rank.release_memory(context.device)
    rank.store_barrier()
    if copies:
        for name, copied_gb in (
            ("unidirectional", transfer.PEER_SIZE / 1e9),
            ("bidirectional", transfer.PEER_SIZE / 5e8),
        ):
            rows: list[list[float | None]] = [[None] * len(gpus) for _ in gpus]  # None on the diagonal
            for copy in copies:
                timing: DeviceTiming = getattr(copy, name)
                subject = f"{context.node}/{gpus[copy.source]}->{gpus[copy.target]}"
                evidence = {"peer access": "yes" if copy.peer_access else "no"}
                yield value(name, timing.rates(copied_gb), subject, evidence=evidence)
                rows[copy.source][copy.target] = round(timing.rate(copied_gb), 1)
            yield fact(f"{name}_matrix", {"gpus": gpus, "gb_s": rows})  # from the GPU of the row to that of the column
        yield fact(
            "method",
            f"copies of {format_bytes(transfer.PEER_SIZE)} from each GPU to each other, one pair at a time, "
            "timed with CUDA events; bidirectional: copies in both directions on two streams, synchronized at the "
            "ends of a window, sum of both",
        )


_FIX = (
    "nvidia-smi nvlink -s -i INDEX; nvidia-smi nvlink -e -i INDEX (errors and replays); nvidia-smi topo -p2p r; "
    "dmesg | grep -E 'Xid.*(74|145)|SXid'; reset the GPUs, then the fabric manager"
)
# Of 102 pairs of H100 and H200 in docs/results: unidirectional 0.998 and more, bidirectional 0.884 and more
_OPPOSITE = ">= 0.80 opposite"
CHECK = Check(
    name="transfer.peers",
    title="GPU-to-GPU bandwidth of every pair in a node",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    measure=measure,
    declared=(
        metric(
            "unidirectional",
            (">= 0.90 reference", ">= 0.70 bound", _OPPOSITE),
            "unidirectional bandwidth of this pair is low: a collective runs at the speed of its slowest link",
            _FIX,
            unit="GB/s",
            warn=(">= 0.95 reference", ">= 0.95 opposite"),
            reference="transfer.peer_unidirectional",
            per="ordered pair",
            bound="nvlink",
            speed=True,
            also_measured_by=(
                "nvbandwidth device_to_device_memcpy_read_ce",
                "nvbandwidth device_to_device_memcpy_write_ce",
            ),
        ),
        metric(
            "bidirectional",
            # The same share as for unidirectional copies of an H200: 335 of the 396 GB/s that it reaches are required
            # (data/skus)
            (">= 0.85 reference", ">= 0.70 bound", _OPPOSITE),
            "bidirectional bandwidth of this pair is low: in every collective both GPUs send at the same time",
            _FIX,
            warn=(">= 0.95 reference", ">= 0.95 opposite"),
            unit="GB/s",
            reference="transfer.peer_bidirectional",
            per="ordered pair",
            bound=BIDIRECTIONAL,
            speed=True,
            also_measured_by=(
                "nvbandwidth device_to_device_bidirectional_memcpy_read_ce_total",
                "nvbandwidth device_to_device_bidirectional_memcpy_write_ce_total",
            ),
        ),
    ),
    limit_s=300.0,
    needs=Needs(gpus=True, min_ranks=2),
    options=PeerOptions,
    skip_if=(SkipIf.ONE_RANK_PER_NODE,),
)
