"""At most a share of the nodes is taken out of service within a time, whatever happens to the record."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from seatrial.operate import drain_limit
from seatrial.operate.drain_limit import DrainAnswer, DrainLimit

LIMIT = DrainLimit(share=0.25, window_s=3600, nodes=8)  # two nodes
NOW = 1_800_000_000.0


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record whose filesystem does not limit the simulated clocks."""
    monkeypatch.setattr(drain_limit, "_filesystem_time", lambda folder: float("inf"))
    drain_limit.prepare(tmp_path)
    return tmp_path


def ask(state: Path, node: str, now: float = NOW, limit: DrainLimit = LIMIT, dry_run: bool = False) -> DrainAnswer:
    return drain_limit.request_drain(state, node, "run1", "GPU 3 is missing", limit, now, dry_run=dry_run)


def entries(state: Path) -> list[str]:
    return sorted(os.listdir(state / "drains"))


def test_a_third_node_is_refused_and_the_answer_names_the_two_granted(state: Path) -> None:
    assert ask(state, "n1").granted
    assert ask(state, "n2").granted
    refused = ask(state, "n3")
    assert not refused.granted
    assert [drain.node for drain in refused.drains] == ["n1", "n2"]
    assert "n1, n2" in refused.reason
    assert entries(state) == ["000001.json", "000002.json"]


def test_a_node_counts_once_and_is_granted_again_when_the_share_is_used_up(state: Path) -> None:
    for node in ("n1", "n1", "n2", "n1"):
        assert ask(state, node).granted
    assert len(entries(state)) == 2


def test_an_entry_ends_with_its_window(state: Path) -> None:
    assert ask(state, "n1").granted
    assert ask(state, "n2", NOW + 1800).granted
    assert not ask(state, "n3", NOW + 3599).granted
    assert ask(state, "n3", NOW + 3600).granted
    assert not ask(state, "n4", NOW + 3601).granted


def test_a_clock_that_is_ahead_ends_no_window_early(state: Path) -> None:
    assert ask(state, "n1", NOW + 86400).granted
    assert ask(state, "n2", NOW + 86400).granted
    refused = ask(state, "n3", NOW)
    assert not refused.granted
    assert "entries of n1, n2 are from the future" in refused.reason


@pytest.mark.parametrize("ahead_s", [0, 7200])
def test_a_node_whose_own_clock_is_ahead_uses_that_of_the_filesystem(tmp_path: Path, ahead_s: float) -> None:
    drain_limit.prepare(tmp_path)
    assert ask(tmp_path, "n1", time.time()).granted
    assert ask(tmp_path, "n2", time.time() + ahead_s).granted
    assert not ask(tmp_path, "n3", time.time() + 2 * ahead_s).granted
    assert entries(tmp_path) == ["000001.json", "000002.json"]


def test_a_clock_that_is_behind_ends_no_window_early(state: Path) -> None:
    assert ask(state, "n1").granted
    assert ask(state, "n2", NOW - 86400).granted  # its entry is younger than the one of n1
    assert not ask(state, "n3").granted
    assert ask(state, "n3", NOW + 3600).granted


def test_the_time_of_the_file_counts_if_it_is_later_than_that_of_the_entry(state: Path) -> None:
    for node in ("n1", "n2"):
        assert ask(state, node, NOW - 86400).granted
    for number in (1, 2):
        os.utime(state / "drains" / f"00000{number}.json", (NOW, NOW))
    assert not ask(state, "n3").granted


@pytest.mark.parametrize(("share", "nodes", "expected"), [(0.1, 4, 1), (0, 100, 1), (0.29, 100, 29), (1, 3, 3)])
def test_one_node_is_always_allowed_and_shares_round_down(share: float, nodes: int, expected: int) -> None:
    assert DrainLimit(share=share, window_s=3600, nodes=nodes).max_nodes == expected


def test_dry_run_records_nothing(state: Path) -> None:
    assert ask(state, "n1", dry_run=True).granted
    assert entries(state) == []


def test_old_entries_are_removed_but_for_the_last_number(state: Path) -> None:
    for node in ("n1", "n2"):
        assert ask(state, node).granted
    assert ask(state, "n3", NOW + 25 * 3600).granted
    assert entries(state) == ["000002.json", "000003.json"]


def test_without_a_record_it_is_refused_and_none_is_made(tmp_path: Path) -> None:
    refused = ask(tmp_path, "n1")
    assert not refused.granted
    assert list(tmp_path.iterdir()) == []
    subprocess.run(shlex.split(refused.reason.rpartition(": ")[2]), check=True)  # the command that creates it
    assert ask(tmp_path, "n1").granted


# times that no comparison counts, or that localtime() refuses
TIMES = [
    f'{{"node":"n2","run_id":"r","reason":"x","time":{time}}}' for time in ("NaN", '"NaN"', "1e400", "1e300", "-1")
]


@pytest.mark.parametrize("content", ["", "{", '{"node": "n1"}', "[]", "\x00" * 70_000, *TIMES])
def test_a_damaged_entry_refuses_and_is_named(state: Path, content: str) -> None:
    (state / "drains" / "000001.json").write_text(content)
    refused = ask(state, "n1")
    assert not refused.granted
    assert "000001.json" in refused.reason


def test_an_entry_that_is_a_pipe_does_not_hang(state: Path) -> None:
    os.mkfifo(state / "drains" / "000001.json")
    assert not ask(state, "n1").granted


def test_a_disk_that_is_full_refuses_and_leaves_no_file(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    refused = ask(state, "n1")
    assert not refused.granted
    assert os.strerror(28) in refused.reason
    assert entries(state) == []


def test_a_process_that_was_killed_while_writing_leaves_nothing_that_counts(state: Path) -> None:
    (state / "drains" / ".incomplete-abc").write_text('{"node": "n9"')
    assert ask(state, "n1").granted
    assert ask(state, "n2").granted


def test_an_entry_has_node_and_reason(state: Path) -> None:
    ask(state, "n1")
    entry = json.loads((state / "drains" / "000001.json").read_text())
    assert entry == {"node": "n1", "run_id": "run1", "reason": "GPU 3 is missing", "time": NOW}


def test_a_stale_list_of_the_folder_grants_no_more(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client can list a folder as it was seconds ago."""
    for node in ("n1", "n2"):
        ask(state, node)
    monkeypatch.setattr(os, "listdir", lambda _folder: [])
    assert not ask(state, "n3").granted


def _granted(state: Path, node: str) -> bool:
    return ask(state, node, limit=DrainLimit(share=0.25, window_s=3600, nodes=20)).granted


def test_of_twenty_nodes_at_once_exactly_five_are_granted(state: Path) -> None:
    with multiprocessing.get_context("fork").Pool(10) as pool:
        granted = pool.map(partial(_granted, state), [f"n{index}" for index in range(20)], chunksize=1)
    assert sum(granted) == 5
    assert entries(state) == [f"{number:06d}.json" for number in range(1, 6)]
