"""What must hold in a distributed training run, counted from what every rank reported. No communication in here."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn


@dataclass(frozen=True)
class RankInfo:
    """What one process says of itself: to torch, in torchrun's environment, and by the device that it holds."""

    rank: int
    world_size: int
    local_rank: int
    environment: dict[str, str | None]  # RANK, WORLD_SIZE, LOCAL_RANK as they are set
    node: str
    gpu_name: str | None  # as NVML calls the model
    gpu_uuid: str | None  # as nvidia-smi -L writes it
    cpus: str  # the cores that it may run on, as in "0-3,8"


def read_rank_info(rank: int, world_size: int, local_rank: int, node: str, device: str) -> RankInfo:
    """This process, as torch.distributed and the worker know it."""
    gpu = torch.cuda.get_device_properties(device) if torch.device(device).type == "cuda" else None
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        environment={name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        node=node,
        gpu_name=gpu.name if gpu else None,
        gpu_uuid=f"GPU-{gpu.uuid}" if gpu else None,
        cpus=core_list(os.sched_getaffinity(0)),
    )


def rank_errors(processes: Sequence[RankInfo]) -> dict[int, str]:
    """Rank → what is wrong with it: it contradicts the environment, is missing, or claimed twice."""
    faults: dict[int, list[str]] = {}
    size = len(processes)
    claims = Counter(process.rank for process in processes)
    seats = Counter((process.node, process.local_rank) for process in processes)
    for process in processes:
        found = faults.setdefault(process.rank, [])
        known = {"RANK": process.rank, "WORLD_SIZE": size, "LOCAL_RANK": process.local_rank}
        for name, value in known.items():
            if process.environment[name] != str(value):
                found.append(f"{name} is {process.environment[name]}, torch has {value}")
        if process.world_size != size:
            found.append(f"torch counts {process.world_size} ranks, {size} answered")
        if claims[process.rank] > 1:
            found.append(f"{claims[process.rank]} processes are rank {process.rank}")
        if seats[process.node, process.local_rank] > 1:
            found.append(f"local rank {process.local_rank} of {process.node} is taken twice")
    missing = set(range(size)) - set(claims)
    return {rank: "; ".join(found) for rank, found in faults.items() if found} | dict.fromkeys(missing, "missing")


def shared_gpus(processes: Sequence[RankInfo]) -> dict[str, list[int]]:
    """GPU UUID → the ranks on it, for every GPU that more than one process holds."""
    holders: dict[str, list[int]] = {}
    for process in processes:
        if process.gpu_uuid is not None:
            holders.setdefault(process.gpu_uuid, []).append(process.rank)
    return {uuid: ranks for uuid, ranks in holders.items() if len(ranks) > 1}


def core_list(cores: Iterable[int]) -> str:
    """Cores as the kernel writes them: {0, 1, 2, 8} → ``0-2,8``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@dataclass(frozen=True)
class Coverage:
    """How the ranks' shares of an epoch add up to its samples."""

    missing: int  # samples that nobody got, besides those left out
    duplicates: int  # samples given out more than once
    left_out: int  # so that every rank gets as many: size mod ranks


def coverage(shares: Sequence[Sequence[int]], size: int) -> Coverage:
    """Compare what each rank was given, of samples 0 to ``size`` - 1, with what ``data.order`` promises."""
    given = Counter(chain.from_iterable(shares))
    left_out = size % len(shares)
    return Coverage(
        missing=max(0, size - left_out - len(given)), duplicates=given.total() - len(given), left_out=left_out
    )


def parameter_digest(models: Iterable[nn.Module]) -> str:
    """SHA-256 over the bytes of every parameter and buffer, in order: one bit changes it."""
    digest = hashlib.sha256()
    for model in models:
        for tensor in model.state_dict().values():
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def mismatched_ranks(digests: Sequence[str]) -> list[int]:
    """The ranks that do not hold what most hold; all of them where no majority says who is right."""
    most, count = Counter(digests).most_common(1)[0]
    if 2 * count <= len(digests):
        return list(range(len(digests)))
    return [rank for rank, digest in enumerate(digests) if digest != most]
