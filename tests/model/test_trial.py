from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from seatrial.model import Measurement, Trial
from tests.report import samples

KEY = "gpu.inventory"
GPU = {"name": "NVIDIA H200", "links": [{"link": 0, "up": True}]}


def test_trial_round_trip() -> None:
    trial = samples.accepted()
    assert Trial.model_validate_json(trial.model_dump_json()) == trial


@pytest.mark.parametrize("wrong", [{"seconds": -1}, {"seconds": True}, {"started": "now"}])
def test_numbers_of_a_trial_are_in_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Trial.model_validate({**samples.accepted().model_dump(), **wrong})


def test_empty_fields_of_verdicts_are_not_written() -> None:
    written = json.loads(samples.accepted().model_dump_json())["verdicts"]
    assert written
    assert all({"check", "subject", "outcome"} <= set(verdict) for verdict in written)
    values = [value for verdict in written for key, value in verdict.items() if key != "subject"]
    assert not [value for value in values if value in ("", [], None)]


@pytest.mark.parametrize("version", ["1", "2", 3])
def test_other_schema_version_is_rejected(version: object) -> None:
    record = json.loads(samples.accepted().model_dump_json())
    with pytest.raises(ValidationError, match=r"schema_version"):
        Trial.model_validate({**record, "schema_version": version})


def of(rank: int, check: str = KEY, error: str | None = None, **facts: object) -> Measurement:
    return Measurement.model_validate(
        {"check": check, "subject": f"n{rank}", "rank": rank, "facts": facts, "error": error}
    )


def gpus(*numbers: int) -> list[dict[str, object]]:
    return [{**GPU, "serial": number} for number in numbers]


@pytest.mark.parametrize(
    ("measurements", "shared"),
    [
        ([of(0, method="m", gpus=gpus(1)), of(1, method="m", gpus=gpus(2, 3))], {KEY: {"method": "m", "gpus[]": GPU}}),
        ([of(0, method="m"), of(1, method="m"), of(2, error="lost")], {KEY: {"method": "m"}}),
        ([of(0, gpus=gpus(1)), of(1, gpus=[*gpus(1), "unreadable"])], {KEY: {"gpus[]": {**GPU, "serial": 1}}}),
        ([of(0, gpus=gpus(1)), of(1, gpus=[])], {KEY: {"gpus[]": {**GPU, "serial": 1}}}),
        ([of(0, method="m"), of(1, method=None)], {KEY: {}}),
        ([of(0, ready=True), of(1, ready=1)], {KEY: {}}),
        ([of(0, read={"a": 1, "b": {"c": 2}}), of(1, read={"a": 1, "b": {}})], {KEY: {"read": {"a": 1}}}),
        ([of(0, read={"a": 1, "x[]": 5}), of(1, read={"a": 1})], {KEY: {"read": {"a": 1}}}),
        ([of(0, read={"a": 1}), of(1, read={"a": 1}), of(2, read={})], {KEY: {}}),
        (
            [of(0, method="m", size=4), of(1, method="m"), of(2, method="m"), of(3, method="m", size=4), of(4, own=1)],
            {KEY: {"method": "m", "size": 4}, f"{KEY} 2": {"method": "m"}},
        ),
        ([of(0, method="m"), of(1)], {}),
    ],
)
def test_facts_of_many_measurements_are_stored_once(measurements: list[Measurement], shared: dict[str, object]) -> None:
    alone = of(0, check="host.versions", kernel="6.8")
    trial = samples.rejected().model_copy(update={"measurements": (*measurements, alone), "verdicts": ()})
    text = trial.as_stored().model_dump_json()
    assert Trial.model_validate_json(text) == trial
    assert trial.as_stored().shared_facts == shared
    assert '"kernel":"6.8"' in text


def metric(subject: str, unit: str, name: str = "speed") -> dict[str, object]:
    return {"name": name, "value": 1.5, "unit": unit, "subject": subject, "samples": [1.0, 2.0]}


def test_units_and_own_subjects_of_metrics_are_not_repeated() -> None:
    metrics = [metric("n0", "GB/s"), metric("n0/gpu1", "GB/s"), metric("n0", "", "share"), metric("n0", "s", "time")]
    other = [metric("n1", "ms", "time"), metric("n1", "GB/s")]
    measurements = tuple(
        Measurement.model_validate({"check": KEY, "subject": subject, "metrics": of_node})
        for subject, of_node in (("n0", metrics), ("n1", other))
    )
    trial = samples.rejected().model_copy(update={"measurements": measurements, "verdicts": ()})
    stored = json.loads(trial.as_stored().model_dump_json())
    assert Trial.model_validate(stored) == trial
    assert stored["units"] == {KEY: {"speed": "GB/s"}}  # of two units, each metric has its own
    written = [each.keys() - {"name", "value", "samples"} for each in stored["measurements"][0]["metrics"]]
    assert written == [set(), {"subject"}, set(), {"unit"}]


def test_shared_facts_of_another_form_are_refused() -> None:
    trial = samples.rejected().model_copy(update={"measurements": (of(0, gpus=gpus(1)),)})
    with pytest.raises(ValidationError, match=r"shared fact gpus\[\] of gpu.inventory is 5, not an object"):
        Trial.model_validate({**trial.model_dump(), "shared_facts": {"gpu.inventory": {"gpus[]": 5}}})
