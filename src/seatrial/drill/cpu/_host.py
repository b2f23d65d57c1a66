"""The node that the drills of this folder run on, as a regular expression."""

from __future__ import annotations

import re
import socket

HOST = re.escape(socket.gethostname())
