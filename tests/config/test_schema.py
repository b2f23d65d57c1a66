"""The schema of a trial: safe defaults, and errors that name the key."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.config.schema import MAX_NAME_BYTES, Config


def config(**fields: Any) -> Config:
    return Config.model_validate({"name": "t", "checks": {}, **fields})


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"name": " "}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "é" * 101}, "name"),  # 202 bytes
        ({"cluster": {"nodes": 0}}, "cluster.nodes"),
        ({"cluster": {"gpus_per_node": -1}}, "cluster.gpus_per_node"),
        ({"launcher": "slurm", "cluster": {"nodes": 2, "min_nodes": 0}}, "cluster.min_nodes"),
        ({"launcher": "slurm", "cluster": {"nodes": 2, "min_nodes": 3}}, "cluster"),
        ({"launcher": "local", "cluster": {"min_nodes": 1}}, ""),
        ({"launcher": "torchrun", "cluster": {"nodes": 2, "min_nodes": 1}}, ""),
        ({"limits": {"heartbeat_timeout_s": 0}}, "limits.heartbeat_timeout_s"),
        ({"limits": {"startup_s": 1e300}}, "limits.startup_s"),
        ({"cluster": {"fabric": {"kind": "ib"}}}, "cluster.fabric.kind"),
        ({"cluster": {"fabric": {"rate": "100 Gb/s"}}}, "cluster.fabric.kind"),
        ({"cluster": {"fabric": {"kind": "tcp", "rate": "100 GB/s"}}}, "cluster.fabric.rate"),
        ({"cluster": {"fabric": {"kind": "tcp", "rate": "0 Gb/s"}}}, "cluster.fabric.rate"),
        ({"cluster": {"fabric": {"kind": "tcp", "rate": 100}}}, "cluster.fabric.rate"),
        ({"cluster": {"fabric": {"kind": "tcp", "speed": 1}}}, "cluster.fabric.speed"),
        ({"telemetry": {"hz": 11}}, "telemetry.hz"),
        ({"slurm": {"cpus_per_task": 0}}, "slurm.cpus_per_task"),
        ({"container": {"runtime": "lxc"}}, "container.runtime"),
        ({"launcher": "ssh"}, "launcher"),
        ({"env": {"1A": "x"}}, "env.1A"),
        ({"env": {"A B": "x"}}, "env.A B"),
        ({"cluster": {"node": 2}}, "cluster.node"),
        ({"checks": {"host.inventory": {"override": True}}}, "checks.host.inventory"),
    ],
)
def test_error_names_the_key_of_a_wrong_value(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**fields)
    (error,) = caught.value.errors()
    assert ".".join(str(part) for part in error["loc"] if part != "[key]") == key


def test_longest_name_with_time_stamp_is_a_valid_file_name() -> None:
    assert len(config(name="x" * MAX_NAME_BYTES).name) + len("20261122-195344-") <= 255


def test_defaults_are_the_safe_choices() -> None:
    defaults = config(checks={"host.inventory": {}})
    assert defaults.cluster.gpus_per_node is None, "no expected number is assumed"
    assert defaults.retry
    assert defaults.slurm.exclusive
    settings = defaults.checks["host.inventory"]
    assert settings.required
    assert not settings.may_skip
    assert not settings.override


def test_rate_of_a_tcp_fabric_survives_the_record() -> None:
    asked = config(cluster={"fabric": {"kind": "tcp", "rate": "2.5 Gb/s"}})
    assert asked.cluster.fabric
    assert asked.cluster.fabric.rate == 2.5
    assert Config.model_validate(asked.model_dump(mode="json")) == asked
