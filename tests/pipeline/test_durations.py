from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.config.schema import Cluster, Config
from seatrial.pipeline.durations import typical_duration, typical_seconds

WITHOUT_DURATION = {"train.command"}  # the user's own training


def config(nodes: int = 1, launcher: str = "auto") -> Config:
    return Config.model_validate({"name": "t", "launcher": launcher, "cluster": Cluster(nodes=nodes), "checks": {}})


def seconds(check: str, options: dict[str, JsonValue] | None = None, nodes: int = 1, gpus: int = 2) -> float:
    typical = typical_duration(catalog()[check], options or {}, config(nodes), gpus)
    assert typical is not None
    return typical


def test_every_check_declares_its_typical_duration() -> None:
    assert typical_seconds().checks.keys() == catalog().keys() - WITHOUT_DURATION
    assert typical_duration(catalog()["train.command"], {}, config(), 8) is None


def test_declared_options_exist() -> None:
    for name, duration in typical_seconds().checks.items():
        assert duration.options.keys() <= catalog()[name].options.model_fields.keys(), name


@pytest.mark.parametrize("check", ["transfer.host", "transfer.peers", "collectives.gpu_pairs"])
def test_checks_of_each_gpu_take_longer_with_more_gpus(check: str) -> None:
    assert seconds(check, gpus=8) > 2 * seconds(check, gpus=2)


def test_pairs_of_nodes_take_time_with_several_nodes_only() -> None:
    assert seconds("collectives.rails") == 0
    assert seconds("collectives.pairs", nodes=4) > 1


def test_seconds_in_options_count() -> None:
    assert seconds("device.burn", {"seconds": 600}) == pytest.approx(seconds("device.burn") + 590)
    assert seconds("train.ddp", {"min_seconds": 1200}) > 1200


def test_slurm_checks_take_time_under_slurm_only() -> None:
    check = catalog()["slurm.jobs"]
    assert typical_duration(check, {}, config(), 8) == 0
    assert (typical_duration(check, {}, config(launcher="slurm"), 8) or 0) > 60


def test_typical_durations_are_near_those_of_the_latest_record() -> None:
    """The sum for 2 H200, without the checks that became faster, or are newer, than that record (437 s)."""
    changed = {"filesystem.metadata", "train.checkpoint", "train.failure", "train.parity", "collectives.nccl_settings"}
    checks = typical_seconds().checks.keys() - changed
    acceptance = [name for name in checks if not name.startswith("train.") or name in ACCEPTANCE_TRAINING]
    assert sum(seconds(name) for name in acceptance) == pytest.approx(437 - 92 - 121 - 22 - 14, rel=0.2)


ACCEPTANCE_TRAINING = ("train.cnn", "train.ddp", "train.fsdp", "train.throughput")
