from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from seatrial.train.blocks import IGNORE_INDEX
from seatrial.train.loss import loss_and_gradient, summed_loss


@pytest.mark.parametrize("chunks", [1, 3, 50])
def test_chunked_loss_equals_cross_entropy(chunks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=generator, dtype=torch.double).requires_grad_()
    weight = torch.randn(31, 8, generator=generator, dtype=torch.double).requires_grad_()
    targets = torch.randint(0, 31, (20,), generator=generator)
    targets[5:9] = IGNORE_INDEX
    loss = summed_loss(hidden, weight, targets, chunks)
    reference = F.cross_entropy(hidden @ weight.t(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=0)
    expected = torch.autograd.grad(reference * 3, (hidden, weight))
    gradients = torch.autograd.grad(loss * 3, (hidden, weight))
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_softmax_minus_one_hot_in_the_dtype_of_the_logits() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    targets = torch.tensor([0, 10, IGNORE_INDEX, 3, 3, IGNORE_INDEX])
    loss, gradient = loss_and_gradient(logits, targets)
    expected = logits.float().softmax(dim=-1) - F.one_hot(targets.clamp(min=0), 11)
    expected[targets == IGNORE_INDEX] = 0
    assert (loss.dtype, gradient.dtype) == (torch.float, torch.bfloat16)
    assert torch.equal(gradient, expected.to(torch.bfloat16))
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), targets, reduction="sum"))


def test_ignored_targets_have_no_loss_and_no_gradient() -> None:
    hidden, weight = torch.ones(4, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    loss = summed_loss(hidden, weight, torch.full((4,), IGNORE_INDEX), chunks=2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_frozen_head_passes_the_gradient_to_the_hidden_states() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    summed_loss(hidden, weight, torch.tensor([0, 1, 2, 3]), chunks=2).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_bf16_head_gradients_are_accumulated_in_fp32() -> None:
    """In bf16, 256 + 1 is 256: later chunks would be lost."""
    hidden = torch.full((512, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    summed_loss(hidden, weight, torch.zeros(512, dtype=torch.long), chunks=512).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [-256, 256]


def test_the_compiled_kernel_is_used_if_compiled_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_sizes: list[int] = []

    def kernel(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chunk_sizes.append(len(logits))
        return loss_and_gradient(logits, targets)

    monkeypatch.setattr("seatrial.train.loss._compiled", lambda: kernel)
    arguments = (torch.randn(7, 3), torch.randn(5, 3), torch.arange(7) % 5, 3)
    eager = summed_loss(*arguments)
    assert chunk_sizes == []
    assert torch.equal(summed_loss(*arguments, compiled=True), eager)
    assert chunk_sizes == [3, 3, 1]
