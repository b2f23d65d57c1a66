from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.checks.fabric._sizes import MANY_NODES
from seatrial.hardware import network_limits
from seatrial.hardware.network_limits import NetworkLimit, find_limit
from seatrial.model import parse_bytes
from seatrial.util import data_files

ENTRY: dict[str, Any] = {
    "operations": ["all_gather"],
    "fabric": "rdma",
    "nodes": 2,
    "min_size": "1GiB",
    "fail_below": 0.7,
    "warn_below": 0.8,
    "reason": "why",
    "source": "where",
}


@pytest.mark.parametrize(
    "change",
    [
        {"source": ""},
        {"reason": ""},
        {"nodes": 1},
        {"max_nodes": 1},
        {"fail_below": 0.9},
        {"warn_below": 1.0},
        {"fabric": "usb"},
        {"limit": 1},
        {"min_size": "1GB"},
    ],
)
def test_an_entry_is_read_strictly(change: dict[str, Any]) -> None:
    NetworkLimit.model_validate(ENTRY)
    with pytest.raises(ValidationError):
        NetworkLimit.model_validate({**ENTRY, **change})


def test_two_entries_for_the_same_nodes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {**ENTRY, "nodes": 8, "max_nodes": 9}
    monkeypatch.setattr(data_files, "read", lambda _name: [ENTRY, many])
    with pytest.raises(ValueError, match="all_gather on 8 nodes"):
        network_limits.network_limits.__wrapped__()


def test_shipped_limits_of_the_all_reduce() -> None:
    for nodes in (2, 4, 15, 16, 32):
        limit = find_limit("all_reduce", "rdma", nodes)
        assert limit
        assert (limit.fail_below, limit.warn_below) == (0.76, 0.83)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive"])
def test_every_number_of_nodes_has_a_limit(operation: str) -> None:
    for fabric in ("rdma", "tcp"):
        assert all(find_limit(operation, fabric, nodes) for nodes in (2, 3, 4, 15, 16, 17, 32, 33, 128, 1024))


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_to_all"])
def test_the_size_that_rules_judge_is_one_that_has_limits(operation: str) -> None:
    few, many = find_limit(operation, "rdma", MANY_NODES - 1), find_limit(operation, "rdma", MANY_NODES)
    assert few
    assert many
    assert (few.min_size, many.min_size) == (parse_bytes("1GiB"), parse_bytes("8GiB"))


def test_rails_of_two_nodes_are_limited_by_their_ports_but_over_efa_by_the_all_reduce() -> None:
    shares = {
        (fabric, nodes): limit and limit.fail_below
        for fabric in ("rdma", "efa")
        for nodes in (2, 3, 4, 15, 16)
        for limit in [find_limit("rails", fabric, nodes)]
    }
    tight = {("rdma", 2), ("rdma", 3)}
    assert shares == {key: 0.88 if key in tight else None if key[1] == 16 else 0.76 for key in shares}
    assert find_limit("all_reduce", "efa", 2) == find_limit("all_reduce", "rdma", 2)


def test_operations_without_a_published_figure_have_no_limit() -> None:
    assert find_limit("reduce", "rdma", 2) is None
    assert find_limit("broadcast", "rdma", 8) is None
