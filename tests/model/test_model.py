from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from seatrial.model import (
    Limit,
    Measurement,
    Metric,
    Outcome,
    Series,
    format_bytes,
    format_value,
    parse_bytes,
    worst,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 * 2**30), ("1 MiB", 2**20), ("512", 512), (1024, 1024), ("1.5KiB", 1536), ("10MiB", 10485760)],
)
def test_sizes_are_binary_and_exact(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["8GB", "", "-1", "1.0001B", "many", "1 mib"])
def test_a_size_that_could_be_read_two_ways_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**50), st.sampled_from(["B", "KiB", "MiB", "GiB"]))
def test_a_whole_size_survives_being_printed(count: int, unit: str) -> None:
    size = parse_bytes(f"{count % 1024}{unit}")
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize("text", ["> 350 GB/s", ">= 0.95", "== 0 elements", "< 180 s", "<= 1073741825 B", "> -3.25"])
def test_a_limit_reads_back_as_itself(text: str) -> None:
    limit = Limit.parse(text)
    assert str(limit) == text
    assert Limit.parse(str(limit)) == limit


def test_a_limit_in_bytes_is_kept_in_bytes() -> None:
    assert Limit.parse(">= 1GiB") == Limit(op=">=", value=2**30, unit="B")


@pytest.mark.parametrize("text", ["350", "=> 3", "> fast", "", "> 1e999"])
def test_a_limit_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a threshold|finite"):
        Limit.parse(text)


@pytest.mark.parametrize(
    ("text", "good", "bad"), [("> 5", 5.1, 5), (">= 5", 5, 4.9), ("< 5", 4.9, 5), ("<= 5", 5, 5.1), ("== 5", 5, 4)]
)
def test_limits_hold_on_the_right_side(text: str, good: float, bad: float) -> None:
    assert Limit.parse(text).holds(good)
    assert not Limit.parse(text).holds(bad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_is_a_number(value: float) -> None:
    with pytest.raises(ValidationError):
        Metric(name="loss", value=value, unit="", subject="cluster")


def test_values_read_as_a_person_reads_them() -> None:
    assert format_value(2**30, "B") == "1GiB"
    assert format_value(1, "bool") == "yes"
    assert format_value(356.4821, "GB/s") == "356.5 GB/s"
    assert format_value(1_234_567.8, "tokens/s") == "1,234,568 tokens/s"


def test_nothing_said_is_unjudged_and_failure_outranks_all() -> None:
    assert worst([]) is Outcome.UNJUDGED
    assert worst([Outcome.PASS, Outcome.ERROR, Outcome.FAIL, Outcome.SKIP]) is Outcome.FAIL
    assert worst([Outcome.PASS, Outcome.SKIP]) is Outcome.PASS
    assert worst([Outcome.PASS, Outcome.UNJUDGED, Outcome.WARN]) is Outcome.UNJUDGED


def test_a_byte_that_is_not_utf8_costs_no_record() -> None:
    stray = "caf\udce9 中 😀"  # as Python reads a path in Latin-1
    metric = Metric(name="m", value=1, unit="", subject=stray)
    record = Measurement(check="c", subject=stray, facts={"f": [stray, {"a": stray}], stray: 1}, metrics=(metric,))
    assert record.subject == stray, "in memory a path still leads to its file"
    for written in (record.model_dump_json(), json.dumps(record.model_dump(mode="json"), ensure_ascii=False)):
        read = Measurement.model_validate_json(written.encode())
        assert read.subject == read.metrics[0].subject == "caf\ufffd 中 😀"
        assert read.facts["f"] == ["caf\ufffd 中 😀", {"a": "caf\ufffd 中 😀"}]
        assert len(read.facts) == 2
    assert record.model_dump()["subject"] == "caf\ufffd 中 😀"


def test_a_metric_is_small_and_checked_like_any_record() -> None:
    one = Metric(name="a", value=1, unit="s", subject="n0", samples=(1, 2))
    assert not hasattr(one, "__dict__"), "a million of them would take twice the memory"
    assert Measurement.model_validate_json(_with(one).model_dump_json()) == _with(one)
    with pytest.raises(FrozenInstanceError):
        one.value = 2.0  # type: ignore[misc]
    for wrong in ({"value": math.nan}, {"samples": (math.inf,)}, {"colour": "green"}, {"unit": 1}):
        with pytest.raises(ValidationError):
            Metric(**{**asdict(one), **wrong})


def _with(metric: Metric) -> Measurement:
    return Measurement(check="c", subject="n0", metrics=(metric,))


def test_a_curve_has_a_y_for_each_x() -> None:
    with pytest.raises(ValueError, match="the curve busbw has 2 values of x and 1 of y"):
        Series(name="busbw", subject="cluster", x=(1, 2), y=(1,), x_unit="B", y_unit="GB/s")
