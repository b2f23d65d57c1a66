from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seatrial.discover import fabric
from tests.discover import trees

Addresses = dict[str, tuple[str, ...]]


@pytest.fixture
def assigned(monkeypatch: pytest.MonkeyPatch) -> Addresses:
    """The interface addresses, to be changed by the test."""
    addresses: Addresses = {"eno1": ("10.0.4.3", "fe80::1"), "lo": ("127.0.0.1",)}
    monkeypatch.setattr(fabric, "interface_addresses", lambda: addresses)
    return addresses


@pytest.fixture
def root(tmp_path: Path) -> Path:
    trees.node(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("assigned")
def test_a_physical_interface(root: Path) -> None:
    (nic,) = fabric.read_nics(root).interfaces
    assert (nic.name, nic.state, nic.speed_mbit_s, nic.mtu) == ("eno1", "up", 25000, 9000)
    assert (nic.driver, nic.numa_node, nic.addresses) == ("bnxt_en", 0, ("10.0.4.3", "fe80::1"))
    assert nic.unreadable == {}


def test_virtual_interfaces_are_reported_if_they_have_a_routable_address(root: Path, assigned: Addresses) -> None:
    for name in ("bond0", "cali123", "veth9"):
        trees.write(root, {f"sys/class/net/{name}/mtu": "1500\n"})
    trees.write(root, {"sys/class/net/bonding_masters": "bond0\n"})  # a regular file
    assigned |= {"bond0": ("10.1.1.1",), "cali123": ("fe80::ecee",)}
    facts = fabric.read_nics(root)
    assert [nic.name for nic in facts.interfaces] == ["bond0", "eno1"]
    assert facts.omitted_virtual == 2
    assert facts.interfaces[0].driver is None


@pytest.mark.usefixtures("assigned")
def test_unreadable_fields_of_interfaces_are_reported(root: Path) -> None:
    trees.nic(root, "eno2", speed="-1\n")
    trees.nic(root, os.fsdecode(b"x\xff\x1b"), speed="fast\n")
    (root / "sys/class/net/eno2/mtu").unlink()
    (root / "sys/class/net/eno2/mtu").mkdir()
    facts = fabric.read_nics(root)
    by_name = {nic.name: nic for nic in facts.interfaces}
    assert "speed: -1" in by_name["eno2"].unreadable["speed_mbit_s"]
    assert "Is a directory" in by_name["eno2"].unreadable["mtu"]
    assert "'fast'" in by_name[r"x\udcff\x1b"].unreadable["speed_mbit_s"]
    assert json.loads(facts.model_dump_json())


@pytest.mark.parametrize(("driver", "speed"), [("bonding", 10000), ("macvlan", 10000), ("veth", None), ("tun", None)])
def test_a_speed_that_is_a_constant_of_the_driver_is_not_read(
    root: Path, assigned: Addresses, monkeypatch: pytest.MonkeyPatch, driver: str, speed: int | None
) -> None:
    trees.write(root, {"sys/class/net/eth0/speed": "10000\n"})
    assigned["eth0"] = ("10.77.0.10",)
    monkeypatch.setattr(fabric, "ethtool_driver", {"eth0": driver}.get)
    eth0 = next(nic for nic in fabric.read_nics(root).interfaces if nic.name == "eth0")
    assert eth0.speed_mbit_s == speed
    assert ("speed_mbit_s" in eth0.unreadable) == (speed is None)


def test_driver_of_an_interface() -> None:
    drivers = {link.parent.parent.name: link for link in Path("/sys/class/net").glob("*/device/driver")}
    if not drivers:
        pytest.skip("this machine has no physical network interface")
    for name, link in drivers.items():
        assert fabric.ethtool_driver(name) == link.resolve().name


def test_an_interface_without_a_driver() -> None:
    assert fabric.ethtool_driver("lo") == ""
    assert fabric.ethtool_driver("missing") == ""


def test_addresses_of_this_machine() -> None:
    assert "127.0.0.1" in fabric.interface_addresses()["lo"]


def test_eight_hcas_and_a_roce_port(root: Path) -> None:
    trees.eight_mlx5(root)
    facts = fabric.read_rdma(root)
    assert [device.name for device in facts.devices] == [f"mlx5_{index}" for index in range(9)]
    first, roce = facts.devices[0], facts.devices[8]
    assert (first.model, first.firmware, first.numa_node, first.verbs_accessible) == ("MT4129", "28.39.1002", 1, True)
    assert first.ports[0] == fabric.RdmaPort(
        port="1",
        state="ACTIVE",
        physical_state="LinkUp",
        rate="400 Gb/sec (4X NDR)",
        link_layer="InfiniBand",
        netdev=None,
    )
    assert (roce.ports[0].link_layer, roce.ports[0].netdev) == ("Ethernet", "ens1f0np0")
    assert facts.inactive_ports == ["mlx5_7/1 (DOWN, Polling)"]
    assert (facts.inaccessible_devices, facts.peermem, facts.status_readable) == ([], True, True)


def test_devices_without_device_node_are_inaccessible(root: Path) -> None:
    trees.eight_mlx5(root)
    for index in range(8):
        (root / f"dev/infiniband/uverbs{index}").unlink()
    facts = fabric.read_rdma(root)
    assert facts.inaccessible_devices == [f"mlx5_{index}" for index in range(8)]
    assert facts.status_readable


def test_without_the_module_ib_uverbs_all_devices_are_inaccessible(root: Path) -> None:
    trees.hca(root, "mlx5_0", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    (root / "sys/class/infiniband_verbs/uverbs0/ibdev").unlink()
    (root / "sys/class/infiniband_verbs/uverbs0").rmdir()
    (root / "sys/class/infiniband_verbs").rmdir()
    assert fabric.read_rdma(root).inaccessible_devices == ["mlx5_0"]


def test_no_rdma_devices(root: Path) -> None:
    facts = fabric.read_rdma(root)
    assert (facts.devices, facts.status_readable, facts.unreadable) == ((), True, {})


def test_without_sys_the_rdma_status_is_unreadable(tmp_path: Path) -> None:
    facts = fabric.read_rdma(tmp_path)
    assert not facts.status_readable
    assert "sys/class: No such file" in facts.unreadable["devices"]


@pytest.mark.parametrize("garbage", ["", "ACTIVE", "4: ", "\x00\xff"])
def test_a_port_without_readable_state_makes_the_rdma_status_unreadable(root: Path, garbage: str) -> None:
    trees.hca(root, "mlx5_0", garbage, "5: LinkUp", "400 Gb/sec (4X NDR)")
    facts = fabric.read_rdma(root)
    assert facts.devices[0].ports[0].state is None
    assert "state" in facts.devices[0].ports[0].unreadable
    assert (facts.status_readable, facts.inactive_ports) == (False, [])


def test_a_device_without_ports_folder_makes_the_rdma_status_unreadable(root: Path) -> None:
    trees.write(root, {"sys/class/infiniband/odd name/hca_type": "MT4129\n"})
    facts = fabric.read_rdma(root)
    assert not facts.status_readable
    assert "ports: No such file" in facts.devices[0].unreadable["ports"]
