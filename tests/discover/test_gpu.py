from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pynvml as real_pynvml
import pytest

from seatrial.discover import gpu
from seatrial.discover.gpu import GpuFacts
from seatrial.model import UsageError
from tests.fakes.nvml import FakeNvml, geforce, h200, links, make_pci_devices, nvml_error, pci

PCI = tuple(f"0000:{0x1B + index:02x}:00.0" for index in range(8))


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GpuFacts:
    FakeNvml(*(h200(index) for index in range(4))).install(monkeypatch)
    return gpu.read(make_pci_devices(tmp_path, *PCI[:4]))


def test_a_healthy_hgx_board(four_gpus: GpuFacts) -> None:
    assert (four_gpus.driver, four_gpus.cuda_driver, four_gpus.nvml_unavailable) == ("580.159.04", "13.0", None)
    assert [g.index for g in four_gpus.gpus] == [0, 1, 2, 3]
    assert (four_gpus.failed_gpus, four_gpus.permission_denied, four_gpus.not_assigned, four_gpus.unreadable) == (
        (),
        (),
        (),
        {},
    )
    assert four_gpus.pci_devices == tuple(g.pci_bus_id for g in four_gpus.gpus) == PCI[:4]
    assert four_gpus.installed_gpus == 4
    assert four_gpus.unusable_pci_devices == ()


def test_fields_of_one_gpu(four_gpus: GpuFacts) -> None:
    first = four_gpus.gpus[0]
    assert (first.name, first.uuid) == ("NVIDIA H200", "GPU-00000000-aaaa-bbbb-cccc-000000000000")
    assert first.compute_capability == "9.0"
    assert (first.memory_total_bytes, first.memory_used_bytes) == (150754820096, 0)
    assert (first.mig_mode, first.ecc_mode, first.persistence_mode) == (False, True, True)
    assert (first.power_w, first.power_limit_w, first.power_default_w) == (79.798, 700.0, 700.0)
    assert (first.pcie_gen, first.pcie_gen_max, first.pcie_width, first.pcie_width_max) == (5, 5, 16, 16)
    assert first.clocks_event_reasons == ("idle",)
    assert (first.sm_clock_mhz, first.sm_clock_max_mhz, first.memory_clock_mhz) == (345, 1980, 3201)
    assert (first.memory_clock_max_mhz, first.memory_bus_width_bits, first.cores) == (3201, 6016, 16896)
    assert first.c2c is False
    assert [g.numa_node for g in four_gpus.gpus] == [0, 0, 1, 1]
    assert first.cpu_affinity == "0-31,64-67"
    assert first.fabric is not None
    assert (first.fabric.state, first.fabric.status, first.fabric.problems) == ("completed", 0, ())


def test_only_existing_nvlinks_are_listed(four_gpus: GpuFacts) -> None:
    nvlinks = four_gpus.gpus[0].nvlinks
    assert [link.link for link in nvlinks] == list(range(18))
    assert nvlinks[17].model_dump() == {
        "link": 17,
        "active": True,
        "version": "4.0",
        "remote": "switch",
        "remote_pci": None,
        "speed_gb_s": 26.562,
    }


def test_unsupported_fields_do_not_make_a_gpu_lost(four_gpus: GpuFacts) -> None:
    assert four_gpus.gpus[0].unreadable == {"pages_retired": "Not Supported", "retirement_pending": "Not Supported"}
    assert four_gpus.gpus[0].unsupported == ("pages_retired", "retirement_pending")


def test_topology_over_switches(four_gpus: GpuFacts) -> None:
    assert four_gpus.topology == (
        ("X", "NV18", "NV18", "NV18"),
        ("NV18", "X", "NV18", "NV18"),
        ("NV18", "NV18", "X", "NV18"),
        ("NV18", "NV18", "NV18", "X"),
    )


def test_topology_of_bridged_cards_counts_links_of_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    def bridged_to(other: int) -> dict[str, object]:
        remote = {"nvmlDeviceGetNvLinkRemotePciInfo": pci(f"00000000:{0x1B + other:02X}:00.0")}
        return {**links(4, remote=real_pynvml.NVML_NVLINK_DEVICE_TYPE_GPU), **remote}

    FakeNvml(h200(0, **bridged_to(1)), h200(1, **bridged_to(0)), h200(2, **links(4, down=range(4)))).install(
        monkeypatch
    )
    assert gpu.read().topology == (("X", "NV4", "NODE"), ("NV4", "X", "NODE"), ("NODE", "NODE", "X"))


