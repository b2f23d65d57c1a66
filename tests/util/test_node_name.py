"""The node's name: of the host, and of the node of a pod."""

from __future__ import annotations

import socket

import pytest

from seatrial.util.node_name import node_name


def test_a_pod_has_the_name_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEATRIAL_NODE", raising=False)
    assert node_name() == socket.gethostname()
    monkeypatch.setenv("SEATRIAL_NODE", "node-a")
    assert node_name() == "node-a"
