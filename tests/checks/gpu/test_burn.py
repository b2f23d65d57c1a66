from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.bench import compute, rank
from seatrial.bench.compute import BurnResult
from seatrial.bench.timing import DeviceTiming
from seatrial.checks.check import Context
from seatrial.checks.gpu import burn as device_burn
from seatrial.checks.gpu.burn import CHECK, MAX_CURVE_POINTS
from seatrial.config.expect import declared_unit
from seatrial.discover.gpu_counters import GPU_COUNTERS
from seatrial.discover.nvml import NvmlReader
from seatrial.hardware.references import References, Sku
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Reason, ReferenceValue, Why
from seatrial.model.telemetry import THROTTLE_REASONS
from seatrial.telemetry import error_counts, gpu_load
from seatrial.telemetry.gpu_load import LoadSample
from seatrial.worker import measure

FLOP = compute.flops(8192)
STARTED, ENDED = 1000.0, 1030.0
BURN_RESULT = BurnResult(DeviceTiming((FLOP / 700e12,) * 600, 32, 0.5, STARTED, ENDED), 0, 0.001)
REFERENCE = ReferenceValue(gpus=1, nodes=1, value=720, unit="TFLOP/s", source="test")
SKU = Sku(name="GPU X", nvml_names=("GPU X",), expected={"gemm.bf16": (REFERENCE,)})


class FakeGpuState:
    """GPU load samples and error counters: ten samples under load, one before, one after, no new errors."""

    def __init__(self, **changes: Any) -> None:
        reasons = changes.pop("reasons", ("software power cap",))
        loaded = {
            "power_w": 690.0,
            "temperature_c": 60,
            "sm_clock_mhz": 1600,
            "clocks_event_reasons": ("software power cap",),
        }
        self.samples = [
            LoadSample(time_s=STARTED + 0.5 * step, **{**loaded, "temperature_c": 60 + step}) for step in range(10)
        ]
        self.samples[4] = self.samples[4].model_copy(update={"clocks_event_reasons": reasons, "sm_clock_mhz": 1400})
        idle = {
            "power_w": 80.0,
            "temperature_c": 99,
            "sm_clock_mhz": 345,
            "clocks_event_reasons": (THROTTLE_REASONS[0],),
        }
        self.samples = [LoadSample(time_s=STARTED - 0.1, **idle), *self.samples, LoadSample(time_s=ENDED + 0.1, **idle)]
        self.increases: dict[str, int | None] = dict.fromkeys(GPU_COUNTERS, 0) | changes.pop("increases", {})
        self.before = dict.fromkeys(GPU_COUNTERS, 0)
        self.slowdown_c: int | None = changes.pop("slowdown_c", 87)
        self.xids = changes.pop("xids", [])
        self.unavailable: dict[str, str] = changes.pop("unavailable", {})
        self.permission_denied: set[str] = changes.pop("permission_denied", set())
        self.unreadable = dict(self.unavailable)
        self.gpu_lost: str | None = changes.pop("gpu_lost", None)
        self.reader = NvmlReader(None)
        self.reader.gpu_lost = changes.pop("lost_while_sampling", None)
        assert not changes, changes

    def increase(self, counter: str) -> int | None:
        return self.increases[counter]


@pytest.fixture
def burn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measurement]:
    """Return a function that runs the check with a fake GPU state and a fake BurnResult."""

    def run(state: FakeGpuState | None = None, **changes: Any) -> Measurement:
        gpu = state or FakeGpuState()

        @contextmanager
        def sampled(index: int) -> Iterator[FakeGpuState]:
            assert index == 5, "NVML's index, not CUDA's"
            yield gpu

        @contextmanager
        def counted(index: int, ports: bool) -> Iterator[Any]:
            assert (index, ports) == (5, False)
            yield SimpleNamespace(gpu_counters=gpu)

        def load(dtype: str, size: int, device: str, seconds: float) -> BurnResult:
            assert (dtype, size, device, seconds) == ("bf16", 8192, "cuda:1", 10.0)
            return replace(BURN_RESULT, **changes)

        device_facts = {"backend": "cuda", "gpu": "GPU X", "cpu": None, "world_size": 1, "nodes": 1}
        monkeypatch.setattr(gpu_load, "sample_gpu_load", sampled)
        monkeypatch.setattr(error_counts, "count_errors", counted)
        monkeypatch.setattr(compute, "burn", load)
        monkeypatch.setattr(compute, "unsupported_reason", lambda dtype, device: None)
        monkeypatch.setattr(rank, "describe_device", lambda device: device_facts)
        return measure(CHECK, make_context(tmp_path, device="cuda:1", nvml_index=5), {})

    return run


