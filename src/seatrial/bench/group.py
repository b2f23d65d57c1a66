"""The process group that all checks of a job share: opened once, closed once."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

# What tells of the path, and costs nothing afterwards: TUNING would write a line for each operation.
_SUBSYSTEMS = "INIT,NET,P2P,ENV"
GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"

set_by_seatrial: set[str] = set()  # variables of the environment that are seatrial's choice and nobody else's


def enable_nccl_log(folder: Path) -> None:
    """Have NCCL write what it does to a file of this process in ``folder``: call it before the group is opened.

    At least INFO: where nobody asked for more, and where WARN was asked for, which INFO holds as well. A file that the
    environment names stays the one if it is each process's own: one of all ranks, or a pipe, could not be read back.
    """
    if os.environ.get("NCCL_DEBUG", "").upper() in ("", "VERSION", "WARN"):
        _set("NCCL_DEBUG", "INFO")
        _set("NCCL_DEBUG_SUBSYS", _SUBSYSTEMS)
    named = os.environ.get("NCCL_DEBUG_FILE", "")
    if "%p" not in named or named.startswith(("/dev/", "/proc/")):
        _set("NCCL_DEBUG_FILE", str(folder / "nccl.%h.%p.log"))


def _set(name: str, value: str) -> None:
    os.environ[name] = value
    set_by_seatrial.add(name)


def disable_graph_mixing() -> None:
    """For the process's life, unless the environment says something about it: NCCL reads it once.

    Operations in CUDA graphs and others never run at once here, and NCCL's care for that case takes 13 us of each one
    in a graph (NCCL User Guide, NCCL_GRAPH_MIXING_SUPPORT; measured on 4 H200, NCCL 2.28.9: 19.4 and 6.7 us).
    """
    if GRAPH_MIXING not in os.environ:
        _set(GRAPH_MIXING, "0")


def open_group(device: str, timeout_s: float) -> None:
    """Join the group that torchrun's environment describes: NCCL for ``cuda:N``, gloo for ``cpu``.

    An operation that waits longer than ``timeout_s`` for its peers is an error. Raises ValueError for any other
    device, and where torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are missing.
    """
    target = torch.device(device)
    timeout = timedelta(seconds=timeout_s)
    if target.type == "cuda" and target.index is not None:
        disable_graph_mixing()
        # The device must be current first: object collectives and NCCL's own buffers go to the current one.
        torch.cuda.set_device(target)
        # With device_id NCCL connects now, so that the first check does not pay for it, or hang in its name.
        dist.init_process_group("nccl", timeout=timeout, device_id=target)
    elif target.type == "cpu":
        torch.set_num_threads(_threads_of_one_process())
        dist.init_process_group("gloo", timeout=timeout)
    else:
        raise ValueError(f"no process group for device {device!r}: expected 'cpu' or 'cuda:N'")


def nccl_log_path() -> Path:
    """Where NCCL writes the log of this process (NCCL User Guide, NCCL_DEBUG_FILE: %h is the host, %p the process)."""
    host = socket.gethostname().partition(".")[0]
    return Path(os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", host).replace("%p", str(os.getpid())))


def connect_all_ranks(device: str) -> None:
    """Have every rank connect to its neighbours and to every other: NCCL does so at the first use."""
    ranks = dist.get_world_size()
    dist.all_reduce(torch.ones(2**20, device=device))
    sent = torch.ones(2**10 * ranks, device=device)
    dist.all_to_all_single(torch.empty_like(sent), sent)
    torch.cuda.synchronize(device)


def close_group() -> None:
    """Wait for work in flight and leave the group. Does nothing where none is open."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == dist.Backend.NCCL:
        torch.cuda.synchronize()
    dist.destroy_process_group()


def exit_without_teardown() -> NoReturn:
    """End this process, successfully, without tearing the interpreter down.

    torch's threads sometimes abort while it is torn down (seen with torch 2.13, gloo and DDP: "terminate called without
    an active exception", about one run in eight). By then all is measured and on disk: that is no fault of the machine.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _threads_of_one_process() -> int:
    """This process's share of the cores it may use: torchrun's own default is one thread."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
