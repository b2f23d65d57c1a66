"""gpu.model: the expected model is part of NVML's name of each GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.check import Context
from seatrial.checks.gpu.model import CHECK
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.worker import measure
from tests.fakes.nvml import FakeNvml, geforce, h200, nvml_error


def measured(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, root: Path, expected: str | None = "h200") -> Measurement:
    fake.install(monkeypatch)
    context = Context(
        node="n1",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=2,
        artifacts_dir=root,
        run_dir=root,
        root=root,
    )
    return measure(CHECK, context, {"expected": expected})


def test_another_model_or_an_unreadable_name_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = measured(FakeNvml(h200(0), h200(1)), monkeypatch, tmp_path)
    assert [verdict.outcome for verdict in judge_check(CHECK, [good], {}, "")] == [Outcome.PASS]
    nameless = h200(2, nvmlDeviceGetName=nvml_error("Unknown"))
    bad = measured(FakeNvml(h200(0), geforce(1), nameless), monkeypatch, tmp_path)
    (verdict,) = judge_check(CHECK, [bad], {}, "")
    assert (verdict.outcome, verdict.value) == (Outcome.FAIL, 2)
    others = ["gpu1: NVIDIA GeForce RTX 4090", "gpu2: name not readable"]
    assert bad.metrics[0].evidence == {"expected": "h200", "other models": others}


def test_without_a_gpu_or_an_expected_model_it_does_not_apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "set --gpu-model" in (measured(FakeNvml(h200(0)), monkeypatch, tmp_path, None).skipped or "")
    unavailable = FakeNvml(init=nvml_error("DriverNotLoaded"))
    assert "no usable GPU" in (measured(unavailable, monkeypatch, tmp_path).skipped or "")
