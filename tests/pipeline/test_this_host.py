"""GPUs per node, machine identity and GPU errors derived from the facts of a host."""

from __future__ import annotations

import pytest

from seatrial.config.schema import CheckSettings, Cluster, Config, Slurm
from seatrial.discover.gpu import GpuFacts
from seatrial.discover.nvml import Gpu
from seatrial.discover.slurm import SlurmUnavailable
from seatrial.model import Machine
from seatrial.pipeline.this_host import ThisHost
from tests.fakes.slurm import PARTITIONS, FakeSlurm, cluster, failure


def config(**cluster: int) -> Config:
    return Config(name="t", cluster=Cluster(**cluster), checks={"host.inventory": CheckSettings()})


def this_host(*models: str) -> ThisHost:
    gpus = tuple(Gpu(index=index, name=name, uuid=f"GPU-{index}") for index, name in enumerate(models))
    return ThisHost({}, GpuFacts(gpus=gpus))


def test_failed_gpu_detection_is_an_error() -> None:
    undetected = ThisHost({}, GpuFacts(nvml_unavailable="no driver", unreadable={"pci_devices": "/sys: hidden"}))
    assert "no driver; /sys: hidden" in (undetected.node_gpus(config()).gpu_error or "")
    assert undetected.node_gpus(config(gpus_per_node=0)).gpu_error is None
    assert ThisHost({}, GpuFacts(nvml_unavailable="no driver")).node_gpus(config()).gpu_error is None


@pytest.mark.parametrize(
    ("partition", "max_job_s"), [(None, 3600), ("short", 300), ("closed", None), ("absent", None), ("gpu,short", None)]
)
def test_longest_job_of_the_partition(
    partition: str | None, max_job_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSlurm(cluster()).install(monkeypatch)
    settings = Config(name="t", launcher="slurm", slurm=Slurm(partition=partition), checks={})
    assert this_host().max_job_s(settings) == max_job_s
    assert this_host().max_job_s(settings.model_copy(update={"launcher": "local"})) is None
    FakeSlurm({PARTITIONS: failure("Unable to contact slurm controller")}).install(monkeypatch)
    assert this_host().max_job_s(settings) is None


def test_number_of_gpus_that_slurm_cannot_give(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm({PARTITIONS: failure("scontrol: fatal: Could not establish a configuration source")}).install(monkeypatch)
    several = config(nodes=4)  # launcher auto: Slurm starts the jobs
    with pytest.raises(
        SlurmUnavailable, match=r"cluster\.gpus_per_node \(--gpus-per-node\) is not set, and Slurm.*: .*no slurm\.conf"
    ):
        this_host().node_gpus(several)
    assert this_host().node_gpus(config(nodes=4, gpus_per_node=8)).usable_gpus == 8


def test_machine_has_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    settings = config()
    assert this_host("H200", "H200").machine(settings).gpus == ("GPU-1",)


def test_trial_environment_selects_gpus() -> None:
    hidden = config().model_copy(update={"env": {"CUDA_VISIBLE_DEVICES": ""}})
    two = this_host("H200", "H200")
    assert "CUDA_VISIBLE_DEVICES excludes all of them" in two.gpu_error(hidden)
    second = config().model_copy(update={"env": {"CUDA_VISIBLE_DEVICES": "1"}})
    assert (two.machine(second).gpus, two.node_gpus(second).usable_gpus) == (("GPU-1",), 1)


def test_lost_gpu_is_an_error_unless_excluded_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = GpuFacts(gpus=(Gpu(index=0, uuid="GPU-0"),), failed_gpus=("gpu1: GPU is lost",))
    one_left = ThisHost({}, gpus)
    assert one_left.gpu_error(config()) == "1 of 2 GPUs of this host are usable: gpu1: GPU is lost"
    assert one_left.node_gpus(config()).gpu_error is None, "the other GPU is tested"
    assert one_left.gpu_error(config(gpus_per_node=1)) == ""
    assert this_host("H200").gpu_error(config()) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert one_left.gpu_error(config()) == ""


def test_mig_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(index=index, uuid=f"GPU-{index}", mig_mode=index == 1) for index in range(3))
    three = ThisHost({}, GpuFacts(gpus=gpus))
    gpu_error = three.node_gpus(config()).gpu_error or ""
    assert gpu_error.startswith("gpu1: MIG enabled")
    assert "nvidia-smi -i INDEX -mig 0" in gpu_error
    assert three.node_gpus(config(gpus_per_node=1)).gpu_error is None, "gpu1 is not used"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert three.node_gpus(config()).gpu_error is None


def test_driver_and_kernel_identify_the_machine() -> None:
    def machine(kernel: str, driver: str) -> Machine:
        facts = {"host": {"os": {"kernel": kernel}, "software": {"torch": "2.13.0"}}}
        return ThisHost(facts, GpuFacts(driver=driver)).machine(config())

    assert machine("6.1", "580") == machine("6.1", "580")
    assert len({machine("6.1", "580"), machine("6.2", "580"), machine("6.1", "590")}) == 3
    assert {"kernel 6.1", "driver 580", "torch 2.13.0"} < set(machine("6.1", "580").versions)


def test_machine_id_identifies_a_cpu_host() -> None:
    def machine(machine_id: str | None, *gpus: Gpu) -> Machine:
        return ThisHost({"host": {"os": {"machine_id": machine_id}}}, GpuFacts(gpus=gpus)).machine(config())

    assert machine("aa") == machine("aa") != machine("bb")
    assert not any("machine" in text for text in machine(None).versions), "an unreadable machine id is ignored"
    gpu = Gpu(index=0, uuid="GPU-0")
    assert machine("aa", gpu) == machine("bb", gpu), "the GPU UUID identifies the machine"


def test_gpu_models_of_the_tested_gpus() -> None:
    both = this_host("NVIDIA A", "NVIDIA B")
    assert both.gpu_models(config()) == ("NVIDIA A", "NVIDIA B")
    assert both.gpu_models(config(gpus_per_node=1)) == ("NVIDIA A",)
    elsewhere = config().model_copy(update={"launcher": "slurm"})
    assert both.gpu_models(elsewhere) == ()
