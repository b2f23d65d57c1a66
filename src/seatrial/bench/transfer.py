"""Copies to and from a GPU, and between two of them, by the copy engines.

All copies are on streams of their own: one on CUDA's default stream, which is torch's too, waits for whatever else
either of its GPUs does (CUDA C++ Programming Guide, Peer-to-Peer Memory Copy).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import torch

from seatrial.bench import rank
from seatrial.bench.timing import DeviceTiming, time_on_device
from seatrial.model import SeatrialError

SIZE = 2**28  # bytes of one copy over PCIe, some 5 ms: starting it does not count
PEER_SIZE = 2**30

WARMUP_S = 0.05  # a copy engine does not grow hot: this is for peer access and page tables
# Where GPUs share what is measured: longer than processes of a node are apart, so that each works in all windows of all
OVERLAP_S = 0.3


class ParallelStreams:
    """Streams that work side by side, from where the current stream stands to where it goes on."""

    def __init__(self, *devices: str) -> None:
        self.streams = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]

    @contextmanager
    def concurrent(self) -> Iterator[None]:
        current = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(current)
        yield
        for stream in self.streams:
            current.wait_stream(stream)


class PinnedBuffers:
    """Buffers in page-locked host memory beside some of the same size on a GPU: copies between them are DMA.

    The copies run inside ``side_by_side``. ``placement`` says on which CPUs the host's memory was asked for.
    """

    def __init__(self, device: str, size: int = SIZE) -> None:
        self.size = size
        with _near(device) as self.host_placement:
            self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._gpu = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._lanes = ParallelStreams(device, device)
        self.concurrent = self._lanes.concurrent

    def h2d(self) -> None:
        with torch.cuda.stream(self._lanes.streams[0]):
            self._gpu[0].copy_(self._host[0], non_blocking=True)

    def d2h(self) -> None:
        with torch.cuda.stream(self._lanes.streams[1]):
            self._host[1].copy_(self._gpu[1], non_blocking=True)

    def bidirectional(self) -> None:
        """One copy each way, on two streams: neither waits for the other's."""
        self.h2d()
        self.d2h()


@contextmanager
def _near(device: str) -> Iterator[str]:
    """On the CPUs beside the GPU meanwhile, of those that this process may use; yields what came of that.

    Memory is taken from the NUMA node of the CPU that asks for it (Linux, Documentation/mm/numa.rst): left to chance,
    the same copies would be faster in one run than in the next.
    """
    allowed = os.sched_getaffinity(0)
    try:
        beside = rank.numa_cpus(device) & allowed
    except SeatrialError as reason:
        yield f"asked for on any CPU of this process: {reason}"
        return
    if not beside:
        yield "asked for on CPUs of this process, none of which is beside the GPU"
        return
    os.sched_setaffinity(0, beside)
    try:
        yield f"asked for on CPUs beside the GPU, which are {len(beside)} of the {len(allowed)} of this process"
    finally:
        os.sched_setaffinity(0, allowed)


@dataclass(frozen=True)
class PeerCopy:
    """Copies from GPU ``source`` to ``target`` (CUDA's numbers). ``direct``: without a stop in host memory."""

    source: int
    target: int
    peer_access: bool
    unidirectional: DeviceTiming
    bidirectional: DeviceTiming


def time_peer_copies(gpus: int, seconds: float, note: Callable[[str], None], size: int = PEER_SIZE) -> list[PeerCopy]:
    """Every ordered pair of the ``gpus`` first GPUs that this process sees, one after the other."""
    found = []
    for source, target in permutations(range(gpus), 2):
        note(f"GPU {source} to {target}")
        with torch.cuda.device(source):
            found.append(_time_pair(source, target, seconds, size))
    return found


def _time_pair(source: int, target: int, seconds: float, size: int) -> PeerCopy:
    here, there = f"cuda:{source}", f"cuda:{target}"
    out = [torch.empty(size, dtype=torch.uint8, device=device) for device in (here, there)]
    back = [torch.empty(size, dtype=torch.uint8, device=device) for device in (there, here)]
    for sent, received in (out, back):
        received.copy_(sent)  # torch lets the two GPUs reach each other's memory at the first copy
    lanes = ParallelStreams(here, there)
    forth, home = _copying(out[0], out[1], lanes.streams[0]), _copying(back[0], back[1], lanes.streams[1])

    def both() -> None:
        forth()
        home()

    def timed(operation: Callable[[], None]) -> DeviceTiming:
        return time_on_device(operation, here, seconds, warmup_s=WARMUP_S, window_context=lanes.concurrent)

    return PeerCopy(source, target, torch.cuda.can_device_access_peer(source, target), timed(forth), timed(both))


def _copying(sent: torch.Tensor, received: torch.Tensor, stream: torch.cuda.Stream) -> Callable[[], None]:
    """One copy on ``stream``, of the GPU that sends. torch's own has the streams of both GPUs wait for each other."""
    copy = _driver().cuMemcpyAsync
    addresses = [c_uint64(tensor.data_ptr()) for tensor in (received, sent)]
    size, handle = c_size_t(sent.nbytes), c_void_p(stream.cuda_stream)

    def run() -> None:
        if code := copy(*addresses, size, handle):
            raise SeatrialError(f"cuMemcpyAsync from {sent.device} to {received.device}: error {code} of CUDA's driver")

    return run


@cache
def _driver() -> Any:
    """CUDA's driver, which torch has loaded. CUDA Driver API: cuMemcpyAsync(dst, src, bytes, stream)."""
    driver = CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    driver.cuMemcpyAsync.argtypes = (c_uint64, c_uint64, c_size_t, c_void_p)
    return driver
