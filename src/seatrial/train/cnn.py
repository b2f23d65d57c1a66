"""The smallest real training: a Conv–Conv–FC net that learns digits, is saved, loaded back and asked again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seatrial.model import SeatrialError
from seatrial.train.images import CLASSES, SIZE, Images
from seatrial.util.files import atomic_write

SEED = 0
# Found on scikit-learn's digits, 5 epochs at batch 128 on a CPU, ten seeds of split and weights: 96.7 to 98.9 % of
# the held-out digits right. Without BatchNorm and shifts two of four seeds stayed under 94 %.
PEAK_LEARNING_RATE = 1e-2
SHIFT = 1  # pixels
# Fewer do not suffice, on hardware that is in order: on the same digits 12 to 46 steps gave 50 to 95.8 %, 48 to 60 at
# batches up to 512 gave 97.2 to 99.2 %; one or two batches an epoch gave 74 to 91 %, even in 120 steps.
MIN_STEPS = 48
MIN_BATCHES_PER_EPOCH = 3  # an epoch
EVALUATION_BATCH = 1000  # pictures at once: bounds memory


@dataclass(frozen=True)
class Training:
    """One run: the loss of every step, only the last of which may be infinite or NaN, and what the steps took."""

    losses: list[float]
    images: int
    seconds: float


def require_min_steps(images: int, epochs: int, batch: int) -> None:
    """Raises SeatrialError where so little training says nothing of the machine: no GPU learns the digits from it."""
    batches = math.ceil(images / batch)
    if batches >= MIN_BATCHES_PER_EPOCH and epochs * batches >= MIN_STEPS:
        return
    raise SeatrialError(
        f"epochs {epochs} and batch {batch} make {epochs * batches} steps of {images} pictures, {batches} an epoch: "
        f"too few for this net to learn on any hardware. It takes {MIN_STEPS} steps, and {MIN_BATCHES_PER_EPOCH} an epoch: "
        f"more epochs, or smaller batches"
    )


def build(device: str) -> nn.Sequential:
    """The net with its first weights: the same on every device, as the CPU draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (SIZE // 4) ** 2, 128),
            nn.ReLU(),
            nn.Linear(128, CLASSES),
        )
    return net.to(device)


def train(net: nn.Module, data: Images, device: str, epochs: int, batch: int, note: Callable[[str], None]) -> Training:
    """Train ``net`` in place. A loss that is not finite ends the run: what follows it would only be noise."""
    images, labels = data.train_images.to(device), data.train_labels.to(device)
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(net.parameters(), lr=PEAK_LEARNING_RATE)
    steps = epochs * math.ceil(len(labels) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=steps)
    losses: list[float] = []
    start, seen = perf_counter(), 0
    net.train()
    for chosen in _batches(len(labels), batch, epochs, generator, note):
        picked = chosen.to(device)
        loss = F.cross_entropy(net(random_shift(images[picked], generator)), labels[picked])
        losses.append(loss.item())  # waits for the device, so that the clock counts work done, not work queued
        seen += len(picked)
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return Training(losses, seen, perf_counter() - start)


def _batches(
    count: int, batch: int, epochs: int, generator: torch.Generator, note: Callable[[str], None]
) -> Iterator[Tensor]:
    for epoch in range(epochs):
        note(f"epoch {epoch + 1}/{epochs}")
        yield from torch.split(torch.randperm(count, generator=generator), batch)


def random_shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture [N, 1, S, S] moved by up to SHIFT pixels in both directions, the gap black."""
    count, _, size, _ = images.shape
    top, left = torch.randint(0, 2 * SHIFT + 1, (2, count, 1, 1), generator=generator).to(images.device)
    span = torch.arange(size, device=images.device)
    which = torch.arange(count, device=images.device).view(-1, 1, 1)
    padded = F.pad(images, (SHIFT,) * 4)
    return padded[which, 0, top + span.view(-1, 1), left + span].unsqueeze(1)


@torch.no_grad()
def accuracy(net: nn.Module, data: Images, device: str) -> float:
    """Percent of the held-out pictures that ``net`` reads right."""
    net.eval()
    parts = (torch.split(whole, EVALUATION_BATCH) for whole in (data.test_images, data.test_labels))
    right = 0
    for images, labels in zip(*parts, strict=True):
        right += int((net(images.to(device)).argmax(dim=1) == labels.to(device)).sum())
    return 100 * right / len(data.test_labels)


def save(net: nn.Module, path: Path) -> None:
    """Write the weights, whole or not at all. Raises OSError."""
    atomic_write(path, lambda file: torch.save(net.state_dict(), file))


def load(path: Path, device: str) -> nn.Sequential:
    """A new net with the weights that ``save`` wrote."""
    net = build(device)
    net.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    return net


def describe_device(device: str) -> dict[str, str]:
    """What the training ran on, for the record."""
    kind = torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": kind, "device_name": name, "torch": str(torch.__version__)}
