"""Previews of a run, which start nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.model import Threshold, UsageError
from seatrial.pipeline.preview import prepare, preview
from seatrial.pipeline.run import run
from seatrial.pipeline.run_directory import Request, RunDir
from tests.pipeline.fixtures import SilentDisplay
from tests.pipeline.test_this_host import this_host


@pytest.mark.parametrize("start", ["run", "preview", "prepare"])
def test_threshold_above_the_hardware_is_refused_before_the_start(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("run", "planned_jobs"):
        monkeypatch.setattr(f"seatrial.pipeline.{module}.discover", lambda: this_host("NVIDIA H100 80GB HBM3"))
    gemm = CheckSettings(expect={"tflops.bf16": Threshold.parse("> 1979 TFLOP/s")})  # the datasheet's, with sparsity
    config = Config(name="t", launcher="local", cluster=Cluster(gpus_per_node=1), checks={"device.gemm": gemm})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: run(RunDir.create(tmp_path / "run", request), SilentDisplay()),
        "preview": lambda: preview(request),
        "prepare": lambda: prepare(request, tmp_path / "run"),
    }
    with pytest.raises(UsageError, match=r"device\.gemm\.expect\.tflops\.bf16: > 1,979 TFLOP/s is above .* 989\.5"):
        calls[start]()
    assert not list((tmp_path / "run").glob("jobs/*"))


@pytest.mark.parametrize(("gpu", "is_noted"), [("NVIDIA Unknown", True), ("NVIDIA H200", False)])
def test_metrics_without_a_reference_value_are_named_before_the_start(
    gpu: str, is_noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("run", "planned_jobs"):
        monkeypatch.setattr(f"seatrial.pipeline.{module}.discover", lambda: this_host(gpu))
    monkeypatch.setattr("seatrial.pipeline.run._run_job", lambda _job, _results: None)
    config = Config(
        name="t", launcher="local", cluster=Cluster(gpus_per_node=1), checks={"device.gemm": CheckSettings()}
    )
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    notes, display = preview(request).notes, SilentDisplay()
    assert any("device.gemm: tflops.bf16" in line for line in notes) is is_noted
    run(RunDir.create(tmp_path / "run", request), display)
    assert tuple(display.notes) == notes


@pytest.mark.parametrize(("gpus_per_node", "is_noted"), [(None, True), (0, False)])
def test_run_without_gpu_says_before_the_start_that_it_will_not_be_accepted(
    gpus_per_node: int | None, is_noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("run", "planned_jobs"):
        monkeypatch.setattr(f"seatrial.pipeline.{module}.discover", this_host)
    monkeypatch.setattr("seatrial.pipeline.run._run_job", lambda _job, _results: None)
    cluster = Cluster(gpus_per_node=gpus_per_node)
    config = Config(name="t", launcher="local", cluster=cluster, checks={"host.inventory": CheckSettings()})
    request = Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0)
    notes, display = preview(request).notes, SilentDisplay()
    expected = "no GPU on this host: the decision will be INCOMPLETE at best; for a CPU-only run: --gpus-per-node 0"
    assert notes == ((expected,) if is_noted else ())
    trial = run(RunDir.create(tmp_path / "run", request), display)
    assert tuple(display.notes) == notes
    assert (trial.decision.reason_code is not None) is is_noted