@pytest.mark.parametrize(
    ("level", "name"),
    [
        (real_pynvml.NVML_TOPOLOGY_INTERNAL, "PIX"),
        (real_pynvml.NVML_TOPOLOGY_SINGLE, "PIX"),
        (real_pynvml.NVML_TOPOLOGY_MULTIPLE, "PXB"),
        (real_pynvml.NVML_TOPOLOGY_HOSTBRIDGE, "PHB"),
        (real_pynvml.NVML_TOPOLOGY_NODE, "NODE"),
        (real_pynvml.NVML_TOPOLOGY_SYSTEM, "SYS"),
    ],
)
def test_topology_without_nvlink(monkeypatch: pytest.MonkeyPatch, level: int, name: str) -> None:
    FakeNvml(geforce(0), geforce(1), ancestor=level).install(monkeypatch)
    assert gpu.read().topology == (("X", name), (name, "X"))


def test_an_unreadable_topology_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(geforce(0), geforce(1), ancestor=nvml_error("Unknown")).install(monkeypatch)
    facts = gpu.read()
    assert facts.topology == (("X", "?"), ("?", "X"))
    assert facts.unreadable["topology gpu0-gpu1"] == "Unknown Error"


def test_unsupported_fields_of_a_geforce(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(geforce()).install(monkeypatch)
    card = gpu.read().gpus[0]
    assert (card.ecc_mode, card.rows_remapped_correctable, card.fabric, card.mig_mode) == (None, None, None, None)
    assert card.nvlinks == ()
    missing = {
        "ecc_mode",
        "ecc_uncorrected",
        "remap_pending",
        "remap_failed",
        "fabric",
        "mig_mode",
        "nvlinks",
        "serial",
    }
    assert missing <= set(card.unsupported)
    assert missing <= set(card.unreadable)
    assert (card.pcie_gen, card.pcie_gen_max) == (1, 4)  # lower in idle


def test_a_field_that_fails_is_unreadable_and_not_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(
        h200(nvmlDeviceGetRemappedRows=nvml_error("Unknown"), nvmlDeviceGetSerial=nvml_error("NoPermission"))
    ).install(monkeypatch)
    card = gpu.read().gpus[0]
    assert card.remap_pending is None
    assert card.unreadable["remap_pending"] == card.unreadable["rows_remapped_correctable"] == "Unknown Error"
    assert card.unreadable["serial"] == "Insufficient Permissions"
    assert not {"remap_pending", "serial"} & set(card.unsupported)


@pytest.mark.parametrize("broken", [nvml_error("GpuIsLost"), nvml_error("Unknown"), h200(2).lost()])
def test_a_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: object) -> None:
    fake = FakeNvml(h200(0), h200(1), broken, h200(3)).install(monkeypatch)  # type: ignore[arg-type]
    facts = gpu.read(make_pci_devices(tmp_path, *PCI[:4]))
    assert [card.index for card in facts.gpus] == [0, 1, 3]
    assert len(facts.failed_gpus) == 1
    assert facts.failed_gpus[0].startswith("gpu2")
    assert (facts.installed_gpus, facts.unusable_pci_devices) == (4, (PCI[2],))
    assert len(facts.topology) == 3
    assert fake.open == 0


def test_a_gpu_lost_during_reading_is_listed_with_uuid_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(h200(0), h200(1, nvmlDeviceGetEccMode=nvml_error("GpuIsLost"))).install(monkeypatch)
    facts = gpu.read()
    assert [card.index for card in facts.gpus] == [0]
    assert facts.failed_gpus == ("gpu1 (GPU-10000000-aaaa-bbbb-cccc-000000000001, PCI 0000:1c:00.0): GPU is lost",)


