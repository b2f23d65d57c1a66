"""The schema of training configs (YAML files). Comments state the reason for a default.

Two stacks train from the same config: native (seatrial's own loop) and hf (the Trainer of transformers). The first
group of keys of TrainConfig has the names of common command line flags of training scripts.
"""

from __future__ import annotations

import difflib
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, model_validator

from seatrial.config.layers import load_as, parse_assignment
from seatrial.config.strict_yaml import parse_yaml
from seatrial.model import Frozen, UsageError
from seatrial.train import architecture
from seatrial.train.architecture import MAX_LAYERS, MAX_SIZE, Architecture, ModelTooLargeError
from seatrial.util import data_files
from seatrial.util.input_files import read_text

# The linear layers of a decoder block, each of which can have a LoRA adapter
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_LINEAR: tuple[LoraTarget, ...] = get_args(LoraTarget)
CONFIGS_FOLDER = Path(__file__).parents[1] / "data" / "configs"
HUB_PREFIX = "hub:"  # before OWNER/NAME, a repository of the Hugging Face Hub
_MAX_BYTES, _MIN_KEYS = 2**16, 2  # to recognise the config of another program
_MAX_SUGGESTIONS = 3  # for an unknown config name


class Model(Frozen):
    """``name``: a preset of seatrial, or a local folder with Hugging Face's config.json."""

    name: str
    weights: str = Field(
        default="random", description="random, or a directory with *.safetensors; with stack hf also hub:OWNER/NAME"
    )

    layers: int | None = Field(default=None, gt=0, le=MAX_LAYERS, description="number of layers; random weights only")
    width: int | None = Field(
        default=None, gt=0, le=MAX_SIZE, description="hidden size, with heads to match; random weights only"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_local_weights(cls, fields: Any) -> Any:
        """The name of local weights is their folder, since FLOPs per token and memory are computed from ``name``."""
        weights = fields.get("weights") if isinstance(fields, Mapping) else None
        if isinstance(weights, str) and weights != "random":
            try:
                if Path(weights, "config.json").is_file():
                    architecture.load(weights)
                    return {**fields, "name": weights}
            except ModelTooLargeError:
                raise
            except (OSError, UsageError):
                return fields  # another kind of model than seatrial's; stack hf compares it with ``name``
        return fields

    @model_validator(mode="after")
    def _check_resized_weights_are_random(self) -> Model:
        for key in ("layers", "width"):
            if getattr(self, key) is not None and self.weights != "random":
                raise ValueError(f"{key} requires weights: random")
        return self

    def architecture(self) -> Architecture:
        """The architecture of ``name``, resized. Raises UsageError if it cannot be read or the width is invalid."""
        return architecture.load(self.name).resize(self.layers, self.width)


class Data(Frozen):
    """Training data: rows of a file, or generated sequences of a Markov chain with known entropy."""

    path: str | None = Field(
        default=None,
        description=".json, .jsonl or .parquet file; with stack hf also hub:OWNER/NAME; null: generated data",
    )
    tokenizer: str | None = Field(
        default=None,
        description="tokenizer.json; with stack hf also a directory or hub:OWNER/NAME; null: trained on the rows",
    )
    samples: int | None = Field(default=None, gt=0, description="number of rows to read or sequences to generate")
    cache: str | None = Field(
        default=None, description="directory for prepared data, shared by all nodes; null: in --out"
    )
    cold: bool = Field(
        default=False,
        description="stack native: drop the prepared data from the page cache, and read it without readahead",
    )
    layout: Literal["markov_chain", "no_robots", "alpaca", "function_calling"] = Field(
        default="markov_chain", description="stack hf: layout of the rows, read or generated"
    )
    packing: bool = Field(default=False, description="stack hf: pack several rows into a sequence instead of padding")
    variable_length: bool = Field(
        default=False, description="stack native: generated sequences of different lengths; padding has no loss"
    )

    @model_validator(mode="after")
    def _check_variable_length_is_generated(self) -> Data:
        if self.variable_length and self.path is not None:
            raise ValueError("variable_length requires generated data: rows of a file are packed into full sequences")
        return self


class _Finite(Frozen):
    """Base of models that reject infinity and NaN, which JSON does not support."""

    model_config = ConfigDict(allow_inf_nan=False)


class Schedule(_Finite):
    """Learning rate: linear warm-up to ``peak``, then constant, or linear or cosine decay.

    In step n of w warm-up steps the learning rate is n/w × ``peak``. Stack hf uses (n - 1)/w × ``peak``, as in
    transformers. The decay would reach ``min_ratio`` × ``peak`` one step after the last.
    """

    peak: float = Field(default=5e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    min_ratio: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _check_constant_schedule(self) -> Schedule:
        if self.schedule == "constant" and self.min_ratio:
            raise ValueError("min_ratio requires the schedule linear or cosine")
        return self


class Optimizer(_Finite):
    """AdamW with the defaults of transformers."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this norm")


class Parallel(Frozen):
    """Parallelism. ddp: the full model on each rank. fsdp2: each weight sharded over the ranks.

    zero3: DeepSpeed's sharding, with stack hf; if DeepSpeed is not installed, fsdp2 is used and reported.
    """

    strategy: Literal["ddp", "fsdp2", "zero3"] = "ddp"
    deepspeed: str | None = Field(
        default=None, description="zero3: DeepSpeed's JSON config; path relative to this file or the working directory"
    )
    # More than one replica is HSDP. A replica is a copy of the model on consecutive ranks, such as those of a node:
    # weights are all-gathered within it, and sharded gradients are all-reduced between replicas
    replicas: int = Field(
        default=1, gt=0, description="fsdp2, native: number of model copies, each sharded over its ranks"
    )
    wrap: Literal["block", "size", "none"] = Field(
        default="block",
        description="fsdp2: the modules whose weights are gathered at once. block: each block; size: each attention, "
        "MLP, block and head with at least wrap_min_parameters; none: the whole model",
    )
    wrap_min_parameters: int | None = Field(default=None, gt=0, description="wrap: size")
    cpu_offload: bool = False
    # fp32, although bf16 halves the traffic: with many ranks, sums in bf16 lose small gradients
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    reshard_after_forward: bool = Field(
        default=True, description="false: keep gathered weights until backward (ZeRO-2)"
    )
    prefetch: int = Field(
        default=1, ge=0, le=8, description="fsdp2, native: number of modules to all-gather ahead; 0: torch's default"
    )

    @model_validator(mode="after")
    def _check_strategy(self) -> Parallel:
        if self.strategy != "fsdp2" and (self.cpu_offload or not self.reshard_after_forward):
            zero3 = "; with zero3, set them in the deepspeed file" if self.strategy == "zero3" else ""
            raise ValueError(f"cpu_offload and reshard_after_forward=false require strategy fsdp2{zero3}")
        if self.strategy != "fsdp2" and self.replicas > 1:
            raise ValueError("replicas requires strategy fsdp2")
        if self.strategy != "fsdp2" and self.wrap != "block":
            raise ValueError(f"wrap {self.wrap} requires strategy fsdp2")
        if (self.wrap == "size") != (self.wrap_min_parameters is not None):
            raise ValueError("wrap size and wrap_min_parameters require each other")
        if (self.strategy == "zero3") != (self.deepspeed is not None):
            raise ValueError(
                "strategy zero3 and a deepspeed file require each other, such as configs/deepspeed/zero3.json"
            )
        return self


class Checkpoint(Frozen):
    """Checkpoints; off by default, since saves take time from training."""

    every: int = Field(default=0, ge=0, description="steps between saves, and a save after the last step; 0: never")
    asynchronous: bool = False
    keep: int = Field(default=2, gt=0, description="number of newest checkpoints to keep")
    resume: bool = Field(default=False, description="resume from the newest complete checkpoint in --out, if any")
    requeue: bool = Field(default=False, description="resume if Slurm restarts the job (sbatch --requeue)")
    max_restarts: int = Field(default=3, gt=0, description="requeue: number of restarts, after which the job fails")

    @model_validator(mode="after")
    def _check_requeue(self) -> Checkpoint:
        if self.requeue and not self.every:
            raise ValueError("requeue requires checkpoint.every: without checkpoints a restarted job begins at step 1")
        return self


class Evaluation(_Finite):
    """Function calling evaluation by `seatrial train evaluate`, before and after training."""

    cases: int = Field(default=200, gt=0, description="maximum number of cases per split")
    bsz: int = Field(default=16, gt=0)
    max_new_tokens: int = Field(default=256, gt=0)
    # Level of the one-sided sign test over the cases that are correct either before or after training, but not both
    significance: float = Field(default=0.05, gt=0, lt=1)


class TrainConfig(_Finite):
    """A resolved training config."""

    run_name: str = Field(min_length=1, pattern=r"^[^/\s]+$")
    max_steps: int = Field(default=10, gt=0)
    seq_len: int = Field(default=512, gt=1)
    bsz: int = Field(default=1, gt=0, description="sequences per rank and micro-batch")
    grad_accum: int = Field(default=1, gt=0, description="micro-batches per step")
    bf16: bool = Field(default=True, description="compute in bf16; else in fp32")
    fp8: bool = Field(default=False, description="fp8 products in the blocks' linear layers; native, GPUs only")
    gradient_checkpointing: bool = False
    use_lora: bool = False
    lora_r: int = Field(default=8, gt=0)
    lora_alpha: float = Field(default=16, gt=0)
    lora_dropout: float = Field(default=0.05, ge=0, lt=1)
    lora_targets: tuple[LoraTarget, ...] = Field(default=ALL_LINEAR, min_length=1)

    description: str = ""
    stack: Literal["native", "hf"] = "native"
    model: Model
    data: Data = Data()
    learning_rate: Schedule = Schedule()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    export: bool = Field(default=True, description="write final/: the LoRA adapters, or with stack hf the model")
    tensorboard: bool = Field(default=False, description="write TensorBoard logs to --out")
    # most Adam updates are below the resolution of bf16 weights (8 bits) and would be lost
    master_dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="dtype of trained weights and Adam state")
    compile: bool = Field(default=True, description="torch.compile of each block; GPUs only")
    autotune: bool = Field(default=False, description="max-autotune compilation: takes minutes, gains a few percent")
    deterministic: bool = Field(
        default=False, description="stack native: bitwise reproducible on the same number of ranks; slower kernels"
    )
    attention: Literal["auto", "flash", "cudnn"] = Field(
        default="auto", description="attention kernel of torch; GPUs only"
    )
    loss_chunks: int = Field(
        default=4, gt=0, description="parts of a micro-batch whose logits are computed one at a time"
    )
    seed: int = Field(default=0, ge=0, lt=2**31)
    # DDP rebuilds its buckets after the first step; allocator and clocks stabilize in the following steps
    untimed_steps: int = Field(default=3, ge=0, description="first steps, excluded from speed")
    profile_steps: int = Field(
        default=3,
        ge=0,
        description="additional steps to measure exposed communication of several ranks; 0: not measured",
    )
    log_every_s: float = Field(default=10.0, gt=0, description="interval of rank 0's progress lines")
    timeout_s: float = Field(default=600.0, gt=0, description="timeout of a collective")

    @model_validator(mode="after")
    def _check_combinations(self) -> TrainConfig:
        if self.untimed_steps >= self.max_steps:
            raise ValueError(f"untimed_steps {self.untimed_steps}: expected less than max_steps {self.max_steps}")
        if self.stack == "native" and self.parallel.strategy == "zero3":
            raise ValueError("strategy zero3 requires stack hf")
        linear_ratio = self.learning_rate.schedule == "linear" and self.learning_rate.min_ratio > 0
        native_only = {
            "parallel.replicas": self.parallel.replicas > 1,
            "parallel.wrap size": self.parallel.wrap == "size",  # accelerate 1.15 wraps the list of blocks, and fails
            "deterministic": self.deterministic,
            "data.variable_length": self.data.variable_length,
            "checkpoint.asynchronous": self.checkpoint.asynchronous,
            "learning_rate.min_ratio with schedule linear": linear_ratio,  # that of transformers ends at 0
        }
        if self.stack == "hf" and any(native_only.values()):
            keys = ", ".join(key for key, is_set in native_only.items() if is_set)
            raise ValueError(f"{keys} requires stack native")
        if self.fp8 and not (self.bf16 and self.stack == "native"):
            raise ValueError("fp8 requires bf16=true and stack=native")
        if self.fp8 and (tokens := self.bsz * self.seq_len) % 16:
            raise ValueError(f"fp8 requires that bsz × seq_len is a multiple of 16 (got {tokens})")
        return self

    @property
    def trains_on_markov_chain(self) -> bool:
        """Whether the data are Markov sequences, which each node can generate from the seed."""
        return self.data.layout == "markov_chain" if self.stack == "hf" else self.data.path is None

    @property
    def needs_group(self) -> bool:
        """Whether a single rank that a check starts needs a process group, as FSDP2 and ZeRO-3 of stack hf do.

        A single rank that needs no group trains as if it was started without torchrun, on one visible GPU.
        """
        return self.stack != "native" and self.parallel.strategy != "ddp"

    def architecture(self) -> Architecture:
        """The resized architecture of the model. Raises UsageError if it does not support ``seq_len`` tokens."""
        model_architecture = self.model.architecture()
        model_architecture.validate_seq_len(self.seq_len)
        return model_architecture


def shipped_configs() -> list[str]:
    """The names of the shipped configs, sorted; those in tiny/ run on two CPU cores."""
    return sorted(str(path.relative_to(CONFIGS_FOLDER).with_suffix("")) for path in CONFIGS_FOLDER.rglob("*.yaml"))


def config_path(config: Path | str) -> Path:
    """The file of the shipped config named ``config``, or the path ``config`` itself.

    Raises UsageError if ``config`` is neither the name of a shipped config nor ends in .yaml or .yml.
    """
    if str(config) in shipped_configs():
        return CONFIGS_FOLDER / f"{config}.yaml"
    if not str(config).endswith((".yaml", ".yml")):
        raise UsageError(_unknown_config_message(str(config)))
    return Path(config)


def _unknown_config_message(name: str) -> str:
    names = shipped_configs()
    containing = [candidate for candidate in names if name in candidate] if name else []
    similar = [*dict.fromkeys([*containing, *difflib.get_close_matches(name, names, cutoff=0.5)])][:_MAX_SUGGESTIONS]
    suggestion = f"; did you mean {' or '.join(similar)}?" if similar else "."
    # continuation lines of a message are indented
    listing = textwrap.fill(", ".join(names), 80, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return f"unknown training config {name!r}{suggestion} Expected a .yaml file, or one of\n{listing}"


def load(config: Path | str, overrides: Iterable[str] = ()) -> TrainConfig:
    """The config at ``config_path(config)`` with ``overrides`` such as ``parallel.strategy=ddp``.

    Of several overrides of a key, the last applies. If the file parallel.deepspeed exists relative to the config, its
    path becomes absolute. Raises UsageError with the file or override, the key and the expected value.
    """
    assignments: list[tuple[str, str, Any]] = [(f"--set {text}", *parse_assignment(text)) for text in overrides]
    try:
        path = config_path(config)
        train_config = load_as(TrainConfig, str(path), assignments)
    except UsageError as error:
        if program := _program_of(Path(config)):
            raise UsageError(
                f"{config} is a config of {program}, which seatrial does not read: run it with {program}, or write one "
                "with the keys of docs/training.md"
            ) from error
        raise
    _check_hub_names(train_config)
    train_config.architecture()
    parallel = train_config.parallel
    if parallel.deepspeed is None or not (deepspeed := path.parent / parallel.deepspeed).is_file():
        return train_config
    resolved = parallel.model_copy(update={"deepspeed": str(deepspeed.resolve())})
    return train_config.model_copy(update={"parallel": resolved})


def _program_of(path: Path) -> str:
    """The training program for which a config was written, by two of its keys; empty if it is not known."""
    try:
        text = read_text(path, _MAX_BYTES)
        content = tomllib.loads(text) if path.suffix == ".toml" else parse_yaml(text, str(path))
    except (OSError, ValueError, UsageError):
        return ""
    keys = set(content) if isinstance(content, dict) else set()
    programs: dict[str, list[str]] = data_files.read("training_programs.yaml")
    return next((name for name, own in programs.items() if len(keys.intersection(own)) >= _MIN_KEYS), "")


def _check_hub_names(train_config: TrainConfig) -> None:
    """Raises UsageError if stack native, which reads local files only, is given a Hub name."""
    data = train_config.data
    for key, name, local in (
        ("model.weights", train_config.model.weights, "DIR"),
        ("data.path", data.path, "DIR/FILE.parquet"),
        ("data.tokenizer", data.tokenizer, "DIR/tokenizer.json"),
    ):
        if train_config.stack == "native" and name and name.startswith(HUB_PREFIX):
            repo_type = " --repo-type dataset" if key == "data.path" else ""
            raise UsageError(
                f"{key}={name}: only stack hf reads from the Hub. For stack native run "
                f"`hf download {name.removeprefix(HUB_PREFIX)}{repo_type} --local-dir DIR` "
                f"on a machine with network access, then set {key}={local}"
            )