def make_context(out: Path, **more: Any) -> Context:
    values: dict[str, Any] = {"node": "n", "rank": 1, "world_size": 2, "local_rank": 1, "expected_gpus": None}
    return Context(**values, artifacts_dir=out, run_dir=out, **more)


def judged(measurement: Measurement) -> dict[str, Outcome]:
    verdicts = judge_check(CHECK, [measurement], {}, "t", References(None, [SKU]))
    return {verdict.metric: verdict.outcome for verdict in verdicts if verdict.outcome is not Outcome.PASS}


DTYPES_NOT_RUN = {"relative_error.fp16": Outcome.SKIP, "relative_error.fp32": Outcome.SKIP}


def test_healthy_gpu_at_its_power_cap(burn: Callable[..., Measurement]) -> None:
    measurement = burn()
    assert measurement.error is None
    assert judged(measurement) == DTYPES_NOT_RUN
    metrics = {metric.name: metric.value for metric in measurement.metrics}
    assert metrics["tflops.sustained"] == pytest.approx(700)
    assert (metrics["power_mean"], metrics["temperature_max"], metrics["sm_clock_min"]) == (690, 69, 1400)
    # same unit as the GPU load sampler
    assert {metric.unit for metric in measurement.metrics if metric.name == "temperature_max"} == {"°C"}
    assert metrics["throttled_share"] == 0
    assert throttling_evidence(measurement) == {"software power cap": 100.0}
    assert {metric.subject for metric in measurement.metrics} == {"n/gpu5"}


def throttling_evidence(measurement: Measurement) -> Any:
    (throttled,) = (metric for metric in measurement.metrics if metric.name == "throttled_share")
    assert isinstance(throttled.evidence, dict)
    return throttled.evidence["percent of samples"]


def test_every_metric_is_declared_with_its_unit(burn: Callable[..., Measurement]) -> None:
    measurement = burn()
    counters = {name for name in CHECK.units if name.startswith("new_errors.")}
    assert {"pcie_replay_rate", *counters} < {metric.name for metric in measurement.metrics}
    assert len(counters) == len(GPU_COUNTERS) - 1
    for metric in measurement.metrics:
        assert declared_unit(metric.name, CHECK.units) == metric.unit


@pytest.mark.parametrize("reason", THROTTLE_REASONS)
def test_one_throttled_sample_of_ten_fails(reason: str, burn: Callable[..., Measurement]) -> None:
    measurement = burn(FakeGpuState(reasons=("software power cap", reason)))
    assert judged(measurement) == {**DTYPES_NOT_RUN, "throttled_share": Outcome.FAIL}
    assert {metric.name: metric.value for metric in measurement.metrics}["throttled_share"] == 10
    assert throttling_evidence(measurement) == {"software power cap": 100.0, reason: 10.0}


@pytest.mark.parametrize(
    ("counter", "outcome"),
    [
        ("ecc_uncorrected", Outcome.FAIL),
        ("remap_pending", Outcome.FAIL),
        ("remap_failed", Outcome.FAIL),
        ("rows_remapped", Outcome.WARN),
        ("xid", Outcome.FAIL),
        ("nvlinks_down", Outcome.FAIL),
        ("nvlink_recoveries", Outcome.FAIL),
        ("nvlink_replays", Outcome.WARN),
    ],
)
def test_new_errors(counter: str, outcome: Outcome, burn: Callable[..., Measurement]) -> None:
    assert judged(burn(FakeGpuState(increases={counter: 1}))) == {**DTYPES_NOT_RUN, f"new_errors.{counter}": outcome}


def test_evidence_of_new_errors(burn: Callable[..., Measurement]) -> None:
    measurement = burn(FakeGpuState(increases={"xid": 1}, xids=[79]))
    evidence = {metric.name: metric.evidence for metric in measurement.metrics if metric.name.startswith("new_errors.")}
    assert evidence.pop("new_errors.xid") == {"before": 0, "xids": [79]}
    assert set(evidence.values()) == {None}


@pytest.mark.parametrize("counter", ["ecc_corrected", "nvlink_crc_flits", "nvlink_crc_data"])
def test_corrected_errors_are_not_judged(counter: str, burn: Callable[..., Measurement]) -> None:
    assert judged(burn(FakeGpuState(increases={counter: 50}))) == DTYPES_NOT_RUN


def test_pcie_replay_rate(burn: Callable[..., Measurement]) -> None:
    """The burn takes 30.2 s: 4 replays are 7.9 per minute, 5 are 9.9."""
    assert judged(burn(FakeGpuState(increases={"pcie_replays": 4}))) == DTYPES_NOT_RUN
    assert judged(burn(FakeGpuState(increases={"pcie_replays": 5}))) == {
        **DTYPES_NOT_RUN,
        "pcie_replay_rate": Outcome.WARN,
    }