def test_gpus_without_permission_are_not_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeNvml(h200(0), nvml_error("NoPermission"), h200(2), nvml_error("NoPermission")).install(monkeypatch)
    facts = gpu.read(make_pci_devices(tmp_path, *PCI[:4]))
    assert [card.index for card in facts.gpus] == [0, 2]
    assert facts.failed_gpus == ()
    assert facts.permission_denied == ("gpu1: Insufficient Permissions", "gpu3: Insufficient Permissions")
    assert facts.installed_gpus == 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("LibraryNotFound", "libnvidia-ml.so.1 not found"),
        ("DriverNotLoaded", "the NVIDIA kernel module is not loaded"),
        ("LibRmVersionMismatch", "different driver versions"),
        ("Unknown", "Unknown Error"),
    ],
)
def test_a_driver_that_fails_is_not_a_machine_without_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, text: str
) -> None:
    FakeNvml(init=nvml_error(kind)).install(monkeypatch)
    facts = gpu.read(make_pci_devices(tmp_path, *PCI[:2], driver=None))
    assert facts.gpus == ()
    assert text in (facts.nvml_unavailable or "")
    assert (facts.pci_devices, facts.installed_gpus, facts.unusable_pci_devices) == (PCI[:2], 2, PCI[:2])


def test_an_unreadable_gpu_count_makes_nvml_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeNvml(nvmlDeviceGetCount=nvml_error("Unknown")).install(monkeypatch)
    facts = gpu.read(make_pci_devices(tmp_path, PCI[0], device_nodes=False))
    assert facts.nvml_unavailable == "Unknown Error"
    assert (facts.installed_gpus, fake.open) == (1, 0)


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeNvml(init=nvml_error("LibraryNotFound")).install(monkeypatch)
    make_pci_devices(tmp_path, "0000:00:02.0", vendor="0x8086", kind="0x030000", driver="i915")
    make_pci_devices(tmp_path, "0000:00:1f.3", kind="0x040300", driver="snd_hda_intel")  # the GPU's audio function
    make_pci_devices(tmp_path, "0000:00:05.0", kind="0x068000", driver="nvidia-nvswitch")
    facts = gpu.read(tmp_path)
    assert (facts.pci_devices, facts.installed_gpus) == ((), 0)


def test_an_unreadable_pci_bus_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeNvml(h200()).install(monkeypatch)
    facts = gpu.read(tmp_path / "empty")
    assert facts.installed_gpus == 1
    assert "No such file" in facts.unreadable["pci_devices"]


@pytest.mark.parametrize(("folder", "readable"), [("sys/bus/pci/devices", True), ("sys/bus", True), ("sys", False)])
def test_detection_fails_if_neither_driver_nor_pci_bus_is_readable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, readable: bool
) -> None:
    FakeNvml(init=nvml_error("LibraryNotFound")).install(monkeypatch)
    (tmp_path / folder).mkdir(parents=True)
    facts = gpu.read(tmp_path)
    assert (facts.detection_error is None) == readable
    if not readable:
        assert "sys/bus: No such file" in (facts.detection_error or "")


def test_other_gpus_of_a_containers_host_are_not_assigned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeNvml(h200(0), h200(1)).install(monkeypatch)
    make_pci_devices(tmp_path, *PCI[:2])
    make_pci_devices(tmp_path, *PCI[2:7], device_nodes=False)
    make_pci_devices(tmp_path, PCI[7], driver="vfio-pci")
    facts = gpu.read(tmp_path)
    assert facts.not_assigned == PCI[2:]
    assert (facts.installed_gpus, facts.unusable_pci_devices) == (2, ())


def test_a_container_with_all_proc_entries_and_few_device_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FakeNvml(h200(0)).install(monkeypatch)
    make_pci_devices(tmp_path, *PCI[:2])
    (tmp_path / "dev/nvidia1").unlink()
    assert gpu.read(tmp_path).not_assigned == (PCI[1],)


@pytest.mark.parametrize("driver", ["nvidia", "nouveau", None])
def test_a_gpu_that_the_driver_does_not_list_is_not_usable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str | None
) -> None:
    FakeNvml(h200(0)).install(monkeypatch)
    make_pci_devices(tmp_path, PCI[0])
    make_pci_devices(tmp_path, PCI[1], driver=driver)
    facts = gpu.read(tmp_path)
    assert (facts.installed_gpus, facts.unusable_pci_devices, facts.not_assigned) == (2, (PCI[1],), ())


