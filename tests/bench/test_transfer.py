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
    """CUDA's current device and the current stream of each, and what is put on them. Unknown calls are errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: Log = []
        self.device = "cuda:0"
        self.streams: dict[str, str] = {}
        self.buffers: list[Buffer] = []
        self.made = 0
        for name in ("device", "stream", "Stream", "current_stream", "can_device_access_peer"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name.lower()}" if name != "Stream" else "_make"))

    def current(self, device: str) -> str:
        return self.streams.get(device, f"{device} default")

    @contextmanager
    def _device(self, device: str | int) -> Iterator[None]:
        before, self.device = self.device, f"cuda:{device}" if isinstance(device, int) else device
        yield
        self.device = before

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, self.device = self.device, stream.device
        streams, self.streams = self.streams, {**self.streams, stream.device: stream.name}
        yield
        self.streams, self.device = streams, before

    def _make(self, device: str) -> Stream:
        self.made += 1
        return Stream(self, device, f"{device} new", self.made)

    def _current_stream(self) -> Stream:
        return Stream(self, self.device, self.current(self.device), 0)

    def _can_device_access_peer(self, one: int, other: int) -> bool:
        return {one, other} != {0, 2}


class Stream:
    def __init__(self, streams: Streams, device: str, name: str, handle: int) -> None:
        self.streams, self.device, self.name, self.cuda_stream = streams, device, name, handle

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append((self.name, "waits for", other.name))


class Buffer:
    """A tensor of a GPU, at an address of its own; torch copies it once, in either direction."""

    def __init__(self, streams: Streams, device: str, size: int) -> None:
        self.streams, self.device, self.nbytes = streams, device, size
        self.streams.buffers.append(self)
        self._address = 0x1000 * len(self.streams.buffers)

    def data_ptr(self) -> int:
        return self._address

    def copy_(self, source: Buffer) -> None:
        self.streams.log.append(("torch copies", source.device, self.device))


class Driver:
    """CUDA's driver, with the signature of cuda.h: dst, src, bytes, stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self.code = streams, 0
        self.cuMemcpyAsync = CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)(self._copy)

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        by = {buffer.data_ptr(): buffer for buffer in self._streams.buffers}
        assert {by[target].nbytes, by[source].nbytes} == {size}
        self._streams.log.append((f"copies {by[source].device} to {by[target].device}", f"stream {stream}"))
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
    monkeypatch.setattr(transfer, "time_on_device", twice(streams))
    return driver


def twice(streams: Streams) -> Callable[..., DeviceTiming]:
    def time_alone(
        operation: Callable[[], object],
        device: str,
        seconds: float,
        *,
        heat_up_s: float,
        inside: Callable[[], AbstractContextManager[object]],
    ) -> DeviceTiming:
        streams.log.append(("timed on", device, "while current is " + streams.device))
        with inside():
            operation()
            operation()
        return DeviceTiming((seconds,), 1, heat_up_s, 0.0)

    return time_alone


def test_every_ordered_pair_is_copied_from_its_source(streams: Streams, driver: Driver) -> None:
    notes: list[str] = []
    copies = transfer.time_peer_copies(3, 0.5, notes.append)
    pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert [(copy.source, copy.target) for copy in copies] == pairs
    assert [copy.peer_access for copy in copies] == [True, False, True, True, False, True]
    assert notes == [f"GPU {source} to {target}" for source, target in pairs]
    timed = [entry for entry in streams.log if entry[0] == "timed on"]
    assert timed == [("timed on", f"cuda:{s}", f"while current is cuda:{s}") for s, _ in pairs for _ in range(2)]
    assert streams.device == "cuda:0"


def test_both_ways_wait_for_each_other_only_at_the_ends_of_a_window(streams: Streams, driver: Driver) -> None:
    """With a stream in common, or CUDA's default one, the copies take turns."""
    transfer.time_peer_copies(2, 0.5, lambda text: None)
    began = [("cuda:0 new", "waits for", "cuda:0 default"), ("cuda:1 new", "waits for", "cuda:0 default")]
    ended = [("cuda:0 default", "waits for", "cuda:0 new"), ("cuda:0 default", "waits for", "cuda:1 new")]
    forth, back = ("copies cuda:0 to cuda:1", "stream 1"), ("copies cuda:1 to cuda:0", "stream 2")
    timed = [index for index, entry in enumerate(streams.log) if entry[0] == "timed on"]
    assert streams.log[: timed[0]] == [("torch copies", "cuda:0", "cuda:1"), ("torch copies", "cuda:1", "cuda:0")]
    assert streams.log[timed[0] + 1 : timed[1]] == [*began, forth, forth, *ended]
    assert streams.log[timed[1] + 1 : timed[1] + 9] == [*began, forth, back, forth, back, *ended]


def test_an_error_of_the_driver_is_told(streams: Streams, driver: Driver) -> None:
    driver.code = 700
    with pytest.raises(SeatrialError, match="cuMemcpyAsync from cuda:0 to cuda:1: error 700"):
        transfer.time_peer_copies(2, 0.5, lambda text: None)


def test_host_copies_both_ways_run_on_two_streams(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    log = streams.log

    class Copied:
        def __init__(self, size: int, dtype: torch.dtype, device: str = "host", pin_memory: bool = False) -> None:
            assert pin_memory == (device == "host"), "copies from pageable memory go through a buffer of the driver"
            self.device = device

        def copy_(self, source: Copied, non_blocking: bool) -> None:
            assert non_blocking
            log.append((streams.current("cuda:1"), source.device, self.device))

    monkeypatch.setattr(torch, "empty", Copied)
    monkeypatch.setattr(rank, "numa_cpus", lambda device: os.sched_getaffinity(0))
    names = iter(("lane 1", "lane 2"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(streams, device, next(names), 1))
    streams.device = "cuda:1"
    pinned = transfer.PinnedBuffers("cuda:1")
    with pinned.concurrent():
        pinned.bidirectional()
    assert log == [
        ("lane 1", "waits for", "cuda:1 default"),
        ("lane 2", "waits for", "cuda:1 default"),
        ("lane 1", "host", "cuda:1"),
        ("lane 2", "cuda:1", "host"),
        ("cuda:1 default", "waits for", "lane 1"),
        ("cuda:1 default", "waits for", "lane 2"),
    ]


def test_host_memory_is_asked_for_beside_the_gpu_and_the_process_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = [{0, 1, 2}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: allowed[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cpus: allowed.append(cpus))
    monkeypatch.setattr(rank, "numa_cpus", lambda device: {2, 3})
    with pytest.raises(KeyError), transfer._near("cuda:0") as told:
        raise KeyError
    assert allowed[1:] == [{2}, {0, 1, 2}]
    assert told == "asked for on CPUs beside the GPU, which are 1 of the 3 of this process"


def test_where_nothing_is_known_of_the_gpus_cpus_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cpus: pytest.fail("moved"))

    def unknown(device: str) -> set[int]:
        raise SeatrialError("NVML does not tell")

    for beside, words in ((unknown, "NVML does not tell"), (lambda device: {10**6}, "none of which is beside")):
        monkeypatch.setattr(rank, "numa_cpus", beside)
        with transfer._near("cuda:0") as told:
            assert words in told
