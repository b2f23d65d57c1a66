from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import pytest
import torch

from seatrial.model import SeatrialError
from seatrial.train.images import MNIST_FILES, Images, _digits, load, read_idx, upsampled_digits
from tests.train.idx import idx_bytes, write_mnist


@pytest.fixture
def few() -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (7, 1, 28, 28), generator=generator) / 255
    labels = torch.tensor([0, 9, 5, 1, 2, 3, 4])
    return Images(images[:4], labels[:4], images[4:], labels[4:], name="test", source="test")


@pytest.mark.parametrize("gzipped", [False, True])
def test_mnist_is_read_as_it_was_written(tmp_path: Path, few: Images, gzipped: bool) -> None:
    write_mnist(tmp_path, few, gzipped)
    read = load(str(tmp_path))
    assert str(tmp_path) in read.source
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        assert torch.equal(getattr(read, name), getattr(few, name)), name
    assert read.train_images.dtype == torch.float32
    assert read.train_labels.dtype == torch.int64


@pytest.mark.parametrize("kept", [0, 3, 10, 16, 16 + 4 * 28 * 28 - 1])
def test_a_truncated_file_is_named(tmp_path: Path, few: Images, kept: int) -> None:
    images = write_mnist(tmp_path, few)[0]
    images.write_bytes(images.read_bytes()[:kept])
    with pytest.raises(SeatrialError, match=r"train-images-idx3-ubyte (is truncated|begins with)"):
        load(str(tmp_path))


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.9])
def test_truncated_gzip_files_are_rejected(tmp_path: Path, few: Images, kept: float) -> None:
    images = write_mnist(tmp_path, few, gzipped=True)[2]
    content = images.read_bytes()
    images.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(SeatrialError, match=r"t10k-images-idx3-ubyte\.gz (is truncated or damaged|begins with)"):
        load(str(tmp_path))


def test_gzip_bomb_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(bytes(2**27)))
    with pytest.raises(SeatrialError, match=r"labels\.gz unpacks to more than"):
        read_idx(path, 1)


def test_damaged_gzip_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    content = bytearray(gzip.compress(idx_bytes(torch.arange(200))))
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(SeatrialError, match=r"labels\.gz is truncated or damaged"):
        read_idx(path, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx_bytes(torch.zeros(3)) + b"\0", "is too long: 12 bytes, expected 11"),
        (idx_bytes(torch.zeros(0)), "has no data"),
        (idx_bytes(torch.zeros(3, 4)), r"begins with 00 00 08 02, expected 00 00 08 01"),
        (struct.pack(">4BI", 0, 0, 0x0D, 1, 1) + b"\0\0\0\0", "begins with 00 00 0d 01"),
        (b"<!DOCTYPE html>", "begins with 3c 21 44 4f"),
    ],
)
def test_invalid_label_files_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(SeatrialError, match=message):
        read_idx(path, 1)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (1, torch.zeros(3), "4 images, .*train-labels.* 3 labels"),
        (1, torch.tensor([1, 2, 10, 3]), "label 10"),
        (2, torch.zeros(3, 32, 32), "32×32 pixels"),
    ],
)
def test_inconsistent_files_are_rejected(
    tmp_path: Path, few: Images, file: int, values: torch.Tensor, message: str
) -> None:
    write_mnist(tmp_path, few)[file].write_bytes(idx_bytes(values))
    with pytest.raises(SeatrialError, match=message):
        load(str(tmp_path))


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_file_is_an_error_without_fallback(tmp_path: Path, few: Images, missing: int) -> None:
    write_mnist(tmp_path, few)[missing].unlink()
    with pytest.raises(SeatrialError, match=f"{tmp_path} has neither {MNIST_FILES[missing]} nor"):
        load(str(tmp_path))


def test_training_and_test_digits_do_not_overlap() -> None:
    data = load(None)
    assert "scikit-learn" in data.source
    assert "not MNIST" in data.source
    assert "shared filesystem" in data.limitation
    assert (len(data.train_labels), len(data.test_labels)) == (1438, 359)
    images = torch.cat([data.train_images, data.test_images])
    assert images.shape == (1797, 1, 28, 28)
    assert len(torch.unique(images.flatten(1), dim=0)) == 1797  # no image is in both parts
    assert (images.min().item(), images.max().item()) == (0, 1)
    assert len(torch.bincount(data.test_labels)) == 10
    assert torch.equal(upsampled_digits().test_labels, data.test_labels)


def test_missing_scikit_learn_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SeatrialError, match=r"scikit-learn \(not installed\).*seatrial\[train\]"):
        load(None)


def test_digits_equal_those_of_load_digits() -> None:
    from sklearn.datasets import load_digits

    rows, digits = _digits(), load_digits()
    assert torch.equal(rows[:, :-1], torch.tensor(digits.data, dtype=torch.float32))
    assert torch.equal(rows[:, -1], torch.tensor(digits.target, dtype=torch.float32))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"1,2\n3,4\n", mtime=0), r"digits.csv.gz has shape \(2, 2\), expected \(1797, 65\)"),
        (gzip.compress(b"1,x\n", mtime=0), "could not convert string to float"),
        (b"1,2\n", "digits.csv.gz is truncated or damaged"),
        (None, "No such file"),
    ],
)
def test_an_invalid_digits_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    folder = tmp_path / "sklearn" / "datasets" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").touch()
    if content:
        (folder / "digits.csv.gz").write_bytes(content)
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SeatrialError, match=rf"cannot read the digits of scikit-learn \(.*{message}"):
        load(None)
