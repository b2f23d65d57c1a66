"""Durations of training steps, measured on the device, and the device's GEMM rate."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

import torch

MATRIX_SIZE = 8192  # rows and columns: enough to occupy all SMs of any GPU
PRODUCTS = 600  # 0.9 s at 750 TFLOP/s: long enough to reach the power limit


def gemm_tflops(device: torch.device) -> float | None:
    """The bf16 GEMM rate in TFLOP/s right after training, at operating temperature; None without a GPU or free memory.

    Training rate ÷ GEMM rate is the efficiency of the software, GEMM rate ÷ peak that of the GPU.
    """
    if device.type != "cuda":
        return None
    try:
        torch.cuda.empty_cache()
        a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16)
        product = torch.mm(a, b)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=product)
        end.record()
        end.synchronize()
    except torch.OutOfMemoryError:
        return None
    milliseconds: float = start.elapsed_time(end)
    return PRODUCTS * 2 * MATRIX_SIZE**3 / milliseconds / 1e9


class StepTimer:
    """Times steps with CUDA events, without blocking the CPU, or with the CPU clock if there is no GPU.

    A step lasts from the end of the previous step to its own end, waiting included. Forward time is that of the first
    micro-batch, from ``begin`` to the first ``end_forward``: with DDP it does not depend on other ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[tuple[Any, Any, Any, Any]] = deque()
        self.reset()

    def reset(self) -> None:
        """Starts the next step now: the time since the previous step is not counted."""
        self._previous_end = self._now()

    def begin(self) -> None:
        self._start, self._forward = self._now(), None

    def end_forward(self) -> None:
        self._forward = self._forward or self._now()

    def end(self) -> None:
        end = self._now()
        self._steps.append((self._previous_end, self._start, self._forward, end))
        self._previous_end = end

    def read(self) -> tuple[float, float]:
        """Seconds of the oldest unread step and of its forward pass; waits for the step to finish."""
        previous_end, start, forward, end = self._steps.popleft()
        if self._device.type == "cuda":
            end.synchronize()
            return previous_end.elapsed_time(end) / 1e3, start.elapsed_time(forward) / 1e3  # elapsed_time is in ms
        return end - previous_end, forward - start

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
