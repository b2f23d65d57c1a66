"""Is the device's memory as fast as it should be, and does it keep what is written to it, almost all of it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from pydantic import Field

from seatrial.checks.base import Check, Context, Options, facts, metric
from seatrial.model import ByteSize, Fact, Observation, Phase, Rule, Scope, format_bytes, parse_bytes

# Arrays far beyond every cache (50 MiB on an H100, tens to hundreds on a server's CPU)
GPU_ARRAY_BYTES, CPU_ARRAY_BYTES = parse_bytes("2GiB"), parse_bytes("256MiB")
# What a CPU rehearsal writes: enough to walk the path, too little to be in anybody's way; nor is less ever tested
MIN_TESTED_BYTES = parse_bytes("64MiB")
# Stays free: for the comparison (memory.BLOCK and a quarter of it), and for what the allocator rounds up. Of the
# 4.6 GiB that are free of a MIG slice 1g.5gb that is 11 %.
SCRATCH_BYTES = parse_bytes("512MiB")


class MemoryOptions(Options):
    """``share`` of the free GPU memory that the pattern test covers; ``size`` of the arrays that are copied."""

    share: float = Field(default=0.9, gt=0, le=0.95)
    size: ByteSize | None = Field(default=None, gt=0, multiple_of=8)
    seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)


def measure(context: Context, options: MemoryOptions) -> Iterator[Observation]:
    """Yield GB/s of a copy and of STREAM's triad, and the words that did not keep a pattern."""
    from seatrial.bench import memory, rank

    size = options.size or (GPU_ARRAY_BYTES if context.on_gpu else CPU_ARRAY_BYTES)
    yield from facts(rank.describe_device(context.device))
    for name, moved, timed in (
        ("copy", 2 * size, memory.time_copy(size, context.device, options.seconds)),
        ("triad", 3 * size, memory.time_triad(size, context.device, options.seconds)),
    ):
        yield timed.metric(name, moved / 1e9, "GB/s", context.subject)
        yield Fact(name=f"timing_{name}", value=timed.describe())
    context.progress("patterns")
    rank.release_memory(context.device)
    free = memory.free_bytes(context.device)
    most = min(int(free * options.share), free - SCRATCH_BYTES) if context.on_gpu else 0
    tested = memory.run_pattern_test(max(MIN_TESTED_BYTES, most), context.device)
    rank.release_memory(context.device)  # NCCL and cuBLAS allocate by themselves: to them, what torch keeps is taken
    yield metric("wrong_words", sum(one.words for one in tested.errors), "words", context.subject)
    yield metric("tested_bytes", tested.size, "B", context.subject)
    yield metric("tested_share", 100 * tested.size / tested.free_bytes, "%", context.subject)
    if tested.errors:
        yield Fact(name="wrong_memory", value=[asdict(one) for one in tested.errors])
    yield Fact(
        name="how",
        value=f"copy (read + write) and triad a = b + s·c (two reads + write) over arrays of {format_bytes(size)}; "
        f"five patterns written to {format_bytes(tested.size)} and read back; the devices of a node side by side, not "
        "in step",
    )


CHECK = Check(
    name="device.memory",
    title="Device memory: bandwidth and patterns",
    phase=Phase.DEVICE,
    scope=Scope.GPU,
    metrics={"copy": "GB/s", "triad": "GB/s", "wrong_words": "words", "tested_bytes": "B", "tested_share": "%"},
    rules=(
        Rule(
            metric="wrong_words",
            expect="== 0 words",
            evidence_facts=("wrong_memory",),
            meaning="memory did not keep what was written to it: weights and gradients will not either",
            fix="nvidia-smi -q -d ECC,ROW_REMAPPER -i INDEX (nvidia-smi -i INDEX -e 1 when ECC is off); reset the "
            "GPU so that bad rows are remapped; wrong again: replace it. On a host: memtest86+, edac-util",
        ),
        Rule(
            metric="tested_share",
            expect=">= 80 %",
            applies_if={"backend": "cuda"},
            meaning="the pattern test did not reach most of the memory that was free",
            fix="nvidia-smi -i INDEX shows who else takes memory; then raise checks.device.memory.options.share",
        ),
        Rule(
            metric="copy",
            reference="memory.copy",
            applies_if={"backend": "cuda"},
            meaning="memory-bound layers run at this speed, and so does decoding",
            fix="nvidia-smi -q -d CLOCK,PERFORMANCE,ROW_REMAPPER -i INDEX: a lowered memory clock or remapped rows; "
            "then dcgmi diag -r 3 -i INDEX",
        ),
    ),
    measure=measure,
    limit_s=300.0,
    options=MemoryOptions,
    performance_metrics=("copy", "triad"),
    bounds={"copy": "hbm", "triad": "hbm"},
)
