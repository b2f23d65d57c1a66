from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.discover import pcie
from tests.discover import trees


def test_devices_and_the_bridges_above_them(tmp_path: Path) -> None:
    trees.gpu_host(tmp_path)
    gpus, nics = pcie.gpus(tmp_path), pcie.rdma_devices(tmp_path)
    assert [device.name for device in (*gpus, *nics)] == ["0000:18:00.0", "0000:19:00.0"]
    assert [bridge.name for bridge in pcie.bridges_above(gpus)] == ["0000:00:01.0", trees.GPU_BRIDGE]
    assert pcie.bridges_above([]) == []


def test_a_machine_without_pci_bus(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # /sys is hidden
        pcie.gpus(tmp_path)
    (tmp_path / "sys/bus/usb").mkdir(parents=True)
    assert pcie.gpus(tmp_path) == pcie.rdma_devices(tmp_path) == []


@pytest.mark.parametrize(
    ("control", "redirects"),
    [
        (0x0000, False),
        (0x0001, False),  # SrcValid alone
        (0x001D, True),  # SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+, as Linux sets it with an active IOMMU
        (0x0004, True),
        (0x0008, True),
        (None, None),
    ],
)
def test_redirection_by_acs(tmp_path: Path, control: int | None, redirects: bool | None) -> None:
    (tmp_path / "config").write_bytes(trees.pci_config(control))
    assert pcie.redirects_peer_traffic(tmp_path) is redirects


def test_a_user_other_than_root_reads_64_bytes(tmp_path: Path) -> None:
    (tmp_path / "config").write_bytes(trees.pci_config(0)[:64])
    with pytest.raises(PermissionError, match="only root"):
        pcie.redirects_peer_traffic(tmp_path)


def test_a_device_without_extended_configuration_has_no_acs(tmp_path: Path) -> None:
    (tmp_path / "config").write_bytes(bytes(256))
    assert pcie.redirects_peer_traffic(tmp_path) is None


@pytest.mark.parametrize("next_offset", [0x100, 0x040, 0xFFC])
def test_a_damaged_list_of_capabilities(tmp_path: Path, next_offset: int) -> None:
    config = bytearray(trees.pci_config(None))
    config[0x100:0x104] = (next_offset << 20 | 0x0001).to_bytes(4, "little")
    (tmp_path / "config").write_bytes(config)
    with pytest.raises(ValueError, match="invalid extended capability"):
        pcie.redirects_peer_traffic(tmp_path)
