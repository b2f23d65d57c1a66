from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from seatrial.checks.base import Context
from seatrial.checks.training import function_calling
from seatrial.checks.training._workload import WorkloadOptions
from seatrial.checks.training.function_calling import (
    CHECK,
    RANDOM_WEIGHTS_OVERRIDES,
    SINGLE_RANK_OVERRIDES,
    evaluation_observations,
    training_task,
)
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Fact, Measurement, Metric, Outcome, UsageError
from seatrial.train import train_config
from seatrial.worker import measure

PRETRAINED = "model.weights=/models/Qwen2-7B-Instruct"


def place(folder: Path, ranks: int = 1, device: str = "cpu") -> Context:
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


def asked(folder: Path, ranks: int, device: str, *overrides: str) -> function_calling.TrainingTask:
    return training_task(place(folder, ranks, device), WorkloadOptions(overrides=overrides))


def test_on_gpus_with_random_weights_it_is_short_and_says_so(tmp_path: Path) -> None:
    found = asked(tmp_path, 4, "cuda:0")
    assert found.config_name == "function-calling-qwen2-7b"
    assert tuple(found.check_overrides) == RANDOM_WEIGHTS_OVERRIDES
    assert (found.config.max_steps, found.config.parallel.strategy) == (10, "zero3")
    assert (found.config.seq_len, found.config.bsz, found.config.grad_accum, found.config.lora_r) == (4096, 2, 1, 64)


def test_pretrained_weights_are_trained_as_the_config_says(tmp_path: Path) -> None:
    found = asked(tmp_path, 4, "cuda:0", PRETRAINED)
    assert found.check_overrides == {}
    assert (found.config.max_steps, found.config.learning_rate.peak) == (100, 2e-5)


def test_who_runs_it_has_the_last_word(tmp_path: Path) -> None:
    assert asked(tmp_path, 4, "cuda:0", "max_steps=50").config.max_steps == 50


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (2, "zero3")])
def test_one_rank_has_nobody_to_shard_with(tmp_path: Path, ranks: int, strategy: str) -> None:
    found = asked(tmp_path, ranks, "cpu")
    assert found.config_name == "tiny/function-calling-qwen2-7b"
    assert found.config.parallel.strategy == strategy
    assert set(found.check_overrides) == (set(SINGLE_RANK_OVERRIDES) if ranks == 1 else set())


def test_what_cannot_be_asked_for_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trains on no_robots: only function calling"):
        asked(tmp_path, 2, "cpu", "data.layout=no_robots")


def test_the_adapters_are_as_many_as_others_counted() -> None:
    config = train_config.load("function-calling-qwen2-7b")
    adapters = config.architecture().adapter_parameters(config.lora_targets, config.lora_r)
    assert adapters == 161_480_704  # what users of this workload report: 161M trainable of 7.7B


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
    "base": {"seen": score(full=(1, 4)), "unseen": score(full=(1, 6), irrelevance=(1, 2))},
    "tuned": {"seen": score(full=(4, 4), names=(3, 3)), "unseen": score(full=(5, 6), names=(2, 4))},
    "gate": {"delta": 0.7, "passed": True},
}


def test_both_splits_make_one_figure_and_what_was_not_asked_makes_none() -> None:
    found = list(evaluation_observations(RECORD))
    values = {one.name: one.value for one in found if isinstance(one, Metric)}
    assert (values["full.base"], values["full.tuned"]) == (20, 90)
    assert values["names.tuned"] == pytest.approx(500 / 7)
    assert "names.base" not in values
    assert values["irrelevance.base"] == 50
    assert (values["call_correct_gain"], values["better"], values["cases"]) == (70, 1, 10)
    assert (values["rows"], values["rows_rejected"], values["rows_unaccounted"]) == (100, 4, 1)
    assert Fact(name="rejected", value={"duplicate": 3, "no chat": 1}) in found


def test_only_gpus_are_held_to_a_speed() -> None:
    name = "tokens_per_second_per_gpu"
    assert judged("no", "cpu", **{name: 1000.0})[name] is Outcome.SKIP
    assert judged("no", "cuda", **{name: 1999.0})[name] is not Outcome.PASS
    assert judged("no", "cuda", **{name: 2001.0})[name] is Outcome.PASS


def judged(pretrained: str, device: str = "cuda", **values: float) -> dict[str, Outcome]:
    metrics = tuple(Metric(name=n, value=v, unit=CHECK.metrics[n], subject=CLUSTER) for n, v in values.items())
    facts = {"trained": "yes", "pretrained": pretrained, "device": device}
    measured = Measurement(check=CHECK.name, subject=CLUSTER, rank=0, metrics=metrics, facts=facts)
    return {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, [measured], {}, "t")}


def test_only_pretrained_weights_are_held_to_what_they_must_learn() -> None:
    assert judged("no", final_loss=6.8, better=0)["final_loss"] is Outcome.SKIP
    assert judged("no", final_loss=6.8, better=0)["better"] is Outcome.SKIP
    assert judged("yes", final_loss=0.7, better=0)["final_loss"] is Outcome.FAIL
    assert judged("yes", final_loss=0.7, better=0)["better"] is Outcome.FAIL
    good = judged("yes", final_loss=0.4, better=1)
    assert (good["final_loss"], good["better"]) == (Outcome.PASS, Outcome.PASS)
    assert judged("yes")["final_loss"] is Outcome.ERROR  # nobody measured it


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this one process."""
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
@pytest.mark.usefixtures("alone")
def test_from_rows_to_scored_answers_on_one_rank(tmp_path: Path) -> None:
    few = ["max_steps=4", "untimed_steps=1", "grad_accum=1", "checkpoint.every=0"]
    short = ["evaluation.cases=2", "evaluation.max_new_tokens=4"]
    measured = measure(CHECK, place(tmp_path), {"overrides": [*few, *short]})
    assert measured.error is None
    verdicts = {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, [measured], {}, "t")}
    for metric in ("final_loss", "better", "tokens_per_second_per_gpu"):  # of pretrained weights, and of GPUs
        assert verdicts.pop(metric) is Outcome.SKIP
    assert set(verdicts.values()) == {Outcome.PASS}
    assert measured.facts["strategy"] == "single"
    assert measured.facts["strategy_requested"] == "zero3"
    assert set(measured.facts["overrides"]) == set(SINGLE_RANK_OVERRIDES)  # type: ignore[arg-type]
    names = [Path(artifact.path).name for artifact in measured.artifacts]
    assert {"metrics.json", "summary.txt", "evaluation.json", "answers.jsonl"} <= set(names)
    assert any(name.startswith("events.out.tfevents") for name in names)
    summary = next(artifact.path for artifact in measured.artifacts if artifact.path.endswith("summary.txt"))
    assert "world_size: 1\n" in (tmp_path / summary).read_text()
