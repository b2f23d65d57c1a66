from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.base import Context
from seatrial.checks.slurm.gres import CHECK, METRICS, RULES
from seatrial.model import Measurement, Outcome
from seatrial.worker import measure
from tests.fakes.nvml import FakeNvml, h200, nvml_error
from tests.fakes.slurm import NEWER_NODES, FakeSlurm, Reply, failure, judge, not_passed, recorded, success

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
    """A node that Slurm calls gpu1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.folder = folder
        self.name = "gpu1.cluster.example"
        self.job: dict[str, str] = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "gpu1", "SLURM_GPUS_ON_NODE": "2"}

    def measure(self, gres: str, *gpus: Any, promised: int | None = 2, replies: Replies = NONE) -> Measurement:
        for name, value in self.job.items():
            self.monkeypatch.setenv(name, value)
        FakeNvml(*gpus, init=None if gpus else nvml_error("LibraryNotFound")).install(self.monkeypatch)
        asked = {"scontrol show node gpu1": success(NODE.format(gres=gres))}
        FakeSlurm({**asked, **replies}).install(self.monkeypatch)
        context = Context(
            node=self.name,
            rank=0,
            world_size=1,
            local_rank=0,
            device="cpu",
            expected_gpus=promised,
            artifacts_dir=self.folder,
            run_dir=self.folder,
            root=self.folder,
        )
        return measure(CHECK, context, {})

    def bad(self, gres: str, *gpus: Any, promised: int | None = 2) -> dict[str, Outcome]:
        found = not_passed(judge(CHECK, self.measure(gres, *gpus, promised=promised)))
        return {key.removesuffix(".cluster.example"): outcome for key, outcome in found.items()}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    return Machine(monkeypatch, tmp_path)


def test_as_many_as_slurm_says(machine: Machine) -> None:
    measurement = machine.measure("gpu:h200:2(S:0-1)", h200(0), h200(1))
    assert not_passed(judge(CHECK, measurement)) == {}
    assert {metric.name for metric in measurement.metrics} == set(METRICS)
    assert {rule.metric for rule in RULES} <= set(METRICS)
    assert (measurement.facts["gres"], measurement.facts["models"]) == ("gpu:h200:2", ["NVIDIA H200"])


def test_both_numbers_are_told(machine: Machine) -> None:
    measurement = machine.measure("gpu:h200:2", h200(0))
    (verdict,) = (verdict for verdict in judge(CHECK, measurement) if verdict.outcome is Outcome.FAIL)
    assert '"2 GPUs by Slurm"; seen: "1 GPUs by NVML"; gres: "gpu:h200:2"' in verdict.evidence


def test_configured_and_no_driver(machine: Machine) -> None:
    assert machine.bad("gpu:h200:2") == {MISSING: Outcome.FAIL}
    assert "libnvidia-ml" in str(machine.measure("gpu:h200:2").facts["nvml_unavailable"])


def test_there_and_not_configured(machine: Machine) -> None:
    assert machine.bad("(null)", h200(0), h200(1), promised=None) == {UNLISTED: Outcome.FAIL}


def test_fewer_configured_than_there(machine: Machine) -> None:
    assert machine.bad("gpu:1", h200(0), h200(1), promised=1) == {UNLISTED: Outcome.FAIL}


def test_a_lost_gpu_is_missing(machine: Machine) -> None:
    measurement = machine.measure("gpu:2", h200(0), h200(1).lost())
    assert not_passed(judge(CHECK, measurement)) == {"gpus_missing gpu1.cluster.example": Outcome.FAIL}
    assert "lost" in str(measurement.facts["gpus_lost"])


def test_fewer_than_promised(machine: Machine) -> None:
    machine.job["SLURM_GPUS_ON_NODE"] = "1"
    assert machine.bad("gpu:1", h200(0)) == {"gpus_below_expected gpu1": Outcome.FAIL}
    assert machine.bad("(null)") == {"gpus_below_expected gpu1": Outcome.FAIL}


def test_other_resources_are_no_gpus(machine: Machine) -> None:
    assert machine.bad("gpu:2,shard:8,nvme:1", h200(0), h200(1)) == {}


class TestPartOfANode:
    """Our job holds two GPUs of eight."""

    def test_that_is_shown_alone_does_not_speak_for_the_rest(self, machine: Machine) -> None:
        measurement = machine.measure("gpu:8", h200(0), h200(1))
        assert "holds 2 of the node's 8 GPUs" in str(measurement.error)
        assert "--gpus-per-node 8" in str(measurement.error)

    def test_that_has_too_few_is_a_failure_all_the_same(self, machine: Machine) -> None:
        found = machine.bad("gpu:8", h200(0))
        assert found == {"gpu1": Outcome.ERROR, MISSING: Outcome.FAIL}

    def test_where_nothing_is_hidden_all_are_counted(self, machine: Machine) -> None:
        assert machine.bad("gpu:4", *map(h200, range(4))) == {}
        assert machine.bad("gpu:4", *map(h200, range(3))) == {MISSING: Outcome.FAIL}

    def test_without_a_gpu_of_our_own(self, machine: Machine) -> None:
        del machine.job["SLURM_GPUS_ON_NODE"]
        assert machine.bad("gpu:4", h200(0)) == {MISSING: Outcome.FAIL}


def test_slices_are_not_compared_with_gpus(machine: Machine) -> None:
    sliced = h200(0, nvmlDeviceGetMigMode=[1, 1])
    assert "MIG is on" in str(machine.measure("gpu:1g.18gb:7", sliced).error)


class TestWhichNode:
    def test_outside_a_job_it_is_that_of_our_name(self, machine: Machine) -> None:
        machine.job = {}
        assert machine.bad("gpu:2", h200(0), h200(1)) == {}

    def test_none_of_slurms(self, machine: Machine) -> None:
        machine.job, machine.name = {}, "laptop"
        unknown = {"scontrol show node laptop": failure("Node laptop not found\n")}
        assert "laptop is not a node of Slurm's" in str(machine.measure("", replies=unknown).skipped)

    def test_in_a_job_it_must_be_known(self, machine: Machine) -> None:
        unknown = {"scontrol show node gpu1": success("Node gpu1 not found\n")}
        assert "Run first: scontrol show node gpu1" in str(machine.measure("", replies=unknown).error)

    def test_the_controller_is_down(self, machine: Machine) -> None:
        down = {"scontrol show node gpu1": recorded("scontrol-show-nodes-controller-down.txt")}
        assert "the controller does not answer" in str(machine.measure("", replies=down).error)

    def test_of_a_newer_slurm(self, machine: Machine) -> None:
        replies = {"scontrol show node gpu1": success(NEWER_NODES.read_text())}
        measurement = machine.measure("", *map(h200, range(8)), promised=8, replies=replies)
        assert measurement.facts["configured"] == "8 GPUs by Slurm"
        assert not_passed(judge(CHECK, measurement)) == {}


class TestWithoutSlurm:
    @pytest.fixture(autouse=True)
    def nothing_on_the_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.fakes.slurm.FakeSlurm.install", lambda slurm, _monkeypatch: slurm)
        monkeypatch.setenv("PATH", "/nowhere")

    def test_no_client(self, machine: Machine) -> None:
        machine.job = {}
        assert machine.measure("gpu:2").skipped == "no Slurm client (sinfo) on this machine"

    def test_in_a_job_that_is_no_reason_to_skip(self, machine: Machine) -> None:
        assert "in job 7, and no Slurm client" in str(machine.measure("gpu:2").error)


def test_neither_gpus_nor_resources(machine: Machine) -> None:
    assert "Slurm has no GPU on gpu1" in str(machine.measure("(null)", promised=None).skipped)
