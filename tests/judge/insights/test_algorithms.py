"""NCCL's algorithm choices from the facts of checks."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.judge.insights.algorithms import read_choices, select_choices
from seatrial.model import Measurement, size_label

DEFAULT_SHAPE = {"dtype": "float32", "buffers": "torch's allocator"}


def transport(**by_operation: Any) -> Measurement:
    return Measurement(check="collectives.transport", subject="n0/gpu0", facts={"nccl_choices": by_operation})


def settings(**by_size: Any) -> Measurement:
    cases = {"path_by_size": {"default": by_size, "Ring": {"8GiB": {"algorithm": "RING", "protocol": "LL"}}}}
    return Measurement(check="collectives.nccl_settings", subject="n0/gpu0", facts=cases)


def choice(algorithm: str, protocol: str = "Simple", **more: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "protocol": protocol, **more}


def test_choice_is_looked_up_by_operation_dtype_and_buffers() -> None:
    choices = read_choices([transport(all_reduce={**DEFAULT_SHAPE, "by_size": {"1MiB": choice("NVLS")}})], catalog())
    assert select_choices(choices, "all_reduce", DEFAULT_SHAPE) == {"1MiB": ("NVLS", "Simple")}
    for operation, facts in (
        ("all_gather", DEFAULT_SHAPE),
        ("all_reduce", {**DEFAULT_SHAPE, "dtype": "bfloat16"}),
        ("all_reduce", {}),
    ):
        assert select_choices(choices, operation, facts) == {}


def test_only_the_default_setting_is_used() -> None:
    choices = read_choices([settings(**{"1GiB": choice("RING", "LL128")})], catalog())
    assert choices == {("all_reduce", "float32", "torch's allocator"): {"1GiB": ("Ring", "LL128")}}


def test_logged_operation_takes_precedence_over_settings() -> None:
    logged = transport(all_reduce={**DEFAULT_SHAPE, "by_size": {"1GiB": choice("NVLS")}})
    for measurements in (
        [settings(**{"1GiB": choice("RING")}), logged],
        [logged, settings(**{"1GiB": choice("RING")})],
    ):
        assert select_choices(read_choices(measurements, catalog()), "all_reduce", DEFAULT_SHAPE) == {
            "1GiB": ("NVLS", "Simple")
        }


@pytest.mark.parametrize(
    ("logged", "name"),
    [("NVLS_TREE", "NVLSTree"), ("COLLNET_DIRECT", "CollNetDirect"), ("TREE", "Tree"), ("PAT", "PAT")],
)
def test_algorithm_names_are_values_of_nccl_algo(logged: str, name: str) -> None:
    choices = read_choices([transport(all_reduce={**DEFAULT_SHAPE, "by_size": {"1MiB": choice(logged)}})], catalog())
    assert select_choices(choices, "all_reduce", DEFAULT_SHAPE)["1MiB"] == (name, "Simple")


def test_missing_algorithm_is_omitted() -> None:
    sizes = {
        "512KiB": choice("not logged"),
        "1MiB": choice("not told"),
        "2MiB": choice("point to point, no algorithm"),
        "4MiB": {},
        "8MiB": "damaged",
        "16MiB": choice("RING", "not logged"),
    }
    choices = read_choices([transport(all_reduce={**DEFAULT_SHAPE, "by_size": sizes})], catalog())
    assert select_choices(choices, "all_reduce", DEFAULT_SHAPE) == {"16MiB": ("Ring", "")}


def test_choice_has_the_requested_and_the_exact_size() -> None:
    choices = read_choices(
        [transport(all_reduce={**DEFAULT_SHAPE, "by_size": {"1MiB": choice("RING", bytes=2**20 + 8)}})], catalog()
    )
    assert select_choices(choices, "all_reduce", DEFAULT_SHAPE) == {
        "1MiB": ("Ring", "Simple"),
        "1048584B": ("Ring", "Simple"),
    }


@pytest.mark.parametrize(("size", "label"), [(2**30, "1GiB"), (8, "8B"), (2**20 + 1, "1048577B"), (1536, "1536B")])
def test_size_label_is_exact(size: float, label: str) -> None:
    assert size_label(size) == label


def test_malformed_facts_are_ignored() -> None:
    damaged = Measurement(check="collectives.transport", subject="n0/gpu0", facts={"nccl_choices": ["RING"]})
    assert read_choices([damaged, settings()], catalog()) == {("all_reduce", "float32", "torch's allocator"): {}}
