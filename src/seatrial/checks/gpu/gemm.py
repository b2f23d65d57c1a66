"""Measures matrix multiplication throughput and accuracy of each device, in every dtype with hardware support.

All devices of a node run concurrently, unsynchronized, so that shared power supplies and fans are under load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Context, Options, RuleFact, facts, metric
from seatrial.model import Fact, Observation, Phase, Rule, Scope

if TYPE_CHECKING:
    from seatrial.bench.timing import DeviceTiming

# Rows and columns. 8192 saturates an H100 or H200: three matrices of 128 MiB in bf16 exceed its cache. 1024 takes about
# 40 ms on a CPU core.
GPU_MATRIX_SIZE, CPU_MATRIX_SIZE = 8192, 1024
# Limits of the relative error: the largest error of a product, divided by its largest exact value. Each limit is about
# 4 times the rounding error. The rounding error is half a unit in the last place of the product for bf16, fp16 and fp8
# (the product of fp8 is bf16). It comes from the short mantissa of the inputs for tf32, and from the accumulation for
# fp32. A defective multiplier exceeds the limits.
MAX_RELATIVE_ERROR = {"bf16": 0.01, "fp16": 0.002, "tf32": 0.004, "fp8": 0.01, "fp32": 1e-5}


class GemmOptions(Options):
    """``size``: rows and columns of the matrices. ``seconds``: maximum timed duration per dtype.

    Timing ends earlier when the 95 % interval of the median is within 1 %, but not before ``min_seconds``. On a GPU it
    continues up to twice ``seconds`` while the interval exceeds 3 %.
    """

    size: int | None = Field(default=None, ge=64, multiple_of=16)
    seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    min_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


def measure(context: Context, options: GemmOptions) -> Iterator[Observation]:
    """Yield TFLOP/s and maximum relative error per dtype, and a fact with the reason for each unsupported dtype."""
    from seatrial.bench import compute, rank

    size = options.size or (GPU_MATRIX_SIZE if context.on_gpu else CPU_MATRIX_SIZE)
    yield from facts(rank.describe_device(context.device))
    timings: dict[str, DeviceTiming] = {}
    unsupported: dict[str, str] = {}
    for dtype in compute.DTYPES:
        if reason := compute.unsupported_reason(dtype, context.device):
            unsupported[dtype] = reason
        yield Fact(name=f"has_{dtype}", value=f"no: {reason}" if reason else "yes")
        if not reason:
            context.progress(dtype)
            timings[dtype] = compute.time_matmul(dtype, size, context.device, options.seconds, options.min_seconds)
            error = compute.relative_error(dtype, size, context.device)
            yield timings[dtype].metric(f"tflops.{dtype}", compute.flops(size) / 1e12, "TFLOP/s", context.subject)
            yield metric(f"relative_error.{dtype}", error, "ratio", context.subject)
    yield Fact(name="unsupported_types", value=unsupported)
    yield Fact(name="timing", value={dtype: timing.describe() for dtype, timing in timings.items()})
    counts = "; ".join(f"{dtype}: {len(timing.windows)} × {timing.per_window}" for dtype, timing in timings.items())
    yield Fact(
        name="method",
        value=f"{size} × {size} matrices of normally distributed numbers, 2·n³ FLOP per product, median of "
        f"back-to-back windows (windows × products: {counts}), all devices of a node concurrently; 1 row in "
        f"{compute.CHECKED_ROW_STRIDE} compared with float64; fp8 without fast accumulation",
    )


_FIX = (
    "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE,TEMPERATURE -i INDEX during the check: look for reduced clocks, a power "
    "cap or high temperature; otherwise dcgmi diag -r 3 -i INDEX, then swap two GPUs: if the fault moves with the GPU, "
    "replace it"
)
CHECK = Check(
    name="device.gemm",
    title="Matrix multiplication: throughput and accuracy",
    phase=Phase.DEVICE,
    scope=Scope.GPU,
    metrics={"tflops.*": "TFLOP/s", "relative_error.*": "ratio"},
    rules=(
        *(
            Rule(
                metric=f"relative_error.{dtype}",
                expect=f"<= {limit} ratio",
                applies_if={f"has_{dtype}": "yes"},
                meaning="relative error above the rounding error of the dtype: this device computes wrong results",
                fix="do not train on this device; run device.digests, then dcgmi diag -r 3 -i INDEX; replace the GPU",
            )
            for dtype, limit in MAX_RELATIVE_ERROR.items()
        ),
        *(
            Rule(
                metric=f"tflops.{dtype}",
                reference=f"gemm.{dtype}",
                peer_fail_below=0.90,
                applies_if={"backend": "cuda", f"has_{dtype}": "yes"},
                meaning="matrix products dominate training time: all ranks wait for the slowest GPU",
                fix=_FIX,
            )
            for dtype in ("bf16", "fp16", "tf32", "fp8")
        ),
    ),
    rule_facts={"backend": RuleFact("cuda|cpu"), **{f"has_{dtype}": RuleFact() for dtype in MAX_RELATIVE_ERROR}},
    measure=measure,
    limit_s=300.0,
    options=GemmOptions,
    performance_metrics=("tflops.*",),
    bounds={f"tflops.{dtype}": dtype for dtype in MAX_RELATIVE_ERROR},
)
