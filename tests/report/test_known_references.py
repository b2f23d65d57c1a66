"""Text of reference values: the note before a run, and the list of one or all GPU models."""

from __future__ import annotations

import io

from rich.console import Console
from tools import references_page

from seatrial.hardware.references import Sku
from seatrial.model import ReferenceValue
from seatrial.report import known_references
from seatrial.report.reference_metrics import ReferenceMetric, UnjudgedMetric

GEMM = ReferenceMetric("device.gemm", "tflops.bf16", "gemm.bf16", is_optional=False, is_per_node=False)
REDUCE = ReferenceMetric("collectives.reduce", "busbw.1GiB", "reduce.busbw.1GiB", is_optional=True, is_per_node=False)
VALUES = tuple(
    ReferenceValue(gpus=gpus, nodes=nodes, fabric=fabric, value=300, required=250, unit="GB/s", source="a paper")
    for gpus, nodes, fabric in ((2, 1, ""), (8, 1, ""), (16, 2, "efa"))
)
SKU = Sku(name="NVIDIA Test", nvml_names=("NVIDIA T",), expected={REDUCE.key: VALUES, "reduce.busbw.8GiB": VALUES})


def test_the_note_names_each_check_and_the_networks_with_a_value() -> None:
    unjudged = [UnjudgedMetric("a", "x"), UnjudgedMetric("a", "y", ("efa", "ib-8x400")), UnjudgedMetric("b", "z")]
    first, *checks, _fix = known_references.unjudged_lines(unjudged, ["NVIDIA T"] * 8, nodes=2)
    assert "2 nodes with 8 × NVIDIA T" in first
    assert "3 metrics of 2 checks" in first
    assert checks == ["  a: x, y (except over efa or ib-8x400)", "  b: z"]
    assert list(known_references.unjudged_lines([], ["NVIDIA T"], nodes=1)) == []


def test_shapes_list_the_numbers_of_gpus_of_a_node_once() -> None:
    assert known_references.shapes(VALUES) == "2, 8 GPUs; 2×8 GPUs (efa)"
    assert known_references.shapes(()) == ""


def test_a_model_is_listed_with_sources_and_metrics_without_a_value() -> None:
    out = io.StringIO()
    known_references.print_model(SKU, [GEMM, REDUCE], Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + len(VALUES) + 1
    assert all(text in lines[3] for text in ("2×8 GPUs (efa)", "300 GB/s, at least 250 GB/s", "a paper"))
    assert lines[-1] == "UNJUDGED, no value: device.gemm tflops.bf16"


def test_json_has_every_metric_and_value() -> None:
    (model,) = known_references.as_json([SKU], [GEMM, REDUCE])
    gemm, reduce = model["metrics"]
    assert (gemm["without_value"], gemm["values"]) == ("UNJUDGED", [])
    assert reduce["without_value"] == "SKIP"
    assert [value["gpus"] for value in reduce["values"]] == [2, 8, 16]


def test_the_page_has_a_column_for_each_model_with_values_and_names_the_others() -> None:
    other = Sku(name="NVIDIA None", nvml_names=("NVIDIA N",))
    page = references_page.page([SKU, other], [GEMM, REDUCE])
    assert "| metric | Test |\n" in page
    assert r"| `collectives.reduce` `busbw.1GiB` \* | 2, 8 GPUs; 2×8 GPUs (efa) |" in page
    assert "on: NVIDIA None." in page
    assert "in `expect`: `reduce.busbw.8GiB`." in page
