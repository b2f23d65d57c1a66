"""The shipped trials have the checks, durations and thresholds that their comments state."""

from __future__ import annotations

import pytest

from seatrial.checks import catalog
from seatrial.checks.fabric._sizes import CollectiveOptions, default_sizes
from seatrial.checks.training.ddp import DdpOptions
from seatrial.config.layers import CheckSchema, resolve
from seatrial.config.schema import CheckSettings

SCHEMAS = {name: CheckSchema(check.options, check.metrics) for name, check in catalog().items()}


@pytest.fixture
def burn_in() -> dict[str, CheckSettings]:
    return resolve("burn-in", environ={}, schemas=SCHEMAS).config.checks


def test_burn_in_duration_is_within_its_limits(burn_in: dict[str, CheckSettings]) -> None:
    reduce, ddp = burn_in["collectives.all_reduce"], burn_in["train.ddp"]
    seconds_per_size = CollectiveOptions.model_validate(reduce.options).min_seconds_per_size
    training = DdpOptions.model_validate(ddp.options).min_seconds
    assert seconds_per_size >= 60
    assert training >= 1200
    for seconds, limit in (
        (seconds_per_size * len(default_sizes("all_reduce").gpu), reduce.limit_s),
        (training, ddp.limit_s),
    ):
        assert 2 * seconds < (limit or 0)  # the other half of the limit is for set-up and a slow start


def test_only_acceptance_measures_the_speed_of_hosts() -> None:
    checks = {name: set(resolve(name, environ={}, schemas=SCHEMAS).config.checks) for name in ("acceptance", "quick")}
    assert {"host.settings", "host.versions"} <= checks["quick"]
    assert {"host.settings", "host.versions", "host.speed", "fabric.nvlink_domain"} <= checks["acceptance"]
    assert "host.speed" not in checks["quick"]


def test_burn_in_has_the_hardware_thresholds_of_acceptance(burn_in: dict[str, CheckSettings]) -> None:
    acceptance = resolve("acceptance", environ={}, schemas=SCHEMAS).config.checks
    for name in ("collectives.all_reduce", "train.ddp"):
        assert burn_in[name].expect == acceptance[name].expect
