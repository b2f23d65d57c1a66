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
from seatrial.checks.base import Context
from seatrial.checks.gpu import burn as device_burn
from seatrial.checks.gpu.burn import CHECK, COUNTER_UNITS, MAX_CURVE_POINTS, THROTTLE_REASONS
from seatrial.config.expect import declared_unit
from seatrial.discover.gpu_counters import GPU_COUNTERS
from seatrial.discover.nvml import NvmlReader
from seatrial.hardware.references import References, Sku
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, ReferenceValue
from seatrial.telemetry import error_counts, gpu_load
from seatrial.telemetry.gpu_load import LoadSample
from seatrial.worker import measure

OPERATIONS = compute.flops(8192)
BEGAN, ENDED = 1000.0, 1030.0
BURNED = BurnResult(DeviceTiming((OPERATIONS / 700e12,) * 600, 32, 0.5, BEGAN, ENDED), 0, 0.001)
KNOWN = ReferenceValue(gpus=1, nodes=1, value=720, unit="TFLOP/s", source="test")
SKU = Sku(name="GPU X", nvml_names=("GPU X",), expected={"gemm.bf16": (KNOWN,)})


class Seen:
    """What was seen of a GPU: ten samples under load, one before it and one after it, nothing new."""

    def __init__(self, **changes: Any) -> None:
        reasons = changes.pop("reasons", ("software power cap",))
        one = {
            "power_w": 690.0,
            "temperature_c": 60,
            "sm_clock_mhz": 1600,
            "clocks_event_reasons": ("software power cap",),
        }
        self.samples = [
            LoadSample(time_s=BEGAN + 0.5 * step, **{**one, "temperature_c": 60 + step}) for step in range(10)
        ]
        self.samples[4] = self.samples[4].model_copy(update={"clocks_event_reasons": reasons, "sm_clock_mhz": 1400})
        cold = {
            "power_w": 80.0,
            "temperature_c": 99,
            "sm_clock_mhz": 345,
            "clocks_event_reasons": (THROTTLE_REASONS[0],),
        }
        self.samples = [LoadSample(time_s=BEGAN - 0.1, **cold), *self.samples, LoadSample(time_s=ENDED + 0.1, **cold)]
        self.grown: dict[str, int | None] = dict.fromkeys(GPU_COUNTERS, 0) | changes.pop("grown", {})
        self.before = dict.fromkeys(GPU_COUNTERS, 0)
        self.xids = changes.pop("xids", [])
        self.lacks: dict[str, str] = changes.pop("lacks", {})
        self.unread = dict(self.lacks)
        self.gone: str | None = changes.pop("gone", None)
        self.interview = NvmlReader(None)
        self.interview.gpu_lost = changes.pop("gone_meanwhile", None)
        assert not changes, changes

    def new(self, counter: str) -> int | None:
        return self.grown[counter]


@pytest.fixture
def burn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measurement]:
    """The check on a GPU that is not there: what it did and what was seen of it."""

    def run(seen: Seen | None = None, **burned: Any) -> Measurement:
        gpu = seen or Seen()

        @contextmanager
        def sampled(index: int) -> Iterator[Seen]:
            assert index == 5, "NVML's index, not CUDA's"
            yield gpu

        @contextmanager
        def counted(index: int, ports: bool) -> Iterator[Any]:
            assert (index, ports) == (5, False)
            yield SimpleNamespace(gpu=gpu)

        def load(kind: str, size: int, device: str, seconds: float) -> BurnResult:
            assert (kind, size, device, seconds) == ("bf16", 8192, "cuda:1", 10.0)
            return replace(BURNED, **burned)

        about = {"backend": "cuda", "gpu": "GPU X", "cpu": None, "world_size": 1, "nodes": 1}
        monkeypatch.setattr(gpu_load, "sample_gpu_load", sampled)
        monkeypatch.setattr(error_counts, "count_errors", counted)
        monkeypatch.setattr(compute, "burn", load)
        monkeypatch.setattr(compute, "unsupported_reason", lambda kind, device: None)
        monkeypatch.setattr(rank, "describe_device", lambda device: about)
        return measure(CHECK, place(tmp_path, device="cuda:1", gpu_index=5), {})

    return run


def place(out: Path, **more: Any) -> Context:
    values: dict[str, Any] = {"node": "n", "rank": 1, "world_size": 2, "local_rank": 1, "promised_gpus": None}
    return Context(**values, artifacts_dir=out, run_dir=out, **more)


def judged(measurement: Measurement) -> dict[str, Outcome]:
    verdicts = judge_check(CHECK, [measurement], {}, "t", References(None, [SKU]))
    return {verdict.metric: verdict.outcome for verdict in verdicts if verdict.outcome is not Outcome.PASS}


LOADS_NOT_RUN = {"relative_error.fp16": Outcome.SKIP, "relative_error.fp32": Outcome.SKIP}


def test_a_healthy_gpu_passes_at_its_power_cap(burn: Callable[..., Measurement]) -> None:
    found = burn()
    assert found.error is None
    assert judged(found) == LOADS_NOT_RUN
    figures = {metric.name: metric.value for metric in found.metrics}
    assert figures["tflops.sustained"] == pytest.approx(700)
    assert (figures["power_mean"], figures["temperature_max"], figures["sm_clock_min"]) == (690, 69, 1400)
    assert {metric.unit for metric in found.metrics if metric.name == "temperature_max"} == {
        "°C"
    }  # as the gauges have it
    assert figures["throttled_share"] == 0
    assert found.facts["clocks_event_reasons_percent"] == {"software power cap": 100.0}
    assert {metric.subject for metric in found.metrics} == {"n/gpu5"}


