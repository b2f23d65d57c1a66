"""The regular expression of the node that the drills of this folder run on."""

from __future__ import annotations

import re
import socket

HOST = re.escape(socket.gethostname())
