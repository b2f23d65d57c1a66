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

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options, Seconds, facts
from seatrial.checks.declare import Answers, NoValue, Value, absent, fact, metric, unreadable, value
from seatrial.checks.gpu.gemm import CPU_MATRIX_SIZE, GPU_MATRIX_SIZE, MAX_RELATIVE_ERROR
from seatrial.discover.gpu_counters import GPU_COUNTERS, GpuErrorCounters
from seatrial.hardware.error_counters import counter_definitions
from seatrial.model import Outcome, Phase, Scope, SeatrialError, Series
from seatrial.model.telemetry import THROTTLE_REASONS

if TYPE_CHECKING:
    from seatrial.bench.compute import BurnResult
    from seatrial.discover.nvml import NvmlReader
    from seatrial.telemetry.gpu_load import GpuLoad, LoadSample

DTYPES = ("bf16", "fp16", "fp32")  # the load uses the first dtype that the device supports
# Maximum points of the TFLOP/s curve: one point per window of 50 ms would be 72,000 points per hour in the record
MAX_CURVE_POINTS = 240
# Error counter → unit of its increase, if that is not "errors"
_UNITS = {"rows_remapped": "rows", "remap_pending": "bool", "remap_failed": "bool", "nvlinks_down": "links"}


class BurnOptions(Options):
    """``seconds``: duration of the load. 10 s detect immediate throttling; thermal throttling takes minutes.

    The GPU load is sampled twice per second; on a GPU, a burn that is too short for one sample ends in ERROR.
    ``size``: rows and columns of the matrices.
    """

    seconds: Seconds = 10.0
    size: int | None = Field(default=None, ge=64, multiple_of=16)


def measure(context: Context, options: BurnOptions) -> Answers:
    """Yield throughput, drift, changed products, relative error, and on a GPU its load samples and new errors.

    Raises SeatrialError if the GPU is lost during the load, or if its error counters cannot be read.
    """
    from seatrial.bench import compute, rank
    from seatrial.telemetry import error_counts, gpu_load

    dtype = next(dtype for dtype in DTYPES if compute.unsupported_reason(dtype, context.device) is None)
    size = options.size or (GPU_MATRIX_SIZE if context.on_gpu else CPU_MATRIX_SIZE)
    yield from facts(rank.describe_device(context.device))
    yield fact("load", dtype)
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
    yield value(f"relative_error.{dtype}", result.error)
    yield absent([f"relative_error.{other}" for other in DTYPES if other != dtype], f"the load is {dtype}")
    if load and counters:
        yield from _gpu_observations(load, counters, result, context.subject)
    else:
        yield absent("*", "no GPU: a CPU has no throttling and no error counters of a GPU")
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
    yield fact("method", method)


def _throughput_observations(result: BurnResult, flop: int, subject: str) -> Answers:
    timing = result.timing
    end_times, tflops = _curve(timing.windows, timing.per_window, flop)
    yield value("tflops.sustained", tflops)._replace(value=flop / fmean(timing.windows) / 1e12)
    yield value("drift", 100 * timing.drift)
    yield value("changed_products", result.changed_products)
    yield Series(name="tflops", subject=subject, x=end_times, y=tflops, x_unit="s", y_unit="TFLOP/s")
    yield fact("timing", timing.describe())


