"""One model trained by all processes together, and the same model trained by one process on the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from seatrial.bench.rank import gather
from seatrial.train import markov, proofs
from seatrial.train.transformer import Shape, build, count_parameters

SEED = 0
# The same on a CPU and on a GPU, and small: one process must repeat the work of all of them in seconds.
SHAPE = Shape(seq_len=128, dim=128, layers=6)
TINY = Shape(seq_len=32, dim=64, layers=2)  # where only the steps count, and not what is learned
BATCH = 4  # sequences a rank and step
# SGD, because Adam divides the gradient's scale out: it would hide a sum that was taken for a mean. From 0.1 on this
# model is unstable, and an unstable run makes rounding grow into differences; 0.03 learns without.
LEARNING_RATE = 0.03
MOMENTUM = 0.9


@dataclass(frozen=True)
class Proof:
    """A run of all ranks, and on rank 0 the run of one process that it must equal. Losses are global means, by step.

    Only the last loss of a run may be infinite or NaN: it ends there.
    """

    samples: int
    coverage: proofs.Coverage
    order_faults: int
    losses: list[float]
    alone: list[float] | None
    model: nn.Module
    parameters: int


def identify(local_rank: int, node: str, device: str) -> list[proofs.Process]:
    """What every process says of itself, by rank."""
    return gather(proofs.this_process(dist.get_rank(), dist.get_world_size(), local_rank, node, device))


def wrap(model: nn.Module, device: str) -> nn.Module:
    """``model`` as one replica of a distributed one: rank 0's weights everywhere, gradients averaged."""
    target = torch.device(device)
    return DistributedDataParallel(model, device_ids=[target.index] if target.type == "cuda" else None)


def prove(device: str, steps: int, note: Callable[[str], None]) -> Proof:
    """Train ``steps`` steps together, then again on rank 0 alone while the others wait.

    Every rank begins with weights of its own, so that equal results also prove that DDP handed out rank 0's.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32: its rounding would hide small faults
    size = dataset_size(dist.get_world_size(), steps)
    shares = gather(my_batches(size))
    data = markov.sequences(size, SHAPE.seq_len + 1, SEED).to(device)
    together = min(map(len, shares))  # a rank with more batches than the others would wait for them forever

    note(f"{together} steps by {len(shares)} processes together")
    replica = build(SHAPE, SEED + dist.get_rank(), device)
    mine = shares[dist.get_rank()][:together]
    losses = fit(wrap(replica, device), [data[batch] for batch in mine], _mean_over_ranks)

    alone = None
    if dist.get_rank() == 0:
        note(f"the same {together} steps by one process")
        whole = [[sample for share in shares for sample in share[step]] for step in range(together)]
        alone = fit(build(SHAPE, SEED, device), [data[batch] for batch in whole], Tensor.item)
    wait_for_all(device)
    return Proof(
        samples=size,
        coverage=proofs.coverage([list(chain.from_iterable(share)) for share in shares], size),
        order_faults=sum(gather(order_faults(size))),
        losses=losses,
        alone=alone,
        model=replica,
        parameters=count_parameters(replica),
    )


def dataset_size(ranks: int, steps: int) -> int:
    """As many sequences as fill all batches, less half a rank count: from two ranks on, the sampler has to pad."""
    return ranks * BATCH * steps - ranks // 2


def my_batches(size: int) -> list[list[int]]:
    """The samples of this rank in epoch 0, batch by batch, as a DataLoader with a DistributedSampler serves them."""
    samples = range(size)
    sampler: DistributedSampler[int] = DistributedSampler(samples, seed=SEED)  # type: ignore[arg-type]
    loader: DataLoader[int] = DataLoader(samples, batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]
    return [batch.tolist() for batch in loader]


def order_faults(size: int) -> int:
    """1 for each promise broken here: the same seed gives the same order, another epoch another one."""

    def order(epoch: int) -> list[int]:
        sampler: DistributedSampler[int] = DistributedSampler(range(size), seed=SEED)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        return list(sampler)

    return (order(0) != order(0)) + (order(0) == order(1))


def endless(device: str) -> Iterator[float]:
    """Train a tiny model together, a step each time; the loss as a global mean in nats. All ranks must take each step.

    A loss that has arrived proves that every rank was in the loop.
    """
    data = markov.sequences(BATCH, TINY.seq_len + 1, SEED + dist.get_rank()).to(device)
    replica = wrap(build(TINY, SEED, device), device)
    while True:
        yield from fit(replica, [data], _mean_over_ranks)


def fit(model: nn.Module, batches: list[Tensor], value_of: Callable[[Tensor], float]) -> list[float]:
    """Train on one batch after the other; the losses as ``value_of`` reads them. Ends at one that is not finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses = []
    for batch in batches:
        loss = model(batch)
        losses.append(value_of(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def wait_for_all(device: str) -> None:
    """Return when every rank has called this, and its device has nothing left to do."""
    _mean_over_ranks(torch.zeros((), device=device))


def _mean_over_ranks(value: Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
