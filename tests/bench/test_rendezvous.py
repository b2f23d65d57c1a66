"""The test of the rendezvous, between two processes of this host."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from seatrial.bench import rendezvous, tcp
from seatrial.bench.rendezvous import connect, serve

TOKEN = b"7".ljust(tcp.TOKEN_BYTES)


@pytest.fixture
def port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def loopback_is_routable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "is_routable", lambda address: True)


@pytest.mark.usefixtures("loopback_is_routable")
def test_all_nodes_connect_and_the_port_is_free_afterwards(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        clients = [pool.submit(connect, "localhost", port, TOKEN, 10) for _ in range(3)]  # some before the server
        server = pool.submit(serve, port, TOKEN, 3, 20)
        assert [client.result() for client in clients] == ["", "", ""]
        assert server.result() == ""
    with socket.socket() as again:
        again.bind(("", port))  # without SO_REUSEADDR: no connection is in TIME_WAIT here


@pytest.mark.usefixtures("loopback_is_routable")
def test_node_that_cannot_connect_names_address_and_port(port: int) -> None:
    assert re.search(
        f"at localhost, port {port}: .*127.0.0.1: Connection refused", connect("localhost", port, TOKEN, 0)
    )
    with socket.create_server(("127.0.0.1", port)), ThreadPoolExecutor() as pool:
        assert "received no answer" in pool.submit(connect, "127.0.0.1", port, TOKEN, 0).result()
        assert f"cannot listen on port {port}" in serve(port, TOKEN, 1, 0)


@pytest.mark.parametrize(("name", "reason"), [("no-such-host.invalid", "cannot resolve"), ("localhost", "127.0.0.1")])
def test_name_that_does_not_resolve_to_the_other_node_is_named(name: str, reason: str, port: int) -> None:
    problem = connect(name, port, TOKEN, 0)
    assert reason in problem
    assert name in problem


def test_a_node_that_cannot_connect_prints_itself_and_a_complete_command(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    rendezvous.main(["no-such-host.invalid", str(port), "7"])
    line = capsys.readouterr().out
    assert line.startswith("preflight: n1: cannot resolve the address of the rendezvous, no-such-host.invalid")
    assert ". Run first: srun --nodelist=n1 sh -c 'getent ahosts no-such-host.invalid; " in line


@pytest.mark.usefixtures("loopback_is_routable")
def test_a_pod_waits_until_the_name_of_the_first_pod_exists(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lookups = iter([OSError("Name or service not known")])

    def resolve(name: str) -> tuple[str, ...]:
        assert name == "job-0.job"
        if error := next(lookups, None):
            raise error
        return ("127.0.0.1",)

    monkeypatch.setattr(rendezvous, "resolve", resolve)
    monkeypatch.setattr(rendezvous, "_LOOKUP_RETRY_S", 0.01)
    with ThreadPoolExecutor() as pool:
        pods = [
            pool.submit(rendezvous.try_pod, "job-0.job", port, TOKEN, index=index, nodes=2, limit_s=20)
            for index in (0, 1)
        ]
        assert [pod.result() for pod in pods] == ["", ""]
    assert "waiting for the address of the first pod, job-0.job: Name or service not known" in capsys.readouterr().err


def test_a_pod_that_cannot_connect_names_its_node_and_fails(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEATRIAL_NODE", "gpu-7")
    with pytest.raises(SystemExit) as end:
        rendezvous.main(["no-such-host.invalid", str(port), "7", "1", "2", "0"])
    assert end.value.code == 1
    line = capsys.readouterr().out
    assert line.startswith("preflight: gpu-7: cannot resolve the address of the rendezvous, no-such-host.invalid")
    assert ". Run first: kubectl describe service invalid; kubectl get networkpolicies" in line


def test_first_pod_whose_port_is_in_use_names_the_port_and_how_to_take_another(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEATRIAL_NODE", "gpu-0")
    with socket.create_server(("", port)), pytest.raises(SystemExit):
        rendezvous.main(["job-0.job", str(port), "7", "0", "2", "5"])
    line = capsys.readouterr().out
    assert line.startswith(f"preflight: gpu-0: cannot listen on port {port} for the rendezvous: Address already in use")
    assert "seatrial run --resume takes another port" in line
    assert "kubectl debug -n kube-system node/gpu-0 " in line
    assert line.endswith(f" ss -ltnp sport = :{port}\n")


def test_a_missing_node_ends_the_server(port: int) -> None:
    assert serve(port, TOKEN, 1, 0.2) == ""


def test_node_reports_itself_in_one_line_and_torch_is_not_imported(port: int) -> None:
    env = {**os.environ, "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURMD_NODENAME": "n1"}
    program = (
        "import sys; from seatrial.bench.rendezvous import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", program, "no-such-host.invalid", str(port), "7"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60)
    line, torch_imported = done.stdout.splitlines()
    assert line.startswith("preflight: n1: cannot resolve the address of the rendezvous, no-such-host.invalid")
    assert torch_imported == "False"
    assert rendezvous.CONNECT_LIMIT_S < rendezvous.LISTEN_LIMIT_S
