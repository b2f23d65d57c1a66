"""Child processes beside real ranks, successful and failing.

Here the ranks are forked. Beside ranks of torchrun they run in tests/pipeline/test_training_trial.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import child_ranks
from tests.bench import child_ranks_driver
from tests.train import ranks

pytestmark = pytest.mark.training

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the driver, which has ended."""
    out = tmp_path_factory.mktemp("children")
    ranks.require_success(ranks.run(2, child_ranks_driver.main, out, seconds=240))
    return out


@pytest.fixture(scope="module")
def records(out: Path) -> Records:
    """The results of all tasks, as each rank received them."""
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def errors(records: Records, task: str) -> list[str]:
    return [result["error"] for result in records[0][task]["results"]]


def test_all_ranks_get_the_same_results(records: Records) -> None:
    for task in records[0]:
        assert records[0][task]["results"] == records[1][task]["results"]


def test_child_has_the_same_rank_and_its_own_environment(records: Records) -> None:
    values = [result["value"] for result in records[0]["succeed"]["results"]]
    # Variables are inherited, except for seatrial's NCCL_GRAPH_MIXING_SUPPORT
    assert [Path(value.pop("NCCL_DEBUG_FILE")).name for value in values] == ["nccl.%h.%p.log"] * 2
    assert values == [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NCCL_EXTRA": "of the child"}
        for rank in range(2)
    ]


def test_waiting_child_runs_the_first_training_with_the_environment_of_its_task(out: Path) -> None:
    for rank in range(2):
        record = json.loads((out / f"spare{rank}.json").read_text())
        in_spare, in_new = (record[name][rank]["value"] for name in ("first", "second"))
        assert in_spare.pop("pid") == record["spare"] != in_new.pop("pid")
        assert (in_spare.pop("torch"), in_new.pop("torch")) == (True, False)
        assert Path(in_spare["NCCL_DEBUG_FILE"]).name == "nccl.%h.%p.log"
        assert in_spare["NCCL_EXTRA_2"] == "set after the start of the child"
        assert "NCCL_GRAPH_MIXING_SUPPORT" not in in_spare
        assert in_spare == in_new


def test_failed_child_is_reported_and_ends_the_other(records: Records) -> None:
    first, second = errors(records, "fail_on_rank1")
    assert "another rank" in first
    assert second.startswith("exit code 1")
    assert second.endswith("out of order")
    assert records[0]["fail_on_rank1"]["seconds"] < 60, "its limit"


def test_children_that_are_started_together_run_in_turn(out: Path) -> None:
    for rank in range(2):
        together = json.loads((out / f"together{rank}.json").read_text())
        assert together["ready"] < min(together["first"])
        opened = [result["value"]["opened"] for result in together["second"]]
        assert max(together["first"]) < together["between"] < min(opened)
        assert together["unused_ended"] is not None


def test_groups_have_their_own_ranks(records: Records) -> None:
    values = [result["value"] for result in records[0]["two_groups"]["results"]]
    assert [(value["RANK"], value["WORLD_SIZE"], value["LOCAL_RANK"]) for value in values] == [
        ("0", "1", "0"),
        ("0", "1", "1"),
    ]


def test_rank_outside_all_groups_starts_no_child(records: Records) -> None:
    outside, inside = records[0]["one_group"]["results"]
    assert (outside["value"], outside["error"]) == (None, "")
    assert inside["value"]["WORLD_SIZE"] == "1"


def test_failure_in_one_group_does_not_end_another(records: Records) -> None:
    succeeded, failed = records[0]["one_group_fails"]["results"]
    assert (succeeded["error"], succeeded["exit_code"]) == ("", 0)
    assert (failed["exit_code"], failed["failure_order"]) == (1, 1)


def test_failure_order_shows_the_first_failure(records: Records) -> None:
    first, second = records[0]["fail_on_rank1"]["results"]
    assert (first["failure_order"], second["failure_order"], second["exit_code"]) == (2, 1, 1)


def test_hanging_child_is_ended_after_the_limit(records: Records) -> None:
    codes = {result["exit_code"] for result in records[0]["hang"]["results"]}
    assert child_ranks.EXIT_TIMEOUT in codes
    assert any(f"{child_ranks_driver.LIMIT_S:g} s" in error for error in errors(records, "hang"))
    assert records[0]["hang"]["seconds"] >= child_ranks_driver.LIMIT_S


def test_child_without_a_json_result_is_an_error(records: Records) -> None:
    assert all("JSON" in error for error in errors(records, "print_nothing"))
    assert all("'no JSON at all'" in error for error in errors(records, "print_text"))


def test_nccl_settings_are_measured_in_a_group_of_children(records: Records) -> None:
    for result in records[0]["nccl_settings"]["results"]:
        assert result["error"] == ""
        value = result["value"]
        (busbw,) = value["busbw"]["all_ranks"]
        assert busbw
        assert all(rate > 0 for rate in busbw)
        assert (value["wrong_elements"], value["log_bytes"], value["not_allocated"]) == (0, 0, [])


def test_each_operation_runs_once_with_its_exact_size(out: Path) -> None:
    """Gloo writes no log, so the ranges are empty."""
    (result, _) = json.loads((out / "together0.json").read_text())["second"]
    assert result["error"] == ""
    blocks = [992, 0, 0]  # two blocks, multiples of 16 B
    expected = [[1000, 0, 0], blocks, blocks, blocks, [1000, 0, 0], [1000, 0, 0], [1000, 0, 0]]
    assert result["value"]["log_ranges"] == expected