def _curve(windows: Sequence[float], per_window: int, flop: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Two tuples of at most MAX_CURVE_POINTS values: end times in seconds since the start, and TFLOP/s.

    Each point is the mean of neighbouring ``windows``, which have seconds per product. ``flop``: of one product.
    """
    group_size = ceil(len(windows) / MAX_CURVE_POINTS)
    groups = [windows[start : start + group_size] for start in range(0, len(windows), group_size)]
    end_times = accumulate(per_window * sum(group) for group in groups)
    return tuple(end_times), tuple(flop / fmean(group) / 1e12 for group in groups)


def _gpu_observations(load: GpuLoad, counters: GpuErrorCounters, result: BurnResult, subject: str) -> Answers:
    """Yield the load and the new errors of the GPU. Raises SeatrialError if the GPU was lost."""
    if reason := counters.gpu_lost or load.reader.gpu_lost:
        raise SeatrialError(f"{subject} was lost under load: {reason}")
    started, ended = result.timing.started, result.timing.ended
    samples = [sample for sample in load.samples if started <= sample.time_s <= ended]  # without the warmup
    for name, (field, unit, aggregate) in _LOAD_METRICS.items():
        readable = [sample for sample in samples if getattr(sample, field) is not None]
        if not readable:
            yield no_value(name, field, load.reader)
            continue
        times = tuple(sample.time_s - started for sample in readable)
        values = tuple(float(getattr(sample, field)) for sample in readable)
        yield value(name, values)._replace(value=aggregate(values))
        yield Series(name=field, subject=subject, x=times, y=values, x_unit="s", y_unit=unit)
    temperatures = [sample.temperature_c for sample in samples if sample.temperature_c is not None]
    if load.slowdown_c is not None and temperatures:
        yield value("temperature_margin", load.slowdown_c - max(temperatures))
    else:
        # not every driver reports this threshold; temperature_max is judged in any case
        reason = load.reader.unreadable.get("slowdown_c") or "NVML read no temperature"
        yield absent("temperature_margin", f"no slowdown threshold: {reason}")
    yield _throttling(samples) or no_value("throttled_share", "clocks_event_reasons", load.reader)
    load_minutes = sum(result.timing.windows) * result.timing.per_window / 60
    for counter in GPU_COUNTERS:
        name, increase = _metric_name(counter), counters.increase(counter)
        if increase is None:
            yield no_value(name, counter, counters)
            continue
        evidence = {"before": counters.before[counter], "xids": [*counters.xids]}
        yield value(
            name, increase / load_minutes if name == _REPLAYS else increase, evidence=evidence if increase else None
        )


# Metric → the field of LoadSample, its unit, and the function that computes the metric from the values of this field
_LOAD_METRICS: dict[str, tuple[str, str, Callable[[Sequence[float]], float]]] = {
    "power_mean": ("power_w", "W", fmean),
    "temperature_max": ("temperature_c", "°C", max),
    "sm_clock_min": ("sm_clock_mhz", "MHz", min),
}
_REPLAYS = "pcie_replay_rate"  # the only counter with a limit per minute


def _metric_name(counter: str) -> str:
    return _REPLAYS if counter == "pcie_replays" else f"new_errors.{counter}"


def no_value(name: str, reading: str, reader: GpuErrorCounters | NvmlReader) -> NoValue:
    """Why a metric has no value: the GPU lacks the reading, or this user may not read it, or reading it failed."""
    if reading in reader.unavailable:
        return absent(name, reader.unavailable[reading])
    return unreadable(name, reader.unreadable.get(reading, "no reading during the load"))


def _throttling(samples: Sequence[LoadSample]) -> Value | None:
    """The share of samples with throttling, and as evidence the share of each reason; None without a reading."""
    readings = [sample.clocks_event_reasons for sample in samples if sample.clocks_event_reasons is not None]
    if not readings:
        return None
    throttled_count = sum(not set(THROTTLE_REASONS).isdisjoint(reasons) for reasons in readings)
    counts = sorted(Counter(chain.from_iterable(readings)).items())
    percent = {reason: round(100 * count / len(readings), 1) for reason, count in counts}
    return value("throttled_share", 100 * throttled_count / len(readings), evidence={"percent of samples": percent})


def _counter_metrics() -> Iterator[metric]:
    """Yield a metric for the increase of each error counter, or for its rate if its limit is per minute."""
    for name, counter in counter_definitions().gpu.items():
        unit = "errors/min" if counter.per_minute else _UNITS.get(name, "errors")
        limit = f"{'<=' if counter.per_minute else '=='} {counter.per_minute:g} {unit}"
        yield metric(
            _metric_name(name),
            "recorded" if counter.level == "info" else limit,
            f"{counter.meaning} (during the burn)",
            counter.fix,
            unit=unit,
            outcome=Outcome.WARN if counter.level == "WARN" else Outcome.FAIL,
            varies_by_device=name.startswith("nvlink"),
            cause=_PCIE_REPLAYS if counter.per_minute else None,
        )


COOLING = (
    "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i INDEX during the check; high temperature: check fans, air flow, "
    "coolant, heat sink; power brake: check the power supplies and the BMC log (ipmitool sel list)"
)
_PCIE_REPLAYS = Cause(
    id="pcie_replays",
    title="transfer errors on the GPU's PCIe link",
    place="gpu",
    explains=("transfer.host", "collectives.*", "train.*"),
    first_command="nvidia-smi --id={gpu} --query-gpu=pcie.link.width.current,pcie.link.gen.current --format=csv; dmesg "
    "| grep -i 'AER\\|pcie'",
    fix="Reseat the card or riser. If the errors (PCIe replays) continue, replace them.",
    action="replace-hardware",
)
CHECK = Check(
    name="device.burn",
    title="Sustained load: throughput, temperature, clocks, new errors",
    phase=Phase.DEVICE,
    scope=Scope.GPU,
    measure=measure,
    declared=(
        *(
            metric(
                f"relative_error.{dtype}",
                f"<= {MAX_RELATIVE_ERROR[dtype]} ratio",
                "relative error after the burn above the rounding error of the dtype: wrong results under load",
                "do not train on this device; run device.gemm and device.digests, then dcgmi diag -r 3 -i INDEX; "
                "replace the GPU",
            )
            for dtype in DTYPES
        ),
        metric(
            "changed_products",
            "== 0 products",
            "the same matrix product gave different bits under load: training results get corrupted",
            "dcgmi diag -r 4 -i INDEX; set clocks, voltage and cooling to factory settings and repeat; if bits still "
            "differ, replace the GPU",
            when="backend == cuda",  # CPU libraries may change the order of summation
        ),
        metric(
            "tflops.sustained",
            (">= 0.90 reference", ">= 0.90 peers", ">= 0.40 bound"),
            "sustained throughput below the reference of this GPU model",
            COOLING,
            unit="TFLOP/s",
            when="backend == cuda and load == bf16",
            warn=">= 0.95 reference",
            reference="gemm.bf16",
            bound="bf16",
            speed=True,
        ),
        metric(
            "drift",
            # as the shares of reference values; healthy H100 and H200 have -0.2 to 2.2 % (20 values, docs/results)
            "<= 10 %",
            "the last third of the burn was slower than the first: temperature or power reduces the clocks",
            COOLING,
            warn="<= 5 %",
            when="backend == cuda",
            signed=True,
            may_exceed_100=True,
        ),
        metric("power_mean", unit="W", meaning="mean power during the burn"),
        metric(
            "temperature_max",
            # NVIDIA GPUs shut down before: H100 at 95 °C (limit 87, T.Limit -8), GRID K2 at 97 (BD-06580-001), the
            # highest found 102 (intel/thermal_daemon#300)
            "<= 105 °C",
            "highest GPU temperature during the burn: the sensor or the cooling is defective",
            COOLING,
            when="backend == cuda",
        ),
        metric(
            "temperature_margin",
            "> 0 °C",
            "the GPU reached the temperature at which its hardware lowers the clocks (NVML's slowdown threshold)",
            COOLING,
            when="backend == cuda",
            signed=True,
        ),
        metric("sm_clock_min", unit="MHz", meaning="lowest SM clock during the burn"),
        metric(
            "throttled_share",
            "<= 0 %",
            "clocks reduced by hardware or temperature in this share of the samples: a GPU with sufficient power and "
            "cooling runs this load at its power cap",
            COOLING,
            also_measured_by=("telemetry throttled_share",),
        ),
        *_counter_metrics(),
    ),
    limit_s=300.0,
    options=BurnOptions,
)
