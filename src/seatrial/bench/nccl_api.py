"""NCCL's own functions on torch's communicator: what nccl-tests calls, and nothing around it.

torch's process group does its book-keeping and records an event with each operation: measured by it, an all-reduce of
64 MiB on 4 H200 took 0.9 to 1.7 % longer than by nccl-tests, and one of 1 MiB was bounded by the host.

What is lost is torch's watchdog, which ends a process when an operation of torch's own fails or takes too long. So
``NcclCalls.wait`` asks NCCL for errors, as nccl-tests does; an operation that hangs without one is ended by the limit
of its check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from ctypes import CDLL, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from seatrial.bench.torch_api import process_group_backend
from seatrial.model import SeatrialError

_LIBRARY = "libnccl.so.2"  # its SONAME since NCCL 2.0
# ncclDataType_t and ncclRedOp_t, as torch repeats them from nccl.h (torch/csrc/cuda/nccl.h)
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SUM = 0

_BLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
_BUFFER, _ENUM, _RANK = c_void_p, c_int, c_int
# nccl.h; the communicator and the stream come last in all of them
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ncclAllReduce": (_BUFFER, _BUFFER, c_size_t, _ENUM, _ENUM),
    "ncclAllGather": (_BUFFER, _BUFFER, c_size_t, _ENUM),
    "ncclReduceScatter": (_BUFFER, _BUFFER, c_size_t, _ENUM, _ENUM),
    "ncclAlltoAll": (_BUFFER, _BUFFER, c_size_t, _ENUM),
    "ncclBroadcast": (_BUFFER, _BUFFER, c_size_t, _ENUM, _RANK),
    "ncclReduce": (_BUFFER, _BUFFER, c_size_t, _ENUM, _ENUM, _RANK),
    "ncclSend": (_BUFFER, c_size_t, _ENUM, _RANK),
    "ncclRecv": (_BUFFER, c_size_t, _ENUM, _RANK),
}


class NcclApiUnavailable(Exception):
    """Why NCCL's own functions cannot be called here."""


