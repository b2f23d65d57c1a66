"""The arithmetic of products in 8 bits, on a CPU, where torch computes them as well. Their speed needs a GPU."""

from typing import Any

import pytest
import torch

from seatrial.model import UsageError
from seatrial.train import architecture, fp8, lora, parallel
from seatrial.train.decoder import Decoder, Linear
from tests.train import ranks
from tests.train.decoders import random_decoder
from tests.train.test_decoder import tokens


def drawn(*size: int, spread: float = 1.0) -> torch.Tensor:
    values = torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))) * spread
    return values.bfloat16().requires_grad_()


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of norms: 0.02 to 0.05 is what 3 and 2 bits of mantissa leave of random numbers."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])  # e4m3 itself ends at 448, and at 2e-3
def test_products_and_gradients_are_those_of_bf16_but_for_rounding(spread: float) -> None:
    x, weight, gradient = drawn(2, 32, 64, spread=spread), drawn(48, 64, spread=0.02), drawn(2, 32, 48, spread=1e-5)
    found, exact = fp8.linear(x, weight), torch.nn.functional.linear(x, weight)
    assert found.dtype == torch.bfloat16
    assert found.shape == exact.shape
    assert 1e-3 < distance(found, exact) < 0.06
    ours = torch.autograd.grad(found, (x, weight), gradient)
    theirs = torch.autograd.grad(exact, (x, weight), gradient)
    assert all(1e-3 < distance(*pair) < 0.09 for pair in zip(ours, theirs, strict=True))


def test_a_frozen_weight_gets_no_gradient_and_gives_the_same_one_to_what_comes_before() -> None:
    x, weight, gradient = drawn(2, 32, 64), drawn(48, 64, spread=0.02), drawn(2, 32, 48, spread=1e-5)
    found = fp8.linear(x, weight)
    (wanted, _) = torch.autograd.grad(found, (x, weight), gradient)
    frozen = weight.detach()
    same = fp8.linear(x, frozen)
    assert torch.equal(same, found)
    saved = same.grad_fn.next_functions[0][0].saved_tensors  # type: ignore[union-attr]
    kept = [tensor.shape for tensor in saved if tensor is not None]
    assert kept == [frozen.shape, torch.Size([])]
    torch.autograd.backward(same, gradient)
    assert frozen.grad is None
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)


def test_adapters_on_layers_enable_fp8_learn_nearly_the_same() -> None:
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
    assert max(distance(b, a) for a, b in zip(*gradients, strict=True)) < 0.3


def test_representable_values_are_exact() -> None:
    x = torch.tensor([[448.0, 2.0] * 16] * 16, dtype=torch.bfloat16)
    weight = torch.eye(32, dtype=torch.bfloat16)
    assert torch.equal(fp8.linear(x, weight), x)
    assert torch.equal(fp8.linear(torch.zeros_like(x), weight), torch.zeros_like(x))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_propagate(bad: float) -> None:
    x = drawn(16, 32).detach()
    x[3, 3] = bad
    assert not fp8.linear(x, drawn(16, 32)).isfinite().any()


def enable_fp8(model: Decoder) -> Decoder:
    for layer in model.layers.modules():
        if isinstance(layer, Linear):
            layer.fp8 = True
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
    assert max(distance(b.grad, a.grad) for a, b in pairs if a.grad is not None and b.grad is not None) < 0.3
    output = random_decoder("qwen2-tiny", dtype=torch.bfloat16).output
    assert not any(getattr(module, "fp8", False) for module in output.modules())


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
