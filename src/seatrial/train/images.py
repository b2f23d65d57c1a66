"""28×28 pictures of handwritten digits: MNIST from its IDX files, or the digits that scikit-learn brings along."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from seatrial.model import SeatrialError

SIZE = 28  # pixels a side
CLASSES = 10
MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
SKLEARN_DIGITS = 1797  # that scikit-learn brings along
TEST_FRACTION = 0.2  # of scikit-learn's digits, never trained on
SPLIT_SEED = 0


@dataclass(frozen=True)
class Images:
    """Pictures [N, 1, 28, 28] in 0..1 (float32) and labels [N] in 0..9 (int64), and where they come from."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    name: str  # of the data set, short
    source: str
    limitation: str = ""


def load(folder: str | None) -> Images:
    """MNIST from ``folder``, or scikit-learn's digits where no folder is named.

    Raises SeatrialError that names the file when ``folder`` does not hold MNIST whole: it never falls back.
    """
    return read_mnist(Path(folder)) if folder is not None else upsampled_digits()


def read_mnist(folder: Path) -> Images:
    """The four IDX files of MNIST (http://yann.lecun.com/exdb/mnist), each plain or with ``.gz``."""
    train_images, train_labels, test_images, test_labels = (_find(folder, name) for name in MNIST_FILES)
    return Images(
        *_read_pair(train_images, train_labels),
        *_read_pair(test_images, test_labels),
        name="MNIST",
        source=f"MNIST, IDX files in {folder}",
    )


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The bytes of one IDX file, in the shape that its header states.

    Raises SeatrialError when the magic number is not that of unsigned bytes in so many dimensions, and when the file
    is shorter or longer than its header says.
    """
    raw = _content(path)
    magic = bytes((0, 0, 8, dimensions))
    if raw[:4] != magic:
        expected = f"{magic.hex(' ')} (IDX, unsigned bytes in {dimensions} dimensions)"
        raise SeatrialError(f"{path} begins with {raw[:4].hex(' ') or 'nothing: it is empty'}, expected {expected}")
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise SeatrialError(f"{path} is truncated: {len(raw)} bytes, its header alone has {header}")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    promised = header + prod(shape)
    if len(raw) != promised:
        state = "truncated" if len(raw) < promised else "too long"
        raise SeatrialError(f"{path} is {state}: {len(raw)} bytes, its header promises {promised} (shape {shape})")
    if not prod(shape):
        raise SeatrialError(f"{path} holds no data: its header states the shape {shape}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).reshape(shape)


def upsampled_digits() -> Images:
    """scikit-learn's 1797 digits of 8×8 pixels (UCI, optical recognition of handwritten digits), a fifth held out.

    Raises SeatrialError where scikit-learn is missing.
    """
    rows = _digits()
    small = rows[:, :-1].reshape(-1, 1, 8, 8) / 16  # it counts 16 grey levels
    images = F.interpolate(small, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    labels = rows[:, -1].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order.tensor_split([round(TEST_FRACTION * len(order))])
    return Images(
        images[train],
        labels[train],
        images[test],
        labels[test],
        name="scikit-learn's digits, not MNIST",
        source=f"scikit-learn's bundled digits, {len(labels)} pictures of 8×8 upsampled to 28×28; not MNIST",
        limitation="that training data can be read from a shared filesystem, and MNIST's own accuracy",
    )


def _digits() -> Tensor:
    """[1797, 65]: 64 pixels each, row by row, and the digit; what sklearn.datasets.load_digits reads, in fp32.

    Its file is read past scikit-learn itself: to import that, with SciPy and pandas, takes a rank longer than torch.
    """
    try:
        if (package := find_spec("sklearn")) is None or package.origin is None:
            raise ValueError("it is not installed")
        path = Path(package.origin).parent / "datasets/data/digits.csv.gz"
        rows = torch.tensor([[float(cell) for cell in line.split(b",")] for line in _content(path).splitlines()])
        if rows.shape != (SKLEARN_DIGITS, 65):
            raise ValueError(f"{path} holds {tuple(rows.shape)} numbers, expected {(SKLEARN_DIGITS, 65)}")
    except (OSError, ValueError, SeatrialError) as error:
        raise SeatrialError(
            "no folder with MNIST is configured, and scikit-learn, whose digits are used then, cannot be read "
            f"({error}): install seatrial[train], or set train.cnn's option data to a folder with {MNIST_FILES[0]}, …"
        ) from error
    return rows


def _find(folder: Path, name: str) -> Path:
    candidates = [folder / name, folder / f"{name}.gz"]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise SeatrialError(f"{folder.absolute()} holds neither {name} nor {name}.gz: expected MNIST's four IDX files")
    return found


def _read_pair(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (SIZE, SIZE):
        raise SeatrialError(f"{images_path} holds pictures of {tuple(images.shape[1:])} pixels, expected {SIZE}×{SIZE}")
    if len(images) != len(labels):
        raise SeatrialError(f"{images_path} holds {len(images)} pictures, {labels_path} {len(labels)} labels")
    if labels.max() >= CLASSES:
        raise SeatrialError(f"{labels_path} holds a label {int(labels.max())}, expected 0 to {CLASSES - 1}")
    return images.unsqueeze(1).float() / 255, labels.long()


def _content(path: Path) -> bytes:
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SeatrialError(f"{path} is truncated or damaged: {error}") from error