class NcclApi:
    """Makes ready what puts one operation on the current stream of ``device``.

    Raises NotReachable where torch does not tell its communicator, or its libnccl is not one of its own. What is made
    ready holds addresses: the tensors must outlive it. An error of NCCL's is a SeatrialError with NCCL's own words.
    """

    description = "NCCL's own functions, on torch's communicator"
    supports_out_of_place = True  # every operation has one for what is sent and one for what is received

    def __init__(self, device: torch.device) -> None:
        self._library = _loaded_library()
        self._comm = c_void_p(_communicator(device))
        self._stream: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, device.index)
        for name, expected in (("ncclCommCount", dist.get_world_size()), ("ncclCommUserRank", dist.get_rank())):
            if (told := self._ask(name)) != expected:
                raise NcclApiUnavailable(f"{name} of {_LIBRARY} says {told} of torch's communicator, not {expected}")

    def all_reduce(self, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        return self._call("ncclAllReduce", *_ends(sent, received), *_amount(sent), _SUM)

    def all_gather(self, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        return self._call("ncclAllGather", *_ends(sent, received), *_amount(sent))

    def reduce_scatter(self, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        return self._call("ncclReduceScatter", *_ends(sent, received), *_amount(received), _SUM)

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        """One call from NCCL 2.28 on, before that a send and a receive for each rank: as nccl-tests has it."""
        outgoing, incoming = (buffer.chunk(dist.get_world_size()) for buffer in (sent, received))
        if hasattr(self._library, "ncclAlltoAll"):
            return self._call("ncclAlltoAll", *_ends(sent, received), *_amount(outgoing[0]))
        both = ((self._send, outgoing), (self._receive, incoming))
        return self._together([step(blocks[peer], peer) for peer in range(len(outgoing)) for step, blocks in both])

    def broadcast(self, sent: torch.Tensor, received: torch.Tensor, root: int) -> Callable[[], None]:
        return self._call("ncclBroadcast", *_ends(sent, received), *_amount(sent), root)

    def reduce(self, sent: torch.Tensor, received: torch.Tensor, root: int) -> Callable[[], None]:
        return self._call("ncclReduce", *_ends(sent, received), *_amount(sent), _SUM, root)

    def send_receive(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> Callable[[], None]:
        """Send to one rank and receive from another, both at once."""
        return self._together([self._send(sent, to), self._receive(received, source)])

    def wait(self) -> None:
        """To the end of what is on the current stream. Raises SeatrialError where NCCL reports an error meanwhile."""
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end.record()
        while not end.query():  # type: ignore[no-untyped-call]
            self._check(self._ask("ncclCommGetAsyncError"))

    def _send(self, buffer: torch.Tensor, peer: int) -> Callable[[], None]:
        return self._call("ncclSend", buffer.data_ptr(), *_amount(buffer), peer)

    def _receive(self, buffer: torch.Tensor, peer: int) -> Callable[[], None]:
        return self._call("ncclRecv", buffer.data_ptr(), *_amount(buffer), peer)

    def _call(self, name: str, *values: int) -> Callable[[], None]:
        """All that can be is made ready: what Python takes for a call is not to be measured."""
        function = getattr(self._library, name)
        ready = [kind(value) for kind, value in zip(_ARGUMENTS[name], values, strict=True)]
        comm, stream, check = self._comm, self._stream, self._check

        def run() -> None:
            if code := function(*ready, comm, stream()):
                check(code)

        return run

    def _together(self, steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
        start, end, check = self._library.ncclGroupStart, self._library.ncclGroupEnd, self._check

        def run() -> None:
            check(start())
            try:
                for step in steps:
                    step()
            finally:
                check(end())  # of a group that stays open nothing would ever run, nor of what comes later

        return run

    def _ask(self, name: str) -> int:
        answer = c_int()
        self._check(getattr(self._library, name)(self._comm, byref(answer)))
        return answer.value

    def _check(self, code: int) -> None:
        if code:
            said, more = self._library.ncclGetErrorString(code), self._library.ncclGetLastError(self._comm)
            words = "; ".join(text.decode(errors="replace") for text in (said, more) if text)
            raise SeatrialError(f"NCCL reports error {code}: {words}")


def _ends(sent: torch.Tensor, received: torch.Tensor) -> tuple[int, int]:
    return sent.data_ptr(), received.data_ptr()


def _amount(buffer: torch.Tensor) -> tuple[int, int]:
    return buffer.numel(), _TYPES[buffer.dtype]


def _loaded_library() -> CDLL:
    """The libnccl that torch has loaded; another one could not read its communicator."""
    try:
        library = CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        raise NcclApiUnavailable(f"torch has loaded no {_LIBRARY}") from None
    for name, arguments in _ARGUMENTS.items():
        if hasattr(library, name):  # a newer one's are left out
            getattr(library, name).argtypes = (*arguments, c_void_p, c_void_p)
    for name in ("ncclCommCount", "ncclCommUserRank", "ncclCommGetAsyncError"):
        getattr(library, name).argtypes = (c_void_p, c_void_p)
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = (c_int,), c_char_p
    library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = (c_void_p,), c_char_p
    return library


def _communicator(device: torch.device) -> int:
    """torch's ncclComm_t on this device, once it is made (ProcessGroupNCCL::getCommPtr, since torch 2.8)."""
    if os.environ.get(_BLOCKING, "0") != "0":
        raise NcclApiUnavailable(f"{_BLOCKING} is set, and a call would return before its operation is on the stream")
    backend = process_group_backend(device)
    if not hasattr(backend, "_comm_ptr"):
        raise NcclApiUnavailable(f"torch {torch.__version__} does not tell its communicator")
    with torch.cuda.device(device):
        if not (pointer := int(backend._comm_ptr())):
            raise NcclApiUnavailable("torch has made no communicator yet")
    return pointer
