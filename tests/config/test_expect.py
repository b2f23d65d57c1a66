from __future__ import annotations

import pytest
from pydantic import BaseModel

from seatrial.config.expect import declared_unit, metric_error, nearest, threshold_unit_error
from seatrial.model import Threshold

METRICS = {"busbw.*": "GB/s", "efficiency": "%", "wrong_elements": ""}


class Sized(BaseModel):
    sizes: tuple[int, ...] = (2**20, 2**30)


@pytest.mark.parametrize(
    ("metric", "unit"),
    [("busbw.1GiB", "GB/s"), ("efficiency", "%"), ("busbw", None), ("latency.1GiB", None), ("wrong_elements", "")],
)
def test_declared_unit_of_a_metric_or_its_family(metric: str, unit: str | None) -> None:
    assert declared_unit(metric, METRICS) == unit


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        ("busbw.1GiB", ""),
        ("efficiency", ""),
        ("busbw", "busbw.1MiB"),
        ("busbw.*", "busbw.1MiB"),
        ("busbw.8GiB", "not measured with these options"),
        ("eficiency", "did you mean 'efficiency'"),
    ],
)
def test_metric_that_is_not_measured(metric: str, problem: str) -> None:
    error = metric_error(metric, Sized(), METRICS)
    assert problem in error
    assert bool(error) == bool(problem)


@pytest.mark.parametrize(
    ("threshold", "unit", "problem"),
    [
        ("> 350 GB/s", "GB/s", ""),
        ("> 350", "GB/s", "'GB/s'"),
        ("< 30", "us", "'us'"),
        ("> 100", "files/s", "'files/s'"),
        ("== 8", "GPUs", ""),
        ("< 2", "of the median", ""),
        ("== 0", "", ""),
        ("== 1", "bool", ""),
        ("> 350 MB/s", "GB/s", "'MB/s'"),
        ("> 90 %", "%", ""),
        ("> 90", "%", "'%'"),
        ("> 0.9 %", "%", "did you mean 90 %"),
        ("> 190 %", "%", "not between 0 and 100 %"),
    ],
)
def test_threshold_with_a_wrong_unit(threshold: str, unit: str, problem: str) -> None:
    error = threshold_unit_error(Threshold.parse(threshold), unit)
    assert problem in error
    assert bool(error) == bool(problem)


def test_similar_name_is_suggested() -> None:
    assert nearest("eficiency", METRICS) == "; did you mean 'efficiency'?"
    assert nearest("xyz", METRICS) == ""
