"""Writes small IDX files in MNIST's format."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor

from seatrial.train.images import MNIST_FILES, Images


def idx_bytes(values: Tensor) -> bytes:
    header = struct.pack(f">4B{values.dim()}I", 0, 0, 8, values.dim(), *values.shape)
    return header + values.to(torch.uint8).contiguous().numpy().tobytes()


def write_mnist(folder: Path, data: Images, gzipped: bool = False) -> list[Path]:
    """Writes ``data`` as MNIST's four files; returns their paths."""
    parts = (
        (data.train_images[:, 0] * 255).round(),
        data.train_labels,
        (data.test_images[:, 0] * 255).round(),
        data.test_labels,
    )
    paths = []
    for name, values in zip(MNIST_FILES, parts, strict=True):
        path = folder / (f"{name}.gz" if gzipped else name)
        path.write_bytes(gzip.compress(idx_bytes(values)) if gzipped else idx_bytes(values))
        paths.append(path)
    return paths
