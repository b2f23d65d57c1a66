"""28×28 images of handwritten digits: MNIST from IDX files, or the digits bundled with scikit-learn."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from seatrial.model import SeatrialError
from seatrial.util.input_files import MAX_DOCUMENT_BYTES, gunzip, read_bytes

SIZE = 28  # pixels per side
CLASSES = 10  # the digits 0 to 9
MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
SKLEARN_DIGITS = 1797  # images bundled with scikit-learn
TEST_FRACTION = 0.2  # the share of scikit-learn's digits that are test images
SPLIT_SEED = 0


@dataclass(frozen=True)
class Images:
    """Training and test images [N, 1, 28, 28] in 0..1 (float32), labels [N] in 0..9 (int64), and their source."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    name: str  # short name of the dataset
    source: str
    limitation: str = ""  # what training on this dataset does not test


def load(folder: str | None) -> Images:
    """MNIST from its four IDX files (http://yann.lecun.com/exdb/mnist) in ``folder``, plain or gzipped.

    If ``folder`` is None, scikit-learn's digits. Raises SeatrialError if a file is missing or damaged.
    """
    if folder is None:
        return upsampled_digits()
    train_images, train_labels, test_images, test_labels = (_find(Path(folder), name) for name in MNIST_FILES)
    return Images(
        *_read_pair(train_images, train_labels),
        *_read_pair(test_images, test_labels),
        name="MNIST",
        source=f"MNIST, IDX files in {folder}",
    )


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The data of one IDX file, uint8 in the shape of its header.

    Raises SeatrialError if the header is not that of unsigned bytes in ``dimensions`` dimensions, or the size of the
    file does not match the header.
    """
    raw = _content(path)
    magic = bytes((0, 0, 8, dimensions))
    if raw[:4] != magic:
        expected = f"{magic.hex(' ')} (IDX, unsigned bytes in {dimensions} dimensions)"
        raise SeatrialError(f"{path} begins with {raw[:4].hex(' ') or 'no bytes (empty file)'}, expected {expected}")
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise SeatrialError(f"{path} is truncated: {len(raw)} bytes, the header has {header}")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    expected_size = header + prod(shape)
    if len(raw) != expected_size:
        state = "truncated" if len(raw) < expected_size else "too long"
        raise SeatrialError(f"{path} is {state}: {len(raw)} bytes, expected {expected_size} for shape {shape}")
    if not prod(shape):
        raise SeatrialError(f"{path} has no data: its header has the shape {shape}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).reshape(shape)


def upsampled_digits() -> Images:
    """scikit-learn's 1797 digits (UCI, optical recognition of handwritten digits), upsampled; 20 % are test images.

    Raises SeatrialError if scikit-learn is not installed, or its file is damaged.
    """
    rows = _digits()
    small = rows[:, :-1].reshape(-1, 1, 8, 8) / 16  # grey levels are 0 to 16
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
        source=f"scikit-learn's bundled digits, {len(labels)} images of 8×8 upsampled to 28×28; not MNIST",
        limitation="reading training data from a shared filesystem, and accuracy on MNIST",
    )


def _digits() -> Tensor:
    """float32 [1797, 65]: per image 64 pixels, row-major, and the label, as in sklearn.datasets.load_digits.

    The file is read directly, since importing scikit-learn, with SciPy and pandas, takes longer than importing torch.
    """
    try:
        package = find_spec("sklearn")
        if package is None or package.origin is None:
            raise ValueError("not installed")
        path = Path(package.origin).parent / "datasets/data/digits.csv.gz"
        rows = torch.tensor([[float(cell) for cell in line.split(b",")] for line in _content(path).splitlines()])
        if rows.shape != (SKLEARN_DIGITS, 65):
            raise ValueError(f"{path} has shape {tuple(rows.shape)}, expected {(SKLEARN_DIGITS, 65)}")
    except (OSError, ValueError, SeatrialError) as error:
        raise SeatrialError(
            f"cannot read the digits of scikit-learn ({error}): install seatrial[train], or set the option data of "
            f"the check to a directory with {MNIST_FILES[0]}, …"
        ) from error
    return rows


def _find(folder: Path, name: str) -> Path:
    candidates = [folder / name, folder / f"{name}.gz"]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise SeatrialError(f"{folder.absolute()} has neither {name} nor {name}.gz: expected MNIST's four IDX files")
    return path


def _read_pair(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (SIZE, SIZE):
        size = "×".join(map(str, images.shape[1:]))
        raise SeatrialError(f"{images_path} has images of {size} pixels, expected {SIZE}×{SIZE}")
    if len(images) != len(labels):
        raise SeatrialError(f"{images_path} has {len(images)} images, but {labels_path} {len(labels)} labels")
    if labels.max() >= CLASSES:
        raise SeatrialError(f"{labels_path} has a label {int(labels.max())}, expected 0 to {CLASSES - 1}")
    return images.unsqueeze(1).float() / 255, labels.long()


def _content(path: Path) -> bytes:
    try:
        raw = read_bytes(path)
        return raw if path.suffix != ".gz" else gunzip(raw, MAX_DOCUMENT_BYTES)
    except OSError as error:
        raise SeatrialError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SeatrialError(f"{path} {error}") from error
