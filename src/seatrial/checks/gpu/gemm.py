"""Measures matrix multiplication throughput and accuracy of each device, in every dtype with hardware support.

All devices of a node run concurrently, unsynchronized, so that shared power supplies and fans are under load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.check import Check, Context, Options, Seconds, facts
from seatrial.checks.declare import Answers, absent, fact, metric, value
from seatrial.model import Phase, Scope

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
    seconds: Seconds = 2.0
    min_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


def measure(context: Context, options: GemmOptions) -> Answers:
    """Yield TFLOP/s and maximum relative error per dtype, and a fact with the reason for each unsupported dtype."""
    from seatrial.bench import compute, rank

    size = options.size or (GPU_MATRIX_SIZE if context.on_gpu else CPU_MATRIX_SIZE)
    yield from facts(rank.describe_device(context.device))
    timings: dict[str, DeviceTiming] = {}
    for dtype in compute.DTYPES:
        if reason := compute.unsupported_reason(dtype, context.device):
            yield absent((f"tflops.{dtype}", f"relative_error.{dtype}"), reason)
            continue
        context.progress(dtype)
        timings[dtype] = compute.time_matmul(dtype, size, context.device, options.seconds, options.min_seconds)
        yield value(f"tflops.{dtype}", timings[dtype].rates(compute.flops(size) / 1e12))
        yield value(f"relative_error.{dtype}", compute.relative_error(dtype, size, context.device))
    yield fact("timing", {dtype: timing.describe() for dtype, timing in timings.items()})
    counts = "; ".join(f"{dtype}: {len(timing.windows)} × {timing.per_window}" for dtype, timing in timings.items())
    yield fact(
        "method",
        f"{size} × {size} matrices of normally distributed numbers, 2·n³ FLOP per product, median of "
        f"back-to-back windows (windows × products: {counts}), all devices of a node concurrently; 1 row in "
        f"{compute.CHECKED_ROW_STRIDE} compared with float64; fp8 without fast accumulation",
    )


_FIX = (
    "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE,TEMPERATURE -i INDEX during the check: look for reduced clocks, a power "
    "cap or high temperature; otherwise dcgmi diag -r 3 -i INDEX, then swap two GPUs: if the fault moves with the GPU, "
    "replace it"
)
CHECK = Check(
    measure=measure,
    name="device.gemm",
    title="Matrix multiplication: throughput and accuracy",
    phase=Phase.DEVICE,
    scope=Scope.GPU,
    limit_s=300.0,
    options=GemmOptions,
    declared=(
        *(
            metric(
                f"relative_error.{dtype}",
                f"<= {limit} ratio",
                "relative error above the rounding error of the dtype: this device computes wrong results",
                "do not train on this device; run device.digests, then dcgmi diag -r 3 -i INDEX; replace the GPU",
            )
            for dtype, limit in MAX_RELATIVE_ERROR.items()
        ),
        *(
            metric(
                f"tflops.{dtype}",
                (">= 0.90 reference", ">= 0.90 peers", ">= 0.40 bound") if dtype != "fp32" else "recorded",
                "matrix products dominate training time: all ranks wait for the slowest GPU",
                _FIX,
                unit="TFLOP/s",
                when="backend == cuda",
                warn=">= 0.95 reference" if dtype != "fp32" else (),
                reference=f"gemm.{dtype}",
                bound=dtype,
                speed=True,
            )
            for dtype in MAX_RELATIVE_ERROR
        ),
    ),
)
