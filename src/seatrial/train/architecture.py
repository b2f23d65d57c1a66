"""The shape of a decoder, as Hugging Face's config.json says it. Without torch: both stacks and the reports read it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator

from seatrial.model import Frozen, UsageError, first_validation_error

_MODELS = resources.files("seatrial") / "data" / "models"


class Architecture(Frozen):
    """What shapes the network; the rest of a config.json (tokens, versions) is not ours to read."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model_type: Literal["llama", "mistral", "qwen2"]
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    attention_bias: bool = False  # of q, k and v; o has none
    tie_word_embeddings: bool = False
    sliding_window: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, fields: Any) -> Any:
        """What config.json leaves to the architecture, or says in one of two ways (transformers 4 and 5)."""
        if not isinstance(fields, Mapping):
            return fields
        filled = {key: value for key, value in fields.items() if value is not None}
        rope = filled.get("rope_parameters") or filled.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rotary embeddings of type {kind!r} are not built here: expected the default")
        if "rope_theta" in rope:
            filled["rope_theta"] = rope["rope_theta"]
        heads = filled.get("num_attention_heads")
        filled.setdefault("num_key_value_heads", heads)
        if heads and "hidden_size" in filled:
            filled.setdefault("head_dim", filled["hidden_size"] // heads)
        if filled.get("model_type") == "qwen2":
            filled["attention_bias"] = True
            if not filled.get("use_sliding_window"):
                filled.pop("sliding_window", None)
        elif filled.get("attention_bias") or filled.get("mlp_bias"):
            raise ValueError("biases are built for qwen2 only")
        return filled

    @model_validator(mode="after")
    def _heads_fit(self) -> Architecture:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_key_value_heads must divide num_attention_heads")
        return self

    @property
    def parameters(self) -> int:
        """Of the whole network, a tied embedding counted once."""
        embedding = self.vocab_size * self.hidden_size
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        return embedding * (1 if self.tie_word_embeddings else 2) + norms + self.num_hidden_layers * self._linears()

    def _linears(self) -> int:
        queries = self.num_attention_heads * self.head_dim
        pairs = 2 * self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + pairs) + (queries + pairs) * self.attention_bias
        return attention + 3 * self.hidden_size * self.intermediate_size

    def adapter_parameters(self, targets: Collection[str], rank: int) -> int:
        """Of LoRA's adapters of ``rank`` on the linear layers called ``targets``: an A and a B for each."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        sides = {
            "q_proj": hidden + queries,
            "k_proj": hidden + keys,
            "v_proj": hidden + keys,
            "o_proj": queries + hidden,
            "gate_proj": hidden + inner,
            "up_proj": hidden + inner,
            "down_proj": inner + hidden,
        }
        return self.num_hidden_layers * rank * sum(sides[target] for target in targets)

    def flops_per_token(self, seq_len: int, weight_gradients: bool = True) -> float:
        """6N + 12·L·h·d·s of a training step (PaLM, arXiv 2204.02311, appendix B), causality not discounted.

        N is all parameters; L layers, h·d the width of the heads, s ``seq_len``. Without gradients of the weights, as
        for LoRA's frozen ones, a third of the matrix products falls away: 4N + 12·L·h·d·s, since attention keeps its.
        """
        attention = 12 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * seq_len
        return (6 if weight_gradients else 4) * self.parameters + attention

    def resize(self, layers: int | None, width: int | None) -> Architecture:
        """The same network of so many blocks, and so wide: more or fewer heads, the MLP in proportion.

        Raises UsageError where ``width`` is not made of whole groups of heads.
        """
        changes = {"num_hidden_layers": layers} if layers else {}
        if width:
            group = self.num_attention_heads // self.num_key_value_heads
            if width % (self.head_dim * group):
                raise UsageError(f"model.width {width}: expected a multiple of {self.head_dim * group}")
            changes["hidden_size"] = width
            changes["intermediate_size"] = -(-self.intermediate_size * width // (16 * self.hidden_size)) * 16
            changes["num_attention_heads"] = width // self.head_dim
            changes["num_key_value_heads"] = width // self.head_dim // group
        return self.model_copy(update=changes)

    def validate_seq_len(self, seq_len: int) -> None:
        """Raises UsageError where sequences of ``seq_len`` tokens are not what this network attends to."""
        if seq_len > self.max_position_embeddings:
            raise UsageError(f"seq_len {seq_len} is longer than the model's {self.max_position_embeddings} positions")
        if self.sliding_window and seq_len > self.sliding_window:
            raise UsageError(
                f"seq_len {seq_len} is longer than the model's sliding window of {self.sliding_window}, and only whole "
                f"causal attention is built here: at most {self.sliding_window}, or set sliding_window to null"
            )


def presets() -> list[str]:
    """The architectures that ship with seatrial."""
    return sorted(Path(entry.name).stem for entry in _MODELS.iterdir() if entry.name.endswith(".yaml"))


def load(name: str) -> Architecture:
    """The preset called ``name``, or the config.json at that path (the file, or its folder).

    Raises UsageError, naming what was read, where there is none or it is of another family.
    """
    if name in presets():
        fields = yaml.safe_load((_MODELS / f"{name}.yaml").read_text(encoding="utf-8"))["config"]
    else:
        fields = _read_config(name)
    try:
        return Architecture.model_validate(fields)
    except ValidationError as error:
        raise UsageError(f"model {name}: {first_validation_error(error)}") from error


def _read_config(name: str) -> Any:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"no model {name!r}: expected one of {', '.join(presets())}, or a local folder with a config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the model's {path}: {error}") from error
