"""Trains, saves and loads a small CNN (two convolutions, two linear layers) that learns handwritten digits."""

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
# With this learning rate, 5 epochs at batch 128 on a CPU reach a test accuracy of 96.7 to 98.9 % on scikit-learn's
# digits (ten seeds, which set the split and the weights). Without BatchNorm and shifts, two of four seeds stayed below
# 94 %.
PEAK_LEARNING_RATE = 1e-2
MAX_SHIFT = 1  # largest shift of a training image, in pixels
# Test accuracy on the same digits: 50 to 95.8 % after 12 to 46 steps; 97.2 to 99.2 % after 48 to 60 steps of at most
# 512 images; 74 to 91 % with one or two batches per epoch, even after 120 steps.
MIN_STEPS = 48
MIN_BATCHES_PER_EPOCH = 3
EVALUATION_BATCH = 1000  # images per forward pass: bounds memory


@dataclass(frozen=True)
class Training:
    """The loss of every step (only the last may be infinite or NaN), the number of images processed, and seconds."""

    losses: list[float]
    images: int
    seconds: float


def require_min_steps(images: int, epochs: int, batch: int) -> None:
    """Raises SeatrialError if ``epochs`` and ``batch`` give too few steps to learn the digits.

    The minimum does not depend on the hardware.
    """
    batches = math.ceil(images / batch)
    if batches >= MIN_BATCHES_PER_EPOCH and epochs * batches >= MIN_STEPS:
        return
    raise SeatrialError(
        f"epochs {epochs} and batch {batch} make {epochs * batches} steps of {images} images, {batches} per epoch: "
        f"expected at least {MIN_STEPS} steps and {MIN_BATCHES_PER_EPOCH} per epoch; use more epochs or smaller batches"
    )


def build(device: str) -> nn.Sequential:
    """The untrained network on ``device``; weights are generated on the CPU, identical for every device."""
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


def train(
    net: nn.Module, data: Images, device: str, epochs: int, batch: int, progress: Callable[[str], None]
) -> Training:
    """Trains ``net`` in place; stops after the first step whose loss is not finite."""
    images, labels = data.train_images.to(device), data.train_labels.to(device)
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(net.parameters(), lr=PEAK_LEARNING_RATE)
    steps = epochs * math.ceil(len(labels) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=steps)
    losses: list[float] = []
    start, images_processed = perf_counter(), 0
    net.train()
    for indices in _batches(len(labels), batch, epochs, generator, progress):
        device_indices = indices.to(device)
        loss = F.cross_entropy(net(random_shift(images[device_indices], generator)), labels[device_indices])
        losses.append(loss.item())  # item() waits for the device; without it, only the queueing of steps is timed
        images_processed += len(device_indices)
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return Training(losses, images_processed, perf_counter() - start)


def _batches(
    count: int, batch: int, epochs: int, generator: torch.Generator, progress: Callable[[str], None]
) -> Iterator[Tensor]:
    for epoch in range(epochs):
        progress(f"epoch {epoch + 1}/{epochs}")
        yield from torch.split(torch.randperm(count, generator=generator), batch)


def random_shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """``images`` [N, 1, S, S], each shifted by up to MAX_SHIFT pixels in x and y, padded with 0."""
    count, _, size, _ = images.shape
    top, left = torch.randint(0, 2 * MAX_SHIFT + 1, (2, count, 1, 1), generator=generator).to(images.device)
    offsets = torch.arange(size, device=images.device)
    image_index = torch.arange(count, device=images.device).view(-1, 1, 1)
    padded = F.pad(images, (MAX_SHIFT,) * 4)
    return padded[image_index, 0, top + offsets.view(-1, 1), left + offsets].unsqueeze(1)


@torch.no_grad()
def accuracy(net: nn.Module, data: Images, device: str) -> float:
    """Test accuracy of ``net`` in percent."""
    net.eval()
    parts = (torch.split(tensor, EVALUATION_BATCH) for tensor in (data.test_images, data.test_labels))
    correct = 0
    for images, labels in zip(*parts, strict=True):
        correct += int((net(images.to(device)).argmax(dim=1) == labels.to(device)).sum())
    return 100 * correct / len(data.test_labels)


def save(net: nn.Module, path: Path) -> None:
    """Writes the weights atomically. Raises OSError."""
    atomic_write(path, lambda file: torch.save(net.state_dict(), file))


def load(path: Path, device: str) -> nn.Sequential:
    """The network on ``device``, with the weights that ``save`` wrote to ``path``."""
    net = build(device)
    net.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    return net