@pytest.mark.parametrize("denied", [{"xid"}, set()])
def test_unavailable_counter_is_skipped_with_the_reason(burn: Callable[..., Measurement], denied: set[str]) -> None:
    unavailable = {"xid": "Insufficient Permissions"}
    measured = burn(FakeGpuState(increases={"xid": None}, unavailable=unavailable, permission_denied=denied))
    (absent,) = (each for each in measured.absent if each.metric == "new_errors.xid")
    assert (absent.why, absent.reason) == (Why.DOES_NOT_APPLY, "Insufficient Permissions")
    verdicts = judge_check(CHECK, [measured], {}, "t", References(None, [SKU]))
    (verdict,) = [verdict for verdict in verdicts if verdict.metric == "new_errors.xid"]
    assert verdict.outcome is Outcome.SKIP
    assert (verdict.reasons, verdict.detail) == ((Reason.NOT_APPLICABLE,), "Insufficient Permissions")


def test_unreadable_counter_is_an_error(burn: Callable[..., Measurement]) -> None:
    outcomes = judged(burn(FakeGpuState(increases={"ecc_uncorrected": None})))
    assert outcomes == {**DTYPES_NOT_RUN, "new_errors.ecc_uncorrected": Outcome.ERROR}


def test_no_samples_is_an_error(burn: Callable[..., Measurement]) -> None:
    state = FakeGpuState()
    state.samples = []
    unread = {"throttled_share": Outcome.ERROR, "temperature_max": Outcome.ERROR, "temperature_margin": Outcome.SKIP}
    assert judged(burn(state)) == {**DTYPES_NOT_RUN, **unread}


@pytest.mark.parametrize(
    ("changes", "bad"),
    [
        ({"slowdown_c": 70}, {}),
        ({"slowdown_c": 69}, {"temperature_margin": Outcome.FAIL}),
        ({"slowdown_c": None}, {"temperature_margin": Outcome.SKIP}),
    ],
)
def test_temperature_is_compared_with_the_slowdown_threshold_of_the_gpu(
    changes: dict[str, int | None], bad: dict[str, Outcome], burn: Callable[..., Measurement]
) -> None:
    assert judged(burn(FakeGpuState(**changes))) == {**DTYPES_NOT_RUN, **bad}


@pytest.mark.parametrize("detected", ["gpu_lost", "lost_while_sampling"])
def test_lost_gpu_is_an_error(detected: str, burn: Callable[..., Measurement]) -> None:
    assert (
        burn(FakeGpuState(**{detected: "GPU is lost"})).error
        == "SeatrialError: n/gpu5 was lost under load: GPU is lost"
    )


def test_drift_low_throughput_and_wrong_products(burn: Callable[..., Measurement]) -> None:
    seconds = FLOP / 700e12
    drifting = DeviceTiming((seconds,) * 300 + (1.07 * seconds,) * 300, 32, 0.5, STARTED, ENDED)
    assert judged(burn(timing=drifting)) == {**DTYPES_NOT_RUN, "drift": Outcome.WARN, "tflops.sustained": Outcome.WARN}
    slow = DeviceTiming((1.2 * seconds,) * 600, 32, 0.5, STARTED, ENDED)
    assert judged(burn(timing=slow)) == {**DTYPES_NOT_RUN, "tflops.sustained": Outcome.FAIL}
    assert judged(burn(changed_products=1)) == {**DTYPES_NOT_RUN, "changed_products": Outcome.FAIL}
    assert judged(burn(error=0.02)) == {**DTYPES_NOT_RUN, "relative_error.bf16": Outcome.FAIL}


@pytest.mark.parametrize("windows", [1, MAX_CURVE_POINTS, MAX_CURVE_POINTS + 1, 12_000])
def test_curve_has_few_points_and_the_end_time_of_the_burn(windows: int) -> None:
    x, y = device_burn._curve([0.01] * windows, 5, 10**12)
    assert len(x) == len(y) <= MAX_CURVE_POINTS
    assert x[-1] == pytest.approx(0.05 * windows)
    assert set(map(round, y)) == {100}


def test_cpu_has_accuracy_only(tmp_path: Path) -> None:
    measurement = measure(CHECK, make_context(tmp_path, device="cpu"), {"seconds": 0.1, "size": 128})
    assert measurement.error is None
    verdicts = judge_check(CHECK, [measurement], {}, "t")
    assert {verdict.outcome for verdict in verdicts} == {Outcome.PASS, Outcome.SKIP}
    assert [verdict.metric for verdict in verdicts if verdict.outcome is Outcome.PASS] == ["relative_error.fp32"]
    assert [series.name for series in measurement.series] == ["tflops"]
    answered = {each.metric for each in measurement.absent} | {metric.name for metric in measurement.metrics}
    assert answered == CHECK.units.keys()
