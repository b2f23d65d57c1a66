from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.model.measurement import Absent, Measurement, Metric, Series, Why


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_metric_value_must_be_finite(value: float) -> None:
    with pytest.raises(ValidationError):
        Metric(name="loss", value=value, unit="", subject="cluster")


def test_bytes_that_are_not_utf8_do_not_break_a_record() -> None:
    stray = "caf\udce9 中 😀"  # as Python reads a path in Latin-1
    metric = Metric(name="m", value=1, unit="", subject=stray)
    record = Measurement(check="c", subject=stray, facts={"f": [stray, {"a": stray}], stray: 1}, metrics=(metric,))
    assert record.subject == stray, "paths remain usable in memory"
    for written in (record.model_dump_json(), json.dumps(record.model_dump(mode="json"), ensure_ascii=False)):
        read = Measurement.model_validate_json(written.encode())
        assert read.subject == read.metrics[0].subject == "caf\ufffd 中 😀"
        assert read.facts["f"] == ["caf\ufffd 中 😀", {"a": "caf\ufffd 中 😀"}]
        assert len(read.facts) == 2
    assert record.model_dump()["subject"] == "caf\ufffd 中 😀"


def test_metric_has_slots_and_is_validated() -> None:
    metric = Metric(name="a", value=1, unit="s", subject="n0", samples=(1, 2))
    assert not hasattr(metric, "__dict__"), "a million metrics would take twice the memory"
    assert Measurement.model_validate_json(_with(metric).model_dump_json()) == _with(metric)
    with pytest.raises(FrozenInstanceError):
        metric.value = 2.0  # type: ignore[misc]
    wrongs: list[dict[str, Any]] = [{"value": math.nan}, {"samples": (math.inf,)}, {"colour": "green"}, {"unit": 1}]
    wrongs += [{"value": True}, {"value": "1.5"}, {"samples": (1.0, False)}]
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            Metric(**{**asdict(metric), **wrong})


def _with(metric: Metric) -> Measurement:
    return Measurement(check="c", subject="n0", metrics=(metric,))


def test_series_with_different_lengths_is_rejected() -> None:
    with pytest.raises(ValueError, match="busbw has 2 x values and 1 y values"):
        Series(name="busbw", subject="cluster", x=(1, 2), y=(1,), x_unit="B", y_unit="GB/s")
    with pytest.raises(ValidationError):
        Series(name="busbw", subject="cluster", x=(1, 2), y=(1, True), x_unit="B", y_unit="GB/s")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"retry": 3}, {"retry": -1}, {"retry": True}, {"retry": "1"}),
        *({"seconds": -1.0}, {"seconds": True}, {"seconds": "1"}, {"started": math.inf}),
        *({"rank": -1}, {"rank": False}, {"rank": "0"}),
    ],
)
def test_numbers_of_a_measurement_are_in_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Measurement.model_validate({"check": "c", "subject": "n0", **wrong})


@pytest.mark.parametrize(("subject", "is_valid"), [("n0", False), ("", False), ("n1", True)])
def test_a_value_beside_its_absence_is_refused(subject: str, is_valid: bool) -> None:
    absent = Absent(metric="a", why=Why.DOES_NOT_APPLY, reason="no GPU", subject=subject)
    record = {"check": "c", "subject": "n0", "metrics": (Metric(name="a", value=1, unit="s", subject="n0"),)}
    if is_valid:
        assert Measurement.model_validate({**record, "absent": (absent,)}).absent == (absent,)
    else:
        with pytest.raises(ValidationError, match="a of n0 has a value, and a reason why it has none"):
            Measurement.model_validate({**record, "absent": (absent,)})


def test_evidence_is_written_only_where_there_is_some() -> None:
    plain = Metric(name="a", value=1, unit="s", subject="n0")
    assert "evidence" not in _with(plain).model_dump_json()
    shown = replace(plain, evidence={"pid": 7})
    assert Measurement.model_validate_json(_with(shown).model_dump_json()).metrics == (shown,)
