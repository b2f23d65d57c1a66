from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import memory, rank
from seatrial.bench.memory import PatternError
from seatrial.bench.timing import DeviceTiming
from seatrial.checks.check import Context
from seatrial.checks.gpu.memory import CHECK, GPU_ARRAY_BYTES, MIN_TESTED_BYTES, SCRATCH_BYTES
from seatrial.config.expect import declared_unit
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.worker import measure

GIB = 2**30
PATTERN_ERROR = PatternError("random", 3, 4096, "0x0000000000000008")


def make_context(out: Path, device: str) -> Context:
    return Context(
        node="n", rank=0, world_size=1, local_rank=0, device=device, expected_gpus=None, artifacts_dir=out, run_dir=out
    )


def judged(measurement: Measurement) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "t")}


class Gpu:
    """Fake GPU memory; ``calls`` lists releases and tested sizes in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, *errors: PatternError, share: float = 1.0) -> None:
        self.calls: list[Any] = []
        device_facts = {"backend": "cuda", "gpu": "GPU X", "cpu": None, "world_size": 1, "nodes": 1}

        def time(size: int, device: str, seconds: float) -> DeviceTiming:
            assert (size, device) == (GPU_ARRAY_BYTES, "cuda:0")
            return DeviceTiming((0.001,) * 3, 50, 0.5, 0.0)

        def test(size: int, device: str) -> memory.PatternTestResult:
            self.calls.append(size)
            return memory.PatternTestResult(int(size * share), free, errors)

        monkeypatch.setattr(rank, "describe_device", lambda device: device_facts)
        monkeypatch.setattr(rank, "release_memory", lambda device: self.calls.append("release"))
        monkeypatch.setattr(memory, "time_copy", time)
        monkeypatch.setattr(memory, "time_triad", time)
        monkeypatch.setattr(memory, "free_bytes", lambda device: free)
        monkeypatch.setattr(memory, "run_pattern_test", test)


def test_cpu_memory(tmp_path: Path) -> None:
    measurement = measure(CHECK, make_context(tmp_path, "cpu"), {"size": "1MiB", "seconds": 0.05})
    assert measurement.error is None
    assert judged(measurement) == {"wrong_words": Outcome.PASS, "tested_share": Outcome.SKIP, "copy": Outcome.SKIP}
    assert all(declared_unit(metric.name, CHECK.units) == metric.unit for metric in measurement.metrics)


def test_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Gpu(monkeypatch, 100 * GIB)
    metrics = {metric.name: metric.value for metric in measure(CHECK, make_context(tmp_path, "cuda:0"), {}).metrics}
    assert metrics["copy"] == pytest.approx(2 * 2 * GIB / 0.001 / 1e9)
    assert metrics["triad"] == pytest.approx(3 * 2 * GIB / 0.001 / 1e9)


@pytest.mark.parametrize("free", [int(4.6 * GIB), 6 * GIB, 24 * GIB, 139 * GIB])
def test_most_of_the_free_memory_is_tested_and_released(
    free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu(monkeypatch, free)
    measurement = measure(CHECK, make_context(tmp_path, "cuda:0"), {})
    assert gpu.calls == ["release", min(int(0.9 * free), free - GIB // 2), "release"]
    assert judged(measurement) == {
        "wrong_words": Outcome.PASS,
        "tested_share": Outcome.PASS,
        "copy": Outcome.UNJUDGED,
    }


def test_gpu_with_little_free_memory_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = Gpu(monkeypatch, GIB // 2)
    assert judged(measure(CHECK, make_context(tmp_path, "cuda:0"), {}))["tested_share"] is Outcome.FAIL
    assert gpu.calls[1] == MIN_TESTED_BYTES


def test_comparison_fits_into_scratch_memory() -> None:
    assert memory.BLOCK_BYTES * 5 // 4 + 2**26 <= SCRATCH_BYTES


def test_wrong_words_fail_with_their_offset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Gpu(monkeypatch, 100 * GIB, PATTERN_ERROR, PATTERN_ERROR)
    measurement = measure(CHECK, make_context(tmp_path, "cuda:0"), {})
    (verdict,) = [verdict for verdict in judge_check(CHECK, [measurement], {}, "t") if verdict.metric == "wrong_words"]
    assert verdict.outcome is Outcome.FAIL
    assert verdict.value == 6
    assert '"offset": 4096' in verdict.evidence


def test_half_of_the_memory_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Gpu(monkeypatch, 100 * GIB, share=0.5)
    assert judged(measure(CHECK, make_context(tmp_path, "cuda:0"), {}))["tested_share"] is Outcome.FAIL
