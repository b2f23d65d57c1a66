from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml as real
import pytest

from seatrial.checks import catalog
from seatrial.checks.check import Context
from seatrial.checks.gpu.inventory import CHECK
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Reason, Verdict, Why, worst
from seatrial.worker import measure
from tests.fakes.nvml import (
    FakeGpu,
    FakeNvml,
    fabric,
    geforce,
    h200,
    links,
    make_pci_devices,
    memory,
    nvml_error,
    processes,
)

PCI = tuple(f"0000:{0x1B + index:02x}:00.0" for index in range(8))
UNUSED_PID = 2**22 + 1  # above the maximum of Linux


class InventoryRunner:
    """Runs the check on a fake machine and judges it with its rules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.monkeypatch = monkeypatch
        self.root = root

    def measure(self, fake: FakeNvml, expected: int | None = None) -> Measurement:
        fake.install(self.monkeypatch)
        context = Context(
            node="node3",
            rank=0,
            world_size=1,
            local_rank=0,
            device="cpu",
            expected_gpus=expected,
            artifacts_dir=self.root,
            run_dir=self.root,
            root=self.root,
        )
        return measure(CHECK, context, {})

    def judge(self, fake: FakeNvml, expected: int | None = None) -> dict[tuple[str, str], Verdict]:
        verdicts = judge_check(CHECK, [self.measure(fake, expected)], {}, "")
        return {(verdict.metric, verdict.subject): verdict for verdict in verdicts}

    def not_passed(self, *gpus: FakeGpu | Exception, expected: int | None = None) -> dict[tuple[str, str], Outcome]:
        """Return outcomes other than PASS and SKIP by metric and GPU (empty for the node)."""
        verdicts = self.judge(FakeNvml(*gpus), expected).items()
        return {
            (metric, subject.removeprefix("node3").removeprefix("/")): verdict.outcome
            for (metric, subject), verdict in verdicts
            if verdict.outcome not in (Outcome.PASS, Outcome.SKIP)
        }


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> InventoryRunner:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return InventoryRunner(monkeypatch, tmp_path)


def board(**third: Any) -> list[FakeGpu]:
    """Return four H200; ``third`` replaces answers of the third."""
    return [h200(0), h200(1), h200(2, **third), h200(3)]


def outcome_of(verdicts: dict[tuple[str, str], Verdict], metric: str) -> Outcome:
    return worst(verdict.outcome for (name, _), verdict in verdicts.items() if name == metric)


def test_declaration(runner: InventoryRunner) -> None:
    assert catalog()["gpu.inventory"] is CHECK
    measurement = runner.measure(FakeNvml(*board()), expected=4)
    assert {(metric.name, metric.unit) for metric in measurement.metrics} == set(CHECK.units.items())
    assert measurement.absent == ()
    assert {rule.metric for rule in CHECK.rules} == set(CHECK.units)
    assert {each.name for each in CHECK.declared if each.per is None} == {"gpus_missing", "gpus_hidden", "gpu_models"}


def test_healthy_board(runner: InventoryRunner) -> None:
    make_pci_devices(runner.root, *PCI[:4])
    verdicts = runner.judge(FakeNvml(*board()), expected=4)
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.PASS}
    assert ("ecc_uncorrected", "node3/gpu3") in verdicts
    assert ("gpus_missing", "node3") in verdicts


def test_facts(runner: InventoryRunner) -> None:
    facts = runner.measure(FakeNvml(*board())).facts
    assert facts["driver"] == "580.159.04"
    assert facts["topology"] == [["X" if a == b else "NV18" for b in range(4)] for a in range(4)]
    gpus = facts["gpus"]
    assert isinstance(gpus, list)
    assert len(gpus) == 4
    assert isinstance(gpus[0], dict)
    assert gpus[0]["uuid"] == "GPU-00000000-aaaa-bbbb-cccc-000000000000"
    assert "nvml_unavailable" not in facts


BAD_GPU = [
    ({"nvmlDeviceGetTotalEccErrors": 1}, "ecc_uncorrected", Outcome.FAIL),
    ({"nvmlDeviceGetEccMode": [0, 0]}, "ecc_enabled", Outcome.WARN),
    ({"nvmlDeviceGetRemappedRows": (1, 0, 1, 0)}, "repair_pending", Outcome.FAIL),
    ({"nvmlDeviceGetRemappedRows": (1, 0, 0, 1)}, "remap_failed", Outcome.FAIL),
    ({"nvmlDeviceGetRemappedRows": (11, 0, 0, 0)}, "rows_remapped", Outcome.FAIL),
    ({"nvmlDeviceGetRemappedRows": (0, 2, 0, 0)}, "rows_remapped_uncorrectable", Outcome.WARN),
    ({"nvmlDeviceGetCurrPcieLinkWidth": 8}, "pcie_width_lost", Outcome.FAIL),
    ({"nvmlDeviceGetPersistenceMode": 0}, "persistence", Outcome.WARN),
    ({"nvmlDeviceGetMigMode": [1, 1]}, "mig_enabled", Outcome.WARN),
    ({"nvmlDeviceGetEnforcedPowerLimit": 500000}, "power_limit_reduced", Outcome.WARN),
    ({"nvmlDeviceGetMemoryInfo": memory(150754820096, used=2**30 + 1)}, "memory_used_bytes", Outcome.WARN),
    (
        {"nvmlDeviceGetComputeRunningProcesses_v3": processes((UNUSED_PID, 2**29))},
        "foreign_processes",
        Outcome.FAIL,
    ),
    (
        {"nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_IN_PROGRESS)},
        "fabric_ready",
        Outcome.FAIL,
    ),
    (
        {"nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_COMPLETED, status=999)},
        "fabric_ready",
        Outcome.FAIL,
    ),
    (
        {"nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_COMPLETED, health_mask=1)},
        "fabric_ready",
        Outcome.FAIL,
    ),
    (
        {"nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)},
        "fabric_ready",
        Outcome.FAIL,
    ),
    (
        {"nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonHwSlowdown},
        "hardware_slowdown",
        Outcome.FAIL,
    ),
    (
        {"nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonHwThermalSlowdown},
        "hardware_slowdown",
        Outcome.FAIL,
    ),
    (
        {"nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonHwPowerBrakeSlowdown},
        "hardware_slowdown",
        Outcome.FAIL,
    ),
    (
        {"nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonSwThermalSlowdown},
        "thermal_slowdown",
        Outcome.WARN,
    ),
]


@pytest.mark.parametrize(("answers", "metric", "outcome"), BAD_GPU)
def test_one_bad_gpu(runner: InventoryRunner, answers: dict[str, Any], metric: str, outcome: Outcome) -> None:
    assert runner.not_passed(*board(**answers)) == {(metric, "gpu2"): outcome}


@pytest.mark.parametrize(
    "answers",
    [
        {"nvmlDeviceGetCurrPcieLinkGeneration": 1},  # idle
        {"nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonSwPowerCap},
        {"nvmlDeviceGetRemappedRows": (10, 0, 0, 0)},
        {"nvmlDeviceGetMemoryInfo": memory(150754820096, used=2**30)},
        {"nvmlDeviceGetPowerManagementLimit": 650000, "nvmlDeviceGetEnforcedPowerLimit": 700000},
        {"nvmlDeviceGetGraphicsRunningProcesses_v3": processes((UNUSED_PID, 2**20))},
        {"nvmlDeviceGetSerial": nvml_error("NoPermission")},
    ],
)
def test_normal_states_pass(runner: InventoryRunner, answers: dict[str, Any]) -> None:
    assert runner.not_passed(*board(**answers)) == {}


def test_some_nvlinks_down(runner: InventoryRunner) -> None:
    assert runner.not_passed(*board(**links(18, down=[7, 8]))) == {
        ("nvlinks_down", "gpu2"): Outcome.FAIL,
        ("nvlinks_missing", "gpu2"): Outcome.WARN,
    }


@pytest.mark.parametrize(
    "answers", [links(18, down=range(18)), {"nvmlDeviceGetNvLinkState": nvml_error("NotSupported")}]
)
def test_all_nvlinks_of_one_gpu_down(runner: InventoryRunner, answers: dict[str, Any]) -> None:
    assert runner.not_passed(*board(**answers)) == {
        ("nvlinks_down", "gpu2"): Outcome.FAIL,
        ("nvlinks_missing", "gpu2"): Outcome.WARN,
    }


@pytest.mark.parametrize("name", ["NVIDIA A100 80GB PCIe", "NVIDIA A800 40GB Active"])
def test_pcie_gpus_without_bridge_pass(runner: InventoryRunner, name: str) -> None:
    no_bridge = {
        "nvmlDeviceGetName": name,
        **links(12, down=range(12)),
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    verdicts = runner.judge(FakeNvml(h200(0, **no_bridge), h200(1, **no_bridge)))
    assert worst(verdict.outcome for verdict in verdicts.values()) is Outcome.PASS
    assert outcome_of(verdicts, "nvlinks_down") is Outcome.PASS
    assert outcome_of(verdicts, "fabric_ready") is Outcome.SKIP


@pytest.mark.parametrize(("more_down", "outcome"), [((), Outcome.PASS), ((0,), Outcome.FAIL)])
def test_bridges_of_hopper_cards_use_12_of_18_ports(
    runner: InventoryRunner, more_down: tuple[int, ...], outcome: Outcome
) -> None:
    bridged = {
        "nvmlDeviceGetName": "NVIDIA H100 NVL",
        **links(18, down=(4, 5, 10, 11, 16, 17, *more_down), remote=real.NVML_NVLINK_DEVICE_TYPE_GPU),
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    verdicts = runner.judge(FakeNvml(h200(0, **bridged), h200(1, **bridged)))
    assert worst(verdict.outcome for verdict in verdicts.values()) is outcome
    assert outcome_of(verdicts, "nvlinks_down") is outcome


def test_a_single_gpu_needs_no_nvlink(runner: InventoryRunner) -> None:
    alone = {
        "nvmlDeviceGetName": "NVIDIA GH200 480GB",
        **links(18, down=range(18)),
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    verdicts = runner.judge(FakeNvml(h200(0, **alone)))
    assert worst(verdict.outcome for verdict in verdicts.values()) is Outcome.PASS


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GB200"])
def test_all_nvlinks_of_a_board_down_is_an_error(runner: InventoryRunner, name: str) -> None:
    links_down = {
        "nvmlDeviceGetName": name,
        **links(18, down=range(18)),
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    verdicts = runner.judge(FakeNvml(h200(0, **links_down), h200(1, **links_down)))
    (error,) = (verdict for verdict in verdicts.values() if verdict.outcome is Outcome.ERROR)
    assert (error.metric, error.subject, error.reasons) == ("nvlinks_down", "node3", (Reason.METRIC_PARTLY_MISSING,))
    assert "all links may be down" in error.detail


def test_all_nvlinks_of_a_board_with_fabric_down(runner: InventoryRunner) -> None:
    links_down = {
        **links(18, down=range(18)),
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_STARTED),
    }
    verdicts = runner.judge(FakeNvml(h200(0, **links_down), h200(1, **links_down)))
    assert outcome_of(verdicts, "nvlinks_down") is Outcome.FAIL
    assert outcome_of(verdicts, "fabric_ready") is Outcome.FAIL


def test_unknown_remote_devices(runner: InventoryRunner) -> None:
    """All links of one GPU are down, and the remote devices of the others are unknown."""
    unknown_remotes = {
        "nvmlDeviceGetNvLinkRemoteDeviceType": nvml_error("Unknown"),
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    links_down = {**links(18, down=range(18)), **unknown_remotes}
    outcomes = runner.not_passed(h200(0, **unknown_remotes), h200(1, **unknown_remotes), h200(2, **links_down))
    assert outcomes == {("nvlinks_missing", "gpu2"): Outcome.WARN, ("nvlinks_down", "gpu2"): Outcome.FAIL}


def test_board_without_fabric_state(runner: InventoryRunner) -> None:
    answers = {"nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)}
    verdicts = runner.judge(FakeNvml(h200(0, **answers), h200(1, **answers)))
    assert outcome_of(verdicts, "fabric_ready") is Outcome.SKIP
    assert worst(verdict.outcome for verdict in verdicts.values()) is Outcome.PASS


def test_display_gpu_needs_no_fabric(runner: InventoryRunner) -> None:
    display = geforce(4, nvmlDeviceGetGpuFabricInfoV=fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED))
    assert runner.not_passed(*board(), display) == {("gpu_models", ""): Outcome.WARN}


def test_bridged_pair_and_single_gpu(runner: InventoryRunner) -> None:
    no_fabric = {
        "nvmlDeviceGetName": "NVIDIA H100 NVL",
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    bridged = {**links(12, remote=real.NVML_NVLINK_DEVICE_TYPE_GPU), **no_fabric}
    single = {**links(12, down=range(12)), **no_fabric}
    outcomes = runner.not_passed(h200(0, **bridged), h200(1, **bridged), h200(2, **single))
    assert outcomes == {("nvlinks_missing", "gpu2"): Outcome.WARN}


def test_failed_reading_of_one_gpu(runner: InventoryRunner) -> None:
    assert runner.not_passed(*board(nvmlDeviceGetRemappedRows=nvml_error("Unknown"))) == {
        ("readings_failed", "gpu2"): Outcome.FAIL
    }


def test_failed_reading_of_one_nvlink(runner: InventoryRunner) -> None:
    healthy = links(18)["nvmlDeviceGetNvLinkState"]

    def state(link: int) -> int:
        if link == 4:
            raise nvml_error("Timeout")
        return int(healthy(link))

    assert runner.not_passed(*board(nvmlDeviceGetNvLinkState=state)) == {("readings_failed", "gpu2"): Outcome.FAIL}


@pytest.mark.parametrize(
    ("call", "metrics"),
    [
        ("nvmlDeviceGetTotalEccErrors", {"ecc_uncorrected"}),
        ("nvmlDeviceGetNvLinkState", {"nvlinks_down", "nvlinks_missing"}),
        ("nvmlDeviceGetComputeRunningProcesses_v3", {"foreign_processes"}),
        ("nvmlDeviceGetGpuFabricInfoV", {"fabric_ready"}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {"hardware_slowdown", "thermal_slowdown"}),
    ],
)
def test_reading_that_fails_on_all_gpus_is_an_error(runner: InventoryRunner, call: str, metrics: set[str]) -> None:
    gpus = [h200(index, **{call: nvml_error("NoPermission")}) for index in range(2)]
    assert runner.not_passed(*gpus) == {(metric, ""): Outcome.ERROR for metric in metrics}
    unreadable = {(each.metric, each.subject, each.why) for each in runner.measure(FakeNvml(*gpus)).absent}
    subjects = ("node3/gpu0", "node3/gpu1")
    assert unreadable == {(metric, subject, Why.UNREADABLE) for metric in metrics for subject in subjects}


def test_failed_reading_without_a_gpu_of_the_same_model_is_an_error(runner: InventoryRunner) -> None:
    unreadable = h200(1, nvmlDeviceGetComputeRunningProcesses_v3=nvml_error("NoPermission"))
    assert runner.not_passed(geforce(0), unreadable) == {
        ("gpu_models", ""): Outcome.WARN,
        ("foreign_processes", ""): Outcome.ERROR,
    }


@pytest.mark.parametrize("kind", ["FunctionNotFound", "ArgumentVersionMismatch", "Deprecated"])
@pytest.mark.parametrize(
    ("call", "metric"),
    [
        ("nvmlDeviceGetTotalEccErrors", "ecc_uncorrected"),
        ("nvmlDeviceGetRemappedRows", "repair_pending"),
        ("nvmlDeviceGetRemappedRows", "rows_remapped"),
        ("nvmlDeviceGetNvLinkState", "nvlinks_down"),
        ("nvmlDeviceGetGpuFabricInfoV", "fabric_ready"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "hardware_slowdown"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "foreign_processes"),
        ("nvmlDeviceGetPersistenceMode", "persistence"),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
    ],
)
def test_old_driver_is_an_error(runner: InventoryRunner, call: str, metric: str, kind: str) -> None:
    fake = FakeNvml(*(h200(index, **{call: nvml_error(kind)}) for index in range(2)))
    verdicts = runner.judge(fake)
    errors = {verdict.metric: verdict for verdict in verdicts.values() if verdict.outcome is Outcome.ERROR}
    assert metric in errors
    assert all(call in verdict.detail for verdict in errors.values())
    assert Outcome.FAIL not in {verdict.outcome for verdict in verdicts.values()}


def test_unjudged_reading_may_fail(runner: InventoryRunner) -> None:
    assert runner.not_passed(h200(nvmlDeviceGetSerial=nvml_error("FunctionNotFound"))) == {}


def test_geforce_skips_unsupported_features(runner: InventoryRunner) -> None:
    make_pci_devices(runner.root, PCI[0])
    verdicts = runner.judge(FakeNvml(geforce()))
    skipped = {metric for (metric, _), verdict in verdicts.items() if verdict.outcome is Outcome.SKIP}
    assert skipped == {
        *("ecc_enabled", "ecc_uncorrected", "repair_pending", "remap_failed", "rows_remapped"),
        *("rows_remapped_uncorrectable", "nvlinks_down", "nvlinks_missing", "fabric_ready", "mig_enabled"),
    }
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.PASS, Outcome.SKIP}


def test_retired_pages_of_a_gpu_without_row_remapping(runner: InventoryRunner) -> None:
    pages: dict[str, Any] = {
        "nvmlDeviceGetRemappedRows": nvml_error("NotSupported"),
        "nvmlDeviceGetRetiredPages": [4096],
        "nvmlDeviceGetRetiredPagesPendingStatus": 1,
    }
    verdicts = runner.judge(FakeNvml(h200(**pages)))
    assert outcome_of(verdicts, "repair_pending") is Outcome.FAIL
    assert outcome_of(verdicts, "rows_remapped") is Outcome.SKIP


def test_mixed_models_are_a_warning(runner: InventoryRunner) -> None:
    outcomes = runner.not_passed(geforce(0), h200(1))
    assert outcomes == {("gpu_models", ""): Outcome.WARN}
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(runner.measure(FakeNvml(geforce(0), h200(1))).facts["cuda_order"])


def test_feature_that_only_some_gpus_support(runner: InventoryRunner) -> None:
    verdicts = runner.judge(FakeNvml(geforce(0), h200(1)))
    assert {subject for (_, subject), verdict in verdicts.items() if verdict.outcome is Outcome.SKIP} == {"node3/gpu0"}
    assert verdicts["ecc_enabled", "node3/gpu0"].reasons == (Reason.NOT_APPLICABLE,)
    assert "does not report ecc mode" in verdicts["ecc_enabled", "node3/gpu0"].detail
    assert verdicts["ecc_enabled", "node3/gpu1"].outcome is Outcome.PASS
    failed = runner.judge(FakeNvml(*board(nvmlDeviceGetRemappedRows=nvml_error("Unknown"))))
    assert failed["rows_remapped", "node3/gpu2"].outcome is Outcome.SKIP
    assert "Unknown Error" in failed["rows_remapped", "node3/gpu2"].detail
    assert failed["readings_failed", "node3/gpu2"].outcome is Outcome.FAIL


def test_absent_metrics_do_not_cover_other_metrics(runner: InventoryRunner) -> None:
    measurement = runner.measure(FakeNvml(geforce(0), h200(1)))
    metrics = tuple(
        metric for metric in measurement.metrics if (metric.name, metric.subject) != ("persistence", "node3/gpu0")
    )
    verdicts = judge_check(CHECK, [measurement.model_copy(update={"metrics": metrics})], {}, "")
    (missing,) = (verdict for verdict in verdicts if verdict.outcome is Outcome.ERROR)
    assert (missing.metric, missing.reasons) == ("persistence", (Reason.METRIC_PARTLY_MISSING,))
    assert "node3/gpu0" in missing.message


def test_ecc_off(runner: InventoryRunner) -> None:
    off = {"nvmlDeviceGetEccMode": [0, 0], "nvmlDeviceGetTotalEccErrors": nvml_error("NotSupported")}
    verdicts = runner.judge(FakeNvml(h200(0, **off), h200(1, **off)))
    assert outcome_of(verdicts, "ecc_enabled") is Outcome.WARN
    assert outcome_of(verdicts, "ecc_uncorrected") is Outcome.SKIP


class TestMissing:
    def test_machine_without_gpus(self, runner: InventoryRunner) -> None:
        (runner.root / "sys/bus").mkdir(parents=True)
        measurement = runner.measure(FakeNvml(init=nvml_error("LibraryNotFound")))
        assert measurement.error is None
        assert (measurement.skipped or "").startswith("no NVIDIA GPU on this machine, and --gpus-per-node is not set")

    def test_failed_detection_is_an_error(self, runner: InventoryRunner) -> None:
        measurement = runner.measure(FakeNvml(init=nvml_error("LibraryNotFound")))
        assert measurement.error
        assert measurement.skipped is None

    def test_zero_expected_gpus(self, runner: InventoryRunner) -> None:
        skipped = runner.measure(FakeNvml(init=nvml_error("LibraryNotFound")), expected=0).skipped
        assert "--gpus-per-node is 0" in (skipped or "")

    @pytest.mark.parametrize("kind", ["LibraryNotFound", "DriverNotLoaded", "LibRmVersionMismatch"])
    @pytest.mark.parametrize("expected", [None, 0, 2])
    def test_driver_failure(self, runner: InventoryRunner, kind: str, expected: int | None) -> None:
        make_pci_devices(runner.root, *PCI[:2], driver=None)
        measurement = runner.measure(FakeNvml(init=nvml_error(kind)), expected)
        verdicts = judge_check(CHECK, [measurement], {}, "")
        assert [(verdict.metric, verdict.outcome) for verdict in verdicts if verdict.outcome is not Outcome.SKIP] == [
            ("gpus_missing", Outcome.FAIL),
            ("gpus_hidden", Outcome.PASS),
        ]
        assert measurement.metrics[0].value == 2
        assert "NVML" in str(measurement.facts["nvml_unavailable"])
        assert "nvml_unavailable: " in verdicts[0].evidence  # the fact of the cause driver_unusable

    def test_expected_gpus_missing(self, runner: InventoryRunner) -> None:
        measurement = runner.measure(FakeNvml(init=nvml_error("LibraryNotFound")), expected=8)
        assert (measurement.metrics[0].name, measurement.metrics[0].value) == ("gpus_missing", 8)

    @pytest.mark.parametrize("broken", [nvml_error("GpuIsLost"), nvml_error("Unknown"), h200(2).lost()])
    @pytest.mark.parametrize("expected", [None, 2, 4])
    def test_lost_gpu(self, runner: InventoryRunner, broken: FakeGpu | Exception, expected: int | None) -> None:
        assert runner.not_passed(h200(0), h200(1), broken, h200(3), expected=expected) == {
            ("gpus_missing", ""): Outcome.FAIL
        }
        measurement = runner.measure(FakeNvml(h200(0), h200(1), broken, h200(3)), expected)
        assert (measurement.metrics[0].name, measurement.metrics[0].value) == ("gpus_missing", 1)
        assert "node3/gpu3" in {metric.subject for metric in measurement.metrics}

    def test_gpu_that_the_driver_did_not_start(self, runner: InventoryRunner) -> None:
        make_pci_devices(runner.root, *PCI[:4])
        assert runner.not_passed(h200(0), h200(1), h200(2)) == {("gpus_missing", ""): Outcome.FAIL}
        assert runner.measure(FakeNvml(h200(0), h200(1), h200(2))).facts["pci_gpus_not_usable"] == [PCI[3]]

    def test_expected_part_of_a_machine(self, runner: InventoryRunner) -> None:
        make_pci_devices(runner.root, *PCI)
        assert runner.not_passed(*board(), expected=4) == {}

    def test_part_of_a_machine_in_a_container(self, runner: InventoryRunner) -> None:
        make_pci_devices(runner.root, *PCI[:4])
        make_pci_devices(runner.root, *PCI[4:], device_nodes=False)
        assert runner.not_passed(*board()) == {}

    def test_gpus_without_permission_are_not_missing(self, runner: InventoryRunner) -> None:
        make_pci_devices(runner.root, *PCI[:4])
        assert runner.not_passed(h200(0), nvml_error("NoPermission"), h200(2), nvml_error("NoPermission")) == {}


class TestVisibleDevices:
    def test_unlisted_gpus_are_not_judged(self, runner: InventoryRunner) -> None:
        runner.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
        busy = {"nvmlDeviceGetComputeRunningProcesses_v3": processes((UNUSED_PID, 2**33))}
        assert runner.not_passed(*board(**busy)) == {}
        assert runner.measure(FakeNvml(*board(**busy))).facts["gpus_used"] == [3, 1]

    @pytest.mark.parametrize("value", ["0,1", ""])
    def test_fewer_than_expected(self, runner: InventoryRunner, value: str) -> None:
        runner.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert runner.not_passed(*board(), expected=4) == {("gpus_hidden", ""): Outcome.FAIL}

    def test_empty_list(self, runner: InventoryRunner) -> None:
        runner.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert runner.not_passed(*board()) == {}
        absent = runner.measure(FakeNvml(*board())).absent
        assert {each.metric for each in absent} == CHECK.units.keys() - {"gpus_missing", "gpus_hidden"}
        assert {(each.why, each.subject) for each in absent} == {(Why.DOES_NOT_APPLY, "")}

    def test_invalid_entry(self, runner: InventoryRunner) -> None:
        runner.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9")
        measurement = runner.measure(FakeNvml(h200(0), nvml_error("GpuIsLost")))
        assert "lists '9'" in (measurement.error or "")
        assert measurement.metrics[0].value == 1
        verdicts = judge_check(CHECK, [measurement], {}, "")
        assert {verdict.outcome for verdict in verdicts} == {Outcome.ERROR, Outcome.FAIL}


class TestProcesses:
    @pytest.fixture
    def child(self) -> Iterator[int]:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        yield process.pid
        process.kill()
        process.wait()

    def test_processes_of_seatrial_are_not_foreign(self, runner: InventoryRunner, child: int) -> None:
        seatrial_processes = processes((os.getpid(), 2**29), (child, 2**29))
        assert runner.not_passed(h200(nvmlDeviceGetComputeRunningProcesses_v3=seatrial_processes)) == {}

    def test_foreign_processes_have_name_and_memory(self, runner: InventoryRunner) -> None:
        others = processes((os.getppid(), 2**29), (UNUSED_PID, None))
        measurement = runner.measure(FakeNvml(h200(nvmlDeviceGetComputeRunningProcesses_v3=others)))
        listed = measurement.facts["foreign_processes"]
        assert isinstance(listed, list)
        assert [each.evidence for each in measurement.metrics if each.name == "foreign_processes"] == [listed]
        parent, invisible = listed
        assert isinstance(parent, dict)
        assert isinstance(invisible, dict)
        assert (parent["gpu"], parent["pid"], parent["memory"]) == (0, os.getppid(), 2**29)
        assert "not visible" not in str(parent["name"])
        assert (invisible["pid"], invisible["memory"]) == (UNUSED_PID, None)
        assert "not visible" in str(invisible["name"])


def test_every_rule_has_meaning_and_fix() -> None:
    for rule in CHECK.rules:
        assert len(rule.meaning) > 30
        assert len(rule.fix) > 30
        assert rule.threshold is not None
