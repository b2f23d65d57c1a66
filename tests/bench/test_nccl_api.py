"""Calls of NCCL, recorded by a fake library with the signatures of nccl.h."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_void_p
from typing import Any

import pytest
import torch
import torch.distributed as dist

from seatrial.bench import nccl_api, operations, torch_api
from seatrial.bench.nccl_api import NcclApi
from seatrial.bench.operations import OPERATIONS, Operation
from seatrial.bench.torch_api import TorchApi
from seatrial.model import SeatrialError

RANK, RANKS, DEVICE, COMM, STREAM = 1, 3, torch.device("cuda", 5), 0xC0FFEE, 0x57
# nccl.h 2.28: the arguments before communicator and stream
SIGNATURES: dict[str, tuple[type, ...]] = {
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int),
    "ncclReduceScatter": (c_void_p, c_void_p, c_size_t, c_int, c_int),
    "ncclAlltoAll": (c_void_p, c_void_p, c_size_t, c_int),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int),
    "ncclReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int),
}
FLOAT16, FLOAT32, BFLOAT16, SUM = 6, 7, 9, 0  # ncclDataType_t, ncclRedOp_t


class Library:
    """A libnccl that records its calls; a missing function is an AttributeError, as with CDLL."""

    def __init__(self, without: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.values = {"ncclCommCount": RANKS, "ncclCommUserRank": RANK, "ncclCommGetAsyncError": 0}
        self.codes: dict[str, int] = {}
        for name, before in SIGNATURES.items():
            if name != without:
                setattr(self, name, CFUNCTYPE(c_int, *before, c_void_p, c_void_p)(self._recorder(name)))
        for name in self.values:
            setattr(self, name, CFUNCTYPE(c_int, c_void_p, POINTER(c_int))(self._query(name)))
        for name in ("ncclGroupStart", "ncclGroupEnd"):
            setattr(self, name, CFUNCTYPE(c_int)(self._recorder(name)))
        self.ncclGetErrorString = lambda code: b"remote process exited"
        self.ncclGetLastError = lambda comm: b"socket closed"

    def _recorder(self, name: str) -> Callable[..., int]:
        def record(*arguments: int) -> int:
            self.calls.append((name, *arguments))
            return self.codes.get(name, 0)

        return record

    def _query(self, name: str) -> Callable[[int, Any], int]:
        def query(comm: int, result: Any) -> int:
            assert comm == COMM
            result[0] = self.values[name]
            return 0

        return query


class Backend:
    """Fake of torch's ProcessGroupNCCL; ``communicator`` None: this torch does not expose it."""

    def __init__(self, communicator: int | None) -> None:
        if communicator is not None:
            self._comm_ptr = lambda: communicator


class Torch:
    """Fake of torch with an NCCL group of three ranks and a loaded libnccl."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self.library, self.current = monkeypatch, Library(), [0]
        self.set_backend(Backend(COMM))
        self.set_library(self.library)
        monkeypatch.setattr(dist, "get_rank", lambda: RANK)
        monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", self._stream, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self._use)
        monkeypatch.delenv("TORCH_NCCL_USE_COMM_NONBLOCKING", raising=False)

    def set_backend(self, backend: Backend) -> None:
        for module in (nccl_api, torch_api):
            self._monkeypatch.setattr(module, "process_group_backend", lambda device: backend)

    def set_library(self, library: Library) -> None:
        self.library = library
        self._monkeypatch.setattr(nccl_api, "CDLL", lambda name, mode: library)

    def _stream(self, index: int) -> int:
        assert index == DEVICE.index
        return STREAM

    def _use(self, device: torch.device) -> Any:
        assert device == DEVICE
        return nullcontext()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


def recorded_calls(nccl: Torch, operation: Operation, count: int = 12, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Calls of NCCL in one run of the operation; addresses as offsets into the sent (s) or received (r) buffer."""
    api = NcclApi(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "collective_api", lambda device: api)
        prepared = operation.prepare(count, lambda elements: torch.empty(elements, dtype=dtype))
    assert nccl.library.calls == []
    prepared.run()
    buffers = {"s": prepared.sent, "r": prepared.received}

    def relative(value: int) -> str | int:
        for name, buffer in buffers.items():
            if 0 <= (offset := value - buffer.data_ptr()) < buffer.nbytes:
                return f"{name}+{offset}"
        return value

    return [(name, *map(relative, arguments)) for name, *arguments in nccl.library.calls]


