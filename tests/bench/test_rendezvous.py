"""The rendezvous that is tried before a job: real connections on this host."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from seatrial.bench.rendezvous import connect, listen


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_all_nodes_connect_and_the_port_is_free_afterwards() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        nodes = [pool.submit(connect, "127.0.0.1", port, 20.0) for _ in range(2)]
        assert listen(port, 2, 20.0) == ""
        assert [node.result() for node in nodes] == ["", ""]
    socket.create_server(("127.0.0.1", port)).close()


def test_no_listener_and_a_used_port_are_problems() -> None:
    port = free_port()
    problem = connect("127.0.0.1", port, 0.3)
    assert problem.startswith(f"cannot connect to 127.0.0.1 port {port}")
    assert "refused" in problem
    with socket.create_server(("", port)):
        assert "in use" in listen(port, 1, 0.3)
