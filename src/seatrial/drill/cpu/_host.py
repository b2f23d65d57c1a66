"""A regular expression that matches the name of this host, on which the drills of this folder run."""

from __future__ import annotations

import re
import socket

HOST = re.escape(socket.gethostname())
