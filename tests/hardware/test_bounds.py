from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.hardware.bounds import MetricLookup, hardware_bound
from seatrial.hardware.links import BIDIRECTIONAL, COLLECTIVE
from seatrial.hardware.references import References, skus

REFERENCES = References(None, skus())
H100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA B200"
BUSBW = MetricLookup("all_reduce.busbw.8GiB", "busbw.8GiB", COLLECTIVE, "all_reduce")


def bound_value(
    lookup: MetricLookup, gpu: str, ranks: int = 1, nodes: int = 1, references: References = REFERENCES
) -> float | None:
    facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": ranks, "nodes": nodes}
    bound = hardware_bound(lookup, facts, references)
    return bound.value if bound else None


@pytest.mark.parametrize(
    ("lookup", "ranks", "value"),
    [
        (MetricLookup("gemm.bf16", "tflops.bf16", "bf16"), 1, 989.5),
        (MetricLookup("memory.copy", "copy", "hbm"), 1, 3350),
        (MetricLookup("transfer.peer_unidirectional", "unidirectional", "nvlink"), 1, 450),
        (MetricLookup("transfer.peer_bidirectional", "bidirectional", BIDIRECTIONAL), 1, 900),
        (MetricLookup("all_gather.busbw.1GiB", "busbw.1GiB", COLLECTIVE, "all_gather"), 8, 450),
        (BUSBW, 8, 700),  # NVLS: the switches reduce
        (MetricLookup("loss", "loss"), 1, None),
    ],
)
def test_the_bound_of_each_kind_of_metric(lookup: MetricLookup, ranks: int, value: float | None) -> None:
    assert bound_value(lookup, H100, ranks) == (value and pytest.approx(value))


def test_mixed_models_have_the_highest_bound_and_none_with_an_unknown_model() -> None:
    bf16 = MetricLookup("gemm.bf16", "tflops.bf16", "bf16")
    assert bound_value(bf16, f"{H100} + {B200}") == bound_value(bf16, B200)
    assert bound_value(bf16, f"{H100} + NVIDIA Unlisted") is None


def test_a_known_network_bounds_collectives_between_nodes() -> None:
    assert bound_value(BUSBW, H100, 16, 2, References(None, skus(), fabric="ib-8x200")) == pytest.approx(375)
    assert bound_value(BUSBW, H100, 16, 2) == pytest.approx(450 / (9 / 8 * 16 / (2 * 15)))
