"""Evaluates function calling before and after training, on the same held-out cases with greedy decoding.

A case is a turn of a held-out conversation in which the assistant answers the user and may call a function. A sign
test compares the two models, because a good base model scores well even without training.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import CONFIG_NAME

from seatrial.model import UsageError
from seatrial.train.function_calling.glaive import Conversation, Message
from seatrial.train.function_calling.preprocess import Split, read_split
from seatrial.train.function_calling.score import Call, Schemas, Score, expected_calls, score, summary
from seatrial.train.function_calling.template import END_OF_TURN
from seatrial.train.hf import data, hub, models
from seatrial.train.train_config import Evaluation, TrainConfig
from seatrial.util.files import atomic_write, write_json

HELD_OUT_SPLITS: tuple[Split, ...] = ("seen", "unseen")


@dataclass(frozen=True)
class Case:
    split: Split
    messages: list[Message]  # up to and including the last message of the user
    tools: list[Message]
    expected: list[Call]

    @property
    def schemas(self) -> Schemas:
        return Conversation(self.messages, self.tools).parameter_schemas


def evaluate(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Score the model before and after the training run in ``out``; return the content of ``out``/evaluation.json.

    Raises UsageError if data.layout is not function_calling, or if there is no exported model or no case.
    """
    final = out / "final"
    if config.data.layout != "function_calling":
        raise UsageError(
            f"{config.run_name}: data.layout is {config.data.layout}; evaluate needs data.layout function_calling"
        )
    required = final / (CONFIG_NAME if config.use_lora else "config.json")
    if not required.is_file():  # peft would interpret the path as a model name on the Hub
        raise UsageError(f"{required} not found: run the training first, with the same config and --out")
    prepared = data.prepare(config, out)
    cases: list[Case] = []
    for split in HELD_OUT_SPLITS:
        conversations = read_split(prepared.folder / "function_calling", split)
        split_cases = itertools.chain.from_iterable(extract_cases(each, split) for each in conversations)
        cases += itertools.islice(split_cases, config.evaluation.cases)
    if not cases:
        raise UsageError(f"{prepared.folder}: no held-out conversation with functions; increase data.samples")
    before, after = _answers_before_and_after(config, out, prepared.tokenizer, cases)
    record = _record(config, prepared.report, cases, before, after)
    lines = []
    for case, base, tuned in zip(cases, before, after, strict=True):
        answers = {
            "split": case.split,
            "user": case.messages[-1]["content"],
            "expected": [{"name": call.name, "arguments": call.arguments} for call in case.expected],
            "base": base,
            "tuned": tuned,
        }
        lines.append(f"{json.dumps(answers, ensure_ascii=False)}\n")
    atomic_write(out / "answers.jsonl", "".join(lines).encode())
    write_json(out / "evaluation.json", record)
    return record


def extract_cases(conversation: Conversation, split: Split) -> Iterator[Case]:
    """A case for each message of the assistant that follows a message of the user, if functions are available."""
    messages = conversation.messages
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and messages[index - 1]["role"] == "user" and conversation.tools:
            yield Case(split, messages[:index], conversation.tools, expected_calls(message))


def _answers_before_and_after(
    config: TrainConfig, out: Path, tokenizer: Any, cases: Sequence[Case]
) -> tuple[list[str], list[str]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = models.build(config, device)
    before = generate_answers(model, tokenizer, cases, config.evaluation, "before")
    if config.use_lora:
        model = PeftModel.from_pretrained(model, str(out / "final"))
    else:
        del model
        model = models.load(out / "final", config).to(device)
    return before, generate_answers(model, tokenizer, cases, config.evaluation, "after")


@torch.inference_mode()
def generate_answers(model: Any, tokenizer: Any, cases: Sequence[Case], settings: Evaluation, when: str) -> list[str]:
    """The model's answer to each case, at most ``max_new_tokens`` tokens.

    ``when``: "before" or "after" training, for the progress lines.
    """
    model.eval()
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    answers: list[str] = []
    for start in range(0, len(cases), settings.bsz):
        prompts = [
            tokenizer.apply_chat_template(case.messages, tools=case.tools, tokenize=False, add_generation_prompt=True)
            for case in cases[start : start + settings.bsz]
        ]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
            pad_token_id=tokenizer.pad_token_id,
        )
        answers += tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"evaluated {len(answers)} of {len(cases)} cases {when} training", file=sys.stderr, flush=True)
    return answers


def _record(
    config: TrainConfig, report: dict[str, Any], cases: Sequence[Case], before: Sequence[str], after: Sequence[str]
) -> dict[str, Any]:
    """The content of evaluation.json."""
    base, tuned = (
        [score(answer, case.expected, case.schemas) for answer, case in zip(answers, cases, strict=True)]
        for answers in (before, after)
    )

    def summaries(scores: list[Score]) -> dict[str, dict[str, dict[str, int]]]:
        pairs = list(zip(cases, scores, strict=True))
        return {split: summary([score for case, score in pairs if case.split == split]) for split in HELD_OUT_SPLITS}

    return {
        "run_name": config.run_name,
        "model": config.model.name,
        "weights": hub.source_label(config.model.weights, "random"),
        "data": report["data"],
        "preprocess": report["preprocess"],
        "cases": {split: sum(case.split == split for case in cases) for split in HELD_OUT_SPLITS},
        "base": summaries(base),
        "tuned": summaries(tuned),
        "sign_test": sign_test(base, tuned, config.evaluation.significance),
    }


def sign_test(base: Sequence[Score], tuned: Sequence[Score], significance: float) -> dict[str, Any]:
    """One-sided sign test of the tuned model over the cases that only one of the two models answers correctly."""
    base_correct, tuned_correct = ([answer.call_correct for answer in scores] for scores in (base, tuned))
    pairs = list(zip(base_correct, tuned_correct, strict=True))
    won, lost = pairs.count((False, True)), pairs.count((True, False))
    p_value = sum(math.comb(won + lost, wins) for wins in range(won, won + lost + 1)) / 2 ** (won + lost)
    base_rate, tuned_rate = sum(base_correct) / len(pairs), sum(tuned_correct) / len(pairs)
    return {
        "call_correct_base": base_rate,
        "call_correct_tuned": tuned_rate,
        "gain": tuned_rate - base_rate,
        "won": won,
        "lost": lost,
        "p_value": p_value,
        "significance": significance,
        "passed": p_value < significance,
    }
