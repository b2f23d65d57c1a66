"""Processes beside the ranks of a real torchrun, good ones and bad ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import child_ranks
from tests.bench import child_ranks_driver
from tests.paths import ROOT

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """What each rank heard from all children."""
    out = tmp_path_factory.mktemp("anew")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = ROOT
    ended = subprocess.run(
        [*torchrun, "-m", child_ranks_driver.__name__, str(out)],
        cwd=root,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def problems(records: Records, deed: str) -> list[str]:
    return [answer["problem"] for answer in records[0][deed]["answers"]]


def test_all_ranks_hear_the_same(records: Records) -> None:
    for deed in records[0]:
        assert records[0][deed]["answers"] == records[1][deed]["answers"]


def test_a_child_is_the_same_rank_in_another_environment(records: Records) -> None:
    told = [one["value"] for one in records[0]["tell"]["answers"]]
    assert [Path(one.pop("NCCL_DEBUG_FILE")).name for one in told] == ["nccl.%h.%p.log"] * 2  # handed on, as all is
    assert told == [  # and seatrial's own choice of how NCCL treats graphs is not
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CONTRAST": "this one"} for rank in range(2)
    ]


def test_one_that_fails_is_told_and_nobody_waits_for_the_other(records: Records) -> None:
    first, second = problems(records, "fail_on_one")
    assert "another rank" in first
    assert second == "exit code 1; its last words: out of order"
    assert records[0]["fail_on_one"]["seconds"] < 30


def test_groups_know_their_own_ranks_only(records: Records) -> None:
    values = [one["value"] for one in records[0]["in_groups"]["answers"]]
    assert [(value["RANK"], value["WORLD_SIZE"], value["LOCAL_RANK"]) for value in values] == [
        ("0", "1", "0"),
        ("0", "1", "1"),
    ]


def test_who_is_in_no_group_starts_nothing_and_hears_the_others(records: Records) -> None:
    none, one = records[0]["one_alone"]["answers"]
    assert (none["value"], none["problem"]) == (None, "")
    assert one["value"]["WORLD_SIZE"] == "1"


def test_a_group_that_fails_ends_no_other(records: Records) -> None:
    good, bad = records[0]["one_group_fails"]["answers"]
    assert (good["problem"], good["code"]) == ("", 0)
    assert (bad["code"], bad["place"]) == (1, 1)


def test_who_failed_first_is_known(records: Records) -> None:
    first, second = records[0]["fail_on_one"]["answers"]
    assert (first["place"], second["place"], second["code"]) == (2, 1, 1)


def test_one_that_hangs_is_ended_in_time(records: Records) -> None:
    assert any(f"did not end within {child_ranks_driver.LIMIT_S:g} s" in one for one in problems(records, "hang"))
    assert child_ranks_driver.LIMIT_S <= records[0]["hang"]["seconds"] < 30


def test_one_that_does_not_answer_is_told(records: Records) -> None:
    assert problems(records, "say_nothing") == ["answered nothing"] * 2
    assert problems(records, "babble") == ["answered 'no JSON at all'"] * 2


def test_a_contrast_opens_a_group_of_its_own_and_measures(records: Records) -> None:
    for answer in records[0]["contrast"]["answers"]:
        assert answer["problem"] == ""
        (busbw,) = answer["value"]["busbw"]["all"]
        assert busbw
        assert all(rate > 0 for rate in busbw)
        assert (answer["value"]["wrong"], answer["value"]["log_bytes"], answer["value"]["not_allocated"]) == (0, 0, [])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "failed"),
        ("out of order\n", "failed; its last words: out of order"),
        ("a warning\nNotFinite: step 2\n", "failed; its last words: NotFinite: step 2\nbefore them: a warning"),
        ("old\nNo memory\n  1. less\n", "failed; its last words: No memory\n  1. less\nbefore them: old"),
    ],
)
def test_what_was_said_last_comes_first(said: str, told: str, tmp_path: Path) -> None:
    errors = tmp_path / "err"
    errors.write_text(said)
    assert child_ranks._with_last_words("failed", errors) == told


def test_each_operation_runs_once_and_its_exact_bytes_are_told(records: Records) -> None:
    """Gloo writes no log, so that nothing is told of any."""
    assert records[0]["choices"]["answers"][0]["problem"] == ""
    told = records[0]["choices"]["answers"][0]["value"]["told"]
    blocks = [992, 0, 0]  # two of whole lines of 16 B
    assert told == [[1000, 0, 0], blocks, blocks, blocks, [1000, 0, 0], [1000, 0, 0], [1000, 0, 0]]
