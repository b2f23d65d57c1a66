from __future__ import annotations

import json

from seatrial.model.job_status import JobStatus, TrainingSpeed


def test_a_loss_that_is_not_finite_is_valid_json() -> None:
    speed = TrainingSpeed(folder="runs/a-1", step=7, loss=float("nan"), steps=6, steps_per_second=2.0, age_s=0.5)
    status = JobStatus(target="1", title="job 1", state="RUNNING", training=speed)
    document = json.loads(status.model_dump_json(), parse_constant=lambda name: f"not JSON: {name}")
    assert document["training"]["loss"] == "NaN"
