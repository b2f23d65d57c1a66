"""Algorithm and link bandwidth of a measured collective."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from seatrial.hardware.links import Links
from seatrial.hardware.references import References, skus
from seatrial.judge.insights.algorithms import AlgorithmProtocol
from seatrial.judge.insights.collective import NVLINK, PORT, Collective, build_collective
from seatrial.model import Measurement

REFERENCES = References(skus=skus())
H200: dict[str, Any] = {"backend": "nccl", "gpu": "NVIDIA H200", "world_size": 8, "nodes": 1}
LINKS = Links(nvlinks=18, nvlink_gb_s=478.1)
EIGHT_GPUS = Collective(
    "c", "all_reduce", 8, 1, {"1GiB": AlgorithmProtocol("NVLS", "Simple")}, LINKS, planned_nvlink_gb_s=None, nvls=True
)


def make(operation: str = "all_reduce", **facts: Any) -> Collective | None:
    return build_collective(
        Measurement(check="c", subject="n0/gpu0", facts=H200 | facts), operation, {}, LINKS, REFERENCES
    )


def test_collective_has_shape_and_sku_values() -> None:
    h200 = next(sku for sku in skus() if "NVIDIA H200" in sku.nvml_names)
    collective = make()
    assert collective is not None
    assert (collective.operation, collective.ranks, collective.nodes) == ("all_reduce", 8, 1)
    assert (collective.nvls, collective.planned_nvlink_gb_s) == (h200.nvls, h200.spec["nvlink_nccl"].value)


def test_unknown_gpu_has_no_planned_bandwidth_and_no_nvls() -> None:
    collective = make(gpu="NVIDIA Unknown")
    assert collective is not None
    assert (collective.planned_nvlink_gb_s, collective.nvls) == (None, False)


@pytest.mark.parametrize(
    "facts", [{"backend": "gloo"}, {"world_size": 1}, {"world_size": "8"}, {"nodes": None}, {"world_size": None}]
)
def test_other_measurements_are_no_collective(facts: dict[str, Any]) -> None:
    assert make(**facts) is None
    assert make(operation="") is None


@pytest.mark.parametrize(
    ("operation", "nodes", "algorithm"),
    [("all_reduce", 1, "Ring"), ("all_reduce", 2, "Tree"), ("all_reduce", 3, "Ring"), ("all_gather", 2, "Ring")],
)
def test_usual_algorithm_is_assumed_without_a_log(operation: str, nodes: int, algorithm: str) -> None:
    collective = replace(EIGHT_GPUS, operation=operation, nodes=nodes)
    assert collective.algorithm("2GiB") == algorithm
    assert collective.algorithm("1GiB") == "NVLS", "the log takes precedence"
    assert ("assumed" in collective.algorithm_text("2GiB"), "assumed" in collective.algorithm_text("1GiB")) == (
        True,
        False,
    )


def test_point_to_point_has_no_algorithm() -> None:
    assert "Ring" not in replace(EIGHT_GPUS, operation="all_to_all").algorithm_text("2GiB")


def test_nvls_is_assumed_above_the_bandwidth_of_ring() -> None:
    achievable = EIGHT_GPUS.achievable_gb_s(NVLINK, 478.1)
    assert EIGHT_GPUS.intra_node_algorithm("2GiB", 0.99 * achievable) == "Ring"
    assert EIGHT_GPUS.intra_node_algorithm("2GiB", 1.01 * achievable) == "NVLS"
    assert replace(EIGHT_GPUS, nvls=False).intra_node_algorithm("2GiB", 1.01 * achievable) == "Ring"
    assert replace(EIGHT_GPUS, operation="all_gather").intra_node_algorithm("2GiB", 1.01 * achievable) == "Ring"
    assert replace(EIGHT_GPUS, links=Links()).intra_node_algorithm("2GiB", 1.01 * achievable) == "Ring"
    assert (
        replace(EIGHT_GPUS, choices={"2GiB": AlgorithmProtocol("Tree", "LL")}).intra_node_algorithm(
            "2GiB", 1.01 * achievable
        )
        == "Tree"
    )


def test_planned_bandwidth_replaces_the_nvlink_share_only() -> None:
    planned = replace(EIGHT_GPUS, planned_nvlink_gb_s=370.0)
    assert planned.achievable_gb_s(NVLINK, 478.1) == 370.0
    assert planned.achievable_gb_s(PORT, 50.0) == pytest.approx(48.0)
    assert EIGHT_GPUS.achievable_gb_s(NVLINK, 100.0) == pytest.approx(77.0)