def test_pynvml_is_imported_late_and_a_missing_library_is_reported(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver")
    code = (
        "import sys; from pathlib import Path; from seatrial.discover import gpu\n"
        "assert 'pynvml' not in sys.modules and 'torch' not in sys.modules\n"
        f"print(gpu.read(Path({str(tmp_path)!r})).nvml_unavailable)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "libnvidia-ml.so.1 not found" in result.stdout


def test_the_fake_rejects_unexpected_calls() -> None:
    fake = FakeNvml(h200())
    with pytest.raises(real_pynvml.NVMLError_Uninitialized):
        fake.nvmlDeviceGetCount()
    fake.nvmlInit()
    with pytest.raises(AssertionError, match="pynvml has no nvmlDeviceGetWishes"):
        fake.nvmlDeviceGetWishes()
    with pytest.raises(AssertionError, match="nvmlDeviceGetFanSpeed"):
        fake.nvmlDeviceGetFanSpeed(h200())
    with pytest.raises(TypeError):
        fake.nvmlDeviceGetName()


class TestCudaVisible:
    def test_all_gpus_if_unset(self, four_gpus: GpuFacts) -> None:
        assert gpu.cuda_visible(four_gpus, {}) == four_gpus.gpus

    @pytest.mark.parametrize("value", ["", " ", "-1", "NoDevFiles"])
    def test_no_gpu(self, four_gpus: GpuFacts, value: str) -> None:
        assert gpu.cuda_visible(four_gpus, {"CUDA_VISIBLE_DEVICES": value}) == ()

    @pytest.mark.parametrize(
        ("value", "indices"),
        [
            ("0", [0]),
            ("2,0", [2, 0]),
            (" 3 , 1", [3, 1]),
            ("GPU-10000000-aaaa-bbbb-cccc-000000000001", [1]),
            ("GPU-2,GPU-0", [2, 0]),
            ("1,GPU-3", [1, 3]),
        ],
    )
    def test_the_order_of_the_list(self, four_gpus: GpuFacts, value: str, indices: list[int]) -> None:
        assert [card.index for card in gpu.cuda_visible(four_gpus, {"CUDA_VISIBLE_DEVICES": value})] == indices

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            ("0,7", "lists '7'"),
            ("0,-1,2", "lists '-1'"),
            ("0,,1", "lists ''"),
            ("0,1,", "lists ''"),
            ("1,1", "lists GPU 1 2 times"),
            ("1,GPU-1", "lists GPU 1 2 times"),
            ("GPU-9", "lists 'GPU-9'"),
            ("GPU-", "matches 4 UUIDs"),
            ("gpu0", "lists 'gpu0'"),
            ("1000", "lists '1000'"),
            ("MIG-6f8b41ff-0000", "MIG-6f8b41ff-0000"),
        ],
    )
    def test_a_wrong_entry_is_an_error_with_the_usable_gpus(
        self, four_gpus: GpuFacts, value: str, problem: str
    ) -> None:
        with pytest.raises(UsageError) as error:
            gpu.cuda_visible(four_gpus, {"CUDA_VISIBLE_DEVICES": value})
        text = str(error.value)
        assert f"CUDA_VISIBLE_DEVICES={value} " in text
        assert problem in text
        assert "3 (GPU-30000000-aaaa-bbbb-cccc-000000000003)" in text

    def test_the_error_lists_lost_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeNvml(h200(0), nvml_error("GpuIsLost")).install(monkeypatch)
        with pytest.raises(UsageError, match="not usable: gpu1: GPU is lost"):
            gpu.cuda_visible(gpu.read(), {"CUDA_VISIBLE_DEVICES": "0,1"})

    def test_the_error_has_the_reason_if_nvml_is_unavailable(self) -> None:
        with pytest.raises(UsageError, match="Usable GPUs: NVML: Driver Not Loaded"):
            gpu.cuda_visible(GpuFacts(nvml_unavailable="NVML: Driver Not Loaded"), {"CUDA_VISIBLE_DEVICES": "0"})


class TestCudaOrderWarning:
    def test_none_for_one_model(self, four_gpus: GpuFacts) -> None:
        assert gpu.cuda_order_warning(four_gpus, {}) is None

    def test_mixed_models_without_pci_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeNvml(geforce(0), h200(1)).install(monkeypatch)
        facts = gpu.read()
        assert "NVIDIA GeForce RTX 4090 and NVIDIA H200" in (gpu.cuda_order_warning(facts, {}) or "")
        assert gpu.cuda_order_warning(facts, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
        assert gpu.cuda_order_warning(facts, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) is None
