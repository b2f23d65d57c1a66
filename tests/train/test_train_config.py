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
def test_what_ships_can_be_read(path: Path) -> None:
    assert train_config.load(path).run_name


def test_each_config_has_a_tiny_twin_of_the_same_kind() -> None:
    for path in CONFIGS.glob("*.yaml"):
        real, tiny = train_config.load(path), train_config.load(CONFIGS / "tiny" / path.name)
        assert real.parallel == tiny.parallel
        assert (real.use_lora, real.stack, real.checkpoint.every > 0) == (
            tiny.use_lora,
            tiny.stack,
            tiny.checkpoint.every > 0,
        )
        assert tiny.model.architecture().parameters < 2**20


def test_later_layers_win(tmp_path: Path) -> None:
    path = write(tmp_path, "run_name: a\nmodel: {name: mistral-tiny}\nseq_len: 8\nparallel: {strategy: fsdp2}\n")
    found = train_config.load(path, ["parallel.strategy=ddp", "bsz=3", "data.samples=9"])
    assert (found.parallel.strategy, found.bsz, found.data.samples) == ("ddp", 3, 9)


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ("run_name: a\nmodel: {name: mistral-tiny}\nbzs: 3\n", [], "unknown key 'bzs'; did you mean 'bsz'"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["parallel.offload=1"], "'parallel.offload'"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["bsz=0"], "bsz: Input should be greater than 0"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["bsz"], "expected key=value"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["data.path="], "nothing stands behind the equals sign"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["learning_rate.peak=inf"], "should be a finite number"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["timeout_s=inf"], "timeout_s: Input should be a finite number"),
        ("run_name: a\nmodel: {name: mistral-tiny}\n", ["seq_len=257"], "sliding window of 256"),
        ("run_name: a\nmodel: {name: qwen2-tiny}\n", ["seq_len=513"], "512 positions"),
        ("run_name: a\nmodel: {name: mistral-8b}\n", [], "no model 'mistral-8b': expected one of markov, mistral-7b"),
        ("run_name: a\nmodel: {name: mistral-tiny}\nmax_steps: 3\n", [], "leave none of 3 steps"),
        ("run_name: a\nmodel: {name: mistral-tiny}\nparallel: {cpu_offload: true}\n", [], "go with strategy fsdp2"),
        ("- a\n", [], "expected a mapping"),
        ("run_name: a\n", [], "model: Field required"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, overrides: list[str], complaint: str) -> None:
    short = ["seq_len=64"] if not any("seq_len" in one for one in overrides) and text.startswith("run") else []
    with pytest.raises(UsageError, match=re.escape(complaint)):
        train_config.load(write(tmp_path, text), [*short, *overrides])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("troughput", "; did you mean throughput or tiny/throughput? Name"),
        ("fsdp", "; did you mean fsdp-mistral-7b or tiny/fsdp-mistral-7b or ddp? Name"),
        ("smollm", "; did you mean sft-smollm-135m or tiny/sft-smollm-135m? Name"),
        ("mistral", "; did you mean fsdp-mistral-7b or lora-mistral-7b-ddp or sft-mistral-7b-1gpu? Name"),
        ("", ". Name"),
        ("nope", ". Name"),
    ],
)
def test_near_names_come_first_then_all_of_them_in_lines_that_fit(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as refused:
        train_config.config_path(name)
    first, *lines = str(refused.value).splitlines()
    assert first == f"no training config called {name!r}{meant} a .yaml file, or one of"
    assert all(line.startswith("  ") and len(line) <= 80 for line in lines)
    assert ", ".join(train_config.shipped_configs()) == " ".join(line.strip() for line in lines)


@pytest.mark.parametrize(
    ("key", "then"),
    [
        ("model.weights", "`hf download a/b --local-dir DIR` on a machine with network, then model.weights=DIR"),
        (
            "data.path",
            "--repo-type dataset --local-dir DIR` on a machine with network, then data.path=DIR/FILE.parquet",
        ),
        ("data.tokenizer", "--local-dir DIR` on a machine with network, then data.tokenizer=DIR/tokenizer.json"),
    ],
)
def test_the_hub_is_for_the_other_stack_which_is_named_with_what_works_here(key: str, then: str) -> None:
    with pytest.raises(UsageError) as refused:
        train_config.load("tiny/lora-mistral-7b-ddp", [f"{key}=hub:a/b"])
    assert str(refused.value).startswith(f"{key}=hub:a/b: only stack=hf asks the Hub. For stack native, `hf download")
    assert str(refused.value).endswith(then)
    train_config.load("tiny/lora-mistral-7b-ddp", [f"{key}=hub:a/b", "stack=hf"])


def test_every_setting_has_its_words() -> None:
    assert {"run_name", "max_steps", "seq_len", "bsz", "grad_accum", "bf16", "gradient_checkpointing"} < set(
        TrainConfig.model_fields
    )
    assert {"use_lora", "lora_r", "lora_alpha", "lora_dropout"} < set(TrainConfig.model_fields)


def test_a_config_that_ships_is_found_by_its_name() -> None:
    assert train_config.config_path("throughput") == train_config.CONFIGS_FOLDER / "throughput.yaml"
    assert train_config.load("tiny/throughput") == train_config.load(CONFIGS / "tiny" / "throughput.yaml")
    with pytest.raises(UsageError, match=r"no training config called 'thruput'"):
        train_config.config_path("thruput")


def test_deepspeeds_file_is_the_one_beside_the_config(tmp_path: Path) -> None:
    beside = train_config.CONFIGS_FOLDER / "deepspeed" / "zero3.json"
    for name in ("function-calling-qwen2-7b", "tiny/function-calling-qwen2-7b"):
        assert train_config.load(name).parallel.deepspeed == str(beside)
    own = tmp_path / "own.json"
    assert train_config.load("function-calling-qwen2-7b", [f"parallel.deepspeed={own}"]).parallel.deepspeed == str(own)


def test_a_model_is_cut_to_some_of_its_layers() -> None:
    wanted = train_config.load("throughput", ["model.layers=8"])
    assert wanted.architecture().num_hidden_layers == 8
    assert 2.0e9 < wanted.architecture().parameters < 2.1e9
    with pytest.raises(UsageError, match="layers goes with weights: random"):
        train_config.load("throughput", ["model.layers=8", "model.weights=folder"])


def test_a_model_is_made_narrower_with_heads_of_the_same_size() -> None:
    mistral = train_config.load("throughput", ["model.width=1024"]).architecture()
    assert (mistral.hidden_size, mistral.intermediate_size, mistral.head_dim) == (1024, 3584, 128)
    assert (mistral.num_attention_heads, mistral.num_key_value_heads) == (8, 2)
    with pytest.raises(UsageError, match=r"model.width 640: expected a multiple of 512"):
        train_config.load("throughput", ["model.width=640"])
    with pytest.raises(UsageError, match="width goes with weights: random"):
        train_config.load("throughput", ["model.width=1024", "model.weights=folder"])


def test_adapters_are_counted_as_they_are_on_mistral() -> None:
    """20,971,520: as peft prints it for r=8 on all seven linear layers of Mistral-7B."""
    wanted = train_config.load("lora-mistral-7b-ddp")
    assert wanted.architecture().adapter_parameters(wanted.lora_targets, wanted.lora_r) == 20_971_520
    tiny = train_config.load("tiny/lora-mistral-7b-ddp")
    assert tiny.architecture().adapter_parameters(tiny.lora_targets, tiny.lora_r) == 17_920


def test_what_does_not_go_together_is_said_without_all_that_was_given() -> None:
    with pytest.raises(UsageError) as refused:
        train_config.load("tiny/throughput", ["fp8=true"])
    assert str(refused.value).endswith(": fp8 goes with bf16=true and stack=native")
    with pytest.raises(UsageError, match=r"multiple of 16 \(got 15\)$"):
        train_config.load("tiny/throughput", ["fp8=true", "bf16=true", "bsz=3", "seq_len=5"])
