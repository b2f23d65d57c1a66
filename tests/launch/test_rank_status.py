"""The state of a rank from its journal and heartbeat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.launch.rank_status import Rank, read_ranks
from seatrial.util.journal import record_line
from seatrial.worker import TERMINATING
from tests.launch.scripted import CLUSTER_CHECK, GPU_CHECK, job

MEASURED = {"measurement": {"check": GPU_CHECK, "subject": "n0/gpu1", "rank": 1}}


class Written:
    """Rank 1 of a job of two checks, and the files that it writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank: Rank = read_ranks(folder, job(GPU_CHECK, CLUSTER_CHECK))[1]

    def raw(self, line: bytes) -> None:
        with (self.folder / "rank1.jsonl").open("ab") as journal:
            journal.write(line + b"\n")

    def write(self, **record: Any) -> None:
        self.raw(record_line(record).strip().encode())

    def start(self, check: str) -> None:
        self.write(start=check, subject="n0/gpu1", time=1.0)

    def measured(self, check: str, rank: int = 1, error: str | None = None) -> None:
        self.write(measurement={"check": check, "subject": "n0/gpu1", "rank": rank, "error": error})

    def heartbeat(self, status: str, progress: str = "") -> None:
        heartbeat = {"pid": 4711, "node": "n0", "status": status, "progress": progress, "time": 1.0}
        (self.folder / "rank1.heartbeat.json").write_text(json.dumps(heartbeat))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def test_one_rank_per_process_of_the_job(tmp_path: Path) -> None:
    two = job(GPU_CHECK).model_copy(update={"nodes": 2, "ranks_per_node": 3})
    assert [rank.number for rank in read_ranks(tmp_path, two)] == [0, 1, 2, 3, 4, 5]


def test_rank_without_output_has_no_last_seen(written: Written) -> None:
    rank = written.rank
    assert rank.read() == []
    assert (rank.last_seen, rank.current_check, rank.done, rank.damage) == (None, None, False, "")
    assert (rank.heartbeat_expected, rank.failed, rank.exit_expected) == (True, False, False)
    assert rank.name == "rank 1"


def test_rank_state_from_start_to_done(written: Written) -> None:
    rank = written.rank
    written.start(GPU_CHECK)
    assert rank.read() == []
    assert (rank.current_check, rank.subject, rank.last_seen is not None) == (GPU_CHECK, "n0/gpu1", True)
    written.measured(GPU_CHECK)
    assert [item.check for item in rank.read()] == [GPU_CHECK]
    assert rank.current_check is None
    assert rank.read() == [], "a measurement is returned once"
    written.start(CLUSTER_CHECK)
    written.measured(CLUSTER_CHECK)
    written.write(done=2.0)
    assert [item.check for item in rank.read()] == [CLUSTER_CHECK]
    assert (rank.done, rank.heartbeat_expected, rank.damage) == (True, False, "")


def test_name_has_the_known_details(written: Written) -> None:
    written.heartbeat("starting")
    written.rank.read()
    assert written.rank.name == "rank 1 (n0, pid 4711)"
    written.start(GPU_CHECK)
    written.rank.read()
    assert written.rank.name == "rank 1 (n0/gpu1, pid 4711)"


def test_rank_is_exiting_after_an_error(written: Written) -> None:
    written.start(GPU_CHECK)
    written.measured(GPU_CHECK, error="CUDA error")
    written.rank.read()
    assert (written.rank.failed, written.rank.exit_expected) == (True, True)
    written.start(CLUSTER_CHECK)
    written.rank.read()
    assert (written.rank.failed, written.rank.exit_expected) == (True, False), "it started another check"


def test_termination_is_read_from_the_heartbeat(written: Written) -> None:
    written.start(GPU_CHECK)
    written.heartbeat(TERMINATING)
    written.rank.read()
    assert (written.rank.is_terminating, written.rank.heartbeat_expected) == (True, False)


def test_last_status_has_progress_only_of_the_same_check(written: Written) -> None:
    written.start(GPU_CHECK)
    written.heartbeat(GPU_CHECK, "step 3 of 4")
    written.rank.read()
    assert written.rank.last_status == f"{GPU_CHECK}: step 3 of 4"
    written.measured(GPU_CHECK)
    written.start(CLUSTER_CHECK)
    written.rank.read()
    assert written.rank.last_status == CLUSTER_CHECK


@pytest.mark.parametrize(
    "record",
    [
        {"start": "a.check.of.another.job", "subject": "n0/gpu1"},
        {"start": "train.cnn"},
        {"done": "yes"},
        {"word": 1},
        {"measurement": {"check": "train.cnn"}},
        {"measurement": {"check": "nodes.reachable", "subject": "n0", "rank": 1}},  # was not started
        {"measurement": {"check": "train.cnn", "subject": "n0", "rank": 0}},  # of another rank
        b"no JSON",
        json.dumps(MEASURED).encode(),  # without its digest
        record_line(MEASURED).replace("gpu1", "gpu7").encode(),
    ],
)
def test_invalid_record_is_damage(record: bytes | dict[str, Any], written: Written) -> None:
    written.start(GPU_CHECK)
    written.raw(record if isinstance(record, bytes) else record_line(record).strip().encode())
    assert written.rank.read() == []
    assert written.rank.damage
    assert (written.rank.current_check, written.rank.done) == (GPU_CHECK, False)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"pid": "x"}'])
def test_unreadable_heartbeat_is_ignored(text: str, written: Written) -> None:
    written.heartbeat(GPU_CHECK)
    written.rank.read()
    before = written.rank.heartbeat
    (written.folder / "rank1.heartbeat.json").write_text(text)
    written.rank.read()
    assert before is not None
    assert (written.rank.heartbeat, written.rank.damage) == (before, "")


def test_unchanged_heartbeat_does_not_update_last_seen(written: Written) -> None:
    written.heartbeat(GPU_CHECK)
    written.rank.read()
    written.rank.last_seen = -1.0
    written.rank.read()
    assert written.rank.last_seen == -1.0
    written.heartbeat(GPU_CHECK, "step 1")
    written.rank.read()
    assert written.rank.last_seen > 0
