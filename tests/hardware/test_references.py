"""Who is compared with what: mixed models, slices, networks, and how few good subjects a fleet flags."""

from __future__ import annotations

import random

import pytest
from pydantic import JsonValue

from seatrial.hardware.references import PeerGroup, Reference, References, Sku
from seatrial.model import Baseline, ReferenceValue


def expected(value: float, *, gpus: int = 8, nodes: int = 1, fabric: str = "", unit: str = "GB/s") -> ReferenceValue:
    return ReferenceValue(gpus=gpus, nodes=nodes, value=value, unit=unit, source="a paper", fabric=fabric)


FAST = Sku(name="Fast", nvml_names=("GPU F",), expected={"speed": (expected(400),), "other": (expected(1, unit="x"),)})
SLOW = Sku(name="Slow", nvml_names=("GPU S",), expected={"speed": (expected(300),), "other": (expected(1),)})
WIDE = Sku(
    name="Wide",
    nvml_names=("GPU W",),
    expected={"speed": (expected(350, nodes=2, fabric="ib-8x400"), expected(200, nodes=2, fabric="roce-8x200"))},
)


def facts(gpu: str, nodes: int = 1) -> dict[str, JsonValue]:
    return {"gpu": gpu, "world_size": 8, "nodes": nodes}


def found(known: References, gpu: str, key: str = "speed", nodes: int = 1) -> tuple[float, str] | str:
    one = known.site_or_sku_reference(key, facts(gpu, nodes))
    return (one.value, one.label) if isinstance(one, Reference) else one


KNOWN = References(None, (FAST, SLOW, WIDE))


def test_mixed_models_are_judged_by_the_slowest_and_it_is_said() -> None:
    assert found(KNOWN, "GPU F + GPU S") == (300, "SKU Slow, the slowest of GPU F + GPU S")


def test_mixed_models_of_which_one_is_unknown_are_not_judged() -> None:
    assert found(KNOWN, "GPU F + GPU X") == "GPU F + GPU X are mixed models, and no SKU data for GPU X"
    assert found(KNOWN, "GPU F + GPU S", "other") == (
        "GPU F + GPU S are mixed models, and their figures are in different units"
    )


def test_unlike_models_are_no_fleet() -> None:
    fleet = PeerGroup("GPU X + GPU Y", (100.0, 100, 100, 100, 50))
    assert not fleet.gives_reference
    assert not fleet.is_low_outlier(50)


@pytest.mark.parametrize(
    ("known", "gpu"),
    [(KNOWN, "GPU F MIG 1g.10gb"), (References(None, (FAST,), mig_models=frozenset({"GPU F"})), "GPU F")],
)
def test_a_slice_is_not_the_whole_gpu(known: References, gpu: str) -> None:
    assert found(known, gpu) == (
        f"{gpu} is cut into MIG slices: what is known of the whole GPU does not apply to a part of it"
    )


def test_several_nodes_are_judged_by_their_network_only() -> None:
    assert found(References(None, (WIDE,), fabric="ib-8x400"), "GPU W", nodes=2) == (350, "SKU Wide")
    assert found(References(None, (WIDE,), fabric="roce-8x200"), "GPU W", nodes=2) == (200, "SKU Wide")
    other = "Wide has no known speed for 8 GPUs on 2 nodes over"
    assert found(References(None, (WIDE,), fabric="tcp"), "GPU W", nodes=2) == f"{other} tcp"
    assert found(KNOWN, "GPU W", nodes=2) == f"{other} a network of unknown class"


def test_a_site_that_learned_over_another_network_says_nothing() -> None:
    own = expected(123, nodes=2, fabric="ib-8x400").model_copy(update={"gpu": "GPU X"})
    site = Baseline(name="lab", learned_from=(), expected={"speed": (own,)})
    assert found(References(site, (), fabric="ib-8x400"), "GPU X", nodes=2) == (123, "site lab")
    assert isinstance(found(References(site, (), fabric="tcp"), "GPU X", nodes=2), str)


def flags(count: int, noise: float, rounds: int, fault: float = 0.0, under: float = 100) -> tuple[float, float]:
    """Share of fleets in which a good member is flagged, and of those in which the first, slower by ``fault``, is.

    Flagged: an outlier, and ``under`` percent of the fleet's median.
    """
    chance, good, bad = random.Random(count), 0, 0
    for _ in range(rounds):
        values = [100 * chance.gauss(1, noise) for _ in range(count)]
        values[0] *= 1 - fault
        fleet = PeerGroup("GPU", tuple(values))
        seen = [fleet.is_low_outlier(value) and value < under / 100 * fleet.median for value in values]
        good, bad = good + any(seen[1:]), bad + seen[0]
    return good / rounds, bad / rounds


FLEETS = [(3, 2000), (4, 2000), (8, 2000), (32, 1000), (1024, 100), (8192, 20)]


@pytest.mark.parametrize(("count", "rounds"), FLEETS)
def test_hardly_a_good_fleet_has_a_flag(count: int, rounds: int) -> None:
    """One fleet in a hundred, and three standard deviations of that for the simulation's own chance."""
    chance = 0.01 + 3 * (0.01 * 0.99 / rounds) ** 0.5
    assert flags(count, 0.003, rounds)[0] <= chance
    assert flags(count, 0.01, rounds)[0] <= chance
    # a wider spread is not known well enough from a few; the rule's own limit, 90 % of the median, is what guards then
    assert flags(count, 0.03, rounds, under=90)[0] <= chance


@pytest.mark.parametrize("count", [3, 4, 8, 32])
def test_a_fault_of_five_percent_is_seen_among_steady_subjects(count: int) -> None:
    """As research has it: 96 to 100 % at a noise of 0.3 %."""
    assert flags(count, 0.003, 500, fault=0.05)[1] >= 0.94


def test_in_a_thousand_a_fault_of_six_percent_is_seen() -> None:
    assert flags(1024, 0.003, 50, fault=0.06)[1] >= 0.96


def test_two_never_outvote_each_other() -> None:
    assert not any(PeerGroup("GPU", (100.0, low)).is_low_outlier(low) for low in (99, 50, 1))
