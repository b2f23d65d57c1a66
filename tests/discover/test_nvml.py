"""Fields and errors of one GPU through NVML."""

from __future__ import annotations

import pynvml as real
import pytest

from seatrial.discover import gpu
from seatrial.discover.nvml import GpuProcess, pci_address, read_fabric
from tests.fakes.nvml import FakeNvml, fabric, h200, links, nvml_error, processes


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0, ()),
        (real.nvmlClocksEventReasonSwPowerCap, ("software power cap",)),
        (
            real.nvmlClocksEventReasonHwSlowdown | real.nvmlClocksEventReasonHwThermalSlowdown,
            ("hardware slowdown", "hardware thermal slowdown"),
        ),
        (real.nvmlClocksEventReasonHwPowerBrakeSlowdown, ("hardware power brake",)),
        (real.nvmlClocksEventReasonSwThermalSlowdown, ("software thermal slowdown",)),
    ],
)
def test_names_of_clocks_event_reasons(monkeypatch: pytest.MonkeyPatch, mask: int, names: tuple[str, ...]) -> None:
    FakeNvml(h200(nvmlDeviceGetCurrentClocksEventReasons=mask)).install(monkeypatch)
    assert gpu.read().gpus[0].clocks_event_reasons == names


def test_a_link_with_unreadable_state_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    states = links(18)

    def state(link: int) -> int:
        if link == 5:
            raise nvml_error("Timeout")
        return int(states["nvmlDeviceGetNvLinkState"](link))

    FakeNvml(h200(nvmlDeviceGetNvLinkState=state)).install(monkeypatch)
    card = gpu.read().gpus[0]
    assert len(card.nvlinks) == 18
    assert card.nvlinks[5].active is None
    assert (card.nvlink_states_readable, card.active_nvlinks) == (False, 17)
    assert card.unreadable["nvlinks[5]"] == "Timeout"


def test_an_inactive_link_has_no_details(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(h200(**links(18, down=[3]))).install(monkeypatch)
    card = gpu.read().gpus[0]
    assert (card.active_nvlinks, card.nvlink_states_readable) == (17, True)
    assert (card.nvlinks[3].active, card.nvlinks[3].version) == (False, None)


def test_an_error_inside_a_field_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed_error(fields: list[tuple[int, int]]) -> object:
        values = (real.c_nvmlFieldValue_t * len(fields))()
        values[0].nvmlReturn = real.NVML_ERROR_NOT_SUPPORTED
        return values

    FakeNvml(h200(nvmlDeviceGetFieldValues=speed_error)).install(monkeypatch)
    card = gpu.read().gpus[0]
    assert card.nvlinks[0].speed_gb_s is None
    assert card.unreadable["nvlinks[0].speed"] == "Not Supported"


def test_fabric_states(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(
        h200(0, nvmlDeviceGetGpuFabricInfoV=fabric(real.NVML_GPU_FABRIC_STATE_IN_PROGRESS)),
        h200(1, nvmlDeviceGetGpuFabricInfoV=fabric(real.NVML_GPU_FABRIC_STATE_COMPLETED, status=999)),
        h200(2, nvmlDeviceGetGpuFabricInfoV=fabric(real.NVML_GPU_FABRIC_STATE_COMPLETED, health_mask=0b10_01_01)),
        h200(3, nvmlDeviceGetGpuFabricInfoV=fabric(17)),
    ).install(monkeypatch)
    in_progress, failed, degraded, unknown = (card.fabric for card in gpu.read().gpus)
    assert in_progress is not None
    assert in_progress.state == "in progress"
    assert failed is not None
    assert failed.status == 999
    assert degraded is not None
    assert degraded.problems == ("degraded bandwidth", "route recovery")
    assert unknown is None
    assert "17" in gpu.read().gpus[3].unreadable["fabric"]


UUID = bytes.fromhex("8f7d1a6e5c3b4d2f9a01b2c3d4e5f607")


def test_nvlink_domain_across_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    completed, in_progress = real.NVML_GPU_FABRIC_STATE_COMPLETED, real.NVML_GPU_FABRIC_STATE_IN_PROGRESS
    FakeNvml(
        h200(0),
        h200(1, nvmlDeviceGetGpuFabricInfoV=fabric(completed, uuid=UUID, clique=32766)),
        h200(2, nvmlDeviceGetGpuFabricInfoV=fabric(in_progress, uuid=UUID, clique=32766)),
        h200(3, nvmlDeviceGetGpuFabricInfoV=nvml_error("NotSupported")),
    ).install(monkeypatch)
    single_node, domain, not_ready, unsupported = (read_fabric(index) for index in range(4))
    assert single_node is not None
    assert (single_node.cluster_uuid, single_node.domain) == ("", "")
    assert domain is not None
    assert domain.domain == "8f7d1a6e-5c3b-4d2f-9a01-b2c3d4e5f607.32766"
    assert not_ready is not None
    assert not_ready.domain == ""
    assert unsupported is None


@pytest.mark.parametrize(("uuid", "problems"), [(UUID, ("no partition",)), (bytes(16), ())], ids=["NVL72", "HGX"])
def test_misconfiguration_counts_in_a_domain_across_nodes(
    monkeypatch: pytest.MonkeyPatch, uuid: bytes, problems: tuple[str, ...]
) -> None:
    health = real.NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NO_PARTITION << 8 | 0b10
    answer = fabric(real.NVML_GPU_FABRIC_STATE_COMPLETED, health_mask=health, uuid=uuid)
    FakeNvml(h200(nvmlDeviceGetGpuFabricInfoV=answer)).install(monkeypatch)
    registration = read_fabric(0)
    assert registration is not None
    assert registration.problems == problems


def test_graphics_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, graphics = processes((300, 2**30), (200, None)), processes((200, None), (100, 5))
    FakeNvml(
        h200(nvmlDeviceGetComputeRunningProcesses_v3=compute, nvmlDeviceGetGraphicsRunningProcesses_v3=graphics)
    ).install(monkeypatch)
    assert gpu.read().gpus[0].processes == (
        GpuProcess(pid=100, kind="graphics", memory=5),
        GpuProcess(pid=200, kind="graphics", memory=None),
        GpuProcess(pid=300, kind="compute", memory=2**30),
    )


def test_an_unreadable_process_list_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(h200(nvmlDeviceGetComputeRunningProcesses_v3=nvml_error("NoPermission"))).install(monkeypatch)
    card = gpu.read().gpus[0]
    assert card.processes is None
    assert card.unreadable["processes"] == "Insufficient Permissions"


def test_a_failed_shutdown_keeps_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise nvml_error("GpuIsLost")

    fake = FakeNvml(h200()).install(monkeypatch)
    monkeypatch.setattr(fake, "nvmlShutdown", fail, raising=False)
    assert len(gpu.read().gpus) == 1


def test_pci_addresses_have_the_format_of_sys() -> None:
    assert pci_address("00000000:1B:00.0") == "0000:1b:00.0"
    assert pci_address("00010000:C1:00.0") == "10000:c1:00.0"
