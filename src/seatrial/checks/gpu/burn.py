"""Runs a sustained matrix multiplication load: throughput, clocks, temperature, result bits and error counters.

The load is the matrix product of device.gemm, as in gpu-burn: a healthy GPU reaches its power cap and stays there. On a
CPU only the accuracy is judged, as throttling and error counters are not available.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, chain
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import NOT_SUPPORTED, PERMISSION_DENIED, Check, Context, Options, RuleFact, facts
from seatrial.checks.gpu.gemm import CPU_MATRIX_SIZE, GPU_MATRIX_SIZE, MAX_RELATIVE_ERROR
from seatrial.discover.gpu_counters import GPU_COUNTERS, GpuErrorCounters
from seatrial.hardware.error_counters import counter_definitions
from seatrial.model import Fact, Metric, Observation, Outcome, Phase, Rule, Scope, SeatrialError, Series

if TYPE_CHECKING:
    from seatrial.bench.compute import BurnResult
    from seatrial.telemetry.gpu_load import GpuLoad, LoadSample

DTYPES = ("bf16", "fp16", "fp32")  # the load uses the first dtype that the device supports
# Maximum points of the TFLOP/s curve: one point per window of 50 ms would be 72,000 points per hour in the record
MAX_CURVE_POINTS = 240
# Clocks event reasons that count as throttling. The software power cap does not count: a GPU at full load runs at this
# cap.
THROTTLE_REASONS = (
    "hardware slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
    "software thermal slowdown",
)
# Error counter → unit of its increase
COUNTER_UNITS = {
    **dict.fromkeys(GPU_COUNTERS, "errors"),
    "rows_remapped": "rows",
    "remap_pending": "bool",
    "remap_failed": "bool",
    "nvlinks_down": "links",
}
# For each of these names, the fact NAME_readable is "yes", or the reason why rules on NAME are skipped
_READINGS = (*COUNTER_UNITS, "clocks_event_reasons")


class BurnOptions(Options):
    """``seconds``: duration of the load. 10 s detect immediate throttling; thermal throttling takes minutes.

    The GPU load is sampled twice per second; on a GPU, a burn that is too short for one sample ends in ERROR.
    ``size``: rows and columns of the matrices.
    """

    seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    size: int | None = Field(default=None, ge=64, multiple_of=16)


def measure(context: Context, options: BurnOptions) -> Iterator[Observation]:
    """Yield throughput, drift, changed products, relative error, and on a GPU its load samples and new errors.

    Raises SeatrialError if the GPU is lost during the load, or if its error counters cannot be read.
    """
    from seatrial.bench import compute, rank
    from seatrial.telemetry import error_counts, gpu_load

    dtype = next(dtype for dtype in DTYPES if compute.unsupported_reason(dtype, context.device) is None)
    size = options.size or (GPU_MATRIX_SIZE if context.on_gpu else CPU_MATRIX_SIZE)
    yield from facts(rank.describe_device(context.device))
    yield Fact(name="load", value=dtype)
    context.progress(f"{options.seconds:g} s of {dtype}")
    load = counters = None
    with ExitStack() as stack:
        if context.on_gpu:
            assert context.nvml_index is not None, "the worker sets nvml_index for a CUDA device"
            load = stack.enter_context(gpu_load.sample_gpu_load(context.nvml_index))
            errors = stack.enter_context(error_counts.count_errors(context.nvml_index, ports=False))
            if (counters := errors.gpu_counters) is None:
                reasons = [f"{name}: {reason}" for name, reason in errors.fact().get("unreadable", {}).items()]
                raise SeatrialError(
                    f"cannot read the error counters of {context.subject}: {'; '.join(reasons) or 'no reason recorded'}"
                )
        result = compute.burn(dtype, size, context.device, options.seconds)
    yield from _throughput_observations(result, compute.flops(size), context.subject)
    yield Metric(name=f"relative_error.{dtype}", value=result.error, unit="ratio", subject=context.subject)
    if load and counters:
        yield from _gpu_observations(load, counters, result, context.subject)
    timing = result.timing
    method = (
        f"{size} × {size} products in {dtype} for {sum(timing.windows) * timing.per_window:.1f} s after "
        f"{timing.warmup_s:.1f} s of warmup, {len(timing.windows)} windows of {timing.per_window} products, the last "
        "product of each window compared bitwise with the first product of the burn"
    )
    if context.on_gpu:
        method += (
            f"; GPU load sampled every {gpu_load.PERIOD_S:g} s, error counters read before and after, Xids from NVML "
            "events"
        )
    yield Fact(name="method", value=method)


def _throughput_observations(result: BurnResult, flop: int, subject: str) -> Iterator[Observation]:
    """Yield TFLOP/s, drift (%), the number of changed products and the curve of TFLOP/s over seconds."""
    timing = result.timing
    end_times, tflops = _curve(timing.windows, timing.per_window, flop)
    mean_tflops = flop / fmean(timing.windows) / 1e12
    yield Metric(name="tflops.sustained", value=mean_tflops, unit="TFLOP/s", subject=subject, samples=tflops)
    yield Metric(name="drift", value=100 * timing.drift, unit="%", subject=subject)
    yield Metric(name="changed_products", value=result.changed_products, unit="products", subject=subject)
    yield Series(name="tflops", subject=subject, x=end_times, y=tflops, x_unit="s", y_unit="TFLOP/s")
    yield Fact(name="timing", value=timing.describe())


def _curve(windows: Sequence[float], per_window: int, flop: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return two tuples of at most MAX_CURVE_POINTS values: end times in seconds since the start, and TFLOP/s.

    Each point is the mean of neighbouring ``windows``, which have seconds per product. ``flop``: of one product.
    """
    group_size = ceil(len(windows) / MAX_CURVE_POINTS)
    groups = [windows[start : start + group_size] for start in range(0, len(windows), group_size)]
    end_times = accumulate(per_window * sum(group) for group in groups)
    return tuple(end_times), tuple(flop / fmean(group) / 1e12 for group in groups)


