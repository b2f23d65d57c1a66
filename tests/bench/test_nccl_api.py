"""What is asked of NCCL, and of which communicator: told by a stand-in that has the signatures of nccl.h."""

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
# nccl.h 2.28: what comes before communicator and stream
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
    """A libnccl that writes down what it is asked. A name it does not have is an AttributeError, as with CDLL."""

    def __init__(self, without: str = "") -> None:
        self.told: list[tuple[Any, ...]] = []
        self.answers = {"ncclCommCount": RANKS, "ncclCommUserRank": RANK, "ncclCommGetAsyncError": 0}
        self.codes: dict[str, int] = {}
        for name, before in SIGNATURES.items():
            if name != without:
                setattr(self, name, CFUNCTYPE(c_int, *before, c_void_p, c_void_p)(self._writes(name)))
        for name in self.answers:
            setattr(self, name, CFUNCTYPE(c_int, c_void_p, POINTER(c_int))(self._answers(name)))
        for name in ("ncclGroupStart", "ncclGroupEnd"):
            setattr(self, name, CFUNCTYPE(c_int)(self._writes(name)))
        self.ncclGetErrorString = lambda code: b"remote process exited"
        self.ncclGetLastError = lambda comm: b"socket closed"

    def _writes(self, name: str) -> Callable[..., int]:
        def write(*arguments: int) -> int:
            self.told.append((name, *arguments))
            return self.codes.get(name, 0)

        return write

    def _answers(self, name: str) -> Callable[[int, Any], int]:
        def answer(comm: int, place: Any) -> int:
            assert comm == COMM
            place[0] = self.answers[name]
            return 0

        return answer


class Backend:
    """torch's ProcessGroupNCCL. ``communicator`` None: this torch does not tell it."""

    def __init__(self, communicator: int | None) -> None:
        if communicator is not None:
            self._comm_ptr = lambda: communicator


