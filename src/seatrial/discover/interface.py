"""The network interface that has an address of this machine."""

from __future__ import annotations

import psutil

from seatrial.model import Frozen


class Interface(Frozen):
    """``mtu`` in bytes. ``speed_mbps`` is what the driver says; None where it says nothing, as virtual ones do."""

    name: str
    mtu: int
    speed_mbps: int | None


def holding(address: str) -> Interface | None:
    """The interface with this IPv4 or IPv6 address; None where there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            stats = psutil.net_if_stats()[name]
            return Interface(name=name, mtu=stats.mtu, speed_mbps=stats.speed or None)
    return None
