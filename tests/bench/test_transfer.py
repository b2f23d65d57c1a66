from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import CFUNCTYPE, c_int, c_size_t, c_uint64, c_void_p

import pytest
import torch

from seatrial.bench import rank, transfer
from seatrial.bench.timing import DeviceTiming
from seatrial.model import SeatrialError

Log = list[tuple[str, ...]]


class Streams:
    """Fake of CUDA's current device and streams, with a log of the work on them; other calls are errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: Log = []
        self.device = "cuda:0"
        self.streams: dict[str, str] = {}
        self.buffers: list[Buffer] = []
        self.created = 0
        for name in ("device", "stream", "Stream", "current_stream", "can_device_access_peer"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name.lower()}" if name != "Stream" else "_create"))

    def current(self, device: str) -> str:
        return self.streams.get(device, f"{device} default")

    @contextmanager
    def _device(self, device: str | int) -> Iterator[None]:
        previous, self.device = self.device, f"cuda:{device}" if isinstance(device, int) else device
        yield
        self.device = previous

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        previous, self.device = self.device, stream.device
        streams, self.streams = self.streams, {**self.streams, stream.device: stream.name}
        yield
        self.streams, self.device = streams, previous

    def _create(self, device: str) -> Stream:
        self.created += 1
        return Stream(self, device, f"{device} new", self.created)

    def _current_stream(self) -> Stream:
        return Stream(self, self.device, self.current(self.device), 0)

    def _can_device_access_peer(self, source: int, target: int) -> bool:
        return {source, target} != {0, 2}


class Stream:
    def __init__(self, streams: Streams, device: str, name: str, handle: int) -> None:
        self.streams, self.device, self.name, self.cuda_stream = streams, device, name, handle

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append((self.name, "waits for", other.name))


class Buffer:
    """Fake of a GPU tensor with its own address; torch copies it once in each direction."""

    def __init__(self, streams: Streams, device: str, size: int) -> None:
        self.streams, self.device, self.nbytes = streams, device, size
        self.streams.buffers.append(self)
        self._address = 0x1000 * len(self.streams.buffers)

    def data_ptr(self) -> int:
        return self._address

    def copy_(self, source: Buffer) -> None:
        self.streams.log.append(("torch copies", source.device, self.device))


class Driver:
    """Fake of the CUDA driver, with the signature of cuda.h: dst, src, bytes, stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self.code = streams, 0
        self.cuMemcpyAsync = CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)(self._copy)

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        by_address = {buffer.data_ptr(): buffer for buffer in self._streams.buffers}
        assert {by_address[target].nbytes, by_address[source].nbytes} == {size}
        self._streams.log.append(
            (f"copies {by_address[source].device} to {by_address[target].device}", f"stream {stream}")
        )
        return self.code


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams(monkeypatch)

    def empty(size: int, dtype: torch.dtype, device: str) -> Buffer:
        assert dtype == torch.uint8
        return Buffer(streams, device, size)

    monkeypatch.setattr(torch, "empty", empty)
    return streams


