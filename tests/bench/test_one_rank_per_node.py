from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from seatrial.bench import one_rank_per_node
from seatrial.bench.group import close_group, open_group
from seatrial.bench.one_rank_per_node import (
    ParticipantError,
    Participants,
    error_text,
    group_by_reason,
    select_participants,
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, text in {**values, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, text)
    open_group("cpu", timeout_s=30)
    yield
    close_group()


def pretend(monkeypatch: pytest.MonkeyPatch, names: list[str], rank: int) -> None:
    """Let the gather bring what processes on nodes of these names would say."""
    monkeypatch.setattr(one_rank_per_node, "gather", lambda value: names)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)


@pytest.mark.parametrize(
    ("rank", "at_least", "expected"),
    [
        (0, 1, Participants(("a", "b"), 0, True)),
        (1, 1, Participants(("a", "b"), -1, True)),
        (2, 1, Participants(("a", "b"), 1, True)),
        (3, 2, Participants(("a", "b"), -1, True)),
    ],
)
def test_the_lowest_rank_of_each_node_acts(
    monkeypatch: pytest.MonkeyPatch, rank: int, at_least: int, expected: Participants
) -> None:
    pretend(monkeypatch, ["a", "a", "b", "b"], rank)
    assert select_participants(["a", "a", "b", "b"][rank], at_least) == expected


def test_nodes_may_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["a", "b", "a", "b"], 1)
    assert select_participants("b") == Participants(("a", "b"), 1, True)


@pytest.mark.parametrize(("rank", "me"), [(0, 0), (1, 1), (2, -1)])
def test_on_one_node_the_first_ranks_act_where_one_is_too_few(
    monkeypatch: pytest.MonkeyPatch, rank: int, me: int
) -> None:
    pretend(monkeypatch, ["a", "a", "a"], rank)
    assert select_participants("a", min_count=2) == Participants(("a/rank0", "a/rank1"), me, False)
    assert select_participants("a").names == ("a",)


def test_the_leader_is_the_first_actor_alone() -> None:
    assert Participants(("a", "b"), 0, True).first_only == Participants(("a",), 0, True)
    assert Participants(("a", "b"), 1, True).first_only == Participants(("a",), -1, True)


@pytest.mark.usefixtures("alone")
def test_work_that_returns_nothing_is_done_all_the_same() -> None:
    assert select_participants("a").run_on_all(lambda: None) == [None]
    assert select_participants("a").run_on_all(lambda: 7) == [7]


@pytest.mark.usefixtures("alone")
def test_who_does_not_act_does_not_work() -> None:
    assert Participants((), -1, False).run_on_all(lambda: pytest.fail("worked")) == []


@pytest.mark.usefixtures("alone")
def test_an_error_of_the_system_is_told_with_the_name() -> None:
    def work() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/mnt/x")

    with pytest.raises(ParticipantError, match=r"^/mnt/x: Permission denied \(a\)$") as raised:
        select_participants("a").run_on_all(work)
    assert not raised.value.timed_out


@pytest.mark.usefixtures("alone")
def test_work_that_hangs_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(ParticipantError, match=r"no answer within 0\.1 s \(a\)") as raised:
        select_participants("a").run_on_all(lambda: time.sleep(600), seconds=0.1)
    assert raised.value.timed_out
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("alone")
def test_a_timeout_that_the_work_itself_raises_is_no_hang() -> None:
    def work() -> None:
        raise TimeoutError("the lock did not come")

    with pytest.raises(ParticipantError, match="the lock did not come") as raised:
        select_participants("a").run_on_all(work)
    assert not raised.value.timed_out


@pytest.mark.usefixtures("alone")
def test_a_fault_of_our_own_is_not_taken_for_one_of_the_machine() -> None:
    with pytest.raises(ZeroDivisionError):
        select_participants("a").run_on_all(lambda: 1 / 0)


@pytest.mark.usefixtures("alone")
def test_without_nccl_there_is_no_version() -> None:
    assert one_rank_per_node.nccl_version() is None


def test_names_with_one_reason_stand_together() -> None:
    assert group_by_reason({"a": "full", "b": "gone", "c": "full"}) == "full (a, c); gone (b)"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "/x: No space left on device"),
        (OSError(errno.EPIPE, "Broken pipe"), "Broken pipe"),
        (TimeoutError("timed out"), "timed out"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_reason_is_one_line(error: Any, text: str) -> None:
    assert error_text(error) == text
