"""The name of this host, on which the drills of this folder run, as a regular expression."""

from __future__ import annotations

import re
import socket

HOST = re.escape(socket.gethostname())
