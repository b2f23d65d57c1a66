"""The arithmetic of fp8 products on a CPU, where torch supports them too."""

from typing import Any

import pytest
import torch

from seatrial.model import UsageError
from seatrial.train import architecture, fp8, lora, parallel
from seatrial.train.decoder import Decoder, Linear
from tests.train import ranks
from tests.train.decoders import random_decoder
from tests.train.test_decoder import tokens


def normal(*size: int, std: float = 1.0) -> torch.Tensor:
    values = torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))) * std
    return values.bfloat16().requires_grad_()


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the error ÷ the norm of ``exact``; 0.02 to 0.05 for random numbers with 3 or 2 bits of mantissa."""
    return float((value.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("std", [1e-6, 1.0, 1e4])  # without a scale, e4m3 covers 2e-3 to 448
def test_products_and_gradients_equal_those_of_bf16_except_for_rounding(std: float) -> None:
    x, weight, gradient = normal(2, 32, 64, std=std), normal(48, 64, std=0.02), normal(2, 32, 48, std=1e-5)
    output, exact = fp8.linear(x, weight), torch.nn.functional.linear(x, weight)
    assert output.dtype == torch.bfloat16
    assert output.shape == exact.shape
    assert 1e-3 < relative_error(output, exact) < 0.06
    gradients = torch.autograd.grad(output, (x, weight), gradient)
    exact_gradients = torch.autograd.grad(exact, (x, weight), gradient)
    assert all(1e-3 < relative_error(*pair) < 0.09 for pair in zip(gradients, exact_gradients, strict=True))


def test_a_frozen_weight_gets_no_gradient_and_the_gradient_of_x_is_the_same() -> None:
    x, weight, gradient = normal(2, 32, 64), normal(48, 64, std=0.02), normal(2, 32, 48, std=1e-5)
    output = fp8.linear(x, weight)
    (expected, _) = torch.autograd.grad(output, (x, weight), gradient)
    frozen = weight.detach()
    frozen_output = fp8.linear(x, frozen)
    assert torch.equal(frozen_output, output)
    saved = frozen_output.grad_fn.next_functions[0][0].saved_tensors  # type: ignore[union-attr]
    saved_shapes = [tensor.shape for tensor in saved if tensor is not None]
    assert saved_shapes == [frozen.shape, torch.Size([])]
    torch.autograd.backward(frozen_output, gradient)
    assert frozen.grad is None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_fp8_changes_loss_and_gradients_of_adapters_by_rounding_only() -> None:
    losses, gradients = [], []
    for use_fp8 in (False, True):
        model = random_decoder("qwen2-tiny", dtype=torch.bfloat16)
        lora.attach(model, ("q_proj", "down_proj"), 4, 8, 0.0)
        for number, adapter in enumerate(lora.adapter_parameters(model).values()):
            torch.nn.init.normal_(adapter, std=0.1, generator=torch.Generator().manual_seed(number))
        if use_fp8:
            enable_fp8(model)
        loss = model(tokens((2, 32)), tokens((2, 32)))
        loss.backward()
        losses.append(loss)
        gradients.append([adapter.grad for adapter in lora.adapter_parameters(model).values()])
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[0], losses[1], rtol=0.01, atol=0)
    assert max(relative_error(b, a) for a, b in zip(*gradients, strict=True)) < 0.3


def test_representable_values_are_exact() -> None:
    x = torch.tensor([[448.0, 2.0] * 16] * 16, dtype=torch.bfloat16)
    weight = torch.eye(32, dtype=torch.bfloat16)
    assert torch.equal(fp8.linear(x, weight), x)
    assert torch.equal(fp8.linear(torch.zeros_like(x), weight), torch.zeros_like(x))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_propagate(bad: float) -> None:
    x = normal(16, 32).detach()
    x[3, 3] = bad
    assert not fp8.linear(x, normal(16, 32)).isfinite().any()


def enable_fp8(model: Decoder) -> Decoder:
    for layer in model.layers.modules():
        if isinstance(layer, Linear):
            layer.uses_fp8 = True
    return model


def test_fp8_applies_to_all_layers_except_the_head() -> None:
    reference, fp8_model = (random_decoder("qwen2-tiny", dtype=torch.bfloat16) for _ in range(2))
    enable_fp8(fp8_model)
    losses = [model(tokens((2, 32)), tokens((2, 32))) for model in (reference, fp8_model)]
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[0], losses[1], rtol=0.01, atol=0)
    for loss in losses:
        loss.backward()
    pairs = zip(reference.parameters(), fp8_model.parameters(), strict=True)
    assert max(relative_error(b.grad, a.grad) for a, b in pairs if a.grad is not None and b.grad is not None) < 0.3
    output = random_decoder("qwen2-tiny", dtype=torch.bfloat16).output
    assert not any(getattr(module, "uses_fp8", False) for module in output.modules())


def test_unsupported_hardware_and_sizes_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ranks.config(bf16=True, fp8=True)
    with parallel.process_group(60) as world, pytest.raises(UsageError, match="there is no GPU"):
        parallel.build(settings, world)
    gpu = torch.device("cuda", 0)
    for capability, message in (((8, 0), r"8\.9.* 8\.0"), ((9, 0), "16.* 90")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        with pytest.raises(UsageError, match=message):
            fp8.require_support(gpu, architecture.load("mistral-tiny").model_copy(update={"intermediate_size": 90}))
    fp8.require_support(gpu, architecture.load("mistral-7b"))


@pytest.mark.parametrize(
    "changes",
    [{"bf16": False}, {"stack": "hf"}, {"bsz": 3, "seq_len": 5}],
)
def test_incompatible_settings_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fp8 requires"):
        ranks.config(**({"bf16": True, "fp8": True} | changes))
