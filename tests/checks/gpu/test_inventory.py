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
from seatrial.checks.base import Context
from seatrial.checks.gpu.inventory import CHECK
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Verdict, worst
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
NEVER_A_PID = 2**22 + 1  # above the largest that Linux gives


class Trial:
    """Runs the check on a fake machine and judges it with its own rules, as a trial does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.monkeypatch = monkeypatch
        self.root = root

    def measure(self, fake: FakeNvml, promised: int | None = None) -> Measurement:
        fake.install(self.monkeypatch)
        context = Context(
            node="node3",
            rank=0,
            world_size=1,
            local_rank=0,
            device="cpu",
            expected_gpus=promised,
            artifacts_dir=self.root,
            run_dir=self.root,
            root=self.root,
        )
        return measure(CHECK, context, {})

    def judge(self, fake: FakeNvml, promised: int | None = None) -> dict[tuple[str, str], Verdict]:
        verdicts = judge_check(CHECK, [self.measure(fake, promised)], {}, "")
        return {(verdict.metric, verdict.subject): verdict for verdict in verdicts}

    def bad(self, *gpus: FakeGpu | Exception, promised: int | None = None) -> dict[tuple[str, str], Outcome]:
        """What does not pass, by metric and GPU (empty for the node)."""
        verdicts = self.judge(FakeNvml(*gpus), promised).items()
        return {
            (metric, subject.removeprefix("node3").removeprefix("/")): verdict.outcome
            for (metric, subject), verdict in verdicts
            if verdict.outcome not in (Outcome.PASS, Outcome.SKIP)
        }


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trial:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return Trial(monkeypatch, tmp_path)


def board(**third: Any) -> list[FakeGpu]:
    """Four H200, the third with other answers."""
    return [h200(0), h200(1), h200(2, **third), h200(3)]


def outcome_of(verdicts: dict[tuple[str, str], Verdict], metric: str) -> Outcome:
    return worst(verdict.outcome for (name, _), verdict in verdicts.items() if name == metric)


def test_the_check_is_in_the_catalog_and_declares_what_it_yields(trial: Trial) -> None:
    assert catalog()["gpu.inventory"] is CHECK
    found = trial.measure(FakeNvml(*board()), promised=4)
    assert {(metric.name, metric.unit) for metric in found.metrics} == set(CHECK.metrics.items())
    assert {rule.metric for rule in CHECK.rules} == set(CHECK.metrics)
    asked = {name for rule in CHECK.rules for name in rule.applies_if}
    assert asked <= set(found.facts)


def test_a_healthy_board_passes_every_rule(trial: Trial) -> None:
    make_pci_devices(trial.root, *PCI[:4])
    verdicts = trial.judge(FakeNvml(*board()), promised=4)
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.PASS}
    assert ("ecc_uncorrected", "node3/gpu3") in verdicts
    assert ("gpus_missing", "node3") in verdicts


def test_the_record_holds_the_whole_inventory(trial: Trial) -> None:
    facts = trial.measure(FakeNvml(*board())).facts
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
        {"nvmlDeviceGetComputeRunningProcesses_v3": processes((NEVER_A_PID, 2**29))},
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
def test_one_bad_gpu_is_found_and_named(trial: Trial, answers: dict[str, Any], metric: str, outcome: Outcome) -> None:
    assert trial.bad(*board(**answers)) == {(metric, "gpu2"): outcome}


@pytest.mark.parametrize(
    "answers",
    [
        {"nvmlDeviceGetCurrPcieLinkGeneration": 1},  # an idle GPU
        {"nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonSwPowerCap},
        {"nvmlDeviceGetRemappedRows": (10, 0, 0, 0)},
        {"nvmlDeviceGetMemoryInfo": memory(150754820096, used=2**30)},
        {"nvmlDeviceGetPowerManagementLimit": 650000, "nvmlDeviceGetEnforcedPowerLimit": 700000},
        {"nvmlDeviceGetGraphicsRunningProcesses_v3": processes((NEVER_A_PID, 2**20))},
        {"nvmlDeviceGetSerial": nvml_error("NoPermission")},
    ],
)
def test_what_is_normal_passes(trial: Trial, answers: dict[str, Any]) -> None:
    assert trial.bad(*board(**answers)) == {}


def test_links_down_among_active_ones(trial: Trial) -> None:
    assert trial.bad(*board(**links(18, down=[7, 8]))) == {
        ("nvlinks_down", "gpu2"): Outcome.FAIL,
        ("nvlinks_missing", "gpu2"): Outcome.WARN,
    }


@pytest.mark.parametrize(
    "answers", [links(18, down=range(18)), {"nvmlDeviceGetNvLinkState": nvml_error("NotSupported")}]
)
def test_all_links_of_one_gpu_of_a_switched_board_down(trial: Trial, answers: dict[str, Any]) -> None:
    assert trial.bad(*board(**answers)) == {
        ("nvlinks_down", "gpu2"): Outcome.FAIL,
        ("nvlinks_missing", "gpu2"): Outcome.WARN,
    }


def test_pcie_cards_without_a_bridge_are_no_fault(trial: Trial) -> None:
    bare = {
        "nvmlDeviceGetName": "NVIDIA A100 80GB PCIe",
        **links(12, down=range(12)),
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    verdicts = trial.judge(FakeNvml(h200(0, **bare), h200(1, **bare)))
    assert worst(verdict.outcome for verdict in verdicts.values()) is Outcome.PASS
    assert outcome_of(verdicts, "nvlinks_down") is Outcome.PASS
    assert outcome_of(verdicts, "fabric_ready") is Outcome.SKIP


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GB200"])
def test_a_board_with_every_link_down_is_not_taken_for_cards_without_a_bridge(trial: Trial, name: str) -> None:
    dark = {
        "nvmlDeviceGetName": name,
        **links(18, down=range(18)),
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    verdicts = trial.judge(FakeNvml(h200(0, **dark), h200(1, **dark)))
    (error,) = (verdict for verdict in verdicts.values() if verdict.outcome is Outcome.ERROR)
    assert "not measured: gpu0, gpu1 nvlinks_down: nothing here tells" in error.message
    assert "nvlinks_down" not in {metric for metric, _ in verdicts}


def test_a_board_with_every_link_down_that_knows_of_its_fabric_fails(trial: Trial) -> None:
    dark = {**links(18, down=range(18)), "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_STARTED)}
    verdicts = trial.judge(FakeNvml(h200(0, **dark), h200(1, **dark)))
    assert outcome_of(verdicts, "nvlinks_down") is Outcome.FAIL
    assert outcome_of(verdicts, "fabric_ready") is Outcome.FAIL


def test_links_that_do_not_say_what_they_lead_to(trial: Trial) -> None:
    """One GPU of a board is dark, and nothing tells what the others are joined to."""
    mute = {
        "nvmlDeviceGetNvLinkRemoteDeviceType": nvml_error("Unknown"),
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    dark = {**links(18, down=range(18)), **mute}
    found = trial.bad(h200(0, **mute), h200(1, **mute), h200(2, **dark))
    assert found == {("nvlinks_missing", "gpu2"): Outcome.WARN, ("nvlinks_down", "gpu2"): Outcome.FAIL}


def test_a_switched_board_of_before_fabric_states_has_none_to_judge(trial: Trial) -> None:
    answers = {"nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)}
    verdicts = trial.judge(FakeNvml(h200(0, **answers), h200(1, **answers)))
    assert outcome_of(verdicts, "fabric_ready") is Outcome.SKIP
    assert worst(verdict.outcome for verdict in verdicts.values()) is Outcome.PASS


def test_a_display_card_beside_a_board_has_no_fabric_to_join(trial: Trial) -> None:
    display = geforce(4, nvmlDeviceGetGpuFabricInfoV=fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED))
    assert trial.bad(*board(), display) == {("gpu_models", ""): Outcome.WARN}


def test_cards_bridged_in_pairs_with_one_left_over(trial: Trial) -> None:
    none = {
        "nvmlDeviceGetName": "NVIDIA H100 NVL",
        "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED),
    }
    paired = {**links(12, remote=real.NVML_NVLINK_DEVICE_TYPE_GPU), **none}
    alone = {**links(12, down=range(12)), **none}
    found = trial.bad(h200(0, **paired), h200(1, **paired), h200(2, **alone))
    assert found == {("nvlinks_missing", "gpu2"): Outcome.WARN}


def test_one_reading_that_fails_on_one_gpu_is_that_gpus_fault(trial: Trial) -> None:
    assert trial.bad(*board(nvmlDeviceGetRemappedRows=nvml_error("Unknown"))) == {
        ("readings_failed", "gpu2"): Outcome.FAIL
    }


def test_one_link_whose_state_fails_is_neither_up_nor_down(trial: Trial) -> None:
    healthy = links(18)["nvmlDeviceGetNvLinkState"]

    def state(link: int) -> int:
        if link == 4:
            raise nvml_error("Timeout")
        return int(healthy(link))

    assert trial.bad(*board(nvmlDeviceGetNvLinkState=state)) == {("readings_failed", "gpu2"): Outcome.FAIL}


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
def test_what_no_gpu_lets_us_read_is_an_error_never_a_pass(trial: Trial, call: str, metrics: set[str]) -> None:
    gpus = [h200(index, **{call: nvml_error("NoPermission")}) for index in range(2)]
    assert trial.bad(*gpus) == {("", ""): Outcome.ERROR}
    error = trial.measure(FakeNvml(*gpus)).error or ""
    assert all(f"gpu0, gpu1 {metric}: Insufficient Permissions" in error for metric in metrics)


def test_what_one_model_hides_is_not_known_from_another_model(trial: Trial) -> None:
    mute = h200(1, nvmlDeviceGetComputeRunningProcesses_v3=nvml_error("NoPermission"))
    assert trial.bad(geforce(0), mute) == {("gpu_models", ""): Outcome.WARN, ("", ""): Outcome.ERROR}


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
def test_a_driver_that_cannot_be_asked_is_an_error_that_says_so(
    trial: Trial, call: str, metric: str, kind: str
) -> None:
    fake = FakeNvml(*(h200(index, **{call: nvml_error(kind)}) for index in range(2)))
    verdicts = trial.judge(fake)
    (verdict,) = (found for found in verdicts.values() if found.outcome is Outcome.ERROR)
    assert f"gpu0, gpu1 {metric}: " in verdict.message
    assert f"the driver is too old for {call}" in verdict.message
    assert Outcome.FAIL not in {found.outcome for found in verdicts.values()}


def test_what_is_not_judged_may_be_beyond_the_driver(trial: Trial) -> None:
    assert trial.bad(h200(nvmlDeviceGetSerial=nvml_error("FunctionNotFound"))) == {}


def test_a_geforce_passes_and_skips_what_it_does_not_have(trial: Trial) -> None:
    make_pci_devices(trial.root, PCI[0])
    verdicts = trial.judge(FakeNvml(geforce()))
    skipped = {metric for (metric, _), verdict in verdicts.items() if verdict.outcome is Outcome.SKIP}
    assert skipped == {
        *("ecc_enabled", "ecc_uncorrected", "repair_pending", "remap_failed", "rows_remapped"),
        *("rows_remapped_uncorrectable", "nvlinks_down", "nvlinks_missing", "fabric_ready", "mig_enabled"),
    }
    assert {verdict.outcome for verdict in verdicts.values()} == {Outcome.PASS, Outcome.SKIP}


def test_a_gpu_before_row_remapping_has_its_pages_judged(trial: Trial) -> None:
    old: dict[str, Any] = {
        "nvmlDeviceGetRemappedRows": nvml_error("NotSupported"),
        "nvmlDeviceGetRetiredPages": [4096],
        "nvmlDeviceGetRetiredPagesPendingStatus": 1,
    }
    verdicts = trial.judge(FakeNvml(h200(**old)))
    assert outcome_of(verdicts, "repair_pending") is Outcome.FAIL
    assert outcome_of(verdicts, "rows_remapped") is Outcome.SKIP


def test_mixed_models_warn_and_are_judged_each_by_its_own_kind(trial: Trial) -> None:
    found = trial.bad(geforce(0), h200(1))
    assert found == {("gpu_models", ""): Outcome.WARN}
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(trial.measure(FakeNvml(geforce(0), h200(1))).facts["cuda_order"])


def test_what_one_gpu_has_not_and_others_have_is_told_of_it(trial: Trial) -> None:
    verdicts = trial.judge(FakeNvml(geforce(0), h200(1)))
    assert {place for (_, place), one in verdicts.items() if one.outcome is Outcome.SKIP} == {"node3/gpu0"}
    assert verdicts["ecc_enabled", "node3/gpu0"].message == "does not apply: this GPU has none"
    assert verdicts["ecc_enabled", "node3/gpu1"].outcome is Outcome.PASS
    refuses = trial.judge(FakeNvml(*board(nvmlDeviceGetRemappedRows=nvml_error("Unknown"))))
    assert refuses["rows_remapped", "node3/gpu2"].message.endswith("(Unknown Error), which readings_failed judges")
    assert refuses["readings_failed", "node3/gpu2"].outcome is Outcome.FAIL


def test_one_gpu_that_has_not_one_thing_is_excused_of_nothing_else(trial: Trial) -> None:
    found = trial.measure(FakeNvml(geforce(0), h200(1)))
    kept = tuple(one for one in found.metrics if (one.name, one.subject) != ("persistence", "node3/gpu0"))
    verdicts = judge_check(CHECK, [found.model_copy(update={"metrics": kept})], {}, "")
    (missing,) = (one.message for one in verdicts if one.outcome is Outcome.ERROR)
    assert missing == "persistence was not measured everywhere; not of 1 of 2: node3/gpu0"


def test_ecc_off_everywhere_warns_and_its_counts_do_not_apply(trial: Trial) -> None:
    off = {"nvmlDeviceGetEccMode": [0, 0], "nvmlDeviceGetTotalEccErrors": nvml_error("NotSupported")}
    verdicts = trial.judge(FakeNvml(h200(0, **off), h200(1, **off)))
    assert outcome_of(verdicts, "ecc_enabled") is Outcome.WARN
    assert outcome_of(verdicts, "ecc_uncorrected") is Outcome.SKIP


class TestMissing:
    def test_a_machine_without_gpus_is_skipped(self, trial: Trial) -> None:
        (trial.root / "sys/bus").mkdir(parents=True)
        found = trial.measure(FakeNvml(init=nvml_error("LibraryNotFound")))
        assert found.error is None
        assert (found.skipped or "").startswith("no NVIDIA GPU on this machine and none promised")

    def test_where_it_cannot_be_looked_for_it_is_not_skipped(self, trial: Trial) -> None:
        found = trial.measure(FakeNvml(init=nvml_error("LibraryNotFound")))
        assert "could not be detected" in (found.error or "")

    def test_a_promise_of_none_is_kept_by_none(self, trial: Trial) -> None:
        assert trial.measure(FakeNvml(init=nvml_error("LibraryNotFound")), promised=0).skipped

    @pytest.mark.parametrize("kind", ["LibraryNotFound", "DriverNotLoaded", "LibRmVersionMismatch"])
    @pytest.mark.parametrize("promised", [None, 0, 2])
    def test_a_dead_driver_fails(self, trial: Trial, kind: str, promised: int | None) -> None:
        make_pci_devices(trial.root, *PCI[:2], driver=None)
        found = trial.measure(FakeNvml(init=nvml_error(kind)), promised)
        verdicts = judge_check(CHECK, [found], {}, "")
        assert [(v.metric, v.outcome) for v in verdicts if v.outcome is not Outcome.SKIP] == [
            ("gpus_missing", Outcome.FAIL),
            ("gpus_hidden", Outcome.PASS),
        ]
        assert found.metrics[0].value == 2
        assert "NVML" in str(found.facts["nvml_unavailable"])

    def test_promised_and_absent_fails(self, trial: Trial) -> None:
        found = trial.measure(FakeNvml(init=nvml_error("LibraryNotFound")), promised=8)
        assert (found.metrics[0].name, found.metrics[0].value) == ("gpus_missing", 8)

    @pytest.mark.parametrize("broken", [nvml_error("GpuIsLost"), nvml_error("Unknown"), h200(2).lost()])
    @pytest.mark.parametrize("promised", [None, 2, 4])
    def test_a_lost_gpu_fails_and_the_others_are_judged(
        self, trial: Trial, broken: FakeGpu | Exception, promised: int | None
    ) -> None:
        assert trial.bad(h200(0), h200(1), broken, h200(3), promised=promised) == {("gpus_missing", ""): Outcome.FAIL}
        found = trial.measure(FakeNvml(h200(0), h200(1), broken, h200(3)), promised)
        assert (found.metrics[0].name, found.metrics[0].value) == ("gpus_missing", 1)
        assert "node3/gpu3" in {metric.subject for metric in found.metrics}

    def test_a_gpu_that_the_driver_did_not_start_fails_with_its_address(self, trial: Trial) -> None:
        make_pci_devices(trial.root, *PCI[:4])
        assert trial.bad(h200(0), h200(1), h200(2)) == {("gpus_missing", ""): Outcome.FAIL}
        assert trial.measure(FakeNvml(h200(0), h200(1), h200(2))).facts["pci_gpus_not_usable"] == [PCI[3]]

    def test_a_part_of_a_machine_is_whole_where_the_scheduler_promised_that_part(self, trial: Trial) -> None:
        make_pci_devices(trial.root, *PCI)
        assert trial.bad(*board(), promised=4) == {}

    def test_a_part_of_a_machine_in_a_container_is_whole(self, trial: Trial) -> None:
        make_pci_devices(trial.root, *PCI[:4])
        make_pci_devices(trial.root, *PCI[4:], device_nodes=False)
        assert trial.bad(*board()) == {}

    def test_gpus_denied_to_the_job_are_not_missing(self, trial: Trial) -> None:
        make_pci_devices(trial.root, *PCI[:4])
        assert trial.bad(h200(0), nvml_error("NoPermission"), h200(2), nvml_error("NoPermission")) == {}


class TestVisibleDevices:
    def test_gpus_outside_the_list_are_not_judged(self, trial: Trial) -> None:
        trial.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
        busy = {"nvmlDeviceGetComputeRunningProcesses_v3": processes((NEVER_A_PID, 2**33))}
        assert trial.bad(*board(**busy)) == {}
        assert trial.measure(FakeNvml(*board(**busy))).facts["gpus_used"] == [3, 1]

    @pytest.mark.parametrize("value", ["0,1", ""])
    def test_fewer_than_promised_fails(self, trial: Trial, value: str) -> None:
        trial.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert trial.bad(*board(), promised=4) == {("gpus_hidden", ""): Outcome.FAIL}

    def test_none_left_and_none_promised_says_only_that(self, trial: Trial) -> None:
        trial.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert trial.bad(*board()) == {}

    def test_a_wrong_entry_is_an_error_and_keeps_the_count(self, trial: Trial) -> None:
        trial.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9")
        found = trial.measure(FakeNvml(h200(0), nvml_error("GpuIsLost")))
        assert "lists '9'" in (found.error or "")
        assert found.metrics[0].value == 1
        verdicts = judge_check(CHECK, [found], {}, "")
        assert {verdict.outcome for verdict in verdicts} == {Outcome.ERROR, Outcome.FAIL}


class TestProcesses:
    @pytest.fixture
    def child(self) -> Iterator[int]:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        yield process.pid
        process.kill()
        process.wait()

    def test_ours_are_not_foreign(self, trial: Trial, child: int) -> None:
        own = processes((os.getpid(), 2**29), (child, 2**29))
        assert trial.bad(h200(nvmlDeviceGetComputeRunningProcesses_v3=own)) == {}

    def test_others_are_listed_with_name_and_memory(self, trial: Trial) -> None:
        others = processes((os.getppid(), 2**29), (NEVER_A_PID, None))
        found = trial.measure(FakeNvml(h200(nvmlDeviceGetComputeRunningProcesses_v3=others)))
        listed = found.facts["foreign_processes"]
        assert isinstance(listed, list)
        parent, invisible = listed
        assert isinstance(parent, dict)
        assert isinstance(invisible, dict)
        assert (parent["gpu"], parent["pid"], parent["memory"]) == (0, os.getppid(), 2**29)
        assert "not visible" not in str(parent["name"])
        assert (invisible["pid"], invisible["memory"]) == (NEVER_A_PID, None)
        assert "not visible from here" in str(invisible["name"])


def test_every_rule_says_why_and_what_to_do() -> None:
    for rule in CHECK.rules:
        assert len(rule.meaning) > 30
        assert len(rule.fix) > 30
        assert rule.expect is not None
