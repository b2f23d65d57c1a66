"""Programs that use a GPU at the same time as the trial."""

from __future__ import annotations

import sys
import time

from seatrial.drill.injection import Injection, TrialEndedEarly

GPU = 0  # index of the GPU that the programs use: it also exists on a host with one GPU
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


def start_on_gpu(injection: Injection, mode: str) -> None:
    """Start a program that holds 8 GiB of memory of GPU. With ``mode`` ``compute`` it also multiplies matrices.

    Raises TrialEndedEarly if the program ends, or is not ready within 120 s.
    """
    injection.progress(f"starting a program on GPU {GPU}, at most {_START_TIMEOUT_S:g} s")
    ready = injection.folder / "ready"
    argv = [sys.executable, "-c", _LOAD, str(ready), mode]
    child = injection.start_process(argv, "gpu-program", {"CUDA_VISIBLE_DEVICES": str(GPU)})
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not ready.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise TrialEndedEarly(f"the program on GPU {GPU} did not start: {injection.folder / 'gpu-program.err'}")
        time.sleep(0.1)
