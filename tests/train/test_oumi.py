from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.cli.app import app
from seatrial.model import UsageError
from seatrial.train import oumi, train_config
from seatrial.train.train_config import TrainConfig
from tests.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "oumi"
LOCAL = ("model.weights=/models/SmolLM-135M", "data.path=/data/no_robots.jsonl")
HUB = ("model.weights=hub:HuggingFaceTB/SmolLM-135M", "data.path=hub:HuggingFaceH4/no_robots")


def config(*overrides: str) -> TrainConfig:
    return train_config.load(ROOT / "configs" / "sft-smollm-135m.yaml", overrides)


@pytest.mark.parametrize(("name", "overrides"), [("nothing-at-hand", ()), ("local", LOCAL), ("hub", HUB)])
def test_the_config_as_it_was_read(name: str, overrides: tuple[str, ...]) -> None:
    golden, text = GOLDEN / f"{name}.yaml", oumi.rendered(config(*overrides), Path("/shared/run"))
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_weights_that_are_trained_in_bf16_are_loaded_so_and_need_no_mixed_precision() -> None:
    text = oumi.rendered(config("master_dtype=bf16"), Path("/shared/run"))
    assert "torch_dtype_str: bfloat16\n" in text
    assert "mixed_precision_dtype: NONE\n" in text


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["data.layout=walks"], "data.layout walks"),
        (["use_lora=true"], "use_lora"),
        (["parallel.strategy=fsdp2"], "parallel.strategy fsdp2"),
        (["data.packing=true"], "data.packing"),
        (["learning_rate.floor=0.1"], "learning_rate.floor"),
        (["data.path=/data/rows.parquet"], "data.path /data/rows.parquet: a .jsonl or .json file"),
    ],
)
def test_what_is_not_rendered_is_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match="cannot be rendered for Oumi") as refused:
        oumi.rendered(config(*overrides), Path("/shared/run"))
    assert reason in str(refused.value)


def test_the_command_line_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["render", "oumi", str(ROOT / "configs" / "sft-smollm-135m.yaml"), "--out", "/shared/run"]
    app(words, standalone_mode=False)
    assert capsys.readouterr().out == (GOLDEN / "nothing-at-hand.yaml").read_text()
