"""Every collective operation in a real group of three gloo processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seatrial.bench.collectives import DTYPES
from seatrial.bench.operations import OPERATIONS
from seatrial.checks import catalog
from tests.bench import operations_driver
from tests.train import ranks


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    of_rank0: dict[str, Any] = json.loads(ranks.require_success(ranks.run(3, operations_driver.main, seconds=240))[0])
    return of_rank0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_result_of_every_operation_is_exact(results: dict[str, Any], name: str, dtype: str) -> None:
    assert results[f"{name} {dtype}"]["mismatches"] == {}


@pytest.mark.parametrize("name", OPERATIONS)
def test_flipped_bit_is_found_with_its_offset(results: dict[str, Any], name: str) -> None:
    mismatches = results[f"{name} corrupted"]["mismatches"]
    assert mismatches["0"]["offset"] == 5
    assert mismatches["0"]["xor"] == "0x00000200"


@pytest.mark.parametrize("name", OPERATIONS)
def test_data_of_a_graph_is_checked(results: dict[str, Any], name: str) -> None:
    assert results[f"{name} graph"]["mismatches"] == {}
    assert results[f"{name} corrupted graph"]["mismatches"]["0"]["offset"] == 5


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_timed(results: dict[str, Any], name: str) -> None:
    timings = results[f"{name} each operation"]["timings"]
    assert timings["per_window"] == 1
    assert {len(window) for window in timings["windows"]} == {3}  # ranks
    assert results[f"{name} each operation"]["mismatches"] == {}


@pytest.mark.parametrize("name", OPERATIONS)
def test_exact_size_has_whole_blocks(results: dict[str, Any], name: str) -> None:
    size = results[f"{name} float32"]["size"]
    assert size == (
        996 * 4 if OPERATIONS[name].one_block_per_rank else 1003 * 4
    )  # blocks of 16 B, as nccl-tests rounds


def test_block_has_at_least_one_element() -> None:
    assert OPERATIONS["all_gather"].element_count(8, 4, 4) == 4
    assert OPERATIONS["all_gather"].element_count(8 * 4, 4, 4) == 8
    assert OPERATIONS["all_gather"].element_count(100, 2, 3) == 48


def test_nominal_size() -> None:
    gather = OPERATIONS["all_gather"]
    assert [gather.nominal_size(size, 4, 8) for size in (8, 16, 32, 100, 2**20)] == [32, 32, 32, 96, 2**20]
    assert gather.nominal_size(2**30, 4, 3) == 2**30  # exact size is 16 B smaller
    assert gather.nominal_size(gather.nominal_size(8, 2, 7), 2, 7) == 14
    assert OPERATIONS["all_reduce"].nominal_size(8, 4, 8) == 8


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_in_place_variant_is_exact(results: dict[str, Any], name: str) -> None:
    assert results[f"{name} offsets"] == [0, 16, 32]  # the offsets of the ranks' blocks that NCCL expects
    assert results[f"{name} in place"]["mismatches"] == {}
    assert results[f"{name} in place"]["size"] == 996 * 4
    variant = OPERATIONS[name].opposite_variant()
    assert variant
    assert variant.in_place
    assert variant.opposite_variant() is None


def test_every_operation_has_a_check() -> None:
    others = (
        "transport",
        "pairs",
        "gpu_pairs",
        "each_node",
        "rails",
        "nccl_settings",
        "scaling",
        "localization",
        "one_gpu",
    )
    other_checks = {f"collectives.{name}" for name in others}
    assert {f"collectives.{name}" for name in OPERATIONS} == {
        name for name in catalog() if name.startswith("collectives.") and name not in other_checks
    }


# nccl-tests, doc/PERFORMANCE.md: bus bandwidth over algorithm bandwidth, for 4 ranks
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send_receive", 1.0),
    ],
)
def test_busbw_factors_match_nccl_tests(name: str, factor: float) -> None:
    assert OPERATIONS[name].busbw_factor(4) == factor
