import json
import re
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train import train_config
from seatrial.train.train_config import TrainConfig
from tests.paths import CONFIGS

SHIPPED = sorted(CONFIGS.rglob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_shipped_configs_load(path: Path) -> None:
    assert train_config.load(path).run_name


def test_each_config_has_a_tiny_version() -> None:
    for path in CONFIGS.glob("*.yaml"):
        real, tiny = train_config.load(path), train_config.load(CONFIGS / "tiny" / path.name)
        assert real.parallel == tiny.parallel
        assert (real.use_lora, real.stack, real.checkpoint.every > 0) == (
            tiny.use_lora,
            tiny.stack,
            tiny.checkpoint.every > 0,
        )
        assert tiny.model.architecture().parameters < 2**20


def test_overrides_have_priority(tmp_path: Path) -> None:
    path = write(tmp_path, "run_name: a\nmodel: {name: mistral-tiny}\nseq_len: 8\nparallel: {strategy: fsdp2}\n")
    config = train_config.load(path, ["parallel.strategy=ddp", "bsz=3", "data.samples=9"])
    assert (config.parallel.strategy, config.bsz, config.data.samples) == ("ddp", 3, 9)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("run_name: a\nmodel: {name: mistral-tiny}\nbzs: 3\n", [], "unknown key 'bzs'; did you mean 'bsz'"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["parallel.offload=1"], "'parallel.offload'"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["bsz=0"], "bsz=0: expected greater than 0"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["bsz"], "expected key=value"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["data.path="], "data.path"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["learning_rate.peak=inf"], "expected a finite number"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["timeout_s=inf"], "timeout_s=inf: expected a finite"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["seq_len=257"], "seq_len 257: expected at most 256"),
        ("run_name: a\nmodel: {name: qwen2-tiny}\n", ["seq_len=513"], "seq_len 513: the model has 512"),
        ("run_name: a\nmodel: {name: mistral-8b}\n", [], "'mistral-8b': expected one of markov, mistral-7b"),
        ("run_name: a\nmodel: {name: mistral-tiny}\nmax_steps: 3\n", [], "max_steps 3"),
        ("run_name: a\nmodel: {name: mistral-tiny}\nparallel: {cpu_offload: true}\n", [], "require strategy fsdp2"),
        ("- a\n", [], "expected a mapping"),
        ("run_name: a\n", [], "model: required key is missing"),
    ],
)
def test_errors_name_the_key_or_value(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    short_sequences = (
        ["seq_len=64"] if not any("seq_len" in override for override in overrides) and text.startswith("run") else []
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        train_config.load(write(tmp_path, text), [*short_sequences, *overrides])


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("troughput", "; did you mean throughput or tiny/throughput?"),
        ("fsdp", "; did you mean fsdp-mistral-7b or tiny/fsdp-mistral-7b or ddp?"),
        ("smollm", "; did you mean sft-smollm-135m or tiny/sft-smollm-135m?"),
        ("mistral", "; did you mean fsdp-mistral-7b or lora-mistral-7b-ddp or sft-mistral-7b-1gpu?"),
        ("", "."),
        ("nope", "."),
    ],
)
def test_unknown_names_get_suggestions_and_a_list_of_all(name: str, suggestion: str) -> None:
    with pytest.raises(UsageError) as raised:
        train_config.config_path(name)
    first, *lines = str(raised.value).splitlines()
    assert first.startswith(f"unknown training config {name!r}{suggestion} ")
    assert all(line.startswith("  ") and len(line) <= 80 for line in lines)
    assert ", ".join(train_config.shipped_configs()) == " ".join(line.strip() for line in lines)


