"""The name of this node in measurements and messages."""

from __future__ import annotations

import os
import socket


def node_name() -> str:
    """Return the name of this host. A pod has another host name than its node: there, return SEATRIAL_NODE."""
    return os.environ.get("SEATRIAL_NODE") or socket.gethostname()