def _gpu_observations(
    load: GpuLoad, counters: GpuErrorCounters, result: BurnResult, subject: str
) -> Iterator[Observation]:
    """Yield the load and the new errors of the GPU. Raises SeatrialError if the GPU was lost."""
    if reason := counters.gpu_lost or load.reader.gpu_lost:
        raise SeatrialError(f"{subject} was lost under load: {reason}")
    started, ended = result.timing.started, result.timing.ended
    samples = [sample for sample in load.samples if started <= sample.time_s <= ended]  # without the warmup
    yield from _load_metrics(samples, started, subject)
    unavailable = counters.unavailable | load.reader.unavailable
    permission_denied = counters.permission_denied | load.reader.permission_denied
    # A rule is skipped only for a value that the GPU does not have or the user may not read. If reading fails for
    # another reason, the fact is yes and the metric is missing, which is an ERROR.
    for reading in _READINGS:
        readable = "yes"
        if reading in unavailable:
            state = PERMISSION_DENIED if reading in permission_denied else NOT_SUPPORTED
            readable = f"{state}: {unavailable[reading]}"
        yield Fact(name=f"{reading}_readable", value=readable)
    for counter, unit in COUNTER_UNITS.items():
        if (increase := counters.increase(counter)) is not None:
            yield Metric(name=f"new_errors.{counter}", value=increase, unit=unit, subject=subject)
    if (replays := counters.increase("pcie_replays")) is not None:
        load_minutes = sum(result.timing.windows) * result.timing.per_window / 60
        yield Metric(name="pcie_replay_rate", value=replays / load_minutes, unit="errors/min", subject=subject)
    yield Fact(name="counters_before", value=dict(counters.before))
    if counters.xids:
        yield Fact(name="xids", value=list(counters.xids))
    if unreadable := counters.unreadable | load.reader.unreadable:
        yield Fact(name="unreadable", value=unreadable)


# Metric → its unit, the field of LoadSample, and the function that computes the metric from the values of this field
_LOAD_METRICS: dict[str, tuple[str, str, Callable[[Sequence[float]], float]]] = {
    "power_mean": ("W", "power_w", fmean),
    "temperature_max": ("°C", "temperature_c", max),
    "sm_clock_min": ("MHz", "sm_clock_mhz", min),
}


def _load_metrics(samples: Sequence[LoadSample], started: float, subject: str) -> Iterator[Observation]:
    """Yield power, temperature, SM clock and throttling from the samples; times are in seconds after ``started``."""
    for name, (unit, field, aggregate) in _LOAD_METRICS.items():
        readable = [sample for sample in samples if getattr(sample, field) is not None]
        if readable:
            times = tuple(sample.time_s - started for sample in readable)
            values = tuple(float(getattr(sample, field)) for sample in readable)
            yield Metric(name=name, value=aggregate(values), unit=unit, subject=subject, samples=values)
            yield Series(name=field, subject=subject, x=times, y=values, x_unit="s", y_unit=unit)
    reasons_by_sample = [sample.clocks_event_reasons for sample in samples if sample.clocks_event_reasons is not None]
    if reasons_by_sample:
        sample_count = len(reasons_by_sample)
        throttled_count = sum(bool(set(THROTTLE_REASONS) & set(reasons)) for reasons in reasons_by_sample)
        yield Metric(name="throttled_share", value=100 * throttled_count / sample_count, unit="%", subject=subject)
        counts = Counter(chain.from_iterable(reasons_by_sample))
        shares = {reason: round(100 * count / sample_count, 1) for reason, count in sorted(counts.items())}
        yield Fact(name="clocks_event_reasons_percent", value=dict(shares))


