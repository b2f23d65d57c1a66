"""Slurm's lists of hosts."""

from __future__ import annotations

import pytest

from seatrial.util import hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[1-2],login0,n2", ["n1", "n2", "login0"]),
        ("n1, n2", ["n1", "n2"]),
        ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
        ("gpu-[099-101].example.org", ["gpu-099.example.org", "gpu-100.example.org", "gpu-101.example.org"]),
        ("10.140.71.[103-104]", ["10.140.71.103", "10.140.71.104"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert hostlist.expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ",",
        "n1,,n2",
        "n1,",
        "n[1-2",
        "n1-2]",
        "n[]",
        "n[3-1]",
        "n[a-b]",
        "n[1,]",
        "n[[1]]",
        "a b",
        "/home/x",
        "[1",
    ],
)
def test_invalid_lists(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of hosts"):
        hostlist.expand(text)


@pytest.mark.parametrize("text", ["n[1-999999999999]", "a[1-90000],b[1-90000]", "a[1-999]b[1-999]"])
def test_too_many_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="more than 100,000 hosts"):
        hostlist.expand(text)
