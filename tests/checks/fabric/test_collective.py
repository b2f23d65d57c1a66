"""Sizes and modes of the collective checks; real ranks: test_all_reduce.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bench.operations import OPERATIONS
from seatrial.checks.base import Context
from seatrial.checks.fabric._busbw_rules import MANY_NODES, busbw_rule
from seatrial.checks.fabric._collective import (
    CPU_SIZES,
    CUDA_GRAPH_SIZES,
    GPU_SIZES,
    CollectiveOptions,
    _Modes,
    collective_check,
    default_sizes,
    expand_size_sweep,
)
from seatrial.model import NOT_REQUESTED, Fact, Outcome
from tests.checks.fabric.verdicts import outcomes


def modes(device: str, **options: object) -> _Modes:
    context = Context(
        node="node0",
        rank=0,
        world_size=2,
        local_rank=0,
        device=device,
        expected_gpus=None,
        artifacts_dir=Path("/nowhere"),
        run_dir=Path("/nowhere"),
    )
    requested = CollectiveOptions.model_validate(options)
    return _Modes(
        OPERATIONS["all_gather"], default_sizes("all_gather"), requested, context, ["node0/rank0", "node0/rank1"]
    )


def test_size_sweep_multiplies_by_factor_up_to_its_end() -> None:
    assert expand_size_sweep({"from": "8B", "to": "1KiB", "factor": 4}) == [8, 32, 128, 512]
    assert expand_size_sweep({"from": "8B", "to": "32B"}) == [8, 16, 32]
    assert expand_size_sweep(["8B"]) == ["8B"]


def test_sizes_are_from_the_trial_or_the_device_in_descending_order() -> None:
    sizes, default = default_sizes("all_gather"), CollectiveOptions()
    assert sizes.for_mode("back_to_back", default, gpu=True) == sorted(GPU_SIZES, reverse=True)
    assert sizes.for_mode("back_to_back", default, gpu=False) == sorted(CPU_SIZES, reverse=True)
    assert sizes.for_mode("cuda_graph", default, gpu=True) == sorted(CUDA_GRAPH_SIZES, reverse=True)
    requested = CollectiveOptions.model_validate({"sizes": ["8B", "1KiB", "8B"]})
    assert sizes.for_mode("back_to_back", requested, gpu=True) == [1024, 8]
    assert max(default_sizes("all_reduce").gpu) == 2**33, "published acceptance values use 8 GiB"


def test_cpus_have_no_mode_cuda_graph() -> None:
    requested = {"modes": ["back_to_back", "cuda_graph"]}
    assert modes("cuda:0", **requested).applicable == ["back_to_back", "cuda_graph"]
    assert modes("cpu", **requested).applicable == ["back_to_back"]


@pytest.mark.parametrize(
    ("options", "omitted"),
    [
        ({}, None),
        ({"sizes": ["64KiB", "1MiB"]}, {"busbw.10MiB"}),
        ({"modes": ["percentiles"]}, {"busbw.64KiB", "busbw.1MiB", "busbw.10MiB"}),
    ],
)
def test_omitted_default_sizes_are_recorded(options: dict[str, object], omitted: set[str] | None) -> None:
    facts = {fact.name: fact.value for fact in modes("cpu", **options).not_requested() if isinstance(fact, Fact)}
    value = facts.get(NOT_REQUESTED)
    assert (set(value) if isinstance(value, dict) else None) == omitted


def test_collective_check_judges_data_memory_and_given_rules() -> None:
    check = collective_check("all_gather", "t", rules=(busbw_rule("all_gather", "1GiB"),))
    values = {"busbw.1GiB": 1.0, "wrong_elements": 0, "sizes_not_allocated": 0}
    no_reference = {"backend": "nccl", "gpu": "none", "world_size": 8, "nodes": 1}
    assert outcomes(check, values, **no_reference) == {
        "busbw.1GiB": Outcome.UNJUDGED,
        "wrong_elements": Outcome.PASS,
        "sizes_not_allocated": Outcome.PASS,
    }
    assert outcomes(check, values, backend="gloo")["busbw.1GiB"] is Outcome.SKIP


def test_many_nodes_measure_8_gib_too() -> None:
    assert max(default_sizes("all_gather", MANY_NODES - 1).gpu) == 2**30
    assert set(default_sizes("all_gather", MANY_NODES).gpu) == {*GPU_SIZES, 2**33}
    assert default_sizes("all_reduce", MANY_NODES).gpu.count(2**33) == 1
    assert default_sizes("all_gather", MANY_NODES).cpu == CPU_SIZES
