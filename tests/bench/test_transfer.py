from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from seatrial.bench import transfer
from seatrial.bench.alone import Timed

Log = list[tuple[str, ...]]


class Streams:
    """CUDA's current device and the current stream of each, and what is put on them. Unknown calls are errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: Log = []
        self.device = "cuda:0"
        self.streams: dict[str, str] = {}
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
        return Stream(self, device, f"{device} new")

    def _current_stream(self) -> Stream:
        return Stream(self, self.device, self.current(self.device))

    def _can_device_access_peer(self, one: int, other: int) -> bool:
        return {one, other} != {0, 2}


class Stream:
    def __init__(self, streams: Streams, device: str, name: str) -> None:
        self.streams, self.device, self.name = streams, device, name

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append((self.name, "waits for", other.name))


class Buffer:
    """A tensor of a GPU. Its copy_ takes the streams that torch takes (copy_device_to_device in ATen's Copy.cu)."""

    def __init__(self, streams: Streams, device: str, size: int) -> None:
        self.streams, self.device, self.size = streams, device, size

    def copy_(self, source: Buffer, non_blocking: bool) -> None:
        assert non_blocking
        assert source.size == self.size
        source_stream, target_stream = (self.streams.current(buffer.device) for buffer in (source, self))
        self.streams.log.append((source_stream, f"copies to {self.device} with", target_stream))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams(monkeypatch)

    def empty(size: int, dtype: torch.dtype, device: str) -> Buffer:
        assert dtype == torch.uint8
        return Buffer(streams, device, size)

    monkeypatch.setattr(torch, "empty", empty)
    return streams


def once(streams: Streams) -> Callable[..., Timed]:
    def time_alone(operation: Callable[[], object], device: str, seconds: float, *, heat_up_s: float) -> Timed:
        streams.log.append(("timed on", device, "while current is " + streams.device))
        operation()
        return Timed((seconds,), 1, heat_up_s, 0.0)

    return time_alone


def test_every_ordered_pair_is_copied_from_its_source(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "time_alone", once(streams))
    notes: list[str] = []
    copies = transfer.time_peers(3, 0.5, notes.append)
    pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert [(copy.source, copy.target) for copy in copies] == pairs
    assert [copy.direct for copy in copies] == [True, False, True, True, False, True]
    assert notes == [f"GPU {source} to {target}" for source, target in pairs]
    timed = [entry for entry in streams.log if entry[0] == "timed on"]
    assert timed == [("timed on", f"cuda:{s}", f"while current is cuda:{s}") for s, _ in pairs for _ in range(2)]
    assert streams.device == "cuda:0"


def test_both_ways_share_no_stream_and_end_before_the_end_is_recorded(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stream in common the copies take turns, and both ways are as fast as one."""
    monkeypatch.setattr(transfer, "time_alone", once(streams))
    transfer.time_peers(2, 0.5, lambda text: None)
    timed = [index for index, entry in enumerate(streams.log) if entry[0] == "timed on"]
    assert streams.log[timed[0] + 1 : timed[1]] == [
        ("cuda:0 default", "copies to cuda:1 with", "cuda:1 default"),
    ]
    assert streams.log[timed[1] + 1 : timed[2]] == [
        ("cuda:0 new", "waits for", "cuda:0 default"),
        ("cuda:0 default", "copies to cuda:1 with", "cuda:1 default"),
        ("cuda:1 new", "copies to cuda:0 with", "cuda:0 new"),
        ("cuda:0 default", "waits for", "cuda:0 new"),
    ]


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
    streams.device = "cuda:1"
    pinned = transfer.Pinned("cuda:1")
    pinned.both()
    assert log == [
        ("cuda:1 new", "waits for", "cuda:1 default"),
        ("cuda:1 default", "host", "cuda:1"),
        ("cuda:1 new", "cuda:1", "host"),
        ("cuda:1 default", "waits for", "cuda:1 new"),
    ]
