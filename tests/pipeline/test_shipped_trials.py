"""The shipped trials have the checks, durations and thresholds that their comments state."""

from __future__ import annotations

import pytest

from seatrial.checks import catalog
from seatrial.config.layers import resolve, trial_names
from seatrial.config.schema import CheckSettings
from seatrial.model import Job
from seatrial.pipeline.plan import NodeGpus, make_plan

SCHEMAS = catalog()


@pytest.fixture
def burn_in() -> dict[str, CheckSettings]:
    return resolve("burn-in", environ={}, schemas=SCHEMAS).config.checks


def test_burn_in_loads_the_gpus_for_half_an_hour_within_its_limits() -> None:
    (job,) = (job for job in jobs("burn-in", 1, 8, "local") if "device.soak" in job.checks)
    assert job.options["device.soak"]["budget_s"] == 1800
    assert job.limits["device.soak"] >= 1800 + 600  # set-up and a slow start


def test_only_acceptance_measures_the_speed_of_hosts() -> None:
    checks = {name: set(resolve(name, environ={}, schemas=SCHEMAS).config.checks) for name in ("acceptance", "quick")}
    assert {"host.settings", "host.versions"} <= checks["quick"]
    assert {"host.settings", "host.versions", "host.speed", "fabric.nvlink_domain"} <= checks["acceptance"]
    assert "host.speed" not in checks["quick"]


def test_trials_that_measure_gpus_observe_the_process_that_measures() -> None:
    names = {
        name for name in trial_names() if "host.process" in resolve(name, environ={}, schemas=SCHEMAS).config.checks
    }
    assert names == set(trial_names()) - {"hook"}


def test_burn_in_has_the_hardware_thresholds_of_acceptance(burn_in: dict[str, CheckSettings]) -> None:
    acceptance = resolve("acceptance", environ={}, schemas=SCHEMAS).config.checks
    for name in ("collectives.all_reduce", "train.ddp"):
        assert burn_in[name].expect == acceptance[name].expect


def jobs(trial: str, nodes: int, gpus: int, launcher: str) -> tuple[Job, ...]:
    flags = {"launcher": launcher, "cluster.nodes": nodes, "cluster.gpus_per_node": gpus}
    overrides = [(name, name, value) for name, value in flags.items()]
    config = resolve(trial, overrides=overrides, environ={}, schemas=SCHEMAS).config
    return make_plan(config, catalog(), NodeGpus(gpus)).jobs


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_quick_is_expected_to_take_less_than_a_minute(gpus: int) -> None:
    assert sum(job.expected_s for job in jobs("quick", 1, gpus, "local")) < 60


def test_acceptance_of_four_nodes_asks_slurm_for_half_an_hour_per_job() -> None:
    """And not for the sum of the time limits, which are meant for hangs: many partitions refuse five hours."""
    of_ranks = next(job for job in jobs("acceptance", 4, 8, "slurm") if job.name == "ranks")
    assert of_ranks.limit_s > 4 * 3600
    assert all(job.requested_s < 30 * 60 for job in jobs("acceptance", 4, 8, "slurm"))