class Torch:
    """torch with an NCCL group of three ranks, and a libnccl that it has loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self.library, self.current = monkeypatch, Library(), [0]
        self.has(Backend(COMM))
        self.loads(self.library)
        monkeypatch.setattr(dist, "get_rank", lambda: RANK)
        monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", self._stream, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self._use)
        monkeypatch.delenv("TORCH_NCCL_USE_COMM_NONBLOCKING", raising=False)

    def has(self, backend: Backend) -> None:
        for module in (nccl_api, torch_api):
            self._monkeypatch.setattr(module, "backend_of", lambda device: backend)

    def loads(self, library: Library) -> None:
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


def told(nccl: Torch, operation: Operation, count: int = 12, dtype: torch.dtype = torch.float32) -> list[Any]:
    """What one run of the operation asks of NCCL, addresses as bytes into what was sent (s) or received (r)."""
    calls = NcclApi(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "collective_api", lambda device: calls)
        made = operation.prepare(count, lambda own: torch.empty(own, dtype=dtype))
    assert nccl.library.told == []
    made.run()
    buffers = {"s": made.sent, "r": made.received}

    def named(value: int) -> str | int:
        for name, buffer in buffers.items():
            if 0 <= (offset := value - buffer.data_ptr()) < buffer.nbytes:
                return f"{name}+{offset}"
        return value

    return [(name, *map(named, arguments)) for name, *arguments in nccl.library.told]


ENDS = (COMM, STREAM)
EXPECTED: dict[str, list[tuple[Any, ...]]] = {
    "all_reduce": [("ncclAllReduce", "s+0", "s+0", 12, FLOAT32, SUM, *ENDS)],
    "all_gather": [("ncclAllGather", "s+0", "r+0", 4, FLOAT32, *ENDS)],
    "reduce_scatter": [("ncclReduceScatter", "s+0", "r+0", 4, FLOAT32, SUM, *ENDS)],
    "all_to_all": [("ncclAlltoAll", "s+0", "r+0", 4, FLOAT32, *ENDS)],
    "broadcast": [("ncclBroadcast", "s+0", "s+0", 12, FLOAT32, 0, *ENDS)],
    "reduce": [("ncclReduce", "s+0", "s+0", 12, FLOAT32, SUM, 0, *ENDS)],
    "send_receive": [
        ("ncclGroupStart",),
        ("ncclSend", "s+0", 12, FLOAT32, 2, *ENDS),
        ("ncclRecv", "r+0", 12, FLOAT32, 0, *ENDS),
        ("ncclGroupEnd",),
    ],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_one_call_of_nccl_as_nccl_tests_makes_it(nccl: Torch, name: str) -> None:
    assert told(nccl, OPERATIONS[name]) == EXPECTED[name]


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce"])
def test_out_of_place_they_are_the_same_call_with_two_buffers(nccl: Torch, name: str) -> None:
    other = OPERATIONS[name].in_place_variant()
    assert other
    (in_place,) = EXPECTED[name]
    assert in_place[1:3] == ("s+0", "s+0")
    assert told(nccl, other) == [(*in_place[:2], "r+0", *in_place[3:])]


@pytest.mark.parametrize(("dtype", "code"), [(torch.float16, FLOAT16), (torch.bfloat16, BFLOAT16)])
def test_types_are_those_of_nccl(nccl: Torch, dtype: torch.dtype, code: int) -> None:
    assert told(nccl, OPERATIONS["all_reduce"], dtype=dtype)[0][4] == code


def test_an_older_nccl_exchanges_all_to_all_by_a_send_and_a_receive_for_each_rank(nccl: Torch) -> None:
    nccl.loads(Library(without="ncclAlltoAll"))
    steps = [
        (name, f"{side}+{16 * peer}", 4, FLOAT32, peer, *ENDS)
        for peer in range(RANKS)
        for name, side in (("ncclSend", "s"), ("ncclRecv", "r"))
    ]
    assert told(nccl, OPERATIONS["all_to_all"]) == [("ncclGroupStart",), *steps, ("ncclGroupEnd",)]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_in_place_the_own_block_is_where_nccl_takes_it_for_in_place(nccl: Torch, name: str) -> None:
    other = OPERATIONS[name].in_place_variant()
    assert other
    (call,) = told(nccl, other)
    whole, block = ("r+0", "s+0") if name == "all_gather" else ("s+0", "s+16")
    assert call[1:4] == ((block, whole, 4) if name == "all_gather" else (whole, block, 4))


def test_an_error_is_told_in_nccls_words_and_leaves_no_group_open(nccl: Torch) -> None:
    nccl.library.codes["ncclRecv"] = 6
    with pytest.raises(SeatrialError, match="NCCL reports error 6: remote process exited; socket closed"):
        told(nccl, OPERATIONS["send_receive"])
    assert [call[0] for call in nccl.library.told] == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]


def test_who_waits_hears_of_an_error_of_the_network(nccl: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel never ends, and torch's watchdog does not look after what torch has not called."""
    asked = []

    class Event:
        def record(self) -> None:
            asked.append("record")

        def query(self) -> bool:
            asked.append("query")
            if len(asked) > 3:
                nccl.library.answers["ncclCommGetAsyncError"] = 6
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    with pytest.raises(SeatrialError, match="remote process exited"):
        NcclApi(DEVICE).wait()
    assert asked == ["record", "query", "query", "query"]


def test_where_nccl_is_within_reach_it_is_called(nccl: Torch) -> None:
    calls = operations.collective_api(DEVICE)
    assert isinstance(calls, NcclApi)
    assert calls.description == "NCCL's own functions, on torch's communicator"


@pytest.mark.parametrize(
    ("communicator", "why"),
    [(None, "does not tell its communicator"), (0, "torch has made no communicator yet")],
)
def test_without_torchs_communicator_it_is_torch_and_says_why(nccl: Torch, communicator: int | None, why: str) -> None:
    nccl.has(Backend(communicator))
    calls = operations.collective_api(DEVICE)
    assert isinstance(calls, TorchApi)
    assert why in calls.description


def test_a_communicator_of_other_ranks_is_not_taken(nccl: Torch) -> None:
    nccl.library.answers["ncclCommUserRank"] = 2
    assert "ncclCommUserRank of libnccl.so.2 says 2" in operations.collective_api(DEVICE).description


def test_a_communicator_whose_calls_return_early_is_not_taken(nccl: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    assert "TORCH_NCCL_USE_COMM_NONBLOCKING is set" in operations.collective_api(DEVICE).description


def test_a_library_that_torch_has_not_loaded_is_not_loaded_for_it(nccl: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(nccl_api.NcclApiUnavailable, match="torch has loaded no libnccl"):
        nccl_api._loaded_library()  # this torch computes on the CPU
