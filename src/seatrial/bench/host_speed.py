"""Speed of the CPUs, the memory and a local disk of one node; the tests take seconds and need no torch.

Python's threads suffice: these calls (PBKDF2 of OpenSSL, memmove of libc, system calls) release the interpreter's
lock (GIL). Compare the rates with those of nodes of the same CPU model, not with other benchmarks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from statistics import median
from threading import Barrier

WINDOWS = 3  # one disturbed window hardly changes the median
_CALIBRATION_ITERATIONS = 2000  # timed first, in about a millisecond, to compute the number of iterations of a window
COPY_BYTES = 2**25  # size of a buffer; the two buffers of a thread exceed its share of any cache
DISK_CHUNK_BYTES = 2**22  # per read or write
_START_TIMEOUT_S = 30.0  # within which all threads must have allocated their memory


@dataclass(frozen=True)
class DiskSpeed:
    """Sequential rates ``write`` and ``read`` in GB/s with O_DIRECT, and the ``size`` of the file in bytes."""

    write: float
    read: float
    size: int


def hash_rate(cpus: Sequence[int], seconds: float) -> float:
    """Iterations/s of PBKDF2-HMAC-SHA256 on all of ``cpus`` together, one thread each; median of WINDOWS windows."""
    (calibration_s,) = _run_on_cpus(cpus[:1], lambda: partial(_hash_s, _CALIBRATION_ITERATIONS))
    iterations = max(1, int(_CALIBRATION_ITERATIONS * seconds / WINDOWS / calibration_s))

    def rate() -> float:
        return iterations / _hash_s(iterations)

    return median(sum(_run_on_cpus(cpus, lambda: rate)) for _ in range(WINDOWS))


def copy_rates(cpu_groups: Sequence[Sequence[int]], seconds: float, block: int = COPY_BYTES) -> list[float]:
    """Memory copy rate of each group of CPUs (such as a NUMA node) in GB/s, bytes read plus bytes written.

    All CPUs copy concurrently. Each thread first writes to its two buffers of ``block`` bytes, so that both are in the
    memory of its NUMA node, then copies one to the other.
    """
    rates = iter(_run_on_cpus(list(chain.from_iterable(cpu_groups)), lambda: _copy(block, seconds)))  # one per CPU
    return [sum(islice(rates, len(group))) for group in cpu_groups]


def disk_speed(path: Path, size: int, limit_s: float) -> DiskSpeed:
    """The rates of writing and reading a new file with O_DIRECT, up to ``size`` bytes or ``limit_s`` seconds each.

    The file is removed. Raises OSError, with EINVAL if the filesystem does not support O_DIRECT.
    """
    with mmap.mmap(-1, DISK_CHUNK_BYTES) as buffer, memoryview(buffer) as view:
        buffer.write(os.urandom(DISK_CHUNK_BYTES))  # not compressible
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            path.unlink()  # the open file stays until it is closed
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
            written, write_s = _transfer_repeatedly(lambda: os.write(file, view), size, limit_s, lambda: os.fsync(file))
            os.lseek(file, 0, os.SEEK_SET)
            read, read_s = _transfer_repeatedly(lambda: os.readv(file, [view]), written, limit_s)
        finally:
            os.close(file)
    return DiskSpeed(written / write_s / 1e9, read / read_s / 1e9, written)


def _transfer_repeatedly(
    transfer: Callable[[], int], size: int, limit_s: float, finish: Callable[[], None] = lambda: None
) -> tuple[int, float]:
    """(bytes, seconds) of repeated ``transfer`` calls and one ``finish``. Raises OSError if ``transfer`` returns 0."""
    started, total = time.perf_counter(), 0
    while total < size and time.perf_counter() - started < limit_s:
        count = transfer()
        if not count:
            raise OSError(errno.EIO, f"end of file after {total} of {size} bytes")
        total += count
    finish()
    return total, time.perf_counter() - started


def _hash_s(iterations: int) -> float:
    """Seconds of one PBKDF2 computation."""
    started = time.perf_counter()
    hashlib.pbkdf2_hmac("sha256", b"seatrial", b"host speed", iterations)
    return time.perf_counter() - started


def _copy(block: int, seconds: float) -> Callable[[], float]:
    """A function that copies for ``seconds`` and returns GB/s; the memory is allocated and touched before."""
    buffers = [mmap.mmap(-1, block) for _ in range(2)]
    source, target = (ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers)
    for address in (source, target):
        ctypes.memset(address, 1, block)

    def copy() -> float:
        started, copies, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < seconds:
            ctypes.memmove(target, source, block)
            copies += 1
            elapsed = time.perf_counter() - started
        for buffer in buffers:
            buffer.close()
        return 2 * copies * block / elapsed / 1e9

    return copy


def _run_on_cpus(cpus: Sequence[int], prepare: Callable[[], Callable[[], float]]) -> list[float]:
    """Call ``prepare`` in one thread per CPU; then call the functions that it returned, all at once.

    Return the results of these functions, by CPU.
    """
    barrier = Barrier(len(cpus))

    def run(cpu: int) -> float:
        try:
            os.sched_setaffinity(0, {cpu})  # 0: this thread only
            work = prepare()
        except Exception:
            barrier.abort()
            raise
        barrier.wait(_START_TIMEOUT_S)
        return work()

    with ThreadPoolExecutor(len(cpus)) as pool:
        return list(pool.map(run, cpus))
