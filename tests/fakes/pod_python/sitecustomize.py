"""Name resolution in the Python processes of a fake pod: cluster DNS knows the names of pods, and no name of a node.

FAKE_DNS_NAMES has the names of the job's pods, which all have the address FAKE_DNS_ADDRESS.
"""

import ipaddress
import os
import socket
from typing import Any

_getaddrinfo = socket.getaddrinfo


def getaddrinfo(host: str | None, *arguments: Any, **options: Any) -> Any:
    # the kubelet writes a pod's own host name to its /etc/hosts
    if host in (socket.gethostname(), *os.environ["FAKE_DNS_NAMES"].split()):
        return _getaddrinfo(os.environ["FAKE_DNS_ADDRESS"], *arguments, **options)
    if host not in (None, "", "localhost"):
        try:
            ipaddress.ip_address(str(host))
        except ValueError:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
    return _getaddrinfo(host, *arguments, **options)


socket.getaddrinfo = getaddrinfo  # type: ignore[assignment]
