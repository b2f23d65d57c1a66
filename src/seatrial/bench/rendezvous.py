"""Tries the rendezvous of a job before torchrun: ``python -m seatrial.bench.rendezvous ADDRESS PORT KEY`` on each node.

The first node (SLURM_NODEID 0) listens; the others resolve the address and connect. KEY identifies the job. A node that
fails prints one line, ``preflight: NODE: …``, and the job script then ends the job. Without this test, torchrun would
wait for minutes and name no node. The exit code is 0: after any other exit code, srun would end the other nodes before
they print their lines.

A pod of Kubernetes adds three arguments: its INDEX, the number of NODES, and the SECONDS within which all pods start.
Until all pods have started, the name of the first pod may not exist. In a pod, the exit code is 1 if the node fails.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

from seatrial.bench.tcp import TOKEN_BYTES, Endpoint, listen, open_connection, resolve_names
from seatrial.util.resolver import resolve
from seatrial.util.text import error_text

# How long nodes wait for each other. srun starts nodes within seconds; containers or a busy filesystem delay some nodes
CONNECT_LIMIT_S, LISTEN_LIMIT_S = 30.0, 60.0
_RETRY_S = 0.2  # pause between two attempts to connect
_LOOKUP_RETRY_S = 2.0  # pause between two lookups: many pods ask one DNS service


def main(arguments: Sequence[str]) -> None:
    """Try the rendezvous as this node or pod; if it fails, print the problem and the first command to run."""
    address, port, key, *pod_arguments = arguments
    token = key.encode()[:TOKEN_BYTES].ljust(TOKEN_BYTES)
    node = os.environ.get("SLURMD_NODENAME") or os.environ.get("SEATRIAL_NODE") or socket.gethostname()
    if pod_arguments:
        index, nodes, limit_s = pod_arguments
        problem = try_pod(address, int(port), token, index=int(index), nodes=int(nodes), limit_s=float(limit_s))
        if problem and index == "0":  # pod 0 listens, so the problem is the port
            problem += (
                ". With host_network, another process of the node may use it; seatrial run --resume takes another port"
            )
            debug = f"kubectl debug -n kube-system node/{node} -it --image=IMAGE --profile=sysadmin"
            first_command = f"as an administrator: {debug} -- chroot /host ss -ltnp sport = :{port}"
        else:
            first_command = f"kubectl describe service {address.partition('.')[2]}; kubectl get networkpolicies"
    elif os.environ.get("SLURM_NODEID", "0") == "0":
        problem = serve(int(port), token, int(os.environ.get("SLURM_NNODES", "1")) - 1, LISTEN_LIMIT_S)
        first_command = f"srun --nodelist={node} ss -ltnp sport = :{port}"
    else:
        problem = connect(address, int(port), token, CONNECT_LIMIT_S)
        tests = f"getent ahosts {address}; ping -c 3 {address}; ip route get {address}; nft list ruleset"
        first_command = f"srun --nodelist={node} sh -c '{tests}'"
    if problem:
        print(f"preflight: {node}: {problem}. Run first: {first_command}")
        if pod_arguments:
            sys.exit(1)


def try_pod(address: str, port: int, token: bytes, *, index: int, nodes: int, limit_s: float) -> str:
    """Listen in pod 0, connect in the other pods; return "", or why this was not possible within ``limit_s``."""
    if index == 0:
        return serve(port, token, nodes - 1, limit_s)
    deadline, printed = time.monotonic() + limit_s, ""
    while (problem := resolve_names([address], resolve)[address].problem) and time.monotonic() < deadline:
        if problem != printed:  # for the job's log, if seatrial ends the job before the limit
            print(f"waiting for the address of the first pod, {address}: {problem}", file=sys.stderr, flush=True)
        printed = problem
        time.sleep(_LOOKUP_RETRY_S)
    return connect(address, port, token, max(0.0, deadline - time.monotonic()))


def serve(port: int, token: bytes, clients: int, limit_s: float) -> str:
    """Listen until ``clients`` clients have connected, at most ``limit_s``; return "", or why the port cannot be used.

    Missing clients are no problem here: a client that cannot connect reports this itself.
    """
    try:
        listener = listen(port)
    except OSError as error:
        return f"cannot listen on port {port} for the rendezvous: {error_text(error)}"
    deadline, threads = time.monotonic() + limit_s, list[Thread]()  # one per connection
    with listener:
        while len(threads) < clients and (left_s := deadline - time.monotonic()) > 0:
            listener.settimeout(left_s)
            with suppress(OSError):
                connection, _ = listener.accept()
                threads.append(Thread(target=_answer, args=(connection, token), daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    return ""


def _answer(connection: socket.socket, token: bytes) -> None:
    """Send the token and wait until the client has closed the connection.

    The side that closes first keeps the port in TIME_WAIT, and torchrun must listen on this port next.
    """
    with connection, suppress(OSError):
        connection.settimeout(CONNECT_LIMIT_S)
        connection.sendall(token)
        connection.recv(1)


def connect(address: str, port: int, token: bytes, limit_s: float) -> str:
    """Try to connect to the first node for ``limit_s``; return "", or why this was not possible."""
    lookup = resolve_names([address], resolve)[address]
    if lookup.problem:
        return f"cannot resolve the address of the rendezvous, {address} (port {port}): {lookup.problem}"
    deadline = time.monotonic() + limit_s
    while True:
        try:
            open_connection(lookup.addresses, Endpoint(port, token, None)).close()
            return ""
        except OSError as error:
            if time.monotonic() > deadline:
                return (
                    f"cannot connect to the rendezvous at {address}, port {port}: {error_text(error)}. A firewall must "
                    "allow all ports between the nodes"
                )
            time.sleep(_RETRY_S)


if __name__ == "__main__":
    main(sys.argv[1:])
