from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import JsonValue

from seatrial.discover import settings
from tests.discover import trees
from tests.paths import FIXTURES

FLAGS = "flags\t\t: fpu vme de pse tsc msr hypervisor lahf_lm\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    trees.gpu_host(tmp_path)
    return tmp_path


def test_this_machine() -> None:
    for setting in settings.read().values():
        assert setting.reason or setting.value is not None


def test_a_gpu_node(root: Path) -> None:
    assert settings.is_gpu_node(root)
    assert {name: setting.value for name, setting in settings.read(root).items()} == {
        "kernel_module": "open",
        "gpudirect_rdma": "dma-buf",
        "acs": [],
        "iommu": "passthrough",
        "cpu_governor": "performance",
        "turbo": True,
        "idle_state": "C6, 290 us",
        "transparent_hugepages": "madvise",
        "hugepages_bytes": 2 * 2**30,
        "numa_balancing": False,
        "gdrcopy": None,
        "performance_counters": True,
    }


@pytest.mark.parametrize(
    ("setting", "files", "value"),
    [
        (
            "kernel_module",
            {"proc/driver/nvidia/version": (FIXTURES / "host" / "nvidia-version-closed.txt").read_text()},
            "proprietary",
        ),
        ("gpudirect_rdma", {"proc/sys/kernel/osrelease": "5.4.0-216-generic\n"}, "none"),
        (
            "gpudirect_rdma",
            {"proc/sys/kernel/osrelease": "5.4.0-216-generic\n", "sys/module/nvidia_peermem/refcnt": "0\n"},
            "nvidia_peermem",
        ),
        (
            "gpudirect_rdma",
            {"proc/sys/kernel/osrelease": "5.10.240-238.966.amzn2\n", "sys/module/efa_nv_peermem/refcnt": "0\n"},
            "efa_nv_peermem",
        ),
        ("iommu", {"sys/kernel/iommu_groups/1/type": "DMA-FQ\n"}, "translated"),
        (
            "cpu_governor",
            {"sys/devices/system/cpu/cpu3/cpufreq/scaling_governor": "powersave\n"},
            "performance, powersave",
        ),
        ("turbo", {"sys/devices/system/cpu/intel_pstate/no_turbo": "1\n"}, False),
        ("idle_state", {"sys/devices/system/cpu/cpu0/cpuidle/state2/disable": "1\n"}, "C1, 1 us"),
        ("transparent_hugepages", {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}, "never"),
        ("numa_balancing", {"proc/sys/kernel/numa_balancing": "1\n"}, True),
        (
            "performance_counters",
            {"proc/driver/nvidia/params": (FIXTURES / "host" / "nvidia-params.txt").read_text()},
            False,
        ),
    ],
)
def test_other_values(root: Path, setting: str, files: dict[str, str], value: JsonValue) -> None:
    trees.write(root, files)
    assert settings.read(root)[setting] == settings.Setting(value)


def test_acs_on_one_bridge(root: Path) -> None:
    bridge = root / "sys/bus/pci/devices" / trees.NIC_BRIDGE
    (bridge / "config").write_bytes(trees.pci_config(0x1D))
    assert settings.read(root)["acs"].value == [trees.NIC_BRIDGE]


def test_acs_is_not_readable_for_users(root: Path) -> None:
    for config in root.rglob("config"):
        config.write_bytes(config.read_bytes()[:64])
    acs = settings.read(root)["acs"]
    assert acs.is_absent
    assert "only root" in acs.reason


def test_a_virtual_machine_has_no_acs_iommu_and_governor(root: Path) -> None:
    trees.write(root, {"proc/cpuinfo": FLAGS})
    for group in root.rglob("iommu_group"):
        group.unlink()
    for governor in root.rglob("scaling_governor"):
        governor.unlink()
    (root / "sys/devices/system/cpu/intel_pstate/no_turbo").unlink()
    facts = settings.read(root)
    for name in ("acs", "iommu", "cpu_governor", "turbo"):
        assert facts[name].is_absent
        assert facts[name].reason


def test_bridges_without_acs(root: Path) -> None:
    for config in root.rglob("config"):
        config.write_bytes(trees.pci_config(None))
    assert settings.read(root)["acs"].is_absent


def test_a_device_of_a_virtual_machine_does_not_count(root: Path) -> None:
    trees.write(root, {"sys/kernel/iommu_groups/1/type": "unmanaged\n"})
    assert settings.read(root)["iommu"].value == "passthrough"


@pytest.mark.parametrize(("exists", "accessible"), [(True, True), (False, False)])
def test_gdrcopy(root: Path, exists: bool, accessible: bool) -> None:
    trees.write(root, {"sys/module/gdrdrv/refcnt": "0\n", **({"dev/gdrdrv": ""} if exists else {})})
    assert settings.read(root)["gdrcopy"].value is accessible


def test_one_numa_node(root: Path) -> None:
    trees.write(root, {"sys/devices/system/node/node1/cpulist": "\n"})
    assert settings.read(root)["numa_balancing"].is_absent


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("numa_balancing", "proc/sys/kernel/numa_balancing"),
        ("transparent_hugepages", "sys/kernel/mm/transparent_hugepage/enabled"),
        ("turbo", "sys/devices/system/cpu/intel_pstate/no_turbo"),
    ],
)
def test_garbage_is_unreadable(root: Path, setting: str, path: str) -> None:
    trees.write(root, {path: "garbage\n"})
    garbage = settings.read(root)[setting]
    assert garbage.reason
    assert not garbage.is_absent


def test_a_machine_without_files(tmp_path: Path) -> None:
    assert not settings.is_gpu_node(tmp_path)
    assert all(setting.is_absent for setting in settings.read(tmp_path).values())
