from __future__ import annotations

from seatrial.checks import catalog
from seatrial.discover.gpu_counters import GPU_COUNTERS
from seatrial.hardware.error_counters import counter_definitions, increase
from seatrial.model import Outcome


def test_each_gpu_counter_has_a_definition() -> None:
    assert set(counter_definitions().gpu) == set(GPU_COUNTERS)


def test_each_counter_with_a_verdict_has_a_fix() -> None:
    definitions = counter_definitions()
    groups = (definitions.gpu, definitions.port, definitions.xid)
    assert all(counter.fix for group in groups for counter in group.values() if counter.level != "info")


def test_device_burn_has_the_same_levels_as_the_definitions() -> None:
    rules = {rule.metric: limit.outcome for rule in catalog()["device.burn"].rules for limit in rule.limits}
    definitions = counter_definitions().gpu
    levels = {name: Outcome(counter.level) for name, counter in definitions.items() if counter.level != "info"}
    for name in set(GPU_COUNTERS) - {"pcie_replays"}:
        assert rules.get(f"new_errors.{name}") == levels.get(name)
    (rate,) = [rule.threshold for rule in catalog()["device.burn"].rules if rule.metric == "pcie_replay_rate"]
    assert rate is not None
    assert rate.value == definitions["pcie_replays"].per_minute


def test_an_unlisted_xid_fails() -> None:
    assert counter_definitions().for_xid(79).level == "FAIL"
    assert {counter_definitions().for_xid(xid).level for xid in (13, 31, 43, 45)} == {"info"}


def test_error_counters_are_read_around_gpu_checks_except_device_burn() -> None:
    names = {name for name, check in catalog().items() if check.reads_error_counters}
    assert {
        "device.gemm",
        "transfer.peers",
        "collectives.all_reduce",
        "collectives.gpu_pairs",
        "train.fsdp",
        "train.cnn",
    } <= names
    assert not {"device.burn", "gpu.inventory", "filesystem.speed"} & names


def test_the_increase_after_a_reset_is_the_new_value() -> None:
    assert (increase(7, 9), increase(7, 7), increase(7, 0), increase(7, 2)) == (2, 0, 0, 2)