@pytest.mark.parametrize(
    ("key", "download_and_setting"),
    [
        ("model.weights", ("`hf download a/b --local-dir DIR`", "model.weights=DIR")),
        ("data.path", ("--repo-type dataset --local-dir DIR`", "data.path=DIR/FILE.parquet")),
        ("data.tokenizer", ("--local-dir DIR`", "data.tokenizer=DIR/tokenizer.json")),
    ],
)
def test_hub_names_with_the_native_stack_are_an_error(key: str, download_and_setting: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as raised:
        train_config.load("tiny/lora-mistral-7b-ddp", [f"{key}=hub:a/b"])
    download, setting = download_and_setting
    assert str(raised.value).startswith(f"{key}=hub:a/b: ")
    assert download in str(raised.value)
    assert str(raised.value).endswith(setting)
    train_config.load("tiny/lora-mistral-7b-ddp", [f"{key}=hub:a/b", "stack=hf"])


def test_keys_have_the_names_of_script_flags() -> None:
    assert {"run_name", "max_steps", "seq_len", "bsz", "grad_accum", "bf16", "gradient_checkpointing"} < set(
        TrainConfig.model_fields
    )
    assert {"use_lora", "lora_r", "lora_alpha", "lora_dropout"} < set(TrainConfig.model_fields)


def test_shipped_configs_load_by_name() -> None:
    assert train_config.config_path("throughput") == train_config.CONFIGS_FOLDER / "throughput.yaml"
    assert train_config.load("tiny/throughput") == train_config.load(CONFIGS / "tiny" / "throughput.yaml")
    with pytest.raises(UsageError, match="'thruput'"):
        train_config.config_path("thruput")


def test_the_deepspeed_path_is_relative_to_the_config(tmp_path: Path) -> None:
    shipped_file = train_config.CONFIGS_FOLDER / "deepspeed" / "zero3.json"
    for name in ("function-calling-qwen2-7b", "tiny/function-calling-qwen2-7b"):
        assert train_config.load(name).parallel.deepspeed == str(shipped_file)
    custom = tmp_path / "custom.json"
    assert train_config.load("function-calling-qwen2-7b", [f"parallel.deepspeed={custom}"]).parallel.deepspeed == str(
        custom
    )


def test_model_layers() -> None:
    settings = train_config.load("throughput", ["model.layers=8"])
    assert settings.architecture().num_hidden_layers == 8
    assert 2.0e9 < settings.architecture().parameters < 2.1e9
    with pytest.raises(UsageError, match=r"model\.layers"):
        train_config.load("throughput", ["model.layers=1000000000"])
    with pytest.raises(UsageError, match="layers requires weights: random"):
        train_config.load("throughput", ["model.layers=8", "model.weights=folder"])


@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_weights_of_an_absurd_size_are_rejected_before_a_model_is_built(tmp_path: Path, kind: str) -> None:
    fields = {"model_type": kind, "num_hidden_layers": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for stack in ("native", "hf"):
        with pytest.raises(UsageError, match="num_hidden_layers 1000000000, expected at most 1000"):
            train_config.load("tiny/lora-mistral-7b-ddp", [f"model.weights={tmp_path}", f"stack={stack}"])


def test_model_width_keeps_the_head_size() -> None:
    mistral = train_config.load("throughput", ["model.width=1024"]).architecture()
    assert (mistral.hidden_size, mistral.intermediate_size, mistral.head_dim) == (1024, 3584, 128)
    assert (mistral.num_attention_heads, mistral.num_key_value_heads) == (8, 2)
    with pytest.raises(UsageError, match=r"model.width 640: expected a multiple of 512"):
        train_config.load("throughput", ["model.width=640"])
    with pytest.raises(UsageError, match="width requires weights: random"):
        train_config.load("throughput", ["model.width=1024", "model.weights=folder"])


def test_adapter_parameters_of_mistral() -> None:
    """20,971,520 is what peft prints for r=8 on all seven linear layers of Mistral-7B."""
    settings = train_config.load("lora-mistral-7b-ddp")
    assert settings.architecture().adapter_parameters(settings.lora_targets, settings.lora_r) == 20_971_520
    tiny = train_config.load("tiny/lora-mistral-7b-ddp")
    assert tiny.architecture().adapter_parameters(tiny.lora_targets, tiny.lora_r) == 17_920


def test_fp8_requirements() -> None:
    with pytest.raises(UsageError) as raised:
        train_config.load("tiny/throughput", ["fp8=true"])
    assert "fp8 requires bf16=true" in str(raised.value)
    with pytest.raises(UsageError, match=r"multiple of 16 \(got 15\)$"):
        train_config.load("tiny/throughput", ["fp8=true", "bf16=true", "bsz=3", "seq_len=5"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.wrap=none"], "wrap none requires strategy fsdp2"),
        (["parallel.strategy=zero3", "parallel.cpu_offload=true"], "with zero3, set them in the deepspeed file"),
        (["parallel.strategy=fsdp2", "parallel.wrap=size"], "wrap size and wrap_min_parameters require each other"),
        (["parallel.strategy=fsdp2", "parallel.wrap_min_parameters=9"], "wrap size and wrap_min_parameters require"),
        (
            ["stack=hf", "parallel.strategy=fsdp2", "parallel.wrap=size", "parallel.wrap_min_parameters=9"],
            "parallel.wrap size requires stack native",
        ),
    ],
)
def test_wrapping_is_for_fsdp2(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train_config.load("tiny/ddp", overrides)
