"""How long a step takes, as the device sees it."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

import torch

MATRIX = 8192  # rows and columns: large enough for any GPU to be busy
PRODUCTS = 600  # 0.9 s at 750 TFLOP/s: long enough for the power limit to bite


def gemm_tflops(device: torch.device) -> float | None:
    """bf16 TFLOP/s of plain matrix products on this device as warm as training left it; None without a GPU, or room.

    What training reaches of it says how good the software is; what it is of the peak, how good the GPU.
    """
    if device.type != "cuda":
        return None
    try:
        torch.cuda.empty_cache()
        a, b = torch.randn(2, MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
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
    return PRODUCTS * 2 * MATRIX**3 / milliseconds / 1e9


class StepTimer:
    """Marks are CUDA events, for which the CPU need not wait, or readings of its clock.

    A step lasts from the end of the one before: what its start waits for is part of it. Its forward time lasts from
    ``begin`` to ``forward_done`` of the first micro-batch: under DDP that is this rank's own pace.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[tuple[Any, Any, Any, Any]] = deque()
        self.reset()

    def reset(self) -> None:
        """What lies between two steps here is not the next one's."""
        self._last = self._mark()

    def begin(self) -> None:
        self._begun, self._forward = self._mark(), None

    def end_forward(self) -> None:
        self._forward = self._forward or self._mark()

    def end(self) -> None:
        ended = self._mark()
        self._steps.append((self._last, self._begun, self._forward, ended))
        self._last = ended

    def read(self) -> tuple[float, float]:
        """Seconds of the oldest step not read yet, and of its forward pass; waits until it is done."""
        last, begun, forward, ended = self._steps.popleft()
        if self._device.type == "cuda":
            ended.synchronize()
            return last.elapsed_time(ended) / 1e3, begun.elapsed_time(forward) / 1e3  # it counts milliseconds
        return ended - last, forward - begun

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
