from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.model import UsageError
from seatrial.train import hf
from seatrial.train.function_calling import evaluate, generate
from seatrial.train.function_calling.glaive import convert
from seatrial.train.function_calling.score import Call, Score, score
from tests.train.hf import runs


def test_cases_are_where_the_user_has_spoken_and_functions_are_on_offer() -> None:
    one, two, refused, none, thanks = (convert(row) for row in generate.rows(5, seed=0))
    cases = [list(evaluate.extract_cases(conversation, "seen")) for conversation in (one, two, refused, none, thanks)]
    assert [len(found) for found in cases] == [1, 1, 1, 0, 2]
    assert [len(found[0].expected) for found in (cases[0], cases[1], cases[2])] == [1, 2, 0]
    assert cases[4][1].messages[-1]["content"] == "Thank you!"
    assert cases[4][1].expected == []


def scores(*full: int) -> list[Score]:
    call = Call("f", {})
    schemas: dict[str, Any] = {"f": {"type": "object", "properties": {}}}
    right = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    return [score(right if good else "", [call], schemas) for good in full]


@pytest.mark.parametrize(
    ("base", "tuned", "p_value", "passed"),
    [
        ([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1], 1 / 32, True),
        ([0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], 1 / 16, False),  # four of four may be chance
        ([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0], 7 / 64, False),
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], 1, False),  # good, and no better for it
        ([1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], 1, False),
    ],
)
def test_the_gate_is_on_the_difference(base: list[int], tuned: list[int], p_value: float, passed: bool) -> None:
    found = evaluate.sign_test(scores(*base), scores(*tuned), significance=0.05)
    assert found["p_value"] == pytest.approx(p_value)
    assert found["passed"] is passed
    assert found["delta"] == pytest.approx((sum(tuned) - sum(base)) / 6)


def test_both_models_answer_every_case(tmp_path: Path) -> None:
    wanted = runs.config(
        *(
            "function-calling-qwen2-7b",
            "parallel.strategy=ddp",
            "parallel.deepspeed=null",
            "max_steps=1",
            "untimed_steps=0",
        ),
        *("bsz=1", "grad_accum=1", "learning_rate.peak=1.0", "evaluation.cases=3", "evaluation.max_new_tokens=8"),
    )
    runs.train(wanted, tmp_path)
    record = hf.evaluate(wanted, tmp_path)
    assert record == json.loads((tmp_path / "evaluation.json").read_text())
    assert (record["weights"], record["data"], record["cases"]) == ("random", "generated", {"seen": 3, "unseen": 3})
    assert record["base"]["unseen"]["full"]["of"] == record["tuned"]["unseen"]["full"]["of"] == 3
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 6
    assert any(answer["base"] != answer["tuned"] for answer in answers)  # the adapters were really loaded


def test_what_cannot_be_evaluated_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only function calling is evaluated"):
        hf.evaluate(runs.config("sft-smollm-135m"), tmp_path)
    with pytest.raises(UsageError, match="run the training first"):
        hf.evaluate(runs.config("function-calling-qwen2-7b"), tmp_path)
    (tmp_path / "final").mkdir()  # of a training that was cut short, or of one without adapters: never asked of the Hub
    (tmp_path / "final" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"no .*final/adapter_config.json: run the training first"):
        hf.evaluate(runs.config("function-calling-qwen2-7b"), tmp_path)
