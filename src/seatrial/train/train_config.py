"""What a training config may say: the schema of configs/*.yaml. The reason for a default stands beside it.

The keys of the first group have the names that training scripts have as flags, the same on both stacks.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from seatrial.config.layers import load_as, parse_assignment
from seatrial.model import Frozen, UsageError
from seatrial.train import architecture
from seatrial.train.architecture import Architecture

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS_FOLDER = Path(__file__).parents[1] / "data" / "configs"
HUB_PREFIX = "hub:"  # before OWNER/NAME
_LOCAL = {"model.weights": "DIR", "data.path": "DIR/FILE.parquet", "data.tokenizer": "DIR/tokenizer.json"}
_NEAR = 3  # names that are suggested for one that is unknown
ALL_LINEAR: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Model(Frozen):
    """``name``: a preset of seatrial, or a local folder with Hugging Face's config.json."""

    name: str
    weights: str = Field(
        default="random", description="random, or a folder with *.safetensors; with stack hf also hub:OWNER/NAME"
    )

    layers: int | None = Field(default=None, gt=0, description="so many blocks of the model's; random weights only")
    width: int | None = Field(
        default=None, gt=0, description="another hidden size, with more or fewer heads of the same; random weights only"
    )

    @model_validator(mode="after")
    def _only_random_weights_can_be_resized(self) -> Model:
        for key in ("layers", "width"):
            if getattr(self, key) is not None and self.weights != "random":
                raise ValueError(f"{key} goes with weights: random")
        return self

    def architecture(self) -> Architecture:
        """Raises UsageError where ``name`` is neither, or ``width`` does not fit its heads."""
        return architecture.load(self.name).resize(self.layers, self.width)


class Data(Frozen):
    """Rows of a local file, or walks through a Markov chain, whose entropy is known."""

    path: str | None = Field(
        default=None,
        description="rows in .json, .jsonl or .parquet; with stack hf also hub:OWNER/NAME; else generated",
    )
    tokenizer: str | None = Field(
        default=None,
        description="a tokenizer.json; with stack hf also a folder, or hub:OWNER/NAME; else trained on the rows",
    )
    samples: int | None = Field(default=None, gt=0, description="rows to read; of generated ones, sequences to make")
    cache: str | None = Field(default=None, description="a folder that all nodes share; else it lies in --out")
    layout: Literal["markov_chain", "no_robots", "alpaca", "function_calling"] = Field(
        default="markov_chain", description="stack hf: of the rows, read or generated; walks are the Markov chain's"
    )
    packing: bool = Field(default=False, description="stack hf: several rows a sequence, where one would be padding")
    variable_length: bool = Field(
        default=False, description="stack native: generated sequences of unequal lengths; padding counts nothing"
    )

    @model_validator(mode="after")
    def _only_what_is_generated_is_unequal(self) -> Data:
        if self.variable_length and self.path is not None:
            raise ValueError("unequal goes with generated data: rows of a file are packed into whole sequences")
        return self


class _Finite(Frozen):
    """Infinity and NaN are above 0, and no rate or time: JSON has no word for them."""

    model_config = ConfigDict(allow_inf_nan=False)


