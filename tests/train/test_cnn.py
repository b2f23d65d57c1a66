from __future__ import annotations

import math
import pickle
from pathlib import Path

import pytest
import torch

from seatrial.train import cnn
from seatrial.train.images import Images

FEW = 300


@pytest.fixture(scope="module")
def digits() -> Images:
    """Five classes that four pixels distinguish: learned quickly."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (FEW,), generator=generator)
    images = torch.rand(FEW, 1, 28, 28, generator=generator) / 4
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 4 + 4 * label : 8 + 4 * label, 12:16] = 1
    return Images(images[:200], labels[:200], images[200:], labels[200:], name="test", source="test")


def train(data: Images, epochs: int = 5, batch: int = 32) -> tuple[torch.nn.Module, cnn.Training, list[str]]:
    net, notes = cnn.build("cpu"), list[str]()
    return net, cnn.train(net, data, "cpu", epochs, batch, notes.append), notes


def test_training_learns_and_reports_progress(digits: Images) -> None:
    net, training, notes = train(digits)
    assert cnn.accuracy(net, digits, "cpu") > 90
    assert training.losses[0] > 2 > 1 > training.losses[-1]
    assert len(training.losses) == 5 * math.ceil(200 / 32)
    assert training.images == 5 * 200
    assert notes == [f"epoch {epoch}/5" for epoch in range(1, 6)]


def test_training_is_bitwise_reproducible(digits: Images) -> None:
    torch.manual_seed(1)
    first = train(digits, epochs=1)[1].losses
    torch.manual_seed(2)  # an earlier check may have used the generator
    assert train(digits, epochs=1)[1].losses == first


def test_accuracy_is_the_percentage_of_correct_predictions(digits: Images) -> None:
    class Always(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.full((len(images),), 3), 10)

    expected = 100 * (digits.test_labels == 3).double().mean().item()
    assert cnn.accuracy(Always(), digits, "cpu") == pytest.approx(expected)


def test_a_loss_that_is_not_finite_ends_the_run(digits: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cnn, "PEAK_LEARNING_RATE", 1e30)
    losses = train(digits)[1].losses
    assert not math.isfinite(losses[-1])
    assert all(map(math.isfinite, losses[:-1]))
    assert len(losses) < 5 * math.ceil(200 / 32)


@pytest.mark.parametrize(("epochs", "batch"), [(1, 1000), (1, 128), (2, 199)])
def test_few_steps_and_odd_batches_train(digits: Images, epochs: int, batch: int) -> None:
    assert len(train(digits, epochs, batch)[1].losses) == epochs * math.ceil(200 / batch)


def test_a_loaded_net_equals_the_saved_one(digits: Images, tmp_path: Path) -> None:
    net, _, _ = train(digits, epochs=1)
    cnn.save(net, tmp_path / "model.pt")
    loaded = cnn.load(tmp_path / "model.pt", "cpu")
    for name, value in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_pickle_with_code_is_rejected(tmp_path: Path) -> None:
    torch.save({"weights": print}, tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError):
        cnn.load(tmp_path / "model.pt", "cpu")


def test_random_shift_moves_each_image_by_at_most_one_pixel() -> None:
    dot = torch.zeros(200, 1, 28, 28)
    dot[:, 0, 10, 20] = 1
    moved = cnn.random_shift(dot, torch.Generator().manual_seed(0))
    assert moved.shape == dot.shape
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(200))
    _, _, rows, columns = moved.nonzero(as_tuple=True)
    places = set(zip(rows.tolist(), columns.tolist(), strict=True))
    assert places == {(row, column) for row in (9, 10, 11) for column in (19, 20, 21)}


def test_random_shift_pads_with_zero() -> None:
    moved = cnn.random_shift(torch.ones(50, 1, 28, 28), torch.Generator().manual_seed(0))
    assert set(moved.sum((1, 2, 3)).tolist()) == {784.0, 784.0 - 28, 784.0 - 55}
