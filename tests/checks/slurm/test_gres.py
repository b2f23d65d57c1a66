from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.check import Context
from seatrial.checks.slurm.gres import CHECK
from seatrial.model import Measurement, Outcome, Why
from seatrial.worker import measure
from tests.fakes.nvml import FakeNvml, h200, nvml_error
from tests.fakes.slurm import NEWER_NODES, FakeSlurm, Reply, failure, judge, not_passed, reasons, recorded, success

NODE = """\
NodeName=gpu1 Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv=64 CPUTot=64 CPULoad=0.25
   Gres={gres}
   NodeAddr=10.0.0.1 NodeHostName=gpu1 Version=22.05.8
   RealMemory=8000 AllocMem=0 FreeMem=22488 Sockets=2 Boards=1
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=gpu
"""
Replies = Mapping[str, Reply]
NONE: Replies = {}
MISSING, UNLISTED = "gpus_missing gpu1", "gpus_not_configured gpu1"


class Machine:
    """A node with the Slurm name gpu1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.folder = folder
        self.name = "gpu1.cluster.example"
        self.job: dict[str, str] = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "gpu1", "SLURM_GPUS_ON_NODE": "2"}

    def measure(self, gres: str, *gpus: Any, expected: int | None = 2, replies: Replies = NONE) -> Measurement:
        for name, value in self.job.items():
            self.monkeypatch.setenv(name, value)
        FakeNvml(*gpus, init=None if gpus else nvml_error("LibraryNotFound")).install(self.monkeypatch)
        show_node = {"scontrol show node gpu1": success(NODE.format(gres=gres))}
        FakeSlurm({**show_node, **replies}).install(self.monkeypatch)
        context = Context(
            node=self.name,
            rank=0,
            world_size=1,
            local_rank=0,
            device="cpu",
            expected_gpus=expected,
            artifacts_dir=self.folder,
            run_dir=self.folder,
            root=self.folder,
        )
        return measure(CHECK, context, {})

    def not_passed(self, gres: str, *gpus: Any, expected: int | None = 2) -> dict[str, Outcome]:
        outcomes = not_passed(judge(CHECK, self.measure(gres, *gpus, expected=expected)))
        return {key.removesuffix(".cluster.example"): outcome for key, outcome in outcomes.items()}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    return Machine(monkeypatch, tmp_path)


def test_gpu_counts_match(machine: Machine) -> None:
    measurement = machine.measure("gpu:h200:2(S:0-1)", h200(0), h200(1))
    assert not_passed(judge(CHECK, measurement)) == {}
    assert {metric.name for metric in measurement.metrics} == set(CHECK.units)


def evidence(measurement: Measurement) -> Any:
    """The evidence of gpus_missing."""
    return next(metric.evidence for metric in measurement.metrics if metric.name == "gpus_missing")


def test_evidence_has_both_counts(machine: Machine) -> None:
    assert evidence(machine.measure("gpu:h200:2", h200(0))) == {
        "configured": "2 GPUs by Slurm",
        "detected": "1 GPUs by NVML",
        "gres": "gpu:h200:2",
        "models": ["NVIDIA H200"],
        "nvml_unavailable": None,
        "gpus_lost": [],
    }


def test_no_driver(machine: Machine) -> None:
    assert machine.not_passed("gpu:h200:2") == {MISSING: Outcome.FAIL}
    measurement = machine.measure("gpu:h200:2")
    assert "libnvidia-ml" in str(measurement.facts["nvml_unavailable"])
    assert evidence(measurement)["nvml_unavailable"] == measurement.facts["nvml_unavailable"]


def test_gpus_not_configured(machine: Machine) -> None:
    measurement = machine.measure("(null)", h200(0), h200(1), expected=None)
    assert not_passed(judge(CHECK, measurement)) == {f"{UNLISTED}.cluster.example": Outcome.FAIL}
    assert reasons(measurement, Why.DOES_NOT_APPLY).keys() == {"gpus_below_expected"}


def test_fewer_gpus_configured_than_detected(machine: Machine) -> None:
    assert machine.not_passed("gpu:1", h200(0), h200(1), expected=1) == {UNLISTED: Outcome.FAIL}


def test_lost_gpu(machine: Machine) -> None:
    measurement = machine.measure("gpu:2", h200(0), h200(1).lost())
    assert not_passed(judge(CHECK, measurement)) == {"gpus_missing gpu1.cluster.example": Outcome.FAIL}
    assert "lost" in str(evidence(measurement)["gpus_lost"])


def test_fewer_configured_than_expected(machine: Machine) -> None:
    machine.job["SLURM_GPUS_ON_NODE"] = "1"
    assert machine.not_passed("gpu:1", h200(0)) == {"gpus_below_expected gpu1": Outcome.FAIL}
    assert machine.not_passed("(null)") == {"gpus_below_expected gpu1": Outcome.FAIL}


def test_other_gres_are_ignored(machine: Machine) -> None:
    assert machine.not_passed("gpu:2,shard:8,nvme:1", h200(0), h200(1)) == {}


class TestPartOfANode:
    """The job has two of eight GPUs."""

    def test_other_gpus_are_not_checked(self, machine: Machine) -> None:
        measurement = machine.measure("gpu:8", h200(0), h200(1))
        assert "job has 2 of 8 GPUs" in str(measurement.error)
        assert "--gpus-per-node 8" in str(measurement.error)

    def test_fewer_gpus_than_allocated(self, machine: Machine) -> None:
        outcomes = machine.not_passed("gpu:8", h200(0))
        assert outcomes == {"gpu1": Outcome.ERROR, MISSING: Outcome.FAIL}

    def test_all_gpus_visible_in_the_job(self, machine: Machine) -> None:
        assert machine.not_passed("gpu:4", *map(h200, range(4))) == {}
        assert machine.not_passed("gpu:4", *map(h200, range(3))) == {MISSING: Outcome.FAIL}

    def test_job_without_gpus(self, machine: Machine) -> None:
        del machine.job["SLURM_GPUS_ON_NODE"]
        assert machine.not_passed("gpu:4", h200(0)) == {MISSING: Outcome.FAIL}


def test_mig_is_an_error(machine: Machine) -> None:
    mig_gpu = h200(0, nvmlDeviceGetMigMode=[1, 1])
    assert "MIG enabled" in str(machine.measure("gpu:1g.18gb:7", mig_gpu).error)


class TestNodeName:
    def test_host_name_without_job(self, machine: Machine) -> None:
        machine.job = {}
        assert machine.not_passed("gpu:2", h200(0), h200(1)) == {}

    def test_not_a_slurm_node(self, machine: Machine) -> None:
        machine.job, machine.name = {}, "laptop"
        unknown = {"scontrol show node laptop": failure("Node laptop not found\n")}
        assert "laptop is not a Slurm node" in str(machine.measure("", replies=unknown).skipped)

    def test_unknown_node_in_a_job(self, machine: Machine) -> None:
        unknown = {"scontrol show node gpu1": success("Node gpu1 not found\n")}
        assert "Slurm has no node gpu1" in str(machine.measure("", replies=unknown).error)

    def test_controller_down(self, machine: Machine) -> None:
        down = {"scontrol show node gpu1": recorded("scontrol-show-nodes-controller-down.txt")}
        assert "the controller does not answer" in str(machine.measure("", replies=down).error)

    def test_output_of_slurm_24(self, machine: Machine) -> None:
        replies = {"scontrol show node gpu1": success(NEWER_NODES.read_text())}
        measurement = machine.measure("", *map(h200, range(8)), expected=8, replies=replies)
        assert evidence(measurement)["configured"] == "8 GPUs by Slurm"
        assert not_passed(judge(CHECK, measurement)) == {}


class TestWithoutSlurm:
    @pytest.fixture(autouse=True)
    def no_programs_on_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.fakes.slurm.FakeSlurm.install", lambda slurm, _monkeypatch: slurm)
        monkeypatch.setenv("PATH", "/nowhere")

    def test_no_slurm_client(self, machine: Machine) -> None:
        machine.job = {}
        assert machine.measure("gpu:2").skipped == "no Slurm client (sinfo) on this machine"

    def test_no_slurm_client_in_a_job_is_an_error(self, machine: Machine) -> None:
        assert "job 7 on gpu1: no Slurm client" in str(machine.measure("gpu:2").error)


def test_no_gpus(machine: Machine) -> None:
    assert "gpu1 has no GPU in Slurm" in str(machine.measure("(null)", expected=None).skipped)
