"""An operation that does nothing is never found right: every one, in place and out of place, in real groups."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from seatrial.bench.collectives import DTYPES
from seatrial.bench.operations import OPERATIONS
from tests.bench import missing_transfer_driver
from tests.train import ranks as groups

PLACED = [
    (name, "in place" if one.in_place else "out of place")
    for name, usual in OPERATIONS.items()
    for one in (usual, usual.in_place_variant())
    if one
]
CASES = list(product(missing_transfer_driver.SIZES, PLACED, DTYPES))


@pytest.fixture(scope="module")
def found() -> dict[int, dict[str, Any]]:
    return {
        size: json.loads(groups.heard(groups.run(size, missing_transfer_driver.main))[0])
        for size in missing_transfer_driver.SIZES
    }


def who_receives(name: str, place: str, ranks: int) -> list[str]:
    """The ranks with data afterwards that they did not have before: the root of a broadcast in place has its own."""
    everybody = [str(rank) for rank in range(ranks)]
    return {"reduce": ["0"], "broadcast": everybody[place == "in place" :]}.get(name, everybody)


@pytest.mark.parametrize(("ranks", "placed", "dtype"), CASES)
def test_every_rank_sees_that_nothing_moved(
    found: dict[int, dict[str, Any]], ranks: int, placed: tuple[str, str], dtype: str
) -> None:
    told = found[ranks][f"{' '.join(placed)} {dtype}"]
    assert told["done"] == {}
    assert list(told["nothing"]) == who_receives(*placed, ranks)
    # in place some is there already: the own block, or a sum that happens to be what the rank itself adds
    own = (
        missing_transfer_driver.COUNT // ranks
        if placed == ("all_gather", "in place")
        else 12 * (placed[1] == "in place")
    )
    assert all(0 <= told["received"] - one["wrong"] <= own for one in told["nothing"].values())


@pytest.mark.parametrize("ranks", missing_transfer_driver.SIZES)
def test_partners_see_that_nothing_was_exchanged(found: dict[int, dict[str, Any]], ranks: int) -> None:
    assert found[ranks]["pairs"] == {"0": True, "1": True}


def test_all_that_has_two_placements_is_here() -> None:
    both = {name for name, _ in PLACED if [one for one, _ in PLACED].count(name) == 2}
    assert both == {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}
