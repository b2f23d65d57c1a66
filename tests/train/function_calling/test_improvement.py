"""A model of 0.2 million random weights learns to call one of two functions: the evaluation finds the improvement.

The requests for the two functions have no word in common. So the model needs no more than 130 steps of two rows, which
take about ten seconds of CPU time; the held-out requests have other numbers than those of the training.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

from seatrial.cli import training
from seatrial.train.function_calling.glaive import CALL_MARKER, END_OF_TURN, convert
from seatrial.train.hf import tokenization
from tests.paths import CONFIGS
from tests.train.hf import runs

REQUESTS = {
    "lamp": "it is dark and dim, so brighten my evening with more light",
    "door": "two guests wait outside, please let them enter at once",
}
CONFIG = "function-calling-qwen2-7b"


def rows(count: int) -> list[dict[str, str]]:
    """Rows in the layout of glaive-function-calling-v2; both functions are listed, and one is called."""
    parameters = {"type": "object", "properties": {}}
    functions = [{"name": name, "description": "A function", "parameters": parameters} for name in REQUESTS]
    listed = "\n\n".join(json.dumps(function, indent=4) for function in functions)
    names = list(REQUESTS)
    return [
        {
            "system": f"SYSTEM: You are a helpful assistant with access to the following functions.\n{listed}\n",
            "chat": f"USER: {number // 2}: {REQUESTS[name]}\n\n\n"
            f"ASSISTANT: {CALL_MARKER} {json.dumps({'name': name})[:-1]}, \"arguments\": '{{}}'}} {END_OF_TURN}\n\n\n",
        }
        for number, name in enumerate(names[number % 2] for number in range(count))
    ]


def write_data(folder: Path) -> tuple[Path, Path]:
    """A file of rows, and one with a tokenizer for whole words of their chats: fewer tokens than by default."""
    all_rows = rows(400)
    untrained = tokenization.prepare(tokenization.train([], 259), 259, chat=True)
    conversations = [convert(row) for row in all_rows]
    chats = [
        untrained.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
        for conversation in conversations
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in all_rows))
    tokenization.train(chats, 1001).backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "rows.jsonl", folder / "tokenizer.json"


@pytest.mark.training
def test_training_improves_the_score_significantly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, tokenizer = write_data(tmp_path)
    overrides = [
        *(f"data.path={data}", f"data.tokenizer={tokenizer}", "data.samples=400", "data.packing=false"),
        *("parallel.strategy=ddp", "parallel.deepspeed=null", "use_lora=false", "gradient_checkpointing=false"),
        *("seq_len=240", "bsz=2", "grad_accum=1", "max_steps=130", "learning_rate.peak=5e-3"),
        *("checkpoint.every=0", "tensorboard=false", "evaluation.cases=40", "evaluation.bsz=40"),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with such small matrices a second thread only spins, above all on a loaded machine
    try:
        runs.train(runs.config(CONFIG, *overrides), tmp_path / "out")
        with pytest.raises(typer.Exit) as exit_:
            training.evaluate(CONFIGS / "tiny" / f"{CONFIG}.yaml", tmp_path / "out", overrides)
    finally:
        torch.set_num_threads(threads)
    assert exit_.value.exit_code == 0, capsys.readouterr().out
    assert "significant improvement: 0% correct before training" in capsys.readouterr().out
    test = json.loads((tmp_path / "out" / "evaluation.json").read_text())["sign_test"]
    assert (test["call_correct_base"], test["lost"], test["passed"]) == (0, 0, True)
    assert test["call_correct_tuned"] > 0.9
    assert test["p_value"] < 0.001
