"""Times copies between host and GPU and between two GPUs, by the copy engines.

All copies run on streams of their own: on CUDA's default stream, which torch uses, a peer copy waits for all other work
on both GPUs (CUDA C++ Programming Guide, Peer-to-Peer Memory Copy).
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

SIZE = 2**28  # bytes of one copy over PCIe; it takes about 5 ms, so that the launch time is negligible
PEER_SIZE = 2**30  # bytes of one copy between two GPUs

WARMUP_S = 0.05  # for peer access and page tables; copy engines need no thermal warm-up
# Seconds of load before and after concurrent measurements: longer than the skew between the processes of a node, so
# that the load of each process covers the timed windows of all processes
OVERLAP_S = 0.3


class ParallelStreams:
    """CUDA streams whose work in ``concurrent`` starts after earlier work of the current stream.

    Later work of the current stream starts after the work of these streams.
    """

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
    """Two pinned host buffers and two GPU buffers of SIZE bytes; copies between them are DMA transfers.

    Copies must be called inside ``concurrent``. ``host_placement`` describes the CPUs that allocated the host memory.
    """

    size = SIZE

    def __init__(self, device: str) -> None:
        with _on_numa_cpus(device) as self.host_placement:
            self._host = [torch.empty(SIZE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._gpu = [torch.empty(SIZE, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = ParallelStreams(device, device)
        self.concurrent = self._streams.concurrent

    def h2d(self) -> None:
        with torch.cuda.stream(self._streams.streams[0]):
            self._gpu[0].copy_(self._host[0], non_blocking=True)

    def d2h(self) -> None:
        with torch.cuda.stream(self._streams.streams[1]):
            self._host[1].copy_(self._gpu[1], non_blocking=True)

    def bidirectional(self) -> None:
        """One copy in each direction, on two independent streams."""
        self.h2d()
        self.d2h()


@contextmanager
def _on_numa_cpus(device: str) -> Iterator[str]:
    """Bind this process to the usable CPUs of the GPU's NUMA node while the block runs, and yield a description.

    Linux allocates memory on the NUMA node of the requesting CPU (Documentation/mm/numa.rst); without binding the copy
    rate would vary between runs.
    """
    allowed = os.sched_getaffinity(0)
    try:
        numa_cpus = rank.numa_cpus(device) & allowed
    except SeatrialError as error:
        yield f"allocated on any CPU of this process: {error}"
        return
    if not numa_cpus:
        yield "allocated on CPUs of this process; none is on the GPU's NUMA node"
        return
    os.sched_setaffinity(0, numa_cpus)
    try:
        yield f"allocated on the GPU's NUMA node, which has {len(numa_cpus)} of this process's {len(allowed)} CPUs"
    finally:
        os.sched_setaffinity(0, allowed)


@dataclass(frozen=True)
class PeerCopy:
    """Copies from GPU ``source`` to ``target`` (CUDA indices); ``peer_access``: whether they bypass host memory."""

    source: int
    target: int
    peer_access: bool
    unidirectional: DeviceTiming
    bidirectional: DeviceTiming


def time_peer_copies(gpus: int, seconds: float, progress: Callable[[str], None]) -> list[PeerCopy]:
    """Time copies between every ordered pair of the first ``gpus`` visible GPUs, one pair after the other."""
    copies = []
    for source, target in permutations(range(gpus), 2):
        progress(f"GPU {source} to {target}")
        with torch.cuda.device(source):
            copies.append(_time_pair(source, target, seconds))
    return copies


def _time_pair(source: int, target: int, seconds: float) -> PeerCopy:
    """Time copies of PEER_SIZE bytes from ``source`` to ``target``, first single, then with concurrent copies back."""
    source_device, target_device = f"cuda:{source}", f"cuda:{target}"
    sent, received, sent_back, received_back = (
        torch.empty(PEER_SIZE, dtype=torch.uint8, device=device)
        for device in (source_device, target_device, target_device, source_device)
    )
    received.copy_(sent)  # torch enables peer access at the first copy
    received_back.copy_(sent_back)
    streams = ParallelStreams(source_device, target_device)
    forward_stream, back_stream = streams.streams
    copy_forward = _peer_copy(sent, received, forward_stream)
    copy_back = _peer_copy(sent_back, received_back, back_stream)

    def copy_both() -> None:
        copy_forward()
        copy_back()

    def timing(operation: Callable[[], None]) -> DeviceTiming:
        return time_on_device(operation, source_device, seconds, warmup_s=WARMUP_S, window_context=streams.concurrent)

    peer_access = torch.cuda.can_device_access_peer(source, target)
    return PeerCopy(source, target, peer_access, timing(copy_forward), timing(copy_both))


def _peer_copy(sent: torch.Tensor, received: torch.Tensor, stream: torch.cuda.Stream) -> Callable[[], None]:
    """A function that queues a copy on ``stream`` of the sending GPU; torch's copy_ would synchronise both GPUs."""
    copy = _driver().cuMemcpyAsync
    target, source = c_uint64(received.data_ptr()), c_uint64(sent.data_ptr())
    size, handle = c_size_t(sent.nbytes), c_void_p(stream.cuda_stream)

    def run() -> None:
        if code := copy(target, source, size, handle):
            raise SeatrialError(f"cuMemcpyAsync from {sent.device} to {received.device}: CUDA driver error {code}")

    return run


@cache
def _driver() -> Any:
    """The CUDA driver library that torch has loaded. CUDA Driver API: cuMemcpyAsync(dst, src, bytes, stream)."""
    driver = CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    driver.cuMemcpyAsync.argtypes = (c_uint64, c_uint64, c_size_t, c_void_p)
    return driver
