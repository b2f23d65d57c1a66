"""The schema of a trial: its defaults are safe, and slips of the pen are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.config.schema import MAX_NAME_BYTES, Config


def config(**fields: Any) -> Config:
    return Config.model_validate({"name": "t", "checks": {}, **fields})


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"name": " "}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "é" * 101}, "name"),  # bytes count, not letters
        ({"cluster": {"nodes": 0}}, "cluster.nodes"),
        ({"cluster": {"gpus_per_node": -1}}, "cluster.gpus_per_node"),
        ({"limits": {"heartbeat_timeout_s": 0}}, "limits.heartbeat_timeout_s"),
        ({"limits": {"startup_s": 1e300}}, "limits.startup_s"),
        ({"telemetry": {"hz": 11}}, "telemetry.hz"),
        ({"slurm": {"cpus_per_task": 0}}, "slurm.cpus_per_task"),
        ({"container": {"runtime": "docker"}}, "container.runtime"),
        ({"launcher": "ssh"}, "launcher"),
        ({"env": {"1A": "x"}}, "env.1A"),
        ({"env": {"A B": "x"}}, "env.A B"),
        ({"cluster": {"node": 2}}, "cluster.node"),
        ({"checks": {"host.inventory": {"override": True}}}, "checks.host.inventory"),
    ],
)
def test_a_wrong_value_is_refused_at_its_place(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**fields)
    (error,) = refused.value.errors()
    assert ".".join(str(part) for part in error["loc"] if part != "[key]") == where


def test_the_longest_name_leaves_room_for_the_time_in_a_file_name() -> None:
    assert len(config(name="x" * MAX_NAME_BYTES).name) + len("20261122-195344-") <= 255


def test_what_is_not_written_down_is_the_safe_choice() -> None:
    plain = config(checks={"host.inventory": {}})
    assert plain.cluster.gpus_per_node is None, "no promise is made up"
    assert plain.retry
    assert plain.slurm.exclusive
    settings = plain.checks["host.inventory"]
    assert settings.required
    assert not settings.may_skip
    assert not settings.override
