from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from seatrial.model import Measurement, Trial
from tests.report import samples

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


def of(rank: int, check: str = "gpu.inventory", error: str | None = None, **facts: object) -> Measurement:
    return Measurement.model_validate(
        {"check": check, "subject": f"n{rank}", "rank": rank, "facts": facts, "error": error}
    )


def gpus(*numbers: int) -> list[dict[str, object]]:
    return [{**GPU, "serial": number} for number in numbers]


@pytest.mark.parametrize(
    ("measurements", "shared"),
    [
        ([of(0, method="m", gpus=gpus(1)), of(1, method="m", gpus=gpus(2, 3))], {"method": "m", "gpus[]": GPU}),
        ([of(0, method="m", extra=1), of(1, method="m"), of(2, error="lost")], {"method": "m"}),
        ([of(0, gpus=gpus(1)), of(1)], {"gpus[]": {**GPU, "serial": 1}}),
        ([of(0, gpus=gpus(1)), of(1, gpus=[*gpus(1), "unreadable"])], {"gpus[]": {**GPU, "serial": 1}}),
        ([of(0, gpus=gpus(1)), of(1, gpus=[])], {"gpus[]": {**GPU, "serial": 1}}),
        ([of(0, method="m"), of(1, method=None)], {}),
        ([of(0, ready=True), of(1, ready=1)], {}),
    ],
)
def test_facts_of_many_measurements_are_stored_once(measurements: list[Measurement], shared: dict[str, object]) -> None:
    alone = of(0, check="host.versions", kernel="6.8")
    trial = samples.rejected().model_copy(update={"measurements": (*measurements, alone), "verdicts": ()})
    text = trial.as_stored().model_dump_json()
    assert Trial.model_validate_json(text) == trial
    assert {"gpu.inventory": shared} == trial.as_stored().shared_facts
    assert '"kernel":"6.8"' in text


def test_shared_facts_of_another_form_are_refused() -> None:
    trial = samples.rejected().model_copy(update={"measurements": (of(0, gpus=gpus(1)),)})
    with pytest.raises(ValidationError, match=r"shared fact gpus\[\] of gpu.inventory is 5, not an object"):
        Trial.model_validate({**trial.model_dump(), "shared_facts": {"gpu.inventory": {"gpus[]": 5}}})
