"""The names of this node: in measurements and messages, and for other nodes of the job."""

from __future__ import annotations

import os
import socket


def node_name() -> str:
    """Return the host name; in a pod, whose host name differs from that of its node, return SEATRIAL_NODE."""
    return os.environ.get("SEATRIAL_NODE") or socket.gethostname()


def dns_name(node: str) -> str:
    """Return the name by which other nodes of the job resolve ``node``, this node: in a pod that of the pod."""
    return os.environ.get("SEATRIAL_DNS_NAME", node)
