"""Consistency of a distributed training run, computed from the reports of all ranks, without communication."""

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
    """Rank, environment, node and GPU of one training process."""

    rank: int
    world_size: int
    local_rank: int
    environment: dict[str, str | None]  # RANK, WORLD_SIZE, LOCAL_RANK
    node: str
    gpu_name: str | None  # CUDA's name of the model, such as NVIDIA H200
    gpu_uuid: str | None  # in the format of nvidia-smi -L


def read_rank_info(rank: int, world_size: int, local_rank: int, node: str, device: str) -> RankInfo:
    """The RankInfo of this process."""
    gpu = torch.cuda.get_device_properties(device) if torch.device(device).type == "cuda" else None
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        environment={name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        node=node,
        gpu_name=gpu.name if gpu else None,
        gpu_uuid=f"GPU-{gpu.uuid}" if gpu else None,
    )


def rank_errors(processes: Sequence[RankInfo]) -> dict[int, str]:
    """Rank → its errors: missing, several processes, wrong world size, or an environment that differs from torch.

    The world size must be the number of processes. Ranks below this number are expected, and ranks below the
    world size that most processes report. An expected rank without a process is missing.
    """
    errors: dict[int, list[str]] = {}
    size = len(processes)
    processes_per_rank = Counter(process.rank for process in processes)
    local_ranks = Counter((process.node, process.local_rank) for process in processes)
    for process in processes:
        texts = errors.setdefault(process.rank, [])
        expected = {"RANK": process.rank, "WORLD_SIZE": size, "LOCAL_RANK": process.local_rank}
        for name, number in expected.items():
            if process.environment[name] != str(number):
                texts.append(f"{name} is {process.environment[name] or 'not set'}, expected {number}")
        if process.world_size != size:
            texts.append(f"world size {process.world_size} in torch, but {size} ranks reported")
        if processes_per_rank[process.rank] > 1:
            texts.append(f"{processes_per_rank[process.rank]} processes are rank {process.rank}")
        if (count := local_ranks[process.node, process.local_rank]) > 1:
            texts.append(f"local rank {process.local_rank} of {process.node}: {count} processes")
    [(reported_size, _)] = Counter(process.world_size for process in processes).most_common(1)
    missing = set(range(max(size, reported_size))) - set(processes_per_rank)
    return {rank: "; ".join(texts) for rank, texts in errors.items() if texts} | dict.fromkeys(missing, "missing")


def shared_gpus(processes: Sequence[RankInfo]) -> dict[str, list[int]]:
    """GPU UUID → its ranks, for each GPU that several processes use."""
    ranks_by_gpu: dict[str, list[int]] = {}
    for process in processes:
        if process.gpu_uuid is not None:
            ranks_by_gpu.setdefault(process.gpu_uuid, []).append(process.rank)
    return {uuid: ranks for uuid, ranks in ranks_by_gpu.items() if len(ranks) > 1}


@dataclass(frozen=True)
class SampleCounts:
    """How often the ranks read the samples of an epoch."""

    missing: int  # samples that no rank reads, not counting the dropped ones
    duplicates: int  # reads of samples that were read before
    dropped: int  # samples left over when all ranks read the same number


def count_samples(samples_by_rank: Sequence[Sequence[int]], size: int) -> SampleCounts:
    """The SampleCounts of an epoch of ``size`` samples; ``samples_by_rank``: the indices that each rank reads."""
    reads = Counter(chain.from_iterable(samples_by_rank))
    dropped = size % len(samples_by_rank)
    return SampleCounts(
        missing=max(0, size - dropped - len(reads)), duplicates=reads.total() - len(reads), dropped=dropped
    )


def parameter_digest(models: Iterable[nn.Module]) -> str:
    """SHA-256 over the bytes of all parameters and persistent buffers of ``models`` (``state_dict``), in order."""
    digest = hashlib.sha256()
    for model in models:
        for tensor in model.state_dict().values():
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def mismatched_ranks(digests: Sequence[str]) -> list[int]:
    """The ranks whose digest differs from the majority's; all ranks if there is no majority."""
    majority, count = Counter(digests).most_common(1)[0]
    if 2 * count <= len(digests):
        return list(range(len(digests)))
    return [rank for rank, digest in enumerate(digests) if digest != majority]
