from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pydantic import JsonValue

from seatrial.bench.child_ranks import ChildResult
from seatrial.checks.check import Context
from seatrial.checks.training import function_calling
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.checks.training.function_calling import (
    CHECK,
    RANDOM_WEIGHTS_OVERRIDES,
    SINGLE_RANK_OVERRIDES,
    evaluation_observations,
    training_task,
)
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Measurement, Metric, Outcome, UsageError
from seatrial.train import train_config
from seatrial.worker import measure
from tests.checks.training.check_helpers import failed_metrics, lora_training, measured

PRETRAINED = "model.weights=/models/Qwen2-7B-Instruct"


def make_context(folder: Path, ranks: int = 1, device: str = "cpu") -> Context:
    return Context(
        node="node0",
        rank=0,
        world_size=ranks,
        local_rank=0,
        device=device,
        expected_gpus=None,
        artifacts_dir=folder,
        run_dir=folder,
    )


def task_for(folder: Path, ranks: int, device: str, *overrides: str) -> function_calling.TrainingTask:
    return training_task(make_context(folder, ranks, device), WorkloadOptions(overrides=overrides))


def test_random_weights_on_gpus_get_a_short_training(tmp_path: Path) -> None:
    task = task_for(tmp_path, 4, "cuda:0")
    assert task.config_name == "function-calling-qwen2-7b"
    assert tuple(task.check_overrides) == RANDOM_WEIGHTS_OVERRIDES
    assert (task.config.max_steps, task.config.parallel.strategy) == (10, "zero3")
    assert (task.config.seq_len, task.config.bsz, task.config.grad_accum, task.config.lora_r) == (4096, 2, 1, 64)


def test_pretrained_weights_use_the_config(tmp_path: Path) -> None:
    task = task_for(tmp_path, 4, "cuda:0", PRETRAINED)
    assert task.check_overrides == {}
    assert (task.config.max_steps, task.config.learning_rate.peak) == (100, 2e-5)


def test_overrides_of_the_user_win(tmp_path: Path) -> None:
    assert task_for(tmp_path, 4, "cuda:0", "max_steps=50").config.max_steps == 50


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (2, "zero3")])
def test_one_rank_uses_ddp(tmp_path: Path, ranks: int, strategy: str) -> None:
    task = task_for(tmp_path, ranks, "cpu")
    assert task.config_name == "tiny/function-calling-qwen2-7b"
    assert task.config.parallel.strategy == strategy
    assert set(task.check_overrides) == (set(SINGLE_RANK_OVERRIDES) if ranks == 1 else set())


def test_other_layout_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.layout is no_robots"):
        task_for(tmp_path, 2, "cpu", "data.layout=no_robots")


def test_number_of_adapter_parameters() -> None:
    config = train_config.load("function-calling-qwen2-7b")
    adapters = config.architecture().adapter_parameters(config.lora_targets, config.lora_r)
    assert adapters == 161_480_704  # as users of this workload report: 161M trainable of 7.7B


def score(**counts: tuple[int, int]) -> dict[str, Any]:
    names = dict.fromkeys(function_calling.SCORES, (0, 0)) | counts
    return {name: {"count": count, "of": of} for name, (count, of) in names.items()}


RECORD = {
    "data": "path",
    "preprocess": {
        "rows": 100,
        "rejected": {"duplicate": 3, "no chat": 1},
        "kept": {"train": 80, "seen": 6, "unseen": 9},
    },
    "cases": {"seen": 4, "unseen": 6},
    "base": {
        "seen": score(call_correct=(1, 4)),
        "unseen": score(call_correct=(1, 6), irrelevance_correct=(1, 2)),
    },
    "tuned": {
        "seen": score(call_correct=(4, 4), function_name_correct=(3, 3)),
        "unseen": score(call_correct=(5, 6), function_name_correct=(2, 4)),
    },
    "sign_test": {"gain": 0.7, "passed": True},
}


def test_scores_cover_both_splits_and_need_cases() -> None:
    measurement = measured(CHECK, evaluation_observations(RECORD))
    values = {item.name: item.value for item in measurement.metrics}
    assert (values["call_correct.base"], values["call_correct.tuned"]) == (20, 90)
    assert values["function_name_correct.tuned"] == pytest.approx(500 / 7)
    assert "function_name_correct.base" not in values
    assert values["irrelevance_correct.base"] == 50
    assert (values["call_correct_gain"], values["improved"], values["cases"]) == (70, 1, 10)
    (unaccounted,) = (item for item in measurement.metrics if item.name == "rows_unaccounted")
    assert (unaccounted.value, unaccounted.evidence) == (
        1,
        {
            "rows": 100,
            "rejected": {"duplicate": 3, "no chat": 1},
            "used": {"train": 80, "seen": 6, "unseen": 9},
        },
    )
    assert measurement.facts["rejected_by_reason"] == {"duplicate": 3, "no chat": 1}


