from __future__ import annotations

from seatrial.checks import catalog
from seatrial.discover.gpu_counters import GPU_COUNTERS
from seatrial.hardware.error_counters import counter_definitions, increase
from seatrial.model import Outcome


def test_every_counter_of_a_gpu_is_known() -> None:
    assert set(counter_definitions().gpu) == set(GPU_COUNTERS)


def test_what_is_judged_has_a_fix() -> None:
    judged = [
        one
        for kind in (counter_definitions().gpu, counter_definitions().port, counter_definitions().xid)
        for one in kind.values()
        if one.level != "told"
    ]
    assert all(one.fix for one in judged)


def test_the_burn_judges_as_all_other_checks_do() -> None:
    rules = {rule.metric: rule.outcome_if_violated for rule in catalog()["device.burn"].rules}
    own = {name: rules.get(f"new_errors.{name}") for name in GPU_COUNTERS if name != "pcie_replays"}
    levels = {
        name: Outcome(one.level) if one.level != "told" else None for name, one in counter_definitions().gpu.items()
    }
    assert own == {name: level for name, level in levels.items() if name != "pcie_replays"}
    (rate,) = [rule.expect for rule in catalog()["device.burn"].rules if rule.metric == "pcie_replay_rate"]
    assert rate is not None
    assert rate.value == counter_definitions().gpu["pcie_replays"].per_minute


def test_an_xid_that_nobody_listed_is_a_fault() -> None:
    assert counter_definitions().for_xid(79).level == "FAIL"
    assert {counter_definitions().for_xid(xid).level for xid in (13, 31, 43, 45)} == {"told"}


def test_checks_that_use_gpus_are_counted_but_for_the_burn_which_counts_itself() -> None:
    counted = {name for name, check in catalog().items() if check.reads_error_counters}
    assert {
        "device.gemm",
        "transfer.peers",
        "collectives.all_reduce",
        "collectives.gpu_pairs",
        "train.fsdp",
        "train.cnn",
    } <= counted
    assert not {"device.burn", "gpu.inventory", "filesystem.speed"} & counted


def test_a_counter_that_was_cleared_meanwhile_did_not_shrink() -> None:
    assert (increase(7, 9), increase(7, 7), increase(7, 0), increase(7, 2)) == (2, 0, 0, 2)
