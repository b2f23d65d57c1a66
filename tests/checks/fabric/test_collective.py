"""Which sizes and modes the checks of collectives measure; on real ranks: test_all_reduce.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bench.operations import OPERATIONS
from seatrial.checks.base import Context
from seatrial.checks.fabric._collective import (
    CPU_SIZES,
    CUDA_GRAPH_SIZES,
    GPU_SIZES,
    CollectiveOptions,
    _Modes,
    busbw_rule,
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
    asked = CollectiveOptions.model_validate(options)
    return _Modes(OPERATIONS["all_gather"], default_sizes("all_gather"), asked, context, ["node0/rank0", "node0/rank1"])


def test_a_sweep_goes_up_by_its_factor_and_never_past_its_end() -> None:
    assert expand_size_sweep({"from": "8B", "to": "1KiB", "factor": 4}) == [8, 32, 128, 512]
    assert expand_size_sweep({"from": "8B", "to": "32B"}) == [8, 16, 32]
    assert expand_size_sweep(["8B"]) == ["8B"]


def test_sizes_are_those_of_the_trial_else_of_the_device_downwards() -> None:
    sizes, default = default_sizes("all_gather"), CollectiveOptions()
    assert sizes.for_mode("parity", default, gpu=True) == sorted(GPU_SIZES, reverse=True)
    assert sizes.for_mode("parity", default, gpu=False) == sorted(CPU_SIZES, reverse=True)
    assert sizes.for_mode("device", default, gpu=True) == sorted(CUDA_GRAPH_SIZES, reverse=True)
    asked = CollectiveOptions.model_validate({"sizes": ["8B", "1KiB", "8B"]})
    assert sizes.for_mode("parity", asked, gpu=True) == [1024, 8]
    assert max(default_sizes("all_reduce").gpu) == 2**33, "published acceptance figures are of 8 GiB"


def test_cpus_have_no_mode_of_the_device() -> None:
    wanted = {"modes": ["parity", "device"]}
    assert modes("cuda:0", **wanted).done == ["parity", "device"]
    assert modes("cpu", **wanted).done == ["parity"]


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({}, None),
        ({"sizes": ["64KiB", "1MiB"]}, {"busbw.10MiB"}),
        ({"modes": ["distribution"]}, {"busbw.64KiB", "busbw.1MiB", "busbw.10MiB"}),
    ],
)
def test_default_sizes_that_a_trial_leaves_out_are_recorded(
    options: dict[str, object], left_out: set[str] | None
) -> None:
    facts = {one.name: one.value for one in modes("cpu", **options).left_out() if isinstance(one, Fact)}
    value = facts.get(NOT_REQUESTED)
    assert (set(value) if isinstance(value, dict) else None) == left_out


def test_a_check_of_an_operation_judges_data_memory_and_what_it_is_given() -> None:
    check = collective_check("all_gather", "t", rules=(busbw_rule("all_gather", "1GiB"),))
    figures = {"busbw.1GiB": 1.0, "wrong_elements": 0, "sizes_not_allocated": 0}
    nobody_knows = {"backend": "nccl", "gpu": "none", "world_size": 8, "nodes": 1}
    assert outcomes(check, figures, **nobody_knows) == {
        "busbw.1GiB": Outcome.UNJUDGED,
        "wrong_elements": Outcome.PASS,
        "sizes_not_allocated": Outcome.PASS,
    }
    assert outcomes(check, figures, backend="gloo")["busbw.1GiB"] is Outcome.SKIP