@pytest.fixture
def driver(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(streams)

    def loaded(name: str, mode: int) -> Driver:
        assert (name, mode) == ("libcuda.so.1", os.RTLD_NOLOAD)
        return driver

    transfer._driver.cache_clear()
    monkeypatch.setattr(transfer, "CDLL", loaded)
    monkeypatch.setattr(transfer, "time_on_device", run_twice(streams))
    return driver


def run_twice(streams: Streams) -> Callable[..., DeviceTiming]:
    def time_on_device(
        operation: Callable[[], object],
        device: str,
        seconds: float,
        *,
        warmup_s: float,
        window_context: Callable[[], AbstractContextManager[object]],
    ) -> DeviceTiming:
        streams.log.append(("timed on", device, "while current is " + streams.device))
        with window_context():
            operation()
            operation()
        return DeviceTiming((seconds,), 1, warmup_s, 0.0)

    return time_on_device


def test_every_ordered_pair_is_copied_from_its_source(streams: Streams, driver: Driver) -> None:
    progress: list[str] = []
    copies = transfer.time_peer_copies(3, 0.5, progress.append)
    pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert [(copy.source, copy.target) for copy in copies] == pairs
    assert [copy.peer_access for copy in copies] == [True, False, True, True, False, True]
    assert progress == [f"GPU {source} to {target}" for source, target in pairs]
    timed = [entry for entry in streams.log if entry[0] == "timed on"]
    assert timed == [("timed on", f"cuda:{s}", f"while current is cuda:{s}") for s, _ in pairs for _ in range(2)]
    assert streams.device == "cuda:0"


def test_directions_synchronise_only_at_the_ends_of_a_window(streams: Streams, driver: Driver) -> None:
    """On a common stream, or CUDA's default stream, the copies would run one after the other."""
    transfer.time_peer_copies(2, 0.5, lambda text: None)
    start = [("cuda:0 new", "waits for", "cuda:0 default"), ("cuda:1 new", "waits for", "cuda:0 default")]
    end = [("cuda:0 default", "waits for", "cuda:0 new"), ("cuda:0 default", "waits for", "cuda:1 new")]
    forward, back = ("copies cuda:0 to cuda:1", "stream 1"), ("copies cuda:1 to cuda:0", "stream 2")
    timed = [index for index, entry in enumerate(streams.log) if entry[0] == "timed on"]
    assert streams.log[: timed[0]] == [("torch copies", "cuda:0", "cuda:1"), ("torch copies", "cuda:1", "cuda:0")]
    assert streams.log[timed[0] + 1 : timed[1]] == [*start, forward, forward, *end]
    assert streams.log[timed[1] + 1 : timed[1] + 9] == [*start, forward, back, forward, back, *end]


def test_error_of_the_driver_is_raised(streams: Streams, driver: Driver) -> None:
    driver.code = 700
    with pytest.raises(SeatrialError, match=r"cuMemcpyAsync from cuda:0 to cuda:1.*700"):
        transfer.time_peer_copies(2, 0.5, lambda text: None)


def test_bidirectional_host_copies_run_on_two_streams(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    log = streams.log

    class Copied:
        def __init__(self, size: int, dtype: torch.dtype, device: str = "host", pin_memory: bool = False) -> None:
            assert pin_memory == (device == "host"), "copies from pageable memory use a staging buffer"
            self.device = device

        def copy_(self, source: Copied, non_blocking: bool) -> None:
            assert non_blocking
            log.append((streams.current("cuda:1"), source.device, self.device))

    monkeypatch.setattr(torch, "empty", Copied)
    monkeypatch.setattr(rank, "numa_cpus", lambda device: os.sched_getaffinity(0))
    names = iter(("stream 1", "stream 2"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(streams, device, next(names), 1))
    streams.device = "cuda:1"
    pinned = transfer.PinnedBuffers("cuda:1")
    with pinned.concurrent():
        pinned.bidirectional()
    assert log == [
        ("stream 1", "waits for", "cuda:1 default"),
        ("stream 2", "waits for", "cuda:1 default"),
        ("stream 1", "host", "cuda:1"),
        ("stream 2", "cuda:1", "host"),
        ("cuda:1 default", "waits for", "stream 1"),
        ("cuda:1 default", "waits for", "stream 2"),
    ]


def test_host_memory_is_allocated_on_the_gpus_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = [{0, 1, 2}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: allowed[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cpus: allowed.append(cpus))
    monkeypatch.setattr(rank, "numa_cpus", lambda device: {2, 3})
    with pytest.raises(KeyError), transfer._on_numa_cpus("cuda:0") as description:
        raise KeyError
    assert allowed[1:] == [{2}, {0, 1, 2}]
    assert "1 of this process's 3 CPUs" in description


def test_unknown_or_unusable_numa_cpus_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cpus: pytest.fail("moved"))

    def unknown(device: str) -> set[int]:
        raise SeatrialError("Not Supported")

    for numa_cpus, part in ((unknown, "Not Supported"), (lambda device: {10**6}, "none is on the GPU's NUMA node")):
        monkeypatch.setattr(rank, "numa_cpus", numa_cpus)
        with transfer._on_numa_cpus("cuda:0") as description:
            assert part in description
