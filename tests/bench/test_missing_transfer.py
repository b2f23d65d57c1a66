"""Data checks detect an operation that moves no data: all operations, in and out of place, in real groups."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from seatrial.bench.collectives import DTYPES
from seatrial.bench.operations import OPERATIONS
from tests.bench import missing_transfer_driver
from tests.train import ranks as groups

VARIANTS = [
    (name, "in place" if operation.in_place else "out of place")
    for name, default in OPERATIONS.items()
    for operation in (default, default.opposite_variant())
    if operation
]
CASES = list(product(missing_transfer_driver.WORLD_SIZES, VARIANTS, DTYPES))


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, Any]]:
    """Results of rank 0, by world size."""
    return {
        size: json.loads(groups.require_success(groups.run(size, missing_transfer_driver.main))[0])
        for size in missing_transfer_driver.WORLD_SIZES
    }


def receiving_ranks(name: str, placement: str, ranks: int) -> list[str]:
    """The ranks that receive data; the root of an in-place broadcast has its data already."""
    all_ranks = [str(rank) for rank in range(ranks)]
    return {"reduce": ["0"], "broadcast": all_ranks[placement == "in place" :]}.get(name, all_ranks)


@pytest.mark.parametrize(("ranks", "variant", "dtype"), CASES)
def test_every_receiving_rank_detects_missing_data(
    results: dict[int, dict[str, Any]], ranks: int, variant: tuple[str, str], dtype: str
) -> None:
    result = results[ranks][f"{' '.join(variant)} {dtype}"]
    assert result["run"] == {}
    assert list(result["skipped"]) == receiving_ranks(*variant, ranks)
    # In place some elements are correct: the rank's own block, or sums that equal the rank's input
    correct = missing_transfer_driver.COUNT // ranks
    if variant != ("all_gather", "in place"):
        correct = 12 * (variant[1] == "in place")
    assert all(0 <= result["received"] - mismatch["wrong"] <= correct for mismatch in result["skipped"].values())


@pytest.mark.parametrize("ranks", missing_transfer_driver.WORLD_SIZES)
def test_pairs_detect_missing_data(results: dict[int, dict[str, Any]], ranks: int) -> None:
    assert results[ranks]["pairs"] == {"0": True, "1": True}


def test_operations_with_two_variants() -> None:
    names = [name for name, _ in VARIANTS]
    two_variants = {name for name in names if names.count(name) == 2}
    assert two_variants == {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}