LAST_ARGUMENTS = (COMM, STREAM)
EXPECTED: dict[str, list[tuple[Any, ...]]] = {
    "all_reduce": [("ncclAllReduce", "s+0", "s+0", 12, FLOAT32, SUM, *LAST_ARGUMENTS)],
    "all_gather": [("ncclAllGather", "s+0", "r+0", 4, FLOAT32, *LAST_ARGUMENTS)],
    "reduce_scatter": [("ncclReduceScatter", "s+0", "r+0", 4, FLOAT32, SUM, *LAST_ARGUMENTS)],
    "all_to_all": [("ncclAlltoAll", "s+0", "r+0", 4, FLOAT32, *LAST_ARGUMENTS)],
    "broadcast": [("ncclBroadcast", "s+0", "s+0", 12, FLOAT32, 0, *LAST_ARGUMENTS)],
    "reduce": [("ncclReduce", "s+0", "s+0", 12, FLOAT32, SUM, 0, *LAST_ARGUMENTS)],
    "send_receive": [
        ("ncclGroupStart",),
        ("ncclSend", "s+0", 12, FLOAT32, 2, *LAST_ARGUMENTS),
        ("ncclRecv", "r+0", 12, FLOAT32, 0, *LAST_ARGUMENTS),
        ("ncclGroupEnd",),
    ],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_makes_the_calls_of_nccl_tests(nccl: Torch, name: str) -> None:
    assert recorded_calls(nccl, OPERATIONS[name]) == EXPECTED[name]


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce"])
def test_out_of_place_variant_is_the_same_call_with_two_buffers(nccl: Torch, name: str) -> None:
    variant = OPERATIONS[name].opposite_variant()
    assert variant
    (in_place,) = EXPECTED[name]
    assert in_place[1:3] == ("s+0", "s+0")
    assert recorded_calls(nccl, variant) == [(*in_place[:2], "r+0", *in_place[3:])]


@pytest.mark.parametrize(("dtype", "code"), [(torch.float16, FLOAT16), (torch.bfloat16, BFLOAT16)])
def test_data_types_of_nccl(nccl: Torch, dtype: torch.dtype, code: int) -> None:
    assert recorded_calls(nccl, OPERATIONS["all_reduce"], dtype=dtype)[0][4] == code


def test_all_to_all_before_nccl_2_28_is_sends_and_receives(nccl: Torch) -> None:
    nccl.set_library(Library(without="ncclAlltoAll"))
    steps = [
        (name, f"{side}+{16 * peer}", 4, FLOAT32, peer, *LAST_ARGUMENTS)
        for peer in range(RANKS)
        for name, side in (("ncclSend", "s"), ("ncclRecv", "r"))
    ]
    assert recorded_calls(nccl, OPERATIONS["all_to_all"]) == [("ncclGroupStart",), *steps, ("ncclGroupEnd",)]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_in_place_block_is_at_the_offset_that_nccl_expects(nccl: Torch, name: str) -> None:
    variant = OPERATIONS[name].opposite_variant()
    assert variant
    (call,) = recorded_calls(nccl, variant)
    full, block = ("r+0", "s+0") if name == "all_gather" else ("s+0", "s+16")
    assert call[1:4] == ((block, full, 4) if name == "all_gather" else (full, block, 4))


def test_error_has_nccls_message_and_the_group_is_closed(nccl: Torch) -> None:
    nccl.library.codes["ncclRecv"] = 6
    with pytest.raises(SeatrialError, match="error 6: remote process exited; socket closed"):
        recorded_calls(nccl, OPERATIONS["send_receive"])
    assert [call[0] for call in nccl.library.calls] == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]


def test_wait_raises_asynchronous_errors(nccl: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel never ends, and torch's watchdog does not see direct calls."""
    event_calls = []

    class Event:
        def record(self) -> None:
            event_calls.append("record")

        def query(self) -> bool:
            event_calls.append("query")
            if len(event_calls) > 3:
                nccl.library.values["ncclCommGetAsyncError"] = 6
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    with pytest.raises(SeatrialError, match="remote process exited"):
        NcclApi(DEVICE).wait()
    assert event_calls == ["record", "query", "query", "query"]


def test_nccl_is_called_directly_if_possible(nccl: Torch) -> None:
    api = operations.collective_api(DEVICE)
    assert isinstance(api, NcclApi)
    assert "NCCL" in api.description


@pytest.mark.parametrize(
    ("communicator", "reason"),
    [(None, "_comm_ptr"), (0, "not created")],
)
def test_torch_is_used_without_a_communicator(nccl: Torch, communicator: int | None, reason: str) -> None:
    nccl.set_backend(Backend(communicator))
    api = operations.collective_api(DEVICE)
    assert isinstance(api, TorchApi)
    assert reason in api.description


def test_communicator_of_other_ranks_is_not_used(nccl: Torch) -> None:
    nccl.library.values["ncclCommUserRank"] = 2
    assert "ncclCommUserRank of torch's communicator is 2, expected 1" in operations.collective_api(DEVICE).description


def test_nonblocking_communicator_is_not_used(nccl: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    assert "TORCH_NCCL_USE_COMM_NONBLOCKING" in operations.collective_api(DEVICE).description


def test_library_that_torch_has_not_loaded_is_not_loaded(nccl: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(nccl_api.NcclApiUnavailable, match="libnccl"):
        nccl_api._loaded_library()  # this torch has no CUDA
