"""The decoder and transformers compute the same logits, for the three model types with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.train import architecture, weights
from seatrial.train.decoder import Block
from tests.train.decoders import CPU, random_decoder

FAMILIES = ("mistral-tiny", "qwen2-tiny", "smollm-tiny")


def tokens(shape: tuple[int, int] = (2, 40)) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def transformers_model(name: str, folder: Path, **options: Any) -> Any:
    """A small random model of transformers, saved to ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = architecture.load(name).model_dump(exclude={"rope_theta", "attention_bias", "hidden_act"})
    rope = {"rope_type": "default", "rope_theta": architecture.load(name).rope_theta}
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(**fields, rope_parameters=rope)
    model = auto.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():  # including norms and biases, initially 1 and 0
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = transformers_model(name, tmp_path, max_shard_size="200KB" if name == "mistral-tiny" else "1GB")
    shape = architecture.load(str(tmp_path))
    ours = weights.build_on_meta(shape, torch.float, torch.float)
    ours.to_empty(device="cpu")
    weights.fill(ours, weights.from_folder(str(tmp_path), weights.random_weights(0, 0.02)), CPU)
    with torch.no_grad():
        logits, expected = ours(tokens()), theirs(tokens()).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in ours.parameters()) == shape.parameters == theirs.num_parameters()


def test_recomputed_activations_give_the_same_gradients() -> None:
    gradients = []
    for recompute in (False, True):
        model = random_decoder("mistral-tiny")
        for block in model.layers:
            assert isinstance(block, Block)
            block.checkpoint_activations = recompute
        model(tokens(), tokens()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_nan_gradient_of_a_later_block_reaches_the_hook() -> None:
    model, finite = random_decoder("mistral-tiny"), list[bool]()
    model.gradient_hook = lambda gradient: finite.append(bool(gradient.isfinite().all()))
    model(tokens(), tokens()).backward()
    with torch.no_grad():
        model.get_parameter("layers.1.mlp.down_proj.weight")[3, 3] = torch.nan
    model(tokens(), tokens()).backward()
    assert finite == [True, False]


def test_fp32_weights_with_bf16_computation() -> None:
    fp32_model, bf16_model = random_decoder("qwen2-tiny"), random_decoder("qwen2-tiny", dtype=torch.bfloat16)
    assert bf16_model(tokens()).dtype == torch.bfloat16
    torch.testing.assert_close(bf16_model(tokens()).float(), fp32_model(tokens()), rtol=0.05, atol=0.02)
    bf16_model(tokens(), tokens()).backward()
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float for parameter in bf16_model.parameters()
    )
