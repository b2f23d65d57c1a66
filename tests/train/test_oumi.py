from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seatrial.cli.app import app
from seatrial.model import UsageError
from seatrial.train import oumi, train_config
from seatrial.train.train_config import TrainConfig
from tests.paths import FIXTURES, ROOT

GOLDEN = ROOT / "tests" / "golden" / "oumi"
LOCAL = ("model.weights=/models/SmolLM-135M", "data.path=/data/no_robots.jsonl")
HUB = ("model.weights=hub:HuggingFaceTB/SmolLM-135M", "data.path=hub:HuggingFaceH4/no_robots")


def config(*overrides: str) -> TrainConfig:
    return train_config.load(ROOT / "configs" / "sft-smollm-135m.yaml", overrides)


@pytest.mark.parametrize(("name", "overrides"), [("generated", ()), ("local", LOCAL), ("hub", HUB)])
def test_the_rendered_config_equals_the_golden_file(name: str, overrides: tuple[str, ...]) -> None:
    golden, text = GOLDEN / f"{name}.yaml", oumi.render(config(*overrides), Path("/shared/run"))
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_bf16_master_weights_need_no_mixed_precision() -> None:
    text = oumi.render(config("master_dtype=bf16"), Path("/shared/run"))
    assert "torch_dtype_str: bfloat16\n" in text
    assert "mixed_precision_dtype: NONE\n" in text


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["data.layout=markov_chain"], "data.layout markov_chain"),
        (["use_lora=true"], "use_lora"),
        (["parallel.strategy=fsdp2"], "parallel.strategy fsdp2"),
        (["data.packing=true"], "data.packing"),
        (["learning_rate.min_ratio=0.1"], "learning_rate.min_ratio 0.1"),
    ],
)
def test_unsupported_settings_are_rejected(overrides: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match="cannot convert") as raised:
        oumi.render(config(*overrides), Path("/shared/run"))
    assert reason in str(raised.value)


def test_no_robots_rows_keep_only_messages() -> None:
    """With a column prompt, TRL expects a column completion."""
    read = [json.loads(line) for line in (FIXTURES / "no_robots" / "train.jsonl").read_text().splitlines()]
    converted = [oumi.convert_row("no_robots", row) for row in read]
    assert [list(row) for row in converted] == [["messages"]] * 5
    assert {tuple(sorted(message)) for row in converted for message in row["messages"]} == {("content", "role")}
    assert [message["role"] for message in converted[2]["messages"]] == ["system", *["user", "assistant"] * 2]
    assert converted[1]["messages"][1]["content"] == "Mercury is the planet closest to the sun."


def test_alpaca_rows_have_all_keys_of_the_layout() -> None:
    row = {"instruction": "Add 1 and 2.", "output": "3", "text": "the same in one"}
    assert oumi.convert_row("alpaca", row) == {"instruction": "Add 1 and 2.", "input": "", "output": "3"}


@pytest.mark.parametrize("layout", ["no_robots", "alpaca"])
def test_rows_of_another_layout_are_rejected(layout: str) -> None:
    with pytest.raises(ValueError, match=r"no messages|no instruction"):
        oumi.convert_row(layout, {"prompt": "Hello", "completion": "Ahoy"})


def test_the_command_prints_the_golden_file(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["render", "oumi", str(ROOT / "configs" / "sft-smollm-135m.yaml"), "--out", "/shared/run"]
    app(arguments, standalone_mode=False)
    assert capsys.readouterr().out == (GOLDEN / "generated.yaml").read_text()
