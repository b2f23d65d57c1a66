"""Collective operations by direct calls of NCCL on torch's communicator, as in nccl-tests.

torch's process group does bookkeeping and records an event for each operation. With calls through the process group, an
all-reduce of 64 MiB on 4 H200 took 0.9 to 1.7 % longer than with nccl-tests, and the CPU limited the rate at 1 MiB.

torch's watchdog, which ends a process whose operation fails or times out, does not see direct calls. ``NcclApi.wait``
therefore queries NCCL for errors, as nccl-tests does; an operation that hangs without an error is ended by the check's
time limit.
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
# ncclDataType_t and ncclRedOp_t (nccl.h; torch/csrc/cuda/nccl.h)
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SUM = 0
_ROOT = 0  # the rank that sends in a broadcast, and receives in a reduce

_NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
# Arguments of the functions in nccl.h, without the last two of each: communicator and stream
_BUFFERS_COUNT_TYPE = (c_void_p, c_void_p, c_size_t, c_int)
_TRANSFER = (c_void_p, c_size_t, c_int, c_int)  # buffer, count, type and rank of ncclSend and ncclRecv
# Operation → function, and its values after those of _BUFFERS_COUNT_TYPE
_FUNCTIONS = {
    "all_reduce": ("ncclAllReduce", (_SUM,)),
    "all_gather": ("ncclAllGather", ()),
    "reduce_scatter": ("ncclReduceScatter", (_SUM,)),
    "all_to_all": ("ncclAlltoAll", ()),
    "broadcast": ("ncclBroadcast", (_ROOT,)),
    "reduce": ("ncclReduce", (_SUM, _ROOT)),
}


class NcclApiUnavailable(Exception):
    """NCCL cannot be called directly; the message is the reason."""


class NcclApi:
    """Prepares functions that enqueue one operation on the current stream of ``device``.

    Prepared functions hold the addresses of the tensors, so the tensors must outlive the functions. Raises
    NcclApiUnavailable if torch's communicator cannot be used (see ``_communicator``) or torch has not loaded a shared
    libnccl. Raises SeatrialError with NCCL's message if NCCL reports an error.
    """

    description = "NCCL API on torch's communicator"
    supports_out_of_place = True

    def __init__(self, device: torch.device) -> None:
        self._library = _loaded_library()
        self._comm = c_void_p(_communicator(device))
        self._stream: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, device.index)
        for name, expected in (("ncclCommCount", dist.get_world_size()), ("ncclCommUserRank", dist.get_rank())):
            value = self._query(name)
            if value != expected:
                raise NcclApiUnavailable(f"{name} of torch's communicator is {value}, expected {expected}")

    def prepare(self, name: str, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        """A function that enqueues the operation ``name``.

        All-to-all is one call of ncclAlltoAll since NCCL 2.28; before, one send and one receive per rank, as in
        nccl-tests.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if name == "send_receive":
            send = self._transfer("ncclSend", sent, (rank + 1) % ranks)
            return self._group([send, self._transfer("ncclRecv", received, (rank - 1) % ranks)])
        function, values = _FUNCTIONS[name]
        if not hasattr(self._library, function):
            calls = []
            for peer, (outgoing, incoming) in enumerate(zip(sent.chunk(ranks), received.chunk(ranks), strict=True)):
                calls += [self._transfer("ncclSend", outgoing, peer), self._transfer("ncclRecv", incoming, peer)]
            return self._group(calls)
        count = sent.numel() // ranks if name == "all_to_all" else min(sent.numel(), received.numel())
        types = (*_BUFFERS_COUNT_TYPE, *(c_int for _ in values))
        return self._call(function, types, sent.data_ptr(), received.data_ptr(), count, _TYPES[sent.dtype], *values)

    def wait(self) -> None:
        """Wait until all work on the current stream is done. Raises SeatrialError if NCCL reports an error."""
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end.record()
        while not end.query():  # type: ignore[no-untyped-call]
            self._check(self._query("ncclCommGetAsyncError"))

    def _transfer(self, name: str, buffer: torch.Tensor, peer: int) -> Callable[[], None]:
        return self._call(name, _TRANSFER, buffer.data_ptr(), buffer.numel(), _TYPES[buffer.dtype], peer)

    def _call(self, name: str, types: Sequence[Any], *values: int) -> Callable[[], None]:
        """The call of ``name`` with arguments converted beforehand, to keep Python's overhead out of the timing."""
        function = getattr(self._library, name)
        function.argtypes = (*types, c_void_p, c_void_p)
        arguments = [c_type(value) for c_type, value in zip(types, values, strict=True)]
        comm, stream, check = self._comm, self._stream, self._check

        def run() -> None:
            if code := function(*arguments, comm, stream()):
                check(code)

        return run

    def _group(self, calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """A function that makes ``calls`` in one NCCL group, so that their operations run concurrently."""
        start, end, check = self._library.ncclGroupStart, self._library.ncclGroupEnd, self._check

        def run() -> None:
            check(start())
            try:
                for call in calls:
                    call()
            finally:
                check(end())  # an open group would block these operations and all later ones

        return run

    def _query(self, name: str) -> int:
        """The number that NCCL's function ``name`` writes for the communicator. Raises SeatrialError on errors."""
        value = c_int()
        self._check(getattr(self._library, name)(self._comm, byref(value)))
        return value.value

    def _check(self, code: int) -> None:
        """Raise SeatrialError if ``code``, an ncclResult_t, is not 0 (ncclSuccess)."""
        if code:
            messages = self._library.ncclGetErrorString(code), self._library.ncclGetLastError(self._comm)
            text = "; ".join(message.decode(errors="replace") for message in messages if message)
            raise SeatrialError(f"NCCL reports error {code}: {text}")


def _loaded_library() -> CDLL:
    """The libnccl that torch has loaded: another copy cannot use torch's communicator."""
    try:
        library = CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        raise NcclApiUnavailable(f"torch has not loaded {_LIBRARY}") from None
    for name in ("ncclCommCount", "ncclCommUserRank", "ncclCommGetAsyncError"):
        getattr(library, name).argtypes = (c_void_p, c_void_p)
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = (c_int,), c_char_p
    library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = (c_void_p,), c_char_p
    return library


def _communicator(device: torch.device) -> int:
    """Address of torch's ncclComm_t on this device (ProcessGroupNCCL::getCommPtr, since torch 2.8).

    Raises NcclApiUnavailable if it is not exposed, not created yet, or nonblocking.
    """
    if os.environ.get(_NONBLOCKING, "0") != "0":
        raise NcclApiUnavailable(f"{_NONBLOCKING} is set: calls return before the operation is on the stream")
    backend = process_group_backend(device)
    if not hasattr(backend, "_comm_ptr"):
        raise NcclApiUnavailable(f"torch {torch.__version__} does not expose its communicator (_comm_ptr)")
    with torch.cuda.device(device):
        if not (pointer := int(backend._comm_ptr())):
            raise NcclApiUnavailable("torch has not created its communicator yet")
    return pointer
