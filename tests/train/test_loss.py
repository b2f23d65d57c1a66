from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from seatrial.train.loss import IGNORE_INDEX, loss_and_gradient, summed_loss


@pytest.mark.parametrize("chunks", [1, 3, 50])
def test_the_loss_in_parts_is_cross_entropy(chunks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=generator, dtype=torch.double).requires_grad_()
    weight = torch.randn(31, 8, generator=generator, dtype=torch.double).requires_grad_()
    targets = torch.randint(0, 31, (20,), generator=generator)
    targets[5:9] = IGNORE_INDEX
    ours = summed_loss(hidden, weight, targets, chunks)
    whole = F.cross_entropy(hidden @ weight.t(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    torch.testing.assert_close(ours.double(), whole, rtol=1e-6, atol=0)
    expected = torch.autograd.grad(whole * 3, (hidden, weight))
    found = torch.autograd.grad(ours * 3, (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_softmax_minus_one_at_the_target_in_the_type_of_the_logits() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    targets = torch.tensor([0, 10, IGNORE_INDEX, 3, 3, IGNORE_INDEX])
    loss, gradient = loss_and_gradient(logits, targets)
    expected = logits.float().softmax(dim=-1) - F.one_hot(targets.clamp(min=0), 11)
    expected[targets == IGNORE_INDEX] = 0
    assert (loss.dtype, gradient.dtype) == (torch.float, torch.bfloat16)
    assert torch.equal(gradient, expected.to(torch.bfloat16))
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), targets, reduction="sum"))


def test_ignored_targets_alone_have_no_loss_and_no_gradient() -> None:
    hidden, weight = torch.ones(4, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    loss = summed_loss(hidden, weight, torch.full((4,), IGNORE_INDEX), chunks=2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_frozen_head_gets_no_gradient_and_passes_it_on() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    summed_loss(hidden, weight, torch.tensor([0, 1, 2, 3]), chunks=2).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_the_gradient_of_a_bf16_head_is_summed_over_the_parts_in_fp32() -> None:
    """In bf16, 256 + 1 is 256: parts that come late would add nothing."""
    hidden = torch.full((512, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    summed_loss(hidden, weight, torch.zeros(512, dtype=torch.long), chunks=512).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [-256, 256]


def test_the_compiled_kernel_is_used_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []

    def kernel(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts.append(len(logits))
        return loss_and_gradient(logits, targets)

    monkeypatch.setattr("seatrial.train.loss._compiled", lambda: kernel)
    arguments = (torch.randn(7, 3), torch.randn(5, 3), torch.arange(7) % 5, 3)
    plain = summed_loss(*arguments)
    assert parts == []
    assert torch.equal(summed_loss(*arguments, compiled=True), plain)
    assert parts == [3, 3, 1]
