"""What a connection to the slurmd of a node shows."""

from __future__ import annotations

import socket

import pytest

from seatrial.discover.slurm import slurmd_answer
from tests.fakes.slurm import FakeSlurm, success


def answer(monkeypatch: pytest.MonkeyPatch, port: int) -> str:
    node = success("NodeName=n7 NodeAddr=127.0.0.1 NodeHostName=n7 Version=22.05.8\n   State=IDLE ThreadsPerCore=1\n")
    config = success(f"SlurmdPidFile           = /run/slurmd.pid\nSlurmdPort              = {port}\n")
    FakeSlurm({"scontrol show node n7": node, "scontrol show config": config}).install(monkeypatch)
    return slurmd_answer("n7")


def test_a_listening_and_a_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answer(monkeypatch, port) == f"port {port} of n7 accepts connections: slurmd runs"
    assert answer(monkeypatch, port) == f"port {port} of n7 refuses connections: slurmd does not run"
