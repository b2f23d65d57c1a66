"""Is the device's memory as fast as it should be, and does it keep what is written to it, almost all of it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from pydantic import Field

from seatrial.checks.base import Check, Options, Place, facts, metric
from seatrial.model import ByteSize, Fact, Observation, Phase, Rule, Scope, format_bytes, parse_bytes

# Arrays far beyond every cache (50 MiB on an H100, tens to hundreds on a server's CPU)
GPU_SIZE, CPU_SIZE = parse_bytes("2GiB"), parse_bytes("256MiB")
# What a CPU rehearsal writes: enough to walk the path, too little to be in anybody's way; nor is less ever tested
LEAST_TESTED = parse_bytes("64MiB")
# Stays free: for the comparison (memory.BLOCK and a quarter of it), and for what the allocator rounds up. Of the
# 4.6 GiB that are free of a MIG slice 1g.5gb that is 11 %.
SCRATCH = parse_bytes("512MiB")


class MemoryOptions(Options):
    """``share`` of the free GPU memory that the pattern test covers; ``size`` of the arrays that are copied."""

    share: float = Field(default=0.9, gt=0, le=0.95)
    size: ByteSize | None = Field(default=None, gt=0, multiple_of=8)
    seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)


def measure(place: Place, options: MemoryOptions) -> Iterator[Observation]:
    """Yield GB/s of a copy and of STREAM's triad, and the words that did not keep a pattern."""
    from seatrial.bench import memory, rank

    size = options.size or (GPU_SIZE if place.on_gpu else CPU_SIZE)
    yield from facts(rank.describe_device(place.device))
    for name, moved, timed in (
        ("copy", 2 * size, memory.time_copy(size, place.device, options.seconds)),
        ("triad", 3 * size, memory.time_triad(size, place.device, options.seconds)),
    ):
        yield timed.metric(name, moved / 1e9, "GB/s", place.subject)
        yield Fact(name=f"timing_{name}", value=timed.describe())
    place.note("patterns")
    rank.release_memory(place.device)
    free = memory.free_bytes(place.device)
    most = min(int(free * options.share), free - SCRATCH) if place.on_gpu else 0
    tested = memory.try_patterns(max(LEAST_TESTED, most), place.device)
    rank.release_memory(place.device)  # NCCL and cuBLAS allocate by themselves: to them, what torch keeps is taken
    yield metric("wrong_words", sum(one.words for one in tested.wrong), "words", place.subject)
    yield metric("tested_bytes", tested.size, "B", place.subject)
    yield metric("tested_share", 100 * tested.size / tested.free, "%", place.subject)
    if tested.wrong:
        yield Fact(name="wrong_memory", value=[asdict(one) for one in tested.wrong])
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
            shows=("wrong_memory",),
            why="memory did not keep what was written to it: weights and gradients will not either",
            fix="nvidia-smi -q -d ECC,ROW_REMAPPER -i INDEX (nvidia-smi -i INDEX -e 1 when ECC is off); reset the "
            "GPU so that bad rows are remapped; wrong again: replace it. On a host: memtest86+, edac-util",
        ),
        Rule(
            metric="tested_share",
            expect=">= 80 %",
            where={"backend": "cuda"},
            why="the pattern test did not reach most of the memory that was free",
            fix="nvidia-smi -i INDEX shows who else takes memory; then raise checks.device.memory.options.share",
        ),
        Rule(
            metric="copy",
            baseline="memory.copy",
            where={"backend": "cuda"},
            why="memory-bound layers run at this speed, and so does decoding",
            fix="nvidia-smi -q -d CLOCK,PERFORMANCE,ROW_REMAPPER -i INDEX: a lowered memory clock or remapped rows; "
            "then dcgmi diag -r 3 -i INDEX",
        ),
    ),
    measure=measure,
    limit_s=300.0,
    options=MemoryOptions,
    performance=("copy", "triad"),
    bounds={"copy": "hbm", "triad": "hbm"},
)