def _counter_rules() -> Iterator[Rule]:
    """Yield a rule per error counter of level FAIL or WARN.

    The rule limits the increase of the counter. PCIe replays are the only counter with a limit per minute; their rule
    limits the rate.
    """
    for name, counter in counter_definitions().gpu.items():
        if counter.level in (Outcome.FAIL, Outcome.WARN):
            yield Rule(
                metric="pcie_replay_rate" if counter.per_minute else f"new_errors.{name}",
                expect=f"<= {counter.per_minute:g} errors/min" if counter.per_minute else f"== 0 {COUNTER_UNITS[name]}",
                applies_if={"backend": "cuda", f"{name}_readable": "yes"},
                outcome_if_violated=Outcome(counter.level),
                evidence_facts=("counters_before", "xids"),
                meaning=f"{counter.meaning} (during the burn)",
                fix=counter.fix,
            )


_COOLING = (
    "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i INDEX during the check; high temperature: check fans, air flow, "
    "coolant, heat sink; power brake: check the power supplies and the BMC log (ipmitool sel list)"
)
CHECK = Check(
    name="device.burn",
    title="Sustained load: throughput, temperature, clocks, new errors",
    phase=Phase.DEVICE,
    scope=Scope.GPU,
    metrics={
        "tflops.sustained": "TFLOP/s",
        "drift": "%",
        "changed_products": "products",
        "relative_error.*": "ratio",
        **{name: unit for name, (unit, _, _) in _LOAD_METRICS.items()},
        "throttled_share": "%",
        "pcie_replay_rate": "errors/min",
        **{f"new_errors.{counter}": unit for counter, unit in COUNTER_UNITS.items()},
    },
    rules=(
        *(
            Rule(
                metric=f"relative_error.{dtype}",
                expect=f"<= {MAX_RELATIVE_ERROR[dtype]} ratio",
                applies_if={"load": dtype},
                meaning="relative error after the burn above the rounding error of the dtype: wrong results under load",
                fix="do not train on this device; run device.gemm and device.digests, then dcgmi diag -r 3 -i INDEX; "
                "replace the GPU",
            )
            for dtype in DTYPES
        ),
        Rule(
            metric="changed_products",
            expect="== 0 products",
            applies_if={"backend": "cuda"},  # CPU libraries may change the order of summation
            meaning="the same matrix product gave different bits under load: training results get corrupted",
            fix="dcgmi diag -r 4 -i INDEX; set clocks, voltage and cooling to factory settings and repeat; if bits "
            "still differ, replace the GPU",
        ),
        Rule(
            metric="tflops.sustained",
            reference="gemm.bf16",
            peer_fail_below=0.90,
            applies_if={"backend": "cuda", "load": "bf16"},
            meaning="sustained throughput below the reference of this GPU model",
            fix=_COOLING,
        ),
        Rule(
            metric="drift",
            may_be_negative=True,
            # The limit is an estimate, therefore WARN; rules with a reference value warn at 5 % too
            expect="<= 5 %",
            applies_if={"backend": "cuda"},
            outcome_if_violated=Outcome.WARN,
            meaning="the last third of the burn was slower than the first: temperature or power reduces the clocks",
            fix=_COOLING,
        ),
        Rule(
            metric="throttled_share",
            expect="<= 0 %",
            applies_if={"backend": "cuda", "clocks_event_reasons_readable": "yes"},
            evidence_facts=("clocks_event_reasons_percent",),
            meaning="clocks reduced by hardware or temperature: a GPU with sufficient power and cooling runs this load "
            "at its power cap",
            fix=_COOLING,
        ),
        *_counter_rules(),
    ),
    rule_facts={
        "backend": RuleFact("cuda|cpu"),
        "load": RuleFact("|".join(DTYPES)),
        # Permission denied is a SKIP, as for the error counters that the worker reads before and after other checks
        **{
            f"{name}_readable": RuleFact(permission_denied=Outcome.SKIP, varies_by_device=name.startswith("nvlink"))
            for name in _READINGS
        },
    },
    measure=measure,
    may_exceed_100=("drift",),
    limit_s=300.0,
    options=BurnOptions,
    performance_metrics=("tflops.*",),
    bounds={"tflops.sustained": "bf16"},
)
