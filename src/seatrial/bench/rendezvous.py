"""Tries the rendezvous of a job: every node connects to the first one, as torchrun does later and without a message.

``python -m seatrial.bench.rendezvous ADDRESS PORT``, one task per node of Slurm. A node that cannot connect prints one
line, ``preflight: NODE: ...``. Only the standard library is imported.
"""

from __future__ import annotations

import os
import socket
import sys
import time

CONNECT_LIMIT_S = 10.0  # after which a node gives up; the first node starts to listen within a second
_LISTEN_LIMIT_S = 20.0  # for the other nodes; their tasks may start some seconds later
_RETRY_S = 0.1


def main(address: str, port: int) -> None:
    nodes, node = int(os.environ["SLURM_NNODES"]), os.environ["SLURMD_NODENAME"]
    if os.environ["SLURM_NODEID"] == "0":
        problem = listen(port, nodes - 1, _LISTEN_LIMIT_S)
        command = f"ss -ltnp sport = :{port}"
    else:
        problem = connect(address, port, CONNECT_LIMIT_S)
        command = f"sh -c 'ping -c 3 {address}; ip route get {address}; iptables -S'"
    if problem:
        print(f"preflight: {node}: {problem}. Run first: srun --nodelist={node} {command}", flush=True)


def listen(port: int, others: int, limit_s: float) -> str:
    """Accept connections until ``others`` have come or ``limit_s`` are over; the problem if this port is not free."""
    deadline = time.monotonic() + limit_s
    try:
        dual = socket.has_dualstack_ipv6()
        server = socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=4096
        )
    except OSError as error:
        return f"cannot listen on port {port} for the rendezvous: {error.strerror}"
    with server:
        while others > 0 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except OSError:  # timeout
                break
            with connection:
                connection.settimeout(1.0)
                try:
                    others -= connection.recv(1) == b"n"
                    connection.recv(1)  # the other end closes first, so that this port stays free
                except OSError:  # not a node of this job
                    continue
    return ""


def connect(address: str, port: int, limit_s: float) -> str:
    """Connect to the first node, again while it refuses; the problem after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())) as connection:
                connection.sendall(b"n")
            return ""
        except OSError as error:
            reason = str(error.strerror or error)
        if time.monotonic() > deadline - _RETRY_S:
            return (
                f"cannot connect to {address} port {port}, the rendezvous of the first node, in {limit_s:g} s: {reason}"
            )
        time.sleep(_RETRY_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
