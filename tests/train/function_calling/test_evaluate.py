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


def test_cases_follow_user_messages_with_functions() -> None:
    cases = [list(evaluate.extract_cases(convert(row), "seen")) for row in generate.conversations(5, seed=0)]
    one_call, two_calls, no_match, no_functions, with_thanks = cases
    assert [len(conversation_cases) for conversation_cases in cases] == [1, 1, 1, 0, 2]
    assert no_functions == []
    assert [len(case.expected) for (case,) in (one_call, two_calls, no_match)] == [1, 2, 0]
    assert with_thanks[1].messages[-1]["content"] == "Thank you!"
    assert with_thanks[1].expected == []


def scores(*call_correct: int) -> list[Score]:
    call = Call("f", {})
    schemas: dict[str, Any] = {"f": {"type": "object", "properties": {}}}
    correct = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    return [score(correct if is_correct else "", [call], schemas) for is_correct in call_correct]


@pytest.mark.parametrize(
    ("base", "tuned", "p_value", "passed"),
    [
        ([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1], 1 / 32, True),
        ([0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], 1 / 16, False),  # four of four is not significant
        ([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0], 7 / 64, False),
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], 1, False),  # no improvement
        ([1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], 1, False),
    ],
)
def test_sign_test(base: list[int], tuned: list[int], p_value: float, passed: bool) -> None:
    result = evaluate.sign_test(scores(*base), scores(*tuned), significance=0.05)
    assert result["p_value"] == pytest.approx(p_value)
    assert result["passed"] is passed
    assert result["gain"] == pytest.approx((sum(tuned) - sum(base)) / 6)


def test_both_models_answer_all_cases(tmp_path: Path) -> None:
    config = runs.config(
        *(
            "function-calling-qwen2-7b",
            "parallel.strategy=ddp",
            "parallel.deepspeed=null",
            "max_steps=1",
            "untimed_steps=0",
        ),
        *("bsz=1", "grad_accum=1", "learning_rate.peak=1.0", "evaluation.cases=3", "evaluation.max_new_tokens=8"),
    )
    runs.train(config, tmp_path)
    record = hf.evaluate(config, tmp_path)
    assert record == json.loads((tmp_path / "evaluation.json").read_text())
    assert (record["weights"], record["data"], record["cases"]) == ("random", "generated", {"seen": 3, "unseen": 3})
    assert record["base"]["unseen"]["call_correct"]["of"] == record["tuned"]["unseen"]["call_correct"]["of"] == 3
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 6
    assert any(answer["base"] != answer["tuned"] for answer in answers)  # the adapters are loaded


def test_evaluation_needs_a_function_calling_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.layout is no_robots"):
        hf.evaluate(runs.config("sft-smollm-135m"), tmp_path)
    with pytest.raises(UsageError, match=r"final/adapter_config\.json"):
        hf.evaluate(runs.config("function-calling-qwen2-7b"), tmp_path)
    (tmp_path / "final").mkdir()  # of an incomplete training or one without adapters; never requested from the Hub
    (tmp_path / "final" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"final/adapter_config\.json"):
        hf.evaluate(runs.config("function-calling-qwen2-7b"), tmp_path)
