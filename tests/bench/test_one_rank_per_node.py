from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from seatrial.bench import one_rank_per_node
from seatrial.bench.group import close_group, open_group
from seatrial.bench.one_rank_per_node import (
    ParticipantError,
    Participants,
    group_by_text,
    select_participants,
)


@pytest.fixture
def single_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, text in {**values, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, text)
    open_group("cpu", timeout_s=30)
    yield
    close_group()


def fake_nodes(monkeypatch: pytest.MonkeyPatch, names: list[str], rank: int) -> None:
    """Let gather return the node names of several processes."""
    monkeypatch.setattr(one_rank_per_node, "gather", lambda value: names)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)


@pytest.mark.parametrize(
    ("rank", "min_count", "expected"),
    [
        (0, 1, Participants(("a", "b"), 0, True)),
        (1, 1, Participants(("a", "b"), -1, True)),
        (2, 1, Participants(("a", "b"), 1, True)),
        (3, 2, Participants(("a", "b"), -1, True)),
    ],
)
def test_lowest_rank_of_each_node_participates(
    monkeypatch: pytest.MonkeyPatch, rank: int, min_count: int, expected: Participants
) -> None:
    fake_nodes(monkeypatch, ["a", "a", "b", "b"], rank)
    assert select_participants(["a", "a", "b", "b"][rank], min_count) == expected


def test_ranks_may_alternate_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nodes(monkeypatch, ["a", "b", "a", "b"], 1)
    assert select_participants("b") == Participants(("a", "b"), 1, True)


@pytest.mark.parametrize(("rank", "index"), [(0, 0), (1, 1), (2, -1)])
def test_first_ranks_of_one_node_participate_if_one_is_too_few(
    monkeypatch: pytest.MonkeyPatch, rank: int, index: int
) -> None:
    fake_nodes(monkeypatch, ["a", "a", "a"], rank)
    assert select_participants("a", min_count=2) == Participants(("a/rank0", "a/rank1"), index, False)
    assert select_participants("a").names == ("a",)


def test_first_participant_only() -> None:
    assert Participants(("a", "b"), 0, True).first_only == Participants(("a",), 0, True)
    assert Participants(("a", "b"), 1, True).first_only == Participants(("a",), -1, True)


@pytest.mark.usefixtures("single_process_group")
def test_results_may_be_none() -> None:
    assert select_participants("a").run_on_all(lambda: None) == [None]
    assert select_participants("a").run_on_all(lambda: 7) == [7]


@pytest.mark.usefixtures("single_process_group")
def test_other_ranks_do_not_run_the_work() -> None:
    assert Participants((), -1, False).run_on_all(lambda: pytest.fail("worked")) == []


@pytest.mark.usefixtures("single_process_group")
def test_os_error_is_reported_with_the_participants_name() -> None:
    def work() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/mnt/x")

    with pytest.raises(ParticipantError, match=r"^/mnt/x: Permission denied \(a\)$") as raised:
        select_participants("a").run_on_all(work)
    assert not raised.value.timed_out


@pytest.mark.usefixtures("single_process_group")
def test_hanging_work_times_out() -> None:
    started = time.monotonic()
    with pytest.raises(ParticipantError, match=r"did not end within 0\.1 s \(a\)") as raised:
        select_participants("a").run_on_all(lambda: time.sleep(600), timeout_s=0.1)
    assert raised.value.timed_out
    assert time.monotonic() - started < 60


@pytest.mark.usefixtures("single_process_group")
def test_timeout_error_of_the_work_is_not_a_hang() -> None:
    def work() -> None:
        raise TimeoutError("lock is busy")

    with pytest.raises(ParticipantError, match="lock is busy") as raised:
        select_participants("a").run_on_all(work)
    assert not raised.value.timed_out


@pytest.mark.usefixtures("single_process_group")
def test_programming_errors_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        select_participants("a").run_on_all(lambda: 1 / 0)


def test_names_are_grouped_by_reason() -> None:
    assert group_by_text({"a": "full", "b": "gone", "c": "full"}) == "full (a, c); gone (b)"
