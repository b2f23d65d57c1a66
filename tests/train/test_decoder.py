"""Our decoder computes what transformers computes, on networks of the three families with weights of its making."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from seatrial.model import UsageError
from seatrial.train import architecture, weights
from seatrial.train.decoder import Block, Decoder
from seatrial.train.loss import IGNORED, summed_loss

CPU = torch.device("cpu")
FAMILIES = ("mistral-tiny", "qwen2-tiny", "smollm-tiny")


def filled(name: str, seed: int = 0, dtype: torch.dtype = torch.float) -> Decoder:
    shape = architecture.find(name)
    model = weights.build(shape, dtype, torch.float)
    model.to_empty(device="cpu")
    weights.fill(model, weights.random(seed, shape.initializer_range), CPU)
    return model


def tokens(shape: tuple[int, int] = (2, 40)) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def published(name: str, folder: Path, **options: Any) -> Any:
    """A small random model of transformers', saved as it is published."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = architecture.find(name).model_dump(exclude={"rope_theta", "attention_bias", "hidden_act"})
    rope = {"rope_type": "default", "rope_theta": architecture.find(name).rope_theta}
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(**fields, rope_parameters=rope)
    model = auto.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():  # also norms and biases, which begin as 1 and 0
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = published(name, tmp_path, max_shard_size="200KB" if name == "mistral-tiny" else "1GB")
    shape = architecture.find(str(tmp_path))
    ours = weights.build(shape, torch.float, torch.float)
    ours.to_empty(device="cpu")
    weights.fill(ours, weights.from_folder(str(tmp_path), weights.random(0, 0.02)), CPU)
    with torch.no_grad():
        found, expected = ours(tokens()), theirs(tokens()).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in ours.parameters()) == shape.parameters == theirs.num_parameters()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    published("mistral-tiny", tmp_path)
    for name, complaint in (("qwen2-tiny", "is \\[256, 64\\], the model's is \\[257, 64\\]"),):
        model = weights.build(architecture.find(name), torch.float, torch.float).to_empty(device="cpu")
        with pytest.raises(UsageError, match=complaint):
            weights.fill(model, weights.from_folder(str(tmp_path), weights.random(0, 0.02)), CPU)
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        weights.from_folder(str(tmp_path / "nowhere"), weights.random(0, 0.02))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot read the weights"):
        weights.from_folder(str(tmp_path), weights.random(0, 0.02))


def test_the_same_seed_draws_the_same_weights() -> None:
    first, again, other = (filled("qwen2-tiny", seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    assert abs(first["layers.0.mlp.up_proj.weight"].std().item() - 0.02) < 0.001
    a, b = first["layers.0.mlp.up_proj.weight"], first["layers.1.mlp.up_proj.weight"]
    assert not torch.equal(a, b)


def test_recomputed_activations_give_the_same_gradients() -> None:
    found = []
    for recompute in (False, True):
        model = filled("mistral-tiny")
        for block in model.layers:
            assert isinstance(block, Block)
            block.recompute = recompute
        model(tokens(), tokens()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_gradient_that_is_no_number_shows_at_the_first_block() -> None:
    model, seen = filled("mistral-tiny"), list[bool]()
    model.on_gradient = lambda gradient: seen.append(bool(gradient.isfinite().all()))
    model(tokens(), tokens()).backward()
    with torch.no_grad():
        model.get_parameter("layers.1.mlp.down_proj.weight")[3, 3] = torch.nan
    model(tokens(), tokens()).backward()
    assert seen == [True, False]


def test_weights_in_fp32_compute_in_bf16() -> None:
    wide, narrow = filled("qwen2-tiny"), filled("qwen2-tiny", dtype=torch.bfloat16)
    assert narrow(tokens()).dtype == torch.bfloat16
    torch.testing.assert_close(narrow(tokens()).float(), wide(tokens()), rtol=0.05, atol=0.02)
    narrow(tokens(), tokens()).backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float for parameter in narrow.parameters())


@pytest.mark.parametrize("chunks", [1, 3, 50])
def test_the_loss_in_parts_is_cross_entropy(chunks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=generator, dtype=torch.double).requires_grad_()
    weight = torch.randn(31, 8, generator=generator, dtype=torch.double).requires_grad_()
    targets = torch.randint(0, 31, (20,), generator=generator)
    targets[5:9] = IGNORED
    ours = summed_loss(hidden, weight, targets, chunks)
    whole = F.cross_entropy(hidden @ weight.t(), targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(ours.double(), whole, rtol=1e-6, atol=0)
    expected = torch.autograd.grad(whole * 3, (hidden, weight))
    found = torch.autograd.grad(ours * 3, (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
