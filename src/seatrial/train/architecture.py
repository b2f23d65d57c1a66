"""Decoder architecture, read from a preset or Hugging Face's config.json. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from seatrial.model import Frozen, UsageError, first_validation_error
from seatrial.util import data_files
from seatrial.util.input_files import read_json

_MODELS = resources.files("seatrial") / "data" / "models"
# Far above known models, with at most 126 layers and sizes of 2**18: a model of 10**9 layers would fill the memory
# before a weight is allocated, in transformers' class of its config.json
MAX_LAYERS, MAX_SIZE = 1000, 2**20
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_LIMITS = {"num_hidden_layers": MAX_LAYERS, **dict.fromkeys(_SIZES, MAX_SIZE)}


class ModelTooLargeError(UsageError):
    """A config.json has more layers, or a larger size, than any known model."""


class Architecture(Frozen):
    """The fields of Hugging Face's config.json that define the network; others (token ids, versions) are ignored."""

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
    attention_bias: bool = False  # True: q_proj, k_proj and v_proj have a bias; o_proj never has one
    tie_word_embeddings: bool = False
    sliding_window: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, fields: Any) -> Any:
        """Adds the defaults of the model type and reads the rope keys of transformers 4 and 5."""
        if not isinstance(fields, Mapping):
            return fields
        filled = {key: value for key, value in fields.items() if value is not None}
        rope = filled.get("rope_parameters") or filled.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope type {kind!r} is not supported: expected 'default'")
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
            raise ValueError("attention_bias and mlp_bias are not supported for model types other than qwen2")
        return filled

    @model_validator(mode="after")
    def _check_heads(self) -> Architecture:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_key_value_heads must divide num_attention_heads")
        return self

    @property
    def parameters(self) -> int:
        """The number of parameters; a tied embedding counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        weights = sum(inputs * outputs for inputs, outputs in self.linear_shapes.values())
        biases = sum(self.linear_shapes[name][1] for name in ("q_proj", "k_proj", "v_proj")) * self.attention_bias
        return embeddings + norms + self.num_hidden_layers * (weights + biases)

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Name of each linear module of a layer → its numbers of inputs and outputs."""
        hidden, intermediate = self.hidden_size, self.intermediate_size
        query_size = self.num_attention_heads * self.head_dim
        key_size = self.num_key_value_heads * self.head_dim
        return {
            "q_proj": (hidden, query_size),
            "k_proj": (hidden, key_size),
            "v_proj": (hidden, key_size),
            "o_proj": (query_size, hidden),
            "gate_proj": (hidden, intermediate),
            "up_proj": (hidden, intermediate),
            "down_proj": (intermediate, hidden),
        }

    def adapter_parameters(self, targets: Collection[str], rank: int) -> int:
        """The number of parameters of LoRA's A and B matrices of ``rank`` on the linear modules ``targets``."""
        return self.num_hidden_layers * rank * sum(sum(self.linear_shapes[target]) for target in targets)

    def flops_per_token(self, seq_len: int, weight_gradients: bool = True) -> float:
        """Training FLOPs per token: 6N + 12·L·h·d·s (PaLM, arXiv 2204.02311, appendix B).

        N: all parameters, L: layers, h·d: heads × head size, s: ``seq_len``. All s² pairs of tokens count, although the
        causal mask removes half of them. Without ``weight_gradients`` (LoRA freezes the weights), 6N becomes 4N.
        """
        attention = 12 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * seq_len
        return (6 if weight_gradients else 4) * self.parameters + attention

    def resize(self, layers: int | None, width: int | None) -> Architecture:
        """The architecture with ``layers`` layers and hidden size ``width`` (None: unchanged).

        The number of heads and the size of the MLP change in proportion to ``width``. Raises UsageError if
        ``width`` is not a multiple of head_dim × query heads per key-value head.
        """
        changes = {"num_hidden_layers": layers} if layers else {}
        if width:
            query_heads_per_key = self.num_attention_heads // self.num_key_value_heads
            divisor = self.head_dim * query_heads_per_key
            if width % divisor:
                raise UsageError(f"model.width {width}: expected a multiple of {divisor}")
            changes["hidden_size"] = width
            # in proportion to the width, rounded up to a multiple of 16
            changes["intermediate_size"] = -(-self.intermediate_size * width // (16 * self.hidden_size)) * 16
            changes["num_attention_heads"] = width // self.head_dim
            changes["num_key_value_heads"] = width // divisor
        return self.model_copy(update=changes)

    def layers_within(self, max_parameters: float) -> int | None:
        """The largest number of layers with at most ``max_parameters`` parameters, at least 1; None if all fit."""
        layers, parameters = self.num_hidden_layers, self.parameters
        if parameters <= max_parameters or layers == 1:
            return None
        one_layer_parameters = self.resize(layers=1, width=None).parameters
        layer_parameters = (parameters - one_layer_parameters) / (layers - 1)
        return max(1, min(layers, int(1 + (max_parameters - one_layer_parameters) / layer_parameters)))

    def validate_seq_len(self, seq_len: int) -> None:
        """Raises UsageError if ``seq_len`` tokens exceed the model's positions or sliding window."""
        if seq_len > self.max_position_embeddings:
            raise UsageError(f"seq_len {seq_len}: the model has {self.max_position_embeddings} positions")
        if self.sliding_window and seq_len > self.sliding_window:
            raise UsageError(
                f"seq_len {seq_len}: expected at most {self.sliding_window} (the model's sliding window): windowed "
                "attention is not supported. Decrease seq_len, or set sliding_window to null in the model's config.json"
            )


def presets() -> list[str]:
    """The names of the architectures that ship with seatrial, sorted."""
    return sorted(Path(entry.name).stem for entry in _MODELS.iterdir() if entry.name.endswith(".yaml"))


def load(name: str) -> Architecture:
    """The preset ``name``, or the config.json at path ``name`` (the file or its folder).

    Raises UsageError: it names the file if the file cannot be read, and the key if a value is missing or not supported;
    ModelTooLargeError for a model of any kind.
    """
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    try:
        fields = data_files.read(f"models/{name}.yaml")["config"] if name in presets() else read_json(path)
        for key, limit in _LIMITS.items():
            if isinstance(fields, dict) and isinstance(size := fields.get(key), int) and size > limit:
                raise ModelTooLargeError(f"model {name}: {key} {size}, expected at most {limit}")
        return Architecture.model_validate(fields)
    except ValidationError as error:
        raise UsageError(f"model {name}: {first_validation_error(error)}") from error
    except FileNotFoundError as error:
        raise UsageError(
            f"unknown model {name!r}: expected one of {', '.join(presets())}, or a local directory with a config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
