"""Which algorithm NCCL chose, as the facts of checks have it."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.analysis.algorithms import choices_for, read_choices, size_label
from seatrial.checks import catalog
from seatrial.model import Measurement

USUAL = {"dtype": "float32", "buffers": "torch's allocator"}


def path(**by_operation: Any) -> Measurement:
    return Measurement(check="collectives.transport", subject="n0/gpu0", facts={"choices": by_operation})


def contrast(**by_size: Any) -> Measurement:
    cases = {"path_by_size": {"default": by_size, "Ring": {"8GiB": {"algorithm": "RING", "protocol": "LL"}}}}
    return Measurement(check="collectives.nccl_settings", subject="n0/gpu0", facts=cases)


def choice(algorithm: str, protocol: str = "Simple", **more: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "protocol": protocol, **more}


def test_a_choice_is_looked_up_by_operation_type_and_buffers() -> None:
    chosen = read_choices([path(all_reduce={**USUAL, "by_size": {"1MiB": choice("NVLS")}})], catalog())
    assert choices_for(chosen, "all_reduce", USUAL) == {"1MiB": ("NVLS", "Simple")}
    for operation, facts in (("all_gather", USUAL), ("all_reduce", {**USUAL, "dtype": "bfloat16"}), ("all_reduce", {})):
        assert choices_for(chosen, operation, facts) == {}


def test_a_contrast_tells_only_of_the_choice_that_nobody_forced() -> None:
    chosen = read_choices([contrast(**{"1GiB": choice("RING", "LL128")})], catalog())
    assert chosen == {("all_reduce", "float32", "torch's allocator"): {"1GiB": ("Ring", "LL128")}}


def test_the_log_of_the_very_operation_outranks_a_contrast() -> None:
    logged = path(all_reduce={**USUAL, "by_size": {"1GiB": choice("NVLS")}})
    for measurements in (
        [contrast(**{"1GiB": choice("RING")}), logged],
        [logged, contrast(**{"1GiB": choice("RING")})],
    ):
        assert choices_for(read_choices(measurements, catalog()), "all_reduce", USUAL) == {"1GiB": ("NVLS", "Simple")}


@pytest.mark.parametrize(
    ("logged", "name"),
    [("NVLS_TREE", "NVLSTree"), ("COLLNET_DIRECT", "CollNetDirect"), ("TREE", "Tree"), ("PAT", "PAT")],
)
def test_names_are_those_of_the_variable_that_forces_an_algorithm(logged: str, name: str) -> None:
    chosen = read_choices([path(all_reduce={**USUAL, "by_size": {"1MiB": choice(logged)}})], catalog())
    assert choices_for(chosen, "all_reduce", USUAL)["1MiB"] == (name, "Simple")


def test_where_no_algorithm_was_logged_there_is_none() -> None:
    sizes = {
        "1MiB": choice("not told"),
        "2MiB": choice("point to point, no algorithm"),
        "4MiB": {},
        "8MiB": "damaged",
        "16MiB": choice("RING", "not told"),
    }
    chosen = read_choices([path(all_reduce={**USUAL, "by_size": sizes})], catalog())
    assert choices_for(chosen, "all_reduce", USUAL) == {"16MiB": ("Ring", "")}


def test_a_size_is_known_by_its_rounded_and_its_exact_label() -> None:
    chosen = read_choices([path(all_reduce={**USUAL, "by_size": {"1MiB": choice("RING", bytes=2**20 + 8)}})], catalog())
    assert choices_for(chosen, "all_reduce", USUAL) == {"1MiB": ("Ring", "Simple"), "1048584B": ("Ring", "Simple")}


@pytest.mark.parametrize(("size", "label"), [(2**30, "1GiB"), (8, "8B"), (2**20 + 1, "1048577B"), (1536, "1536B")])
def test_a_size_label_is_short_only_where_it_is_exact(size: float, label: str) -> None:
    assert size_label(size) == label


def test_facts_of_another_shape_are_not_known() -> None:
    damaged = Measurement(check="collectives.transport", subject="n0/gpu0", facts={"choices": ["RING"]})
    assert read_choices([damaged, contrast()], catalog()) == {("all_reduce", "float32", "torch's allocator"): {}}
