"""Start of a server program; transfers between ranks: tests/checks/fabric/test_ports_real_group.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from seatrial.bench import perftest

SERVER = [sys.executable, "-SE", "-c"]


def test_a_server_that_ends_at_once_is_reported_with_its_output(tmp_path: Path) -> None:
    server, port = perftest._start_server([*SERVER, "import sys; sys.exit('no device')"], tmp_path / "0")
    result = server.result()
    assert (port, result.code, result.err.strip()) == (0, 1, "no device")


def test_a_server_that_never_listens_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perftest, "START_LIMIT_S", 0.2)
    server, port = perftest._start_server([*SERVER, "import time; time.sleep(60)"], tmp_path / "0")
    assert port == 0
    assert not server.is_running
    assert "did not listen" in server.result().error


def test_another_port_is_tried_if_the_first_one_is_taken(tmp_path: Path) -> None:
    code = (
        "import socket, sys, pathlib, time\n"
        f"tried = pathlib.Path({str(tmp_path / 'tried')!r})\n"
        'if not tried.exists(): tried.touch(); sys.exit(f"Couldn\'t listen to port {sys.argv[2]}")\n'
        "server = socket.socket(); server.bind(('', int(sys.argv[2]))); server.listen(1); time.sleep(60)\n"
    )
    server, port = perftest._start_server([*SERVER, code], tmp_path / "0")
    assert server.is_running
    assert port
    server.end("did not end within 1 s")
    assert server.result().code is not None
    assert server.result().error == "did not end within 1 s"


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    server, port = perftest._start_server(["/nonexistent/ib_write_bw"], tmp_path / "0")
    assert (port, server.result().error) == (0, "/nonexistent/ib_write_bw does not start: No such file or directory")
