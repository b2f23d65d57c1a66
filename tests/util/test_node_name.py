"""The names of the node: of the host, of the node of a pod, and of the pod for other pods."""

from __future__ import annotations

import socket

import pytest

from seatrial.util.node_name import dns_name, node_name


def test_a_pod_has_the_name_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEATRIAL_NODE", raising=False)
    assert node_name() == socket.gethostname()
    monkeypatch.setenv("SEATRIAL_NODE", "node-a")
    assert node_name() == "node-a"


def test_other_nodes_resolve_the_name_of_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEATRIAL_DNS_NAME", raising=False)
    assert dns_name("node-a") == "node-a"
    monkeypatch.setenv("SEATRIAL_DNS_NAME", "job-1.job")
    assert dns_name("node-a") == "job-1.job"
