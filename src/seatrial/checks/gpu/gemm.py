"""How fast does this GPU (or CPU) multiply matrices, in each type that it has hardware for, and how right?

The devices of a node work side by side, if not in step: a power supply or a fan that they share is under load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Context, Options, facts, metric
from seatrial.model import Fact, Observation, Phase, Rule, Scope

if TYPE_CHECKING:
    from seatrial.bench.timing import DeviceTiming

# 8192 fills an H100 or H200 (3 × 128 MiB in bf16, more than its cache holds); 1024 takes a CPU core some 40 ms
GPU_MATRIX_SIZE, CPU_MATRIX_SIZE = 8192, 1024
# What rounding allows, with a margin of about 4: half a unit in the last place of the result's type, and for tf32 and
# fp8 what their short mantissas and sums lose. A broken multiplier is off by more than its type's rounding.
MAX_RELATIVE_ERROR = {"bf16": 0.01, "fp16": 0.002, "tf32": 0.004, "fp8": 0.01, "fp32": 1e-5}


class GemmOptions(Options):
    """``size``: rows and columns of the square matrices. ``seconds`` caps the timed part of each type; it ends earlier
    once the median is known to 1 %, but never before ``min_seconds``."""

    size: int | None = Field(default=None, ge=64, multiple_of=16)
    seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    min_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


def measure(context: Context, options: GemmOptions) -> Iterator[Observation]:
    """Yield TFLOP/s and the largest error of every type; a type without hardware is a fact with the reason."""
    from seatrial.bench import compute, rank

    size = options.size or (GPU_MATRIX_SIZE if context.on_gpu else CPU_MATRIX_SIZE)
    yield from facts(rank.describe_device(context.device))
    without = {kind: reason for kind in compute.DTYPES if (reason := compute.unsupported_reason(kind, context.device))}
    timed: dict[str, DeviceTiming] = {}
    for kind in compute.DTYPES:
        yield Fact(name=f"has_{kind}", value=f"no: {without[kind]}" if kind in without else "yes")
        if kind not in without:
            context.progress(kind)
            timed[kind] = compute.time_matmul(kind, size, context.device, options.seconds, options.min_seconds)
            error = compute.relative_error(kind, size, context.device)
            yield timed[kind].metric(f"tflops.{kind}", compute.flops(size) / 1e12, "TFLOP/s", context.subject)
            yield metric(f"relative_error.{kind}", error, "ratio", context.subject)
    yield Fact(name="unsupported_types", value=without)
    yield Fact(name="timing", value={kind: one.describe() for kind, one in timed.items()})
    windows = "; ".join(f"{kind}: {len(one.windows)} windows of {one.per_window}" for kind, one in timed.items())
    yield Fact(
        name="how",
        value=f"{size} × {size} matrices of normally distributed numbers, 2·n³ operations a product, median of "
        f"back-to-back windows ({windows}), the devices of a node side by side; one row in {compute.CHECKED_ROW_STRIDE} is "
        "compared with float64; fp8 without fast accumulation",
    )


_FIX = (
    "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE,TEMPERATURE -i INDEX while it runs: clocks held down, a power cap or "
    "heat explain slowness; else dcgmi diag -r 3 -i INDEX, and swap it with a good GPU: does it move along?"
)
CHECK = Check(
    name="device.gemm",
    title="Matrix products: speed and accuracy",
    phase=Phase.DEVICE,
    scope=Scope.GPU,
    metrics={"tflops.*": "TFLOP/s", "relative_error.*": "ratio"},
    rules=(
        *(
            Rule(
                metric=f"relative_error.{kind}",
                expect=f"<= {limit} ratio",
                applies_if={f"has_{kind}": "yes"},
                meaning="the product is off by more than its type rounds: this device computes wrongly",
                fix="train nothing on it; repeat with device.digests, run dcgmi diag -r 3, replace it",
            )
            for kind, limit in MAX_RELATIVE_ERROR.items()
        ),
        *(
            Rule(
                metric=f"tflops.{kind}",
                reference=f"gemm.{kind}",
                applies_if={"backend": "cuda", f"has_{kind}": "yes"},
                meaning="training is made of these products: a slow GPU holds up all others",
                fix=_FIX,
            )
            for kind in ("bf16", "fp16", "tf32", "fp8")
        ),
    ),
    measure=measure,
    limit_s=300.0,
    options=GemmOptions,
    performance_metrics=("tflops.*",),
    bounds={f"tflops.{kind}": kind for kind in MAX_RELATIVE_ERROR},
)
