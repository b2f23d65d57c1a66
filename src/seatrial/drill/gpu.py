"""Drills for a machine with GPUs."""

from __future__ import annotations

import sys
import time
from functools import partial

from seatrial.drill.base import ONLY_ERROR, ONLY_FAIL, Drill, Expected, Needs
from seatrial.drill.faults import FAULTY_RANK
from seatrial.drill.injection import Injection, TrialEndedEarly

_drill = partial(Drill, machine="gpu")
_GPU = 0  # index of the GPU that the programs use: it also exists on a host with one GPU
# Arguments: the file that the program creates when it is ready, and the mode
_LOAD = """
import torch, pathlib, sys, time
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
hold = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
pathlib.Path(sys.argv[1]).touch()
while sys.argv[2] == "compute":
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
time.sleep(10**6)
"""
_START_TIMEOUT_S = 120.0


def _set_variable(injection: Injection, name: str, value: str) -> None:
    """Set a variable in the environment of the trial, as one that is left from a debugging or tuning session."""
    injection.environment[name] = value


def _start_on_gpu(injection: Injection, mode: str) -> None:
    """Start a program that holds 8 GiB of memory of GPU. With ``mode`` ``compute`` it also multiplies matrices.

    Raises TrialEndedEarly if the program ends, or is not ready within 120 s.
    """
    injection.progress(f"starting a program on GPU {_GPU}, at most {_START_TIMEOUT_S:g} s")
    ready = injection.folder / "ready"
    argv = [sys.executable, "-c", _LOAD, str(ready), mode]
    child = injection.start_process(argv, "gpu-program", {"CUDA_VISIBLE_DEVICES": str(_GPU)})
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not ready.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise TrialEndedEarly(f"the program on GPU {_GPU} did not start: {injection.folder / 'gpu-program.err'}")
        time.sleep(0.1)


DRILLS = (
    _drill(
        name="corunning-gemm",
        title=f"another program multiplies matrices on GPU {_GPU}",
        checks={"gpu.inventory": {}, "device.gemm": {}, "device.memory": {}},
        expected=Expected(
            check="device.gemm",
            outcomes=ONLY_FAIL,
            cause="foreign_processes",
            place=rf"gpu{_GPU}\b",
            command=rf"nvidia-smi --id={_GPU} --query-compute-apps|ps .*-p \d+",
            action="fix-environment",
        ),
        needs=Needs(gpus=1),
        prepare=partial(_start_on_gpu, mode="compute"),
    ),
    _drill(
        name="leftover-memory",
        title=f"an idle process holds 8 GiB of GPU {_GPU}",
        checks={"gpu.inventory": {}},
        expected=Expected(
            metric="foreign_processes",
            cause="foreign_processes",
            place=rf"gpu{_GPU}\b",
            command=rf"nvidia-smi --id={_GPU} --query-compute-apps|ps .*-p \d+",
            action="fix-environment",
        ),
        needs=Needs(gpus=1),
        prepare=partial(_start_on_gpu, mode="hold"),
    ),
    # NCCL may use two channels only: a variable from a tuning session is still set
    _drill(
        name="max-nchannels",
        title="NCCL_MAX_NCHANNELS=2 in the environment",
        checks={"collectives.all_reduce": {}, "collectives.transport": {}},
        expected=Expected(
            check="collectives.*",
            metric="*busbw.*",
            outcomes=ONLY_FAIL,
            cause="environment_variable",
            place=r"NCCL_MAX_NCHANNELS=2",
            command=r"grep \S*NCCL_MAX_NCHANNELS",
            action="fix-environment",
        ),
        needs=Needs(gpus=2),
        prepare=partial(_set_variable, name="NCCL_MAX_NCHANNELS", value="2"),
    ),
    _drill(
        name="missing-gpu",
        title="one of two expected GPUs is not visible (CUDA_VISIBLE_DEVICES=0)",
        checks={"gpu.inventory": {}},
        expected=Expected(
            metric="gpus_hidden",
            outcomes=ONLY_FAIL,
            cause="gpus_hidden",
            place=r"CUDA_VISIBLE_DEVICES|cuda_visible_devices",
            command=r"nvidia-smi -L|CUDA_VISIBLE_DEVICES",
            action="fix-environment",
        ),
        needs=Needs(gpus=2),
        prepare=partial(_set_variable, name="CUDA_VISIBLE_DEVICES", value="0"),
    ),
    # NCCL may not copy directly between GPUs: a variable from a debugging session is still set
    _drill(
        name="p2p-disabled",
        title="NCCL_P2P_DISABLE=1 in the environment",
        checks={"collectives.all_reduce": {}, "collectives.transport": {}},
        expected=Expected(
            check="collectives.*",
            metric="*",
            outcomes=ONLY_FAIL,
            cause="environment_variable",
            place=r"NCCL_P2P_DISABLE=1",
            command=r"grep \S*NCCL_P2P_DISABLE",
            action="fix-environment",
        ),
        needs=Needs(gpus=2),
        prepare=partial(_set_variable, name="NCCL_P2P_DISABLE", value="1"),
    ),
    _drill(
        name="shared-gpu",
        title=f"rank {FAULTY_RANK} uses the GPU of rank 0",
        checks={"collectives.all_reduce": {"sizes": ["1MiB"]}},
        expected=Expected(
            outcomes=ONLY_ERROR,
            cause="nccl.duplicate_gpu",
            place=r"rank",
            command=r"nvidia-smi --query-compute-apps",
            action="fix-config",
        ),
        needs=Needs(gpus=2),
        fault="shared_gpu",
    ),
)
