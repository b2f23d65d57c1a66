"""The name of this node in measurements and messages."""

from __future__ import annotations

import os
import socket


def node_name() -> str:
    """Return the host name; in a pod, whose host name differs from that of its node, return SEATRIAL_NODE."""
    return os.environ.get("SEATRIAL_NODE") or socket.gethostname()
