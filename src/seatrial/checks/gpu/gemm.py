"""How fast does this GPU (or CPU) multiply matrices, in each type that it has hardware for, and how right?

The devices of a node work side by side, if not in step: a power supply or a fan that they share is under load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Options, Place
from seatrial.model import Fact, Metric, Observation, Phase, Rule, Scope

if TYPE_CHECKING:
    from seatrial.bench.timing import Timed

# 8192 fills an H100 or H200 (3 × 128 MiB in bf16, more than its cache holds); 1024 takes a CPU core some 40 ms
GPU_SIZE, CPU_SIZE = 8192, 1024
# What rounding allows, with a margin of about 4: half a unit in the last place of the result's type, and for tf32 and
# fp8 what their short mantissas and sums lose. A broken multiplier is off by more than its type's rounding.
ERRORS = {"bf16": 0.01, "fp16": 0.002, "tf32": 0.004, "fp8": 0.01, "fp32": 1e-5}


class GemmOptions(Options):
    """``size``: rows and columns of the square matrices. ``seconds`` caps the timed part of each type; it ends earlier
    once the median is known to 1 %, but never before ``least_seconds``."""

    size: int | None = Field(default=None, ge=64, multiple_of=16)
    seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    least_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


def measure(place: Place, options: GemmOptions) -> Iterator[Observation]:
    """Yield TFLOP/s and the largest error of every type; a type without hardware is a fact with the reason."""
    from seatrial.bench import compute, rank

    size = options.size or (GPU_SIZE if place.device.startswith("cuda") else CPU_SIZE)
    yield from (Fact(name=name, value=value) for name, value in rank.describe_device(place.device).items())
    without = {kind: reason for kind in compute.TYPES if (reason := compute.why_not(kind, place.device))}
    timed: dict[str, Timed] = {}
    for kind in compute.TYPES:
        yield Fact(name=f"has_{kind}", value=f"no: {without[kind]}" if kind in without else "yes")
        if kind not in without:
            place.note(kind)
            timed[kind] = compute.time_product(kind, size, place.device, options.seconds, options.least_seconds)
            yield from _figures(place, kind, size, timed[kind], compute.relative_error(kind, size, place.device))
    yield Fact(name="not_in_hardware", value=without)
    yield Fact(name="timing", value={kind: one.describe() for kind, one in timed.items()})
    yield Fact(name="how", value=_how(size, timed))


def _figures(place: Place, kind: str, size: int, timed: Timed, error: float) -> Iterator[Metric]:
    from seatrial.bench.compute import flops

    name, work = f"tflops.{kind}", flops(size) / 1e12
    yield Metric(name=name, value=timed.rate(work), unit="TFLOP/s", subject=place.subject, samples=timed.rates(work))
    yield Metric(name=f"relative_error.{kind}", value=error, unit="ratio", subject=place.subject)


def _how(size: int, timed: dict[str, Timed]) -> str:
    from seatrial.bench.compute import STRIDE

    windows = "; ".join(f"{kind}: {len(one.windows)} windows of {one.per_window}" for kind, one in timed.items())
    return (
        f"{size} × {size} matrices of normally distributed numbers, 2·n³ operations a product, median of back-to-back "
        f"windows ({windows}), the devices of a node side by side; one row in {STRIDE} is compared with float64; fp8 "
        "without fast accumulation"
    )


_REMEDY = (
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
                where={f"has_{kind}": "yes"},
                why="the product is off by more than its type rounds: this device computes wrongly",
                remedy="train nothing on it; repeat with device.digests, run dcgmi diag -r 3, replace it",
            )
            for kind, limit in ERRORS.items()
        ),
        *(
            Rule(
                metric=f"tflops.{kind}",
                baseline=f"gemm.{kind}",
                where={"backend": "cuda", f"has_{kind}": "yes"},
                why="training is made of these products: a slow GPU holds up all others",
                remedy=_REMEDY,
            )
            for kind in ("bf16", "fp16", "tf32", "fp8")
        ),
    ),
    measure=measure,
    limit_s=300.0,
    options=GemmOptions,
    performance=("tflops.*",),
    bounds={f"tflops.{kind}": kind for kind in ERRORS},
)
