"""A measured collective: its algorithm at a size, and how much its links carry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from seatrial.analysis.collective import NVLINK, PORT, Collective, collective_from
from seatrial.hardware.links import Links
from seatrial.hardware.references import References, skus
from seatrial.model import Measurement

KNOWN = References(skus=skus())
H200: dict[str, Any] = {"backend": "nccl", "gpu": "NVIDIA H200", "world_size": 8, "nodes": 1}
LINKS = Links(nvlinks=18, nvlink_gbps=478.1)
EIGHT = Collective("c", "all_reduce", 8, 1, {"1GiB": ("NVLS", "Simple")}, LINKS, planned_nvlink_gbps=None, nvls=True)


def made(operation: str = "all_reduce", **facts: Any) -> Collective | None:
    return collective_from(Measurement(check="c", subject="n0/gpu0", facts=H200 | facts), operation, {}, LINKS, KNOWN)


def test_a_scene_has_the_shape_and_what_the_sku_says() -> None:
    h200 = next(sku for sku in skus() if "NVIDIA H200" in sku.nvml_names)
    found = made()
    assert found is not None
    assert (found.operation, found.ranks, found.nodes) == ("all_reduce", 8, 1)
    assert (found.nvls, found.planned_nvlink_gbps) == (h200.nvls, h200.spec["nvlink_nccl"].value)


def test_of_an_unknown_gpu_nothing_is_planned_and_no_switch_sums() -> None:
    found = made(gpu="NVIDIA Strange")
    assert found is not None
    assert (found.planned_nvlink_gbps, found.nvls) == (None, False)


@pytest.mark.parametrize(
    "facts", [{"backend": "gloo"}, {"world_size": 1}, {"world_size": "8"}, {"nodes": None}, {"world_size": None}]
)
def test_what_is_no_collective_over_nccl_has_no_scene(facts: dict[str, Any]) -> None:
    assert made(**facts) is None
    assert made(operation="") is None


@pytest.mark.parametrize(
    ("operation", "nodes", "algorithm"),
    [("all_reduce", 1, "Ring"), ("all_reduce", 2, "Tree"), ("all_reduce", 3, "Ring"), ("all_gather", 2, "Ring")],
)
def test_without_a_log_the_likeliest_algorithm_is_assumed(operation: str, nodes: int, algorithm: str) -> None:
    here = replace(EIGHT, operation=operation, nodes=nodes)
    assert here.algorithm("2GiB") == algorithm
    assert here.algorithm("1GiB") == "NVLS", "the log outranks it"
    assert ("assumed" in here.algorithm_text("2GiB"), "assumed" in here.algorithm_text("1GiB")) == (True, False)


def test_point_to_point_has_no_algorithm() -> None:
    assert "Ring" not in replace(EIGHT, operation="all_to_all").algorithm_text("2GiB")


def test_more_than_the_links_reach_by_ring_was_summed_in_the_switch() -> None:
    reach = EIGHT.achievable_gbps(NVLINK, 478.1)
    assert EIGHT.intra_node_algorithm("2GiB", 0.99 * reach) == "Ring"
    assert EIGHT.intra_node_algorithm("2GiB", 1.01 * reach) == "NVLS"
    assert replace(EIGHT, nvls=False).intra_node_algorithm("2GiB", 1.01 * reach) == "Ring"
    assert replace(EIGHT, operation="all_gather").intra_node_algorithm("2GiB", 1.01 * reach) == "Ring"
    assert replace(EIGHT, links=Links()).intra_node_algorithm("2GiB", 1.01 * reach) == "Ring"
    assert replace(EIGHT, choices={"2GiB": ("Tree", "LL")}).intra_node_algorithm("2GiB", 1.01 * reach) == "Tree"


def test_a_planned_rate_takes_the_place_of_the_nvlink_share_and_not_of_a_ports() -> None:
    planned = replace(EIGHT, planned_nvlink_gbps=370.0)
    assert planned.achievable_gbps(NVLINK, 478.1) == 370.0
    assert planned.achievable_gbps(PORT, 50.0) == pytest.approx(48.0)
    assert EIGHT.achievable_gbps(NVLINK, 100.0) == pytest.approx(77.0)
