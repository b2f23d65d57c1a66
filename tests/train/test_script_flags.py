"""The arguments of training scripts: accepted under their names, or refused with the name to use."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train import train_config
from seatrial.train.script_flags import accepted_flags, overrides_from_flags, overrides_from_run_args, write_run_args
from seatrial.util import data_files
from tests.processes import call

# as scripts for one GPU, DDP and LoRA are called
SCRIPT = (
    "--run_name sft_ddp --max_steps 10 --seq_len 512 --bsz 1 --grad_accum 1 --bf16 True --gradient_checkpointing False "
    "--use_lora --lora_r 8 --lora_alpha 16 --lora_dropout 0.05"
)

# the sections of torchtitan's train_configs/llama3_8b.toml
TORCHTITAN = """[job]
dump_folder = "./outputs"
[profiling]
enable_profiling = true
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
"""


def test_flags_of_scripts_set_the_keys_of_the_config() -> None:
    config = train_config.load("sft-mistral-7b-1gpu", overrides_from_flags(shlex.split(SCRIPT)))
    assert (config.run_name, config.max_steps, config.seq_len, config.bsz, config.grad_accum) == (
        "sft_ddp",
        10,
        512,
        1,
        1,
    )
    assert (config.bf16, config.gradient_checkpointing, config.use_lora) == (True, False, True)
    assert (config.lora_r, config.lora_alpha, config.lora_dropout) == (8, 16, 0.05)


def test_forms_of_a_flag() -> None:
    assert overrides_from_flags(["--max-steps=3", "--use_lora", "--bf16", "False"]) == [
        "max_steps=3",
        "use_lora=true",
        "bf16=False",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--per_device_train_batch_size", "2"], r"--per_device_train_batch_size: unknown argument; use --bsz$"),
        (["--learning_rate", "2e-5"], r"use --set learning_rate\.peak=VALUE$"),
        (["--output-dir", "x"], r"--output_dir: unknown argument; use --out DIR$"),
        (["--max_step", "2"], r"did you mean --max_steps\?"),
        (["--ouut", "x"], r"did you mean --out\?"),
        (["--zzz"], r"unknown argument; Accepted: --run_name, --max_steps, --seq_len"),
        (["--bsz"], r"--bsz: expected a value"),
        (["--bsz", "--use_lora"], r"--bsz: expected a value"),
        (["--bsz="], r"--bsz: expected a value"),
        (["more"], r"unexpected argument 'more'"),
        (
            ["--nnodes", "2", "--zzz", "3"],
            r"^--nnodes: unknown argument; use torchrun.*; --zzz: unknown argument; Acc",
        ),
        (["--load_in_4bit"], r"without quantized weights"),
    ],
)
def test_unknown_flag_names_the_new_one(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        overrides_from_flags(arguments)


@pytest.mark.parametrize(
    ("text", "program", "name"),
    [
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "accelerate", "config.yaml"),
        ("base_model: x\nsequence_len: 2048\n", "axolotl", "config.yaml"),
        ('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4}', "DeepSpeed", "ds_config.json"),
        (TORCHTITAN, "torchtitan", "llama3_8b.toml"),
        ("bse: 3\n", "", "config.yaml"),
        ("[tool]\nx = 1\n", "", "pyproject.toml"),
        ("[job\n", "", "cut.toml"),
    ],
)
def test_config_of_another_program_is_named(tmp_path: Path, text: str, program: str, name: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    unknown = "unknown key 'bse'" if name.endswith(".yaml") else "unknown training config"
    with pytest.raises(UsageError, match=f"is a config of {program}" if program else unknown):
        train_config.load(path)


def test_refused_names_are_not_accepted_ones() -> None:
    assert not set(data_files.read("training_flags.yaml")) & set(accepted_flags())


def test_run_args_of_a_run_give_the_same_config(tmp_path: Path) -> None:
    config = train_config.load("lora-mistral-7b-ddp", ["max_steps=9", "lora_targets=[q_proj]", "data.cache=/c"])
    write_run_args(config, tmp_path)
    again = train_config.load("throughput", overrides_from_run_args(tmp_path / "run_args.json"))
    assert again == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_steps": 10, "batch_size": 2}', r"run_args\.json: batch_size: unknown argument; use --bsz"),
        ("[1]", "expected a JSON object"),
        ("{", r"cannot read --run_args"),
    ],
)
def test_run_args_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run_args.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        overrides_from_run_args(path)


def test_command_line_has_priority_over_run_args(tmp_path: Path) -> None:
    path = tmp_path / "run_args.json"
    path.write_text(json.dumps({"max_steps": "none"}))
    code, _, err = call("train", "run", "tiny/ddp", "--run_args", str(path), "--seq_len", "512")
    assert (code, "--set max_steps=" in err) == (2, True)
    code, _, err = call("train", "run", "tiny/ddp", "--run_args", str(path), "--max_steps", "two")
    assert (code, "--set max_steps=two" in err) == (2, True)
    code, _, err = call("train", "run", "--max_steps", "3", "tiny/ddp")
    assert (code, "--max_steps: the config comes before its arguments" in err) == (2, True)
    code, _, err = call("train", "run", "tiny/ddp", "--max_steps", "two", "--set", "max_steps=three")
    assert (code, "--set max_steps=three" in err) == (2, True)
