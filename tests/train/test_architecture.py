import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.model import UsageError
from seatrial.train import architecture
from seatrial.train.architecture import Architecture

TINY = architecture.load("mistral-tiny")


def config(**changes: Any) -> dict[str, Any]:
    fields = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "torch_dtype": "bfloat16",
    }
    return {**fields, **changes}


def test_published_sizes() -> None:
    """As in the model cards and state dicts."""
    sizes = {name: architecture.load(name).parameters for name in ("mistral-7b", "qwen2-7b", "smollm-135m")}
    assert sizes == {"mistral-7b": 7_241_732_096, "qwen2-7b": 7_615_616_512, "smollm-135m": 134_515_008}


def test_flops_per_token() -> None:
    mistral = architecture.load("mistral-7b")
    assert mistral.flops_per_token(4096) == 6 * 7_241_732_096 + 12 * 32 * 4096 * 4096
    assert mistral.flops_per_token(512, weight_gradients=False) == 4 * 7_241_732_096 + 12 * 32 * 4096 * 512


def test_config_json_of_transformers_4_and_5(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(rope_scaling=None, head_dim=None)))
    old = architecture.load(str(tmp_path))
    new = config(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    del new["rope_theta"]
    (tmp_path / "new.json").write_text(json.dumps(new))
    assert (old.head_dim, old.num_key_value_heads, old.rope_theta) == (4, 2, 1e4)
    assert architecture.load(str(tmp_path / "new.json")).rope_theta == 5e5


def test_qwen2_has_biases_and_a_sliding_window_only_if_enabled() -> None:
    qwen = Architecture.model_validate(config(model_type="qwen2", sliding_window=16, use_sliding_window=False))
    assert qwen.attention_bias
    assert qwen.sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: expected 'llama', 'mistral' or 'qwen2'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": None}, "vocab_size: required key is missing"),
    ],
)
def test_unsupported_architectures_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(**changes)))
    with pytest.raises(UsageError, match=message):
        architecture.load(str(tmp_path))


def test_sequence_length_is_limited_by_window_and_positions() -> None:
    TINY.validate_seq_len(256)
    with pytest.raises(UsageError, match=r"seq_len 257.* 256"):
        TINY.validate_seq_len(257)
    with pytest.raises(UsageError, match=r"seq_len 513.* 512"):
        TINY.validate_seq_len(513)


def test_the_error_for_a_truncated_config_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(UsageError, match=r"cannot read .*config\.json"):
        architecture.load(str(tmp_path))