def test_every_metric_is_declared_with_its_unit(burn: Callable[..., Measurement]) -> None:
    found = burn()
    assert {f"new_errors.{counter}" for counter in COUNTER_UNITS} < {metric.name for metric in found.metrics}
    for metric in found.metrics:
        assert declared_unit(metric.name, CHECK.metrics) == metric.unit


@pytest.mark.parametrize("reason", THROTTLE_REASONS)
def test_one_throttled_sample_in_ten_fails(reason: str, burn: Callable[..., Measurement]) -> None:
    found = burn(Seen(reasons=("software power cap", reason)))
    assert judged(found) == {**LOADS_NOT_RUN, "throttled_share": Outcome.FAIL}
    assert {metric.name: metric.value for metric in found.metrics}["throttled_share"] == 10
    assert found.facts["clocks_event_reasons_percent"] == {"software power cap": 100.0, reason: 10.0}


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
def test_new_errors_are_judged(counter: str, outcome: Outcome, burn: Callable[..., Measurement]) -> None:
    assert judged(burn(Seen(grown={counter: 1}))) == {**LOADS_NOT_RUN, f"new_errors.{counter}": outcome}


@pytest.mark.parametrize("counter", ["ecc_corrected", "nvlink_crc_flits", "nvlink_crc_data"])
def test_what_was_corrected_is_told_and_not_judged(counter: str, burn: Callable[..., Measurement]) -> None:
    assert judged(burn(Seen(grown={counter: 50}))) == LOADS_NOT_RUN


def test_pcie_replays_are_judged_by_the_minute(burn: Callable[..., Measurement]) -> None:
    """The burn lasts 30.2 s: 4 are 7.9 a minute, 5 are 9.9."""
    assert judged(burn(Seen(grown={"pcie_replays": 4}))) == LOADS_NOT_RUN
    assert judged(burn(Seen(grown={"pcie_replays": 5}))) == {**LOADS_NOT_RUN, "pcie_replay_rate": Outcome.WARN}


def test_what_may_not_be_read_is_skipped_with_the_reason(burn: Callable[..., Measurement]) -> None:
    seen = Seen(grown={"xid": None}, lacks={"xid": "Insufficient Permissions"})
    verdicts = judge_check(CHECK, [burn(seen)], {}, "t", References(None, [SKU]))
    (verdict,) = [one for one in verdicts if one.metric == "new_errors.xid"]
    assert verdict.outcome is Outcome.SKIP
    assert verdict.message == "does not apply: Insufficient Permissions"


def test_a_counter_that_stopped_answering_is_an_error(burn: Callable[..., Measurement]) -> None:
    found = judged(burn(Seen(grown={"ecc_uncorrected": None})))
    assert found == {**LOADS_NOT_RUN, "new_errors.ecc_uncorrected": Outcome.ERROR}


def test_no_sample_at_all_is_an_error(burn: Callable[..., Measurement]) -> None:
    seen = Seen()
    seen.samples = []
    assert judged(burn(seen)) == {**LOADS_NOT_RUN, "throttled_share": Outcome.ERROR}


@pytest.mark.parametrize("noticed", ["gone", "gone_meanwhile"])
def test_a_gpu_that_is_lost_is_an_error(noticed: str, burn: Callable[..., Measurement]) -> None:
    assert burn(Seen(**{noticed: "GPU is lost"})).error == "SeatrialError: the GPU was lost under load: GPU is lost"


def test_falling_speed_warns_slow_speed_fails_and_a_changed_product_fails(burn: Callable[..., Measurement]) -> None:
    second = OPERATIONS / 700e12
    falling = DeviceTiming((second,) * 300 + (1.07 * second,) * 300, 32, 0.5, BEGAN, ENDED)
    assert judged(burn(timed=falling)) == {**LOADS_NOT_RUN, "drift": Outcome.WARN, "tflops.sustained": Outcome.WARN}
    slow = DeviceTiming((1.2 * second,) * 600, 32, 0.5, BEGAN, ENDED)
    assert judged(burn(timed=slow)) == {**LOADS_NOT_RUN, "tflops.sustained": Outcome.FAIL}
    assert judged(burn(changed=1)) == {**LOADS_NOT_RUN, "changed_products": Outcome.FAIL}
    assert judged(burn(error=0.02)) == {**LOADS_NOT_RUN, "relative_error.bf16": Outcome.FAIL}


@pytest.mark.parametrize("windows", [1, MAX_CURVE_POINTS, MAX_CURVE_POINTS + 1, 12_000])
def test_a_curve_has_few_points_and_ends_where_the_burn_does(windows: int) -> None:
    x, y = device_burn._curve([0.01] * windows, 5, 10**12)
    assert len(x) == len(y) <= MAX_CURVE_POINTS
    assert x[-1] == pytest.approx(0.05 * windows)
    assert set(map(round, y)) == {100}


def test_a_cpu_is_loaded_and_only_its_product_is_judged(tmp_path: Path) -> None:
    found = measure(CHECK, place(tmp_path, device="cpu"), {"seconds": 0.1, "size": 128})
    assert found.error is None
    verdicts = judge_check(CHECK, [found], {}, "t")
    assert {verdict.outcome for verdict in verdicts} == {Outcome.PASS, Outcome.SKIP}
    assert [verdict.metric for verdict in verdicts if verdict.outcome is Outcome.PASS] == ["relative_error.fp32"]
    assert [series.name for series in found.series] == ["tflops"]
