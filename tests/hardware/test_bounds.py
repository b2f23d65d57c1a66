"""The most that a figure can show on a GPU model; unknown where the vendor's figure is not known."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.hardware.bounds import BIDIRECTIONAL, COLLECTIVE, MetricLookup, hardware_bound
from seatrial.hardware.references import References, skus

KNOWN = References(None, skus())
H100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA B200"
BUSBW = MetricLookup("all_reduce.busbw.8GiB", "busbw.8GiB", COLLECTIVE, "all_reduce")


def most(figure: MetricLookup, gpu: str, ranks: int = 1, nodes: int = 1, known: References = KNOWN) -> float | None:
    facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": ranks, "nodes": nodes}
    found = hardware_bound(figure, facts, known)
    return found.value if found else None


@pytest.mark.parametrize(
    ("figure", "ranks", "value"),
    [
        (MetricLookup("gemm.bf16", "tflops.bf16", "bf16"), 1, 989.5),
        (MetricLookup("memory.copy", "copy", "hbm"), 1, 3350),
        (MetricLookup("transfer.peer_unidirectional", "unidirectional", "nvlink"), 1, 450),
        (MetricLookup("transfer.peer_bidirectional", "bidirectional", BIDIRECTIONAL), 1, 900),
        (MetricLookup("all_gather.busbw.1GiB", "busbw.1GiB", COLLECTIVE, "all_gather"), 8, 450),
        (BUSBW, 8, 700),  # the switches sum
        (MetricLookup("loss", "loss"), 1, None),
    ],
)
def test_a_figure_is_bounded_by_what_its_check_declares(figure: MetricLookup, ranks: int, value: float | None) -> None:
    assert most(figure, H100, ranks) == (value and pytest.approx(value))


def test_of_mixed_models_the_best_bounds_and_an_unknown_one_unbounds() -> None:
    bf16 = MetricLookup("gemm.bf16", "tflops.bf16", "bf16")
    assert most(bf16, f"{H100} + {B200}") == most(bf16, B200)
    assert most(bf16, f"{H100} + NVIDIA Strange") is None


def test_between_nodes_the_network_bounds_where_its_class_is_known() -> None:
    assert most(BUSBW, H100, 16, 2, References(None, skus(), fabric="ib-8x200")) == pytest.approx(375)
    assert most(BUSBW, H100, 16, 2) == pytest.approx(450 / (9 / 8 * 16 / (2 * 15)))
