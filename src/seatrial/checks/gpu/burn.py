"""What becomes of a GPU (or CPU) under load that lasts: does it keep its speed, its clocks and its bits?

The load is device.gemm's product, as gpu-burn's is: a healthy GPU runs into its power cap with it and stays there. On
a CPU the load runs as well, and only the product is judged: nothing there counts errors or tells of throttling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Context, Options
from seatrial.checks.gpu.gemm import CPU_MATRIX_SIZE, GPU_MATRIX_SIZE, MAX_RELATIVE_ERROR
from seatrial.discover.gpu_counters import GPU_COUNTERS, GpuErrorCounters
from seatrial.hardware.error_counters import counter_definitions
from seatrial.model import Fact, Metric, Observation, Outcome, Phase, Rule, Scope, SeatrialError, Series
from seatrial.telemetry import error_counts, gpu_load
from seatrial.telemetry.gpu_load import GpuLoad, LoadSample

if TYPE_CHECKING:
    from seatrial.bench.compute import BurnResult

LOADS = ("bf16", "fp16", "fp32")  # the first that the device has hardware for
MAX_CURVE_POINTS = 240  # of a curve over time: a window is 50 ms, and a burn may take an hour
# A power cap that software holds is how a GPU at full load works. These are not: the board, the chassis or the power
# supply asks for less.
THROTTLE_REASONS = (
    "hardware slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
    "software thermal slowdown",
)
# counter → unit of its growth
COUNTER_UNITS = {
    **dict.fromkeys(GPU_COUNTERS, "errors"),
    "rows_remapped": "rows",
    "remap_pending": "bool",
    "remap_failed": "bool",
    "nvlinks_down": "links",
}


class BurnOptions(Options):
    """``seconds`` of load. Ten show what throttles at once; heat takes minutes: the burn-in trial sets 600.

    A GPU's state is read twice a second: a burn too short for that is an ERROR there.
    """

    seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    size: int | None = Field(default=None, ge=64, multiple_of=16)


def measure(context: Context, options: BurnOptions) -> Iterator[Observation]:
    """Yield speed and its drift, whether the product stayed the same and right, and the state of a GPU meanwhile.

    Raises SeatrialError when the GPU is lost meanwhile.
    """
    from seatrial.bench import compute, rank

    kind = next(kind for kind in LOADS if compute.unsupported_reason(kind, context.device) is None)
    size = options.size or (GPU_MATRIX_SIZE if context.device.startswith("cuda") else CPU_MATRIX_SIZE)
    yield from (Fact(name=name, value=value) for name, value in rank.describe_device(context.device).items())
    yield Fact(name="load", value=kind)
    context.progress(f"{options.seconds:g} s of {kind}")
    load = counters = None
    with ExitStack() as stack:
        if context.device.startswith("cuda"):
            assert context.nvml_index is not None, "a worker knows its GPU by NVML's index"
            load = stack.enter_context(gpu_load.sample_gpu_load(context.nvml_index))
            window = stack.enter_context(error_counts.count_errors(context.nvml_index, ports=False))
            if (counters := window.gpu) is None:
                raise SeatrialError(f"the error counters of this GPU cannot be read: {window.fact()}")
        burned = compute.burn(kind, size, context.device, options.seconds)
    yield from _of_speed(burned, compute.flops(size), context.subject)
    yield Metric(name=f"relative_error.{kind}", value=burned.error, unit="ratio", subject=context.subject)
    if load and counters:
        yield from _of_gpu(load, counters, burned, context.subject)
    timed = burned.timing
    how = (
        f"{size} × {size} products in {kind} for {sum(timed.windows) * timed.per_window:.1f} s after "
        f"{timed.warmup_s:.1f} s of heating up, {len(timed.windows)} windows of {timed.per_window}, the last product "
        f"of each compared with the first bit by bit; a GPU's state read every {gpu_load.PERIOD_S:g} s, its error "
        "counters before and after, its Xids as NVML tells of them"
    )
    yield Fact(name="how", value=how)


def _of_speed(burned: BurnResult, operations: int, subject: str) -> Iterator[Observation]:
    timed = burned.timing
    x, rates = _curve(timed.windows, timed.per_window, operations)
    rate = operations / fmean(timed.windows) / 1e12
    yield Metric(name="tflops.sustained", value=rate, unit="TFLOP/s", subject=subject, samples=rates)
    yield Metric(name="drift", value=100 * timed.drift, unit="%", subject=subject)
    yield Metric(name="changed_products", value=burned.changed_products, unit="products", subject=subject)
    yield Series(name="tflops", subject=subject, x=x, y=rates, x_unit="s", y_unit="TFLOP/s")
    yield Fact(name="timing", value=timed.describe())


def _curve(windows: Sequence[float], per_window: int, operations: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds since the start, and TFLOP/s of so many neighbouring windows together that few points are left."""
    together = -(-len(windows) // MAX_CURVE_POINTS)
    groups = [windows[start : start + together] for start in range(0, len(windows), together)]
    ends = accumulate(per_window * sum(group) for group in groups)
    return tuple(ends), tuple(operations / fmean(group) / 1e12 for group in groups)


def _of_gpu(load: GpuLoad, counters: GpuErrorCounters, burned: BurnResult, subject: str) -> Iterator[Observation]:
    if gone := counters.gpu_lost or load.reader.gpu_lost:
        raise SeatrialError(f"the GPU was lost under load: {gone}")
    began, ended = burned.timing.started, burned.timing.ended
    samples = [sample for sample in load.samples if began <= sample.time_s <= ended]  # else it was cold, or idle
    yield from _of_samples(samples, began, subject)
    lacks = counters.unavailable | load.reader.unavailable
    for field in (
        *COUNTER_UNITS,
        "clocks_event_reasons",
    ):  # a fault is an error: a rule does not apply only where the GPU lacks it
        yield Fact(name=f"reads_{field}", value=f"no: {lacks[field]}" if field in lacks else "yes")
    for counter, unit in COUNTER_UNITS.items():
        if (grown := counters.increase(counter)) is not None:
            yield Metric(name=f"new_errors.{counter}", value=grown, unit=unit, subject=subject)
    if (replays := counters.increase("pcie_replays")) is not None:
        minutes = sum(burned.timing.windows) * burned.timing.per_window / 60
        yield Metric(name="pcie_replay_rate", value=replays / minutes, unit="errors/min", subject=subject)
    yield Fact(name="counters_before", value=dict(counters.before))
    yield from [Fact(name="xids", value=list(counters.xids))] if counters.xids else []
    unread = counters.unreadable | load.reader.unreadable
    yield from [Fact(name="unread", value=unread)] if unread else []


# metric → unit, field of the samples, how one figure is made of them
_FIGURES: dict[str, tuple[str, str, Callable[[Sequence[float]], float]]] = {
    "power_mean": ("W", "power_w", fmean),
    "temperature_max": ("°C", "temperature_c", max),
    "sm_clock_min": ("MHz", "sm_clock_mhz", min),
}


def _of_samples(samples: Sequence[LoadSample], began: float, subject: str) -> Iterator[Observation]:
    for name, (unit, field, figure) in _FIGURES.items():
        found = [
            (sample.time_s - began, float(value)) for sample in samples if (value := getattr(sample, field)) is not None
        ]
        if found:
            x, y = zip(*found, strict=True)
            yield Metric(name=name, value=figure(y), unit=unit, subject=subject, samples=y)
            yield Series(name=field, subject=subject, x=x, y=y, x_unit="s", y_unit=unit)
    reasons = [sample.clocks_event_reasons for sample in samples if sample.clocks_event_reasons is not None]
    if reasons:
        throttled = sum(bool(set(THROTTLE_REASONS) & set(one)) for one in reasons)
        yield Metric(name="throttled_share", value=100 * throttled / len(reasons), unit="%", subject=subject)
        times = Counter(reason for one in reasons for reason in one)
        shares = {reason: round(100 * count / len(reasons), 1) for reason, count in sorted(times.items())}
        yield Fact(name="clocks_event_reasons_percent", value=dict(shares))


def _counter_rules() -> Iterator[Rule]:
    """A rule for each counter whose growth is a fault. PCIe replays are judged by their rate: a few are normal."""
    for name, counter in counter_definitions().gpu.items():
        if counter.level != "info":
            yield Rule(
                metric="pcie_replay_rate" if counter.per_minute else f"new_errors.{name}",
                expect=f"<= {counter.per_minute:g} errors/min" if counter.per_minute else f"== 0 {COUNTER_UNITS[name]}",
                applies_if={"backend": "cuda", f"reads_{name}": "yes"},
                outcome_if_violated=Outcome(counter.level),
                evidence_facts=("counters_before", "xids"),
                meaning=f"under load: {counter.meaning}",
                fix=counter.fix,
            )


_COOLING = (
    "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i INDEX while it runs; heat: fans, air flow, coolant, heat sink; "
    "power brake: the power supplies and the BMC's log (ipmitool sel list)"
)
CHECK = Check(
    name="device.burn",
    title="Sustained load: speed, heat, clocks, new errors",
    phase=Phase.DEVICE,
    scope=Scope.GPU,
    metrics={
        "tflops.sustained": "TFLOP/s",
        "drift": "%",
        "changed_products": "products",
        "relative_error.*": "ratio",
        **{name: unit for name, (unit, _, _) in _FIGURES.items()},
        "throttled_share": "%",
        "pcie_replay_rate": "errors/min",
        **{f"new_errors.{counter}": unit for counter, unit in COUNTER_UNITS.items()},
    },
    rules=(
        *(
            Rule(
                metric=f"relative_error.{kind}",
                expect=f"<= {MAX_RELATIVE_ERROR[kind]} ratio",
                applies_if={"load": kind},
                meaning="after the burn the product is off by more than its type rounds: this device computes wrongly",
                fix="train nothing on it; repeat with device.gemm and device.digests, dcgmi diag -r 3, replace it",
            )
            for kind in LOADS
        ),
        Rule(
            metric="changed_products",
            expect="== 0 products",
            applies_if={"backend": "cuda"},  # a CPU's library may share its work out anew, and so sum in another order
            meaning="the same product of the same numbers came out differently: what is trained under load is corrupted",
            fix="dcgmi diag -r 4 -i INDEX; clocks, voltage and cooling as delivered? Replace the GPU",
        ),
        Rule(
            metric="tflops.sustained",
            reference="gemm.bf16",
            applies_if={"backend": "cuda", "load": "bf16"},
            meaning="the GPU does not keep the speed that its model is known to keep",
            fix=_COOLING,
        ),
        Rule(
            metric="drift",
            may_be_negative=True,
            expect="<= 5 %",  # an estimate, so that it only warns: a rule on a baseline warns at a shortfall of 5 % too
            applies_if={"backend": "cuda"},
            outcome_if_violated=Outcome.WARN,
            meaning="the last third of the burn was slower than the first: heat or power holds the clocks down",
            fix=_COOLING,
        ),
        Rule(
            metric="throttled_share",
            expect="<= 0 %",
            applies_if={"backend": "cuda", "reads_clocks_event_reasons": "yes"},
            evidence_facts=("clocks_event_reasons_percent",),
            meaning="hardware or heat slowed the clocks down: a GPU that is powered and cooled as it should be runs this "
            "load within its power cap",
            fix=_COOLING,
        ),
        *_counter_rules(),
    ),
    measure=measure,
    limit_s=300.0,
    options=BurnOptions,
    performance_metrics=("tflops.*",),
    bounds={"tflops.sustained": "bf16"},
)