def test_failed_evaluation_is_a_fail_and_its_results_are_errors() -> None:
    failed = ChildResult(error="rank 0: out of memory", exit_code=1)
    measurement = measured(CHECK, function_calling._evaluation_result(failed, 1.0), trained="yes", pretrained="no")
    verdicts = judge_check(CHECK, [measurement], {}, "t")
    outcomes = {verdict.metric: verdict.outcome for verdict in verdicts}
    assert outcomes["evaluation_exit_code"] is Outcome.FAIL
    assert outcomes["rows_unaccounted"] is outcomes["cases"] is Outcome.ERROR
    assert outcomes["improved"] is Outcome.SKIP
    assert "out of memory" in next(v.evidence for v in verdicts if v.metric == "evaluation_exit_code")


def test_outputs_that_the_config_does_not_request_are_skipped(tmp_path: Path) -> None:
    config = train_config.load("tiny/function-calling-qwen2-7b", ("use_lora=false", "tensorboard=false"))
    outputs = function_calling._training_outputs(config, TrainingResult({}, tmp_path, ""))
    verdicts = judge_check(CHECK, [measured(CHECK, outputs, trained="yes")], {}, "t")
    outcomes = {verdict.metric: verdict.outcome for verdict in verdicts}
    assert outcomes["parameters_trained_beyond_adapters"] is outcomes["tensorboard_logs"] is Outcome.SKIP
    assert outcomes["final_model_reloads"] is Outcome.FAIL


def test_speed_rule_applies_only_to_gpus() -> None:
    name = "tokens_per_second_per_gpu"
    assert outcomes("no", "cpu", **{name: 1000.0})[name] is Outcome.SKIP
    assert outcomes("no", "cuda", **{name: 1999.0})[name] is not Outcome.PASS
    assert outcomes("no", "cuda", **{name: 2001.0})[name] is Outcome.PASS


def outcomes(pretrained: str, device: str = "cuda", **values: float) -> dict[str, Outcome]:
    metrics = tuple(Metric(name=n, value=v, unit=CHECK.units[n], subject=CLUSTER) for n, v in values.items())
    facts: dict[str, JsonValue] = {"trained": "yes", "pretrained": pretrained, "device": device}
    facts |= {"gpu": None if device == "cpu" else "GPU X", "world_size": 1, "nodes": 1}
    facts["training"] = {"precision": "bf16", "flops_per_token": 4.6e10}
    measurement = Measurement(check=CHECK.name, subject=CLUSTER, rank=0, metrics=metrics, facts=facts)
    return {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "t")}


def test_learning_rules_need_pretrained_weights() -> None:
    assert outcomes("no", final_loss=6.8, improved=0)["final_loss"] is Outcome.SKIP
    assert outcomes("no", final_loss=6.8, improved=0)["improved"] is Outcome.SKIP
    assert outcomes("yes", final_loss=0.7, improved=0)["final_loss"] is Outcome.FAIL
    assert outcomes("yes", final_loss=0.7, improved=0)["improved"] is Outcome.FAIL
    good = outcomes("yes", final_loss=0.4, improved=1)
    assert (good["final_loss"], good["improved"]) == (Outcome.PASS, Outcome.PASS)
    assert outcomes("yes")["final_loss"] is Outcome.ERROR  # not measured


@pytest.mark.training
@pytest.mark.parametrize("frozen", [True, False])
def test_training_that_does_not_freeze_the_model_fails(tmp_path: Path, frozen: bool) -> None:
    config = train_config.load("tiny/lora-mistral-7b-ddp")
    result = lora_training(config, tmp_path / "out", frozen)
    failed = failed_metrics(CHECK, function_calling._training_outputs(config, result))
    assert failed == (set() if frozen else {"parameters_trained_beyond_adapters"})


@pytest.fixture
def single_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group with one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, text in {**names, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, text)
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.mark.training
@pytest.mark.usefixtures("single_process_group")
def test_training_and_evaluation_on_one_rank(tmp_path: Path) -> None:
    few = ["max_steps=4", "untimed_steps=1", "grad_accum=1", "checkpoint.every=0"]
    short = ["evaluation.cases=2", "evaluation.max_new_tokens=4"]
    measurement = measure(CHECK, make_context(tmp_path), {"overrides": [*few, *short]})
    assert measurement.error is None
    verdicts = {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "t")}
    for metric in ("final_loss", "improved", "tokens_per_second_per_gpu"):  # need pretrained weights or GPUs
        assert verdicts.pop(metric) is Outcome.SKIP
    assert set(verdicts.values()) == {Outcome.PASS}
    assert measurement.facts["strategy"] == "single"
    assert set(measurement.facts["overrides"]) == set(SINGLE_RANK_OVERRIDES)  # type: ignore[arg-type]
    names = [Path(artifact.path).name for artifact in measurement.artifacts]
    assert {"metrics.json", "summary.txt", "evaluation.json", "answers.jsonl"} <= set(names)
    assert any(name.startswith("events.out.tfevents") for name in names)
    summary = next(artifact.path for artifact in measurement.artifacts if artifact.path.endswith("summary.txt"))
    text = (tmp_path / summary).read_text()
    assert " on 1 × CPU, " in text
    assert "\ncorrect answers  " in text
