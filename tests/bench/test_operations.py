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
def found() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(ranks.heard(ranks.run(3, operations_driver.main, seconds=240))[0])
    return told


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_brings_exactly_what_it_should(found: dict[str, Any], name: str, dtype: str) -> None:
    assert found[f"{name} {dtype}"]["mismatches"] == {}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_bit_flipped_on_the_way_is_found_where_it_is(found: dict[str, Any], name: str) -> None:
    mismatches = found[f"{name} broken"]["mismatches"]
    assert mismatches["0"]["offset"] == 5
    assert mismatches["0"]["xor"] == "0x00000200"


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_data_of_a_graph_is_checked(found: dict[str, Any], name: str) -> None:
    assert found[f"{name} replayed"]["mismatches"] == {}
    assert found[f"{name} broken replayed"]["mismatches"]["0"]["offset"] == 5


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_one_by_one_have_a_time_each(found: dict[str, Any], name: str) -> None:
    timings = found[f"{name} one by one"]["timings"]
    assert timings["per_window"] == 1
    assert {len(window) for window in timings["windows"]} == {3}  # ranks
    assert found[f"{name} one by one"]["mismatches"] == {}


@pytest.mark.parametrize("name", OPERATIONS)
def test_sizes_are_whole_blocks_and_stated_exactly(found: dict[str, Any], name: str) -> None:
    size = found[f"{name} float32"]["size"]
    assert size == (
        996 * 4 if OPERATIONS[name].one_block_per_rank else 1003 * 4
    )  # blocks of 16 B, as nccl-tests rounds


def test_a_block_holds_an_element_even_where_nccl_tests_measures_nothing() -> None:
    assert OPERATIONS["all_gather"].element_count(8, 4, 4) == 4
    assert OPERATIONS["all_gather"].element_count(8 * 4, 4, 4) == 8
    assert OPERATIONS["all_gather"].element_count(100, 2, 3) == 48


def test_a_size_that_is_no_whole_blocks_is_called_what_it_is() -> None:
    gather = OPERATIONS["all_gather"]
    assert [gather.nominal_size(size, 4, 8) for size in (8, 16, 32, 100, 2**20)] == [32, 32, 32, 96, 2**20]
    assert gather.nominal_size(2**30, 4, 3) == 2**30  # 16 B less
    assert gather.nominal_size(gather.nominal_size(8, 2, 7), 2, 7) == 14
    assert OPERATIONS["all_reduce"].nominal_size(8, 4, 8) == 8


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_in_place_brings_the_same(found: dict[str, Any], name: str) -> None:
    assert found[f"{name} offsets"] == [0, 16, 32]  # each rank's block where NCCL takes it for in place
    assert found[f"{name} elsewhere"]["mismatches"] == {}
    assert found[f"{name} elsewhere"]["size"] == 996 * 4
    other = OPERATIONS[name].in_place_variant()
    assert other
    assert other.in_place
    assert other.in_place_variant() is None


def test_every_operation_has_a_check_and_every_check_an_operation() -> None:
    others = ("path", "pairs", "gpu_pairs", "each_node", "rails", "contrast", "scaling")
    of_other_kinds = {f"collectives.{name}" for name in others}
    assert {f"collectives.{name}" for name in OPERATIONS} == {
        name for name in catalog() if name.startswith("collectives.") and name not in of_other_kinds
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
def test_factors_are_those_of_nccl_tests(name: str, factor: float) -> None:
    assert OPERATIONS[name].busbw_factor(4) == factor
