from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.checks.base import NEW_ERRORS_PREFIX, Check, Context, Needs
from seatrial.model import Observation, Phase, Scope


def context(device: str, **fields: Any) -> Context:
    where = {"node": "node3", "rank": 9, "world_size": 16, "local_rank": 1, "expected_gpus": 8}
    return Context(device=device, artifacts_dir=Path("/run/a"), run_dir=Path("/run"), **{**where, **fields})


@pytest.mark.parametrize(
    ("device", "index", "subject"),
    [
        ("cuda:1", None, "node3/gpu1"),
        ("cuda:1", 5, "node3/gpu5"),  # CUDA_VISIBLE_DEVICES=4,5: NVML's index is that of the hardware
        ("cuda:0", 0, "node3/gpu0"),
        ("cpu", None, "node3/rank9"),
    ],
)
def test_a_process_is_called_by_its_gpu_where_it_has_one(device: str, index: int | None, subject: str) -> None:
    assert context(device, nvml_index=index).subject == subject


def _measure(context: Context, options: Any) -> Iterator[Observation]:
    yield from ()


@pytest.mark.parametrize(
    ("phase", "metrics", "counted"),
    [
        (Phase.SINGLE_GPU, {"tflops": "TFLOP/s"}, True),
        (Phase.INTERCONNECT, {"busbw.*": "GB/s"}, True),
        (Phase.ENVIRONMENT, {"nodes": "nodes"}, False),
        (Phase.SINGLE_GPU, {f"{NEW_ERRORS_PREFIX}ecc": "count"}, False),  # it counts them itself
    ],
)
def test_error_counters_are_read_around_what_puts_gpus_to_work(
    phase: Phase, metrics: dict[str, str], counted: bool
) -> None:
    check = Check(
        name="t.t", title="t", phase=phase, scope=Scope.GPU, metrics=metrics, rules=(), measure=_measure, limit_s=1
    )
    assert check.reads_error_counters is counted


@pytest.mark.parametrize("name", catalog())
def test_check_that_may_skip_itself_declares_when(name: str) -> None:
    check = catalog()[name]
    measure = getattr(check.measure, "func", check.measure)  # of a partial
    source = inspect.getsource(sys.modules[measure.__module__])
    skips_itself = "raise NotApplicable" in source or "require_client()" in source
    assert not skips_itself or check.skipped_if or check.needs != Needs()
    assert skips_itself or not check.skipped_if
