from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from seatrial.model import UsageError
from seatrial.train import architecture, weights
from tests.train.decoders import CPU, random_decoder

# Of a small model, but for its number of layers
HUGE = architecture.load("qwen2-tiny").model_dump() | {"num_hidden_layers": 10**9}


def test_weights_of_another_model_are_rejected(tmp_path: Path) -> None:
    state = random_decoder("mistral-tiny").state_dict()
    save_file(
        {weights.huggingface_name(name): weight for name, weight in state.items()}, tmp_path / "model.safetensors"
    )
    model = weights.build_on_meta(architecture.load("qwen2-tiny"), torch.float, torch.float).to_empty(device="cpu")
    with pytest.raises(UsageError, match=r"embed_tokens.weight has shape \[256, 64\], expected \[257, 64\]"):
        weights.fill(model, weights.from_folder(str(tmp_path), weights.random_weights(0, 0.02)), CPU)
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        weights.from_folder(str(tmp_path / "nowhere"), weights.random_weights(0, 0.02))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot read the weights"):
        weights.from_folder(str(tmp_path), weights.random_weights(0, 0.02))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot read .*config.json"),
        ('{"model_type": "gemma"}', "model_type"),
        (json.dumps(HUGE), "num_hidden_layers"),
        (json.dumps(HUGE | {"num_hidden_layers": 1, "vocab_size": 10**18}), "vocab_size"),
        ('{"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}', "rope type 'llama3' is not supported"),
    ],
)
def test_weights_of_a_model_that_cannot_be_built_are_rejected(tmp_path: Path, content: str, reason: str) -> None:
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=reason):
        weights.from_folder(str(tmp_path), weights.random_weights(0, 0.02))


def test_the_same_seed_gives_the_same_weights() -> None:
    first, repeated, other = (random_decoder("qwen2-tiny", seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    assert abs(first["layers.0.mlp.up_proj.weight"].std().item() - 0.02) < 0.001
    a, b = first["layers.0.mlp.up_proj.weight"], first["layers.1.mlp.up_proj.weight"]
    assert not torch.equal(a, b)


def test_initial_norms_biases_and_adapters() -> None:
    generate = weights.random_weights(0, 0.02)
    assert torch.equal(generate("layers.0.input_layernorm.norm.weight", torch.Size([4]), CPU), torch.ones(4))
    assert torch.equal(generate("layers.0.self_attn.q_proj.bias", torch.Size([4]), CPU), torch.zeros(4))
    assert torch.equal(generate("layers.0.self_attn.q_proj.lora_B", torch.Size([4, 2]), CPU), torch.zeros(4, 2))
    adapter = generate("layers.0.self_attn.q_proj.lora_A", torch.Size([8, 400]), CPU)
    assert 0.9 / 20 < adapter.abs().max() <= 1 / 20  # uniform within ±400^-0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("output.norm.weight", "model.norm.weight"),
        ("output.lm_head.weight", "lm_head.weight"),
    ],
)
def test_huggingface_names(name: str, expected: str) -> None:
    assert weights.huggingface_name(name) == expected


def test_meta_model_has_the_weight_dtype() -> None:
    model = weights.build_on_meta(architecture.load("mistral-tiny"), torch.float, torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_the_index_selects_the_file_of_a_weight(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.full((3,), 7.0)}, tmp_path / "one.safetensors")
    save_file({"model.norm.weight": torch.full((3,), 8.0)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "one.safetensors"}}))
    read = weights.from_folder(str(tmp_path), weights.random_weights(0, 0.02))
    assert read("output.norm.weight", torch.Size([3]), CPU).tolist() == [7.0] * 3
    index.write_text("{}")
    with pytest.raises(UsageError, match=r"cannot read the weights in .*weight_map"):
        weights.from_folder(str(tmp_path), weights.random_weights(0, 0.02))


def test_adapters_are_generated_and_missing_weights_are_errors(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    read = weights.from_folder(str(tmp_path), lambda name, size, device: torch.full(size, 5.0, device=device))
    assert read("layers.0.q_proj.lora_A", torch.Size([2]), CPU).tolist() == [5.0, 5.0]
    with pytest.raises(UsageError, match=r"model\.embed_tokens\.weight"):
        read("embed_tokens.weight", torch.Size([2]), CPU)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"cannot read model\.norm\.weight from "):
        read("output.norm.weight", torch.Size([3]), CPU)
