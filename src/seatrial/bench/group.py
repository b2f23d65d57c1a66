"""The process group that all checks of a job share: NCCL's settings, opening, debug data, and the end of a process."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# These subsystems of NCCL log at setup only; TUNING would write a line for each operation.
_SUBSYSTEMS = "INIT,NET,P2P,ENV"
GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"

STORE_TIMEOUT = timedelta(days=1)  # a child ends with its parent, which also has a time limit

set_by_seatrial: set[str] = set()  # environment variables that seatrial set


def enable_nccl_log(folder: Path) -> None:
    """Make NCCL log to one file per process in ``folder``; called before the group is opened.

    If NCCL_DEBUG is unset or lower than INFO, sets it to INFO and limits NCCL_DEBUG_SUBSYS. An NCCL_DEBUG_FILE from the
    environment is kept if it names one file per process (%p): a file shared by all ranks, or a pipe, cannot be read.
    """
    if os.environ.get("NCCL_DEBUG", "").upper() in ("", "VERSION", "WARN"):
        _set("NCCL_DEBUG", "INFO")
        _set("NCCL_DEBUG_SUBSYS", _SUBSYSTEMS)
    log_file = os.environ.get("NCCL_DEBUG_FILE", "")
    if "%p" not in log_file or log_file.startswith(("/dev/", "/proc/")):
        _set("NCCL_DEBUG_FILE", str(folder / "nccl.%h.%p.log"))


def _set(name: str, value: str) -> None:
    os.environ[name] = value
    set_by_seatrial.add(name)


def disable_graph_mixing() -> None:
    """Set NCCL_GRAPH_MIXING_SUPPORT=0 for this process, unless the environment sets it; NCCL reads it once.

    The checks never run an operation in a CUDA graph concurrently with one outside of a graph. NCCL's support for that
    adds 13 us to each operation in a graph (NCCL User Guide, NCCL_GRAPH_MIXING_SUPPORT; 4 H200, NCCL 2.28.9: 19.4 us
    with the support, 6.7 us without).
    """
    if GRAPH_MIXING not in os.environ:
        _set(GRAPH_MIXING, "0")


def rendezvous_store(timeout: timedelta = STORE_TIMEOUT) -> Any:
    """A new client of the ranks' rendezvous store, which their child processes use too.

    The children have no store of their own: it would need a port that a firewall may close. Operations time out after
    ``timeout``.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]


def open_group(device: str, timeout_s: float) -> None:
    """Open the process group from torchrun's environment: NCCL for ``cuda:N``, gloo for ``cpu``.

    Operations time out after ``timeout_s``. Raises ValueError for another device, or if a variable of torchrun (RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT) is missing.
    """
    target = torch.device(device)
    timeout = timedelta(seconds=timeout_s)
    if target.type == "cuda" and target.index is not None:
        disable_graph_mixing()
        # Before the group is opened: object collectives and NCCL's buffers use the current device
        torch.cuda.set_device(target)
        # device_id makes NCCL connect now, so that neither its time nor a hang is attributed to the first check
        dist.init_process_group("nccl", timeout=timeout, device_id=target)
    elif target.type == "cpu":
        set_cpu_threads()
        dist.init_process_group("gloo", timeout=timeout)
    else:
        raise ValueError(f"device {device!r}: expected 'cpu' or 'cuda:N'")


def set_cpu_threads() -> None:
    """Let torch use the usable cores divided by the processes of the node; torchrun's default is one thread."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def nccl_version() -> str | None:
    """NCCL's version; None if the process group has another backend."""
    if dist.get_backend() != dist.Backend.NCCL:
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def nccl_log_path() -> Path:
    """Path of this process's NCCL log (NCCL User Guide, NCCL_DEBUG_FILE: %h is the host name, %p the process id)."""
    host = socket.gethostname().partition(".")[0]
    return Path(os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", host).replace("%p", str(os.getpid())))


def nccl_log_size() -> int:
    """Bytes in this process's NCCL log so far: whole lines, since NCCL writes whole lines; 0 without a log."""
    log = nccl_log_path()
    return log.stat().st_size if log.is_file() else 0


def connect_all_ranks(device: str) -> None:
    """Run an all-reduce and an all-to-all on GPUs: NCCL connects ranks when they first communicate."""
    ranks = dist.get_world_size()
    dist.all_reduce(torch.ones(2**20, device=device))
    sent = torch.ones(2**10 * ranks, device=device)
    dist.all_to_all_single(torch.empty_like(sent), sent)
    torch.cuda.synchronize(device)


def flight_recorder_dump() -> bytes:
    """The collectives that this process has queued, as torch dumps them; empty without a process group.

    Read by discover/flight_recorder.py. Called by another thread while the main thread may wait in a collective. Raises
    RuntimeError if torch cannot dump.
    """
    if not dist.is_initialized():
        return b""
    name = "_dump_nccl_trace" if dist.get_backend() == dist.Backend.NCCL else "_dump_fr_trace"
    # Without stack traces: finding the names of their functions took 10 s (torch 2.13, busy CPUs)
    return bytes(getattr(torch._C._distributed_c10d, name)(includeCollectives=True, includeStackTraces=False))


def close_group() -> None:
    """Wait for pending work and destroy the process group, if one is open."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == dist.Backend.NCCL:
        torch.cuda.synchronize()
    dist.destroy_process_group()


def exit_without_teardown() -> NoReturn:
    """Exit with code 0 without interpreter teardown.

    torch's threads sometimes abort during teardown (torch 2.13, gloo and DDP: "terminate called without an active
    exception", about one run in eight). All results are on disk before, so such an abort is no failure of the machine.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
