"""RDMA ports as rdma_ports.read_ports returns them."""

from __future__ import annotations

from typing import Any

from seatrial.discover.rdma_ports import Gid, PortDetails

GIDS = (
    Gid(index=1, address="fe80::bace:f6ff:fe12:3456", type="RoCE v2"),
    Gid(index=2, address="10.0.0.1", type="IB/RoCE v1"),
    Gid(index=3, address="10.0.0.1", type="RoCE v2"),
)


def port(name: str, rate: str = "400 Gb/sec (4X NDR)", state: str | None = "ACTIVE", **changes: Any) -> PortDetails:
    """An InfiniBand port of a ConnectX-7."""
    values: dict[str, Any] = {
        "name": name,
        "device": name,
        "port": "1",
        "model": "MT4129",
        "board": "MT_0000000838",
        "firmware": "28.39.1002",
        "numa_node": 0,
        "verbs_accessible": True,
        "state": state,
        "physical_state": "LinkUp" if state == "ACTIVE" else "Polling",
        "rate": rate if state == "ACTIVE" else "10 Gb/sec (4X SDR)",
        "link_layer": "InfiniBand",
        "netdev": None,
        "has_default_route": False,
        "mtu": None,
        "active_mtu": 4096,
        "gids": (),
        "pci_path": ("0000:15:01.0", f"0000:{16 + sum(map(ord, name)) % 200:02x}:00.0"),
        "pci_gbps": 504.1,
        "capability_gbps": None,
    }
    return PortDetails(**{**values, **changes})


def down(name: str, **changes: Any) -> PortDetails:
    return port(name, state="DOWN", **changes)


def roce(name: str, rate: str = "400 Gb/sec (4X NDR)", **changes: Any) -> PortDetails:
    """A RoCE port of a ConnectX-7 with an IPv4 address."""
    defaults: dict[str, Any] = {"link_layer": "Ethernet", "netdev": f"e{name}", "mtu": 9000, "gids": GIDS}
    return port(name, rate, **{**defaults, **changes})


def eight(**by_name: PortDetails) -> tuple[PortDetails, ...]:
    """Ports mlx5_0 to mlx5_7, with those in ``by_name`` instead or in addition."""
    ports = {f"mlx5_{index}": port(f"mlx5_{index}") for index in range(8)}
    return tuple((ports | by_name).values())
