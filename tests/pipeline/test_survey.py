"""Devices, machine identity and GPU errors derived from the facts of a host."""

from __future__ import annotations

import pytest

from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.discover.gpu import GpuFacts
from seatrial.discover.nvml import Gpu
from seatrial.model import Machine
from seatrial.pipeline.survey import Survey


def config(**cluster: int) -> Config:
    return Config(name="t", cluster=Cluster(**cluster), checks={"host.inventory": CheckSettings()})


def survey(*models: str) -> Survey:
    gpus = tuple(Gpu(index=index, name=name, uuid=f"GPU-{index}") for index, name in enumerate(models))
    return Survey({}, GpuFacts(gpus=gpus))


def test_failed_gpu_detection_is_an_error() -> None:
    blind = Survey({}, GpuFacts(nvml_unavailable="no driver", unreadable={"pci_devices": "/sys: hidden"}))
    assert "no driver; /sys: hidden" in (blind.devices(config()).gpu_error or "")
    assert blind.devices(config(gpus_per_node=0)).gpu_error is None
    assert Survey({}, GpuFacts(nvml_unavailable="no driver")).devices(config()).gpu_error is None


def test_machine_has_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    settings = config()
    assert survey("H200", "H200").machine(settings).gpus == ("GPU-1",)


def test_trial_environment_selects_gpus() -> None:
    hidden = config().model_copy(update={"env": {"CUDA_VISIBLE_DEVICES": ""}})
    two = survey("H200", "H200")
    assert "CUDA_VISIBLE_DEVICES excludes all of them" in two.gpu_error(hidden)
    second = config().model_copy(update={"env": {"CUDA_VISIBLE_DEVICES": "1"}})
    assert (two.machine(second).gpus, two.devices(second).usable_gpus) == (("GPU-1",), 1)


def test_lost_gpu_is_an_error_unless_excluded_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = GpuFacts(gpus=(Gpu(index=0, uuid="GPU-0"),), lost=("gpu1: GPU is lost",))
    one_left = Survey({}, gpus)
    assert one_left.gpu_error(config()) == "1 of 2 GPUs of this host are usable: gpu1: GPU is lost"
    assert one_left.devices(config()).gpu_error is None, "the other GPU is tested"
    assert one_left.gpu_error(config(gpus_per_node=1)) == ""
    assert survey("H200").gpu_error(config()) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert one_left.gpu_error(config()) == ""


def test_mig_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(index=index, uuid=f"GPU-{index}", mig_mode=index == 1) for index in range(3))
    three = Survey({}, GpuFacts(gpus=gpus))
    gpu_error = three.devices(config()).gpu_error or ""
    assert gpu_error.startswith("gpu1: MIG enabled")
    assert "nvidia-smi -i INDEX -mig 0" in gpu_error
    assert three.devices(config(gpus_per_node=1)).gpu_error is None, "gpu1 is not used"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert three.devices(config()).gpu_error is None


def test_driver_and_kernel_identify_the_machine() -> None:
    def of(kernel: str, driver: str) -> Machine:
        facts = {"host": {"os": {"kernel": kernel}, "software": {"torch": "2.13.0"}}}
        return Survey(facts, GpuFacts(driver=driver)).machine(config())

    assert of("6.1", "580") == of("6.1", "580")
    assert len({of("6.1", "580"), of("6.2", "580"), of("6.1", "590")}) == 3
    assert {"kernel 6.1", "driver 580", "torch 2.13.0"} < set(of("6.1", "580").versions)


def test_machine_id_identifies_a_cpu_host() -> None:
    def of(machine_id: str | None, *gpus: Gpu) -> Machine:
        return Survey({"host": {"os": {"machine_id": machine_id}}}, GpuFacts(gpus=gpus)).machine(config())

    assert of("aa") == of("aa") != of("bb")
    assert not any("machine" in text for text in of(None).versions), "an unreadable machine id is ignored"
    gpu = Gpu(index=0, uuid="GPU-0")
    assert of("aa", gpu) == of("bb", gpu), "the GPU UUID identifies the machine"


def test_gpu_models_of_the_tested_gpus() -> None:
    both = survey("NVIDIA A", "NVIDIA B")
    assert both.gpu_models(config()) == ("NVIDIA A", "NVIDIA B")
    assert both.gpu_models(config(gpus_per_node=1)) == ("NVIDIA A",)
    elsewhere = config().model_copy(update={"launcher": "slurm"})
    assert both.gpu_models(elsewhere) == ()
