from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.discover import rdma_ports
from seatrial.discover.rdma_ports import Gid, PortDetails
from seatrial.util import processes
from tests.discover import trees
from tests.paths import FIXTURES

ETHTOOL = (FIXTURES / "host" / "ethtool-400g.txt").read_text()


@pytest.fixture(autouse=True)
def no_ethtool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    trees.node(tmp_path)
    return tmp_path


def roce_port(root: Path) -> PortDetails:
    trees.hca(root, "mlx5_8", "4: ACTIVE", "5: LinkUp", "100 Gb/sec (4X EDR)", netdev="ens1f0np0")
    trees.roce_gids(root, "mlx5_8", trees.ROCE_GIDS)
    trees.nic(root, "ens1f0np0", speed="100000\n")
    (port,) = rdma_ports.read_ports(root)
    return port


def test_an_infiniband_port_has_no_netdev_and_no_gids(root: Path) -> None:
    trees.hca(root, "mlx5_0", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    trees.write(root, {"sys/class/infiniband/mlx5_0/board_id": "MT_0000000838\n"})
    trees.on_pci(root, "mlx5_0", "0000:15:01.0/0000:18:00.0", "32.0 GT/s PCIe", 16)
    (port,) = rdma_ports.read_ports(root)
    assert (port.name, port.kind) == ("mlx5_0", ("MT4129", "MT_0000000838", "InfiniBand"))
    assert (port.rate_gbps, port.netdev, port.gids, port.capability_gbps) == (400.0, None, (), None)
    assert (port.pci_path, port.nic_address) == (("0000:15:01.0", "0000:18:00.0"), "0000:18:00")
    assert port.pci_gbps == pytest.approx(504.1, abs=0.1)
    assert port.unreadable == {}


def test_a_roce_port(root: Path) -> None:
    port = roce_port(root)
    assert (port.netdev, port.mtu, port.has_default_route) == ("ens1f0np0", 9000, False)
    assert [gid.index for gid in port.gids] == [0, 1, 2, 3]
    assert port.gids[3] == Gid(index=3, address="10.0.0.1", type="RoCE v2")
    assert "ethtool" in port.unreadable["capability_gbps"]


@pytest.mark.parametrize(("index", "used"), [(None, 3), (3, 3), (1, None), (2, None), (7, None)])
def test_nccl_needs_a_routable_roce_v2_gid_at_its_index(root: Path, index: int | None, used: int | None) -> None:
    gid = roce_port(root).roce_gid(index)
    assert (gid and gid.index) == used


@pytest.mark.parametrize(
    ("state", "rate", "gbps"),
    [
        ("4: ACTIVE", "200 Gb/sec (2X NDR)", 200.0),
        ("1: DOWN", "10 Gb/sec (4X SDR)", 0.0),
        ("2: INIT", "400 Gb/sec (4X NDR)", 0.0),
        ("4: ACTIVE", "unknown", None),
        ("garbage", "400 Gb/sec (4X NDR)", None),
    ],
)
def test_the_rate_counts_only_while_the_port_is_active(root: Path, state: str, rate: str, gbps: float | None) -> None:
    trees.hca(root, "mlx5_0", state, "5: LinkUp", rate)
    (port,) = rdma_ports.read_ports(root)
    assert port.rate_gbps == gbps


def test_ports_of_one_device_have_names_of_their_own(root: Path) -> None:
    trees.hca(root, "mlx4_0", "4: ACTIVE", "5: LinkUp", "56 Gb/sec (4X FDR)")
    trees.write(root, {"sys/class/infiniband/mlx4_0/ports/2/state": "1: DOWN\n"})
    assert [port.name for port in rdma_ports.read_ports(root)] == ["mlx4_0:1", "mlx4_0:2"]


def test_without_rdma_devices_there_are_no_ports_and_without_sys_an_error(root: Path, tmp_path: Path) -> None:
    assert rdma_ports.read_ports(root) == ()
    with pytest.raises(OSError, match="sys/class"):
        rdma_ports.read_ports(tmp_path / "empty")


def test_default_routes_lead_to_the_interfaces_below_a_bond(root: Path) -> None:
    trees.write(
        root,
        {
            "proc/net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
            "bond0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
            "ens1\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n",
            "proc/net/ipv6_route": f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 00000001 00000000 00200200 lo\n"
            f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 28} 00000400 00000001 00000000 00000003 eno1\n",
            "sys/class/net/bond0/lower_ens2/mtu": "1500\n",
            "sys/class/net/ens2/mtu": "1500\n",
        },
    )
    assert rdma_ports.default_route_interfaces(root) == {"bond0", "ens2", "eno1"}


@pytest.mark.parametrize(
    ("speed", "width", "gbps"),
    [("32.0 GT/s PCIe", 16, 504.1), ("16.0 GT/s PCIe", 16, 252.1), ("5 GT/s", 8, 32.0), ("64.0 GT/s PCIe", 16, 944)],
)
def test_bandwidth_of_the_pci_link(tmp_path: Path, speed: str, width: int, gbps: float) -> None:
    trees.write(tmp_path, {"current_link_speed": f"{speed}\n", "current_link_width": f"{width}\n"})
    assert rdma_ports.pci_bandwidth(tmp_path) == pytest.approx(gbps, abs=0.1)


def test_a_virtual_function_has_no_pci_link_of_its_own(tmp_path: Path) -> None:
    trees.write(tmp_path, {"current_link_speed": "Unknown\n", "current_link_width": "0\n"})
    with pytest.raises(ValueError, match="virtual function"):
        rdma_ports.pci_bandwidth(tmp_path)


def test_the_fastest_link_mode_of_ethtool() -> None:
    assert rdma_ports.parse_link_modes(ETHTOOL) == 400.0
    with pytest.raises(ValueError, match="no supported link mode"):
        rdma_ports.parse_link_modes("Settings for ib0:\n\tSupported link modes:   Not reported\n\tSpeed: 400000Mb/s\n")


def test_active_mtu_of_ibv_devinfo() -> None:
    text = (FIXTURES / "host" / "ibv_devinfo.txt").read_text()
    assert rdma_ports.parse_devinfo(text) == {("mlx5_2", "1"): 4096, ("mlx5_12", "1"): 1024}
    assert rdma_ports.parse_devinfo("No IB devices found\n") == {}


def test_a_device_whose_ports_cannot_be_listed_is_an_error(root: Path) -> None:
    trees.write(root, {"sys/class/infiniband/mlx5_0/hca_type": "MT4129\n"})
    with pytest.raises(OSError, match="ports: No such file"):
        rdma_ports.read_ports(root)


def test_capability_and_active_mtu_are_read_with_tools(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devinfo = (FIXTURES / "host" / "ibv_devinfo.txt").read_text().replace("mlx5_2", "mlx5_8")
    outputs = {("ethtool", "ens1f0np0"): ETHTOOL, ("ibv_devinfo",): devinfo}
    run = lambda argv, _timeout: processes.CommandResult(0, outputs[tuple(argv)], "")  # noqa: E731
    monkeypatch.setattr(processes, "run_command", run)
    port = roce_port(root)
    assert (port.capability_gbps, port.active_mtu) == (400.0, 4096)