class Schedule(_Finite):
    """The learning rate: up in a line for ``warmup_steps``, then down to ``floor`` times the peak at the last step."""

    peak: float = Field(default=5e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    min_ratio: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _constant_has_no_floor(self) -> Schedule:
        if self.schedule == "constant" and self.min_ratio:
            raise ValueError("a constant rate has no floor")
        return self


class Optimizer(_Finite):
    """AdamW, as transformers sets it by default."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this norm")


class Parallel(Frozen):
    """How ranks share the work. ddp: every rank holds the model. fsdp2: every rank holds its share of each weight.

    zero3: DeepSpeed's way of the latter, with stack hf; where DeepSpeed is not installed it is fsdp2, and called so.
    """

    strategy: Literal["ddp", "fsdp2", "zero3"] = "ddp"
    deepspeed: str | None = Field(
        default=None, description="zero3: DeepSpeed's own config file, JSON; beside this file, or from where you are"
    )
    # HSDP: weights are gathered among size / replicas ranks that follow one another, such as those of a node; between
    # the replicas only gradients travel, a share of them each rank
    replicas: int = Field(default=1, gt=0, description="fsdp2, native: copies of the model, each spread over its ranks")
    cpu_offload: bool = False
    # sums of bf16 lose small gradients as ranks are added; bf16 halves what goes over the wire
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    reshard_after_forward: bool = Field(default=True, description="false keeps gathered weights until backward: ZeRO-2")
    prefetch: int = Field(
        default=1, ge=0, le=8, description="blocks whose weights are gathered ahead; 0 leaves it to torch"
    )

    @model_validator(mode="after")
    def _only_fsdp_offloads(self) -> Parallel:
        if self.strategy == "ddp" and (self.cpu_offload or not self.reshard_after_forward):
            raise ValueError("cpu_offload and reshard_after_forward go with strategy fsdp2")
        if self.strategy != "fsdp2" and self.replicas > 1:
            raise ValueError("replicas go with strategy fsdp2: ddp has as many as ranks")
        return self

    @model_validator(mode="after")
    def _zero3_has_its_file(self) -> Parallel:
        if (self.strategy == "zero3") != (self.deepspeed is not None):
            raise ValueError("strategy zero3 and a deepspeed file go together, such as configs/deepspeed/zero3.json")
        return self


class Checkpoint(Frozen):
    """Off by default: a throughput run has nothing to keep."""

    every: int = Field(default=0, ge=0, description="steps between two; 0: none. The last step saves as well")
    asynchronous: bool = False
    keep: int = Field(default=2, gt=0, description="the newest so many stay")
    resume: bool = Field(default=False, description="go on from the newest whole checkpoint in --out, if there is one")


class Evaluation(_Finite):
    """Of function calling: what `seatrial evaluate` asks the model before and after the training."""

    cases: int = Field(default=200, gt=0, description="at most so many of each split")
    bsz: int = Field(default=16, gt=0)
    max_new_tokens: int = Field(default=256, gt=0)
    # one-sided sign test of the cases that only one of the two got right: an improvement that chance would explain
    # one time in 20 is none
    significance: float = Field(default=0.05, gt=0, lt=1)


class TrainConfig(_Finite):
    """A resolved training run."""

    run_name: str = Field(min_length=1, pattern=r"^[^/\s]+$")
    max_steps: int = Field(default=10, gt=0)
    seq_len: int = Field(default=512, gt=1)
    bsz: int = Field(default=1, gt=0, description="sequences a rank and micro-batch")
    grad_accum: int = Field(default=1, gt=0, description="micro-batches a step")
    bf16: bool = Field(default=True, description="compute in bf16; else in fp32")
    fp8: bool = Field(default=False, description="products of the blocks' linear layers in 8 bits; native, GPUs only")
    gradient_checkpointing: bool = False
    use_lora: bool = False
    lora_r: int = Field(default=8, gt=0)
    lora_alpha: float = Field(default=16, gt=0)
    lora_dropout: float = Field(default=0.05, ge=0, lt=1)
    lora_targets: tuple[Target, ...] = Field(default=ALL_LINEAR, min_length=1)

    description: str = ""
    stack: Literal["native", "hf"] = "native"
    model: Model
    data: Data = Data()
    learning_rate: Schedule = Schedule()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    export: bool = Field(default=True, description="final/: of LoRA the adapters, with stack hf else the whole model")
    tensorboard: bool = Field(default=False, description="logs for TensorBoard in --out")
    # Adam's updates are far below bf16's resolution of the weights (8 bits): they would mostly be lost
    master_dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="of trained weights and their Adam state")
    compile: bool = Field(default=True, description="torch.compile, block by block; GPUs only")
    autotune: bool = Field(default=False, description="compile by trying kernels out: minutes, for a few percent")
    deterministic: bool = Field(
        default=False, description="stack native: the same bits in each run on as many ranks; slower kernels"
    )
    attention: Literal["auto", "flash", "cudnn"] = Field(default="auto", description="torch's kernel; GPUs only")
    loss_chunks: int = Field(default=4, gt=0, description="parts of a micro-batch whose logits are in memory at once")
    seed: int = Field(default=0, ge=0, lt=2**31)
    # DDP lays its buckets out anew after the first; allocator and clocks settle in the next ones
    untimed_steps: int = Field(default=3, ge=0, description="first steps, that speed is not measured in")
    profile_steps: int = Field(
        default=3,
        ge=0,
        description="of several ranks, behind the others, for exposed communication; 0: not measured",
    )
    log_every_s: float = Field(default=10.0, gt=0, description="rank 0 writes a line so often")
    timeout_s: float = Field(default=600.0, gt=0, description="a rank that waits longer for its peers gives up")

    @model_validator(mode="after")
    def _steps_are_left_to_measure(self) -> TrainConfig:
        if self.untimed_steps >= self.max_steps:
            raise ValueError(f"untimed_steps {self.untimed_steps} leave none of {self.max_steps} steps to measure")
        return self

    @model_validator(mode="after")
    def _the_stack_can(self) -> TrainConfig:
        if self.stack == "native" and self.parallel.strategy == "zero3":
            raise ValueError("strategy zero3 goes with stack hf")
        if self.stack == "hf" and self.parallel.replicas > 1:
            raise ValueError("parallel.replicas go with stack native")
        if self.stack == "hf" and (self.deterministic or self.data.variable_length):
            raise ValueError("deterministic and data.unequal go with stack native")
        return self

    @model_validator(mode="after")
    def _eight_bits_go(self) -> TrainConfig:
        if self.fp8 and not (self.bf16 and self.stack == "native"):
            raise ValueError("fp8 goes with bf16=true and stack=native")
        if self.fp8 and (tokens := self.bsz * self.seq_len) % 16:
            raise ValueError(f"fp8 goes with bsz × seq_len that is a multiple of 16 (got {tokens})")
        return self

    def architecture(self) -> Architecture:
        """The model's, once it is known to take ``seq_len`` tokens. Raises UsageError."""
        found = self.model.architecture()
        found.validate_seq_len(self.seq_len)
        return found


def shipped_configs() -> list[str]:
    """The configs that come with seatrial, by name: those of tiny/ rehearse the others on two CPU cores."""
    return sorted(str(path.relative_to(CONFIGS_FOLDER).with_suffix("")) for path in CONFIGS_FOLDER.rglob("*.yaml"))


def config_path(config: Path | str) -> Path:
    """The file of a training config: one that ships, by its name, or the one at that path. Raises UsageError."""
    if str(config) in shipped_configs():
        return CONFIGS_FOLDER / f"{config}.yaml"
    if not str(config).endswith((".yaml", ".yml")):
        raise UsageError(_unknown(str(config)))
    return Path(config)


def _unknown(name: str) -> str:
    names = shipped_configs()
    holding = [one for one in names if name in one] if name else []
    near = [*dict.fromkeys([*holding, *difflib.get_close_matches(name, names, cutoff=0.5)])][:_NEAR]
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    # further lines of a message are indented
    there = textwrap.fill(", ".join(names), 80, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return f"no training config called {name!r}{meant} Name a .yaml file, or one of\n{there}"


def load(config: Path | str, overrides: Iterable[str] = ()) -> TrainConfig:
    """The config that ``find`` finds, with ``overrides`` such as ``parallel.strategy=ddp``, in rising priority.

    Raises UsageError that names the file (or override), the key and what was expected.
    """
    path = config_path(config)
    assignments: list[tuple[str, str, Any]] = [(f"--set {text}", *parse_assignment(text)) for text in overrides]
    loaded = load_as(TrainConfig, str(path), assignments)
    _refuse_hub(loaded)
    loaded.architecture()
    return _with_deepspeed_of(path.parent, loaded)


def _refuse_hub(loaded: TrainConfig) -> None:
    """Raises UsageError where the Hub is named to the stack that reads local files alone."""
    named = {
        "model.weights": loaded.model.weights,
        "data.path": loaded.data.path,
        "data.tokenizer": loaded.data.tokenizer,
    }
    for key, name in named.items() if loaded.stack == "native" else ():
        if name and name.startswith(HUB_PREFIX):
            options = " --repo-type dataset" if key == "data.path" else ""
            raise UsageError(
                f"{key}={name}: only stack=hf asks the Hub. For stack native, `hf download {name.removeprefix(HUB_PREFIX)}"
                f"{options} --local-dir DIR` on a machine with network, then {key}={_LOCAL[key]}"
            )


def _with_deepspeed_of(folder: Path, loaded: TrainConfig) -> TrainConfig:
    """DeepSpeed's file is the one beside the config, if it is there; else the one at that path."""
    beside = folder / (loaded.parallel.deepspeed or "")
    if not beside.is_file():
        return loaded
    parallel = loaded.parallel.model_copy(update={"deepspeed": str(beside.resolve())})
    return loaded.model_copy(update={"parallel": parallel})
