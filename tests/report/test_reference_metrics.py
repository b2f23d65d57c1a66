"""The metrics without a reference value, predicted before a run and compared with the verdicts of records."""

from __future__ import annotations

from typing import Any

import pytest
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.hardware.references import skus
from seatrial.model import Baseline, Reason, ReferenceValue, Threshold, Trial
from seatrial.pipeline.rejudge import rejudge
from seatrial.report.reference_metrics import reference_metrics, unjudged_metrics, values_by_metric
from seatrial.util.input_files import read_text
from tests.baselines import learned_runs

NO_REFERENCE = {Reason.NO_REFERENCE, Reason.NO_REFERENCE}


def unjudged(
    *checks: str, gpu: str = "NVIDIA A100 80GB PCIe", gpus: int = 8, nodes: int = 1, **more: Any
) -> dict[str, Any]:
    """Metric → networks with a value."""
    settings = {name: CheckSettings(expect=more.get("expect", {}), options=more.get("options", {})) for name in checks}
    config = Config(name="t", cluster=Cluster(nodes=nodes, gpus_per_node=gpus), checks=settings)
    found = unjudged_metrics(config, catalog(), checks, [gpu] * gpus, more.get("site"))
    return {f"{each.check} {each.metric}": each.fabrics for each in found}


@pytest.mark.parametrize(
    "gpu", ["NVIDIA B200", "NVIDIA GB200", "NVIDIA H100 80GB HBM3", "NVIDIA Unknown", "NVIDIA H200"]
)
def test_predicted_metrics_are_those_without_a_reference_in_the_verdicts(gpu: str) -> None:
    text = read_text(record_path("2026-11-23-2xh200/acceptance"))
    trial = rejudge(Trial.model_validate_json(text.replace("NVIDIA H200", gpu)))
    planned = [check for job in trial.jobs for check in job.checks]
    config = Config.model_validate(trial.config)
    predicted = {(each.check, each.metric) for each in unjudged_metrics(config, catalog(), planned, [gpu] * 2, None)}
    actual = {(verdict.check, verdict.metric) for verdict in trial.verdicts if NO_REFERENCE & set(verdict.reasons)}
    # the facts of NVML that bound a model without published values are not known before the run
    by_links = {check for check, _ in predicted - actual}
    assert all(check.startswith(("transfer.", "collectives.")) for check in by_links)
    assert actual <= predicted
    assert bool(actual) is (gpu == "NVIDIA Unknown")


def test_optional_metrics_are_unjudged_on_unknown_models_only() -> None:
    checks = ("device.memory", "device.gemm", "collectives.broadcast")
    types = ("bf16", "fp16", "tf32", "fp8")
    assert set(unjudged(*checks)) == {"device.gemm tflops.fp8"}, "an A100 has no fp8"
    assert set(unjudged(*checks, gpu="NVIDIA Unknown")) == {
        *(f"device.gemm tflops.{data_type}" for data_type in types),
        "device.memory copy",
        "collectives.broadcast busbw.1GiB",
    }


def test_a_threshold_or_a_baseline_judges_a_metric() -> None:
    assert set(unjudged("device.gemm")) == {"device.gemm tflops.fp8"}
    expect = {"tflops.fp8": Threshold.parse("> 1200 TFLOP/s")}
    assert unjudged("device.gemm", expect=expect) == {}
    value = ReferenceValue(gpus=1, nodes=1, value=1500, unit="TFLOP/s", source="a run", gpu="NVIDIA A100 80GB PCIe")
    site = Baseline(name="lab", learned_from=learned_runs(1), expected={"gemm.fp8": (value,)})
    assert unjudged("device.gemm", site=site) == {}


def test_a_threshold_on_another_size_needs_other_sizes() -> None:
    expect = {"busbw.16GiB": Threshold.parse("> 600 GB/s")}
    assert unjudged("collectives.all_gather", expect=expect) == {"collectives.all_gather busbw.1GiB": ()}
    assert unjudged("collectives.all_gather", expect=expect, options={"sizes": ["16GiB"]}) == {}


def test_between_nodes_the_networks_with_a_value_are_named() -> None:
    checks = ("collectives.all_reduce", "collectives.all_gather", "collectives.each_node")
    assert unjudged(*checks, gpu="NVIDIA B200", nodes=2) == {
        "collectives.all_gather busbw.1GiB": (),
        "collectives.all_reduce busbw.8GiB": ("ib-8x400", "roce-8x400"),
        "collectives.all_reduce busbw_ring.8GiB": (),
    }


def test_nothing_is_predicted_without_a_gpu_model_or_enough_ranks() -> None:
    assert unjudged("collectives.all_gather", gpus=1) == {}
    config = Config(name="t", checks={"device.gemm": CheckSettings()})
    assert unjudged_metrics(config, catalog(), ["device.gemm"], (), None) == ()


def test_each_value_belongs_to_a_rule_or_another_size_of_one() -> None:
    known = reference_metrics(catalog())
    families = {metric.key.rpartition(".")[0] for metric in known}
    for sku in skus():
        assert {key.rpartition(".")[0] for key in sku.expected} <= families
        assert all(value.nodes == 1 for value in values_by_metric(sku, known)[_each_node(known)])


def _each_node(known: Any) -> Any:
    return next(metric for metric in known if metric.is_per_node)
