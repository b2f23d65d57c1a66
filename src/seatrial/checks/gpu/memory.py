"""Measures device memory bandwidth, and tests most of the free memory with data patterns."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import Field

from seatrial.checks.check import Check, Context, Options, Seconds, facts
from seatrial.checks.declare import Answers, fact, metric, value
from seatrial.model import ByteSize, Phase, Scope, format_bytes, parse_bytes

# Much larger than any cache (50 MiB on an H100, tens to hundreds of MiB on a server CPU)
GPU_ARRAY_BYTES, CPU_ARRAY_BYTES = parse_bytes("2GiB"), parse_bytes("256MiB")
# Minimum size of the pattern test on a GPU; size of the test on a CPU
MIN_TESTED_BYTES = parse_bytes("64MiB")
# Free memory that is not tested: the comparison needs 1.25 × memory.BLOCK_BYTES, and the allocator rounds up. These 512
# MiB are 11 % of the 4.6 GiB that are free in a MIG instance 1g.5gb.
SCRATCH_BYTES = parse_bytes("512MiB")


class MemoryOptions(Options):
    """``share``: fraction of the free GPU memory to test. ``size``: bytes of each array of copy and triad.

    ``seconds``: maximum timed duration of copy, and of triad; on a GPU an imprecise median extends it to at most twice.
    """

    share: float = Field(default=0.9, gt=0, le=0.95)
    size: ByteSize | None = Field(default=None, gt=0, multiple_of=8)
    seconds: Seconds = 1.0


def measure(context: Context, options: MemoryOptions) -> Answers:
    """Yield GB/s of copy and STREAM triad, and the number of memory words that lost their pattern."""
    from seatrial.bench import memory, rank

    size = options.size or (GPU_ARRAY_BYTES if context.on_gpu else CPU_ARRAY_BYTES)
    yield from facts(rank.describe_device(context.device))
    for name, moved_bytes, timing in (
        ("copy", 2 * size, memory.time_copy(size, context.device, options.seconds)),
        ("triad", 3 * size, memory.time_triad(size, context.device, options.seconds)),
    ):
        yield value(name, timing.rates(moved_bytes / 1e9))
        yield fact(f"timing_{name}", timing.describe())
    context.progress("patterns")
    rank.release_memory(context.device)
    pattern_test = memory.run_pattern_test(bytes_to_test(context, options.share), context.device)
    rank.release_memory(context.device)  # NCCL and cuBLAS cannot use memory in torch's cache
    errors = pattern_test.errors
    evidence = [asdict(error) for error in errors]
    yield value("wrong_words", sum(error.words for error in errors), evidence=evidence or None)
    yield value("tested_share", 100 * pattern_test.size / pattern_test.free_bytes)
    yield fact(
        "method",
        f"copy (read + write) and triad a = b + s·c (two reads + write) over arrays of {format_bytes(size)}; "
        f"five patterns written to {format_bytes(pattern_test.size)} and read back; all devices of a node "
        "concurrently, unsynchronized",
    )


def bytes_to_test(context: Context, share: float) -> int:
    """The bytes of the pattern test: on a GPU this share of the free memory, without scratch memory."""
    from seatrial.bench import memory

    free = memory.free_bytes(context.device)
    size_on_gpu = min(int(free * share), free - SCRATCH_BYTES) if context.on_gpu else 0
    return max(MIN_TESTED_BYTES, size_on_gpu)


CHECK = Check(
    name="device.memory",
    title="Device memory: bandwidth and pattern test",
    phase=Phase.DEVICE,
    scope=Scope.GPU,
    measure=measure,
    declared=(
        metric(
            "wrong_words",
            "== 0 words",
            "memory words read back differ from the words written: weights and gradients get corrupted",
            "nvidia-smi -q -d ECC,ROW_REMAPPER -i INDEX (nvidia-smi -i INDEX -e 1 if ECC is off); reset the GPU to "
            "remap bad rows; if errors return, replace it. On a host: memtest86+, edac-util",
        ),
        metric(
            "tested_share",
            ">= 80 %",
            "the pattern test covered too little of the free memory",
            "nvidia-smi -i INDEX: which processes use memory? Then raise checks.device.memory.options.share",
            when="backend == cuda",
        ),
        metric(
            "copy",
            (">= 0.90 reference", ">= 0.90 peers", ">= 0.55 bound"),
            "memory-bound layers and decoding run at this bandwidth",
            "nvidia-smi -q -d CLOCK,PERFORMANCE,ROW_REMAPPER -i INDEX: low memory clock or remapped rows? Then dcgmi "
            "diag -r 3 -i INDEX",
            unit="GB/s",
            when="backend == cuda",
            warn=">= 0.95 reference",
            reference="memory.copy",
            bound="hbm",
            speed=True,
        ),
        metric("triad", unit="GB/s", meaning="memory bandwidth of a = b + s·c", bound="hbm", speed=True),
    ),
    limit_s=300.0,
    options=MemoryOptions,
)
