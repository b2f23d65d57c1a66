"""Comparison of records: noise, losses of one part, matching of GPUs, facts, and records that cannot be compared."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from benchmarks.compare_power import scaled, slow_gpu, with_noise
from tools import noise
from tools.records import record_path

from seatrial.handover.compare import Change, Comparison, compare, noise_data, pooled
from seatrial.handover.compare_text import document, loss_lines, result_text
from seatrial.model import Measurement, Metric, Trial
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import html_page, markdown

GPU = "vm/gpu3"
PLANTED = ("one-cpu", "launch-blocking")


@cache
def repeats() -> tuple[Trial, ...]:
    return tuple(load_trial(path) for path in sorted(noise.REPEATS.glob("*.json.gz")))


@cache
def four_gpus() -> Trial:
    return load_trial(record_path("2026-11-22-4xh200/acceptance"))


def noisy(seed: int) -> Trial:
    return scaled(four_gpus(), with_noise(random.Random(seed)))


def slower_by(share: float, check: str, metric: str) -> Trial:
    """Another run of the 4 GPUs, in which one metric of one GPU is lower."""

    def factor(of_check: str, each: Metric) -> float:
        return 1 - share if (of_check, each.name, each.subject) == (check, metric, GPU) else 1.0

    return scaled(noisy(2), factor)


def with_facts(trial: Trial, change: Any) -> Trial:
    """The trial with other facts: ``change`` gets a copy of the facts of each measurement."""

    def changed(measurement: Measurement) -> Measurement:
        facts: dict[str, Any] = {**measurement.facts}
        change(facts)
        return measurement.model_copy(update={"facts": facts})

    return trial.model_copy(update={"measurements": tuple(map(changed, trial.measurements)), "environment": {}})


def with_gpus(trial: Trial, **fields: Any) -> Trial:
    """The trial with other fields of each GPU; a value may be a function of the GPU."""

    def change(facts: dict[str, Any]) -> None:
        if facts.get("gpus"):
            facts["gpus"] = [
                gpu | {name: value(gpu) if callable(value) else value for name, value in fields.items()}
                for gpu in facts["gpus"]
            ]

    return with_facts(trial, change)


def renamed(trial: Trial, names: dict[str, str]) -> Trial:
    """The trial on other hosts; only metrics and facts of single GPUs and hosts."""

    def name(subject: str) -> str:
        host, slash, rest = subject.partition("/")
        return f"{names.get(host, host)}{slash}{rest}"

    measurements = tuple(
        each.model_copy(
            update={
                "subject": name(each.subject),
                "metrics": tuple(replace(metric, subject=name(metric.subject)) for metric in each.metrics),
            }
        )
        for each in trial.measurements
    )
    return trial.model_copy(update={"measurements": measurements, "environment": {}})


def change_of(comparison: Comparison, check: str, metric: str, part: str) -> Change:
    return next(each for each in comparison.changes if (each.check, each.metric, each.part) == (check, metric, part))


def test_pairs_of_healthy_runs_of_one_machine_have_no_alarm() -> None:
    pairs = [compare([a], [b]) for a, b in combinations(repeats(), 2)]
    assert len(pairs) == 45
    assert [pair.losses or pair.parts for pair in pairs if pair.has_regression] == []
    assert min(pair.tested for pair in pairs) >= 5


def test_the_shipped_noise_is_that_of_the_records() -> None:
    assert noise.main(["--check"]) == 0
    training = noise_data().speeds["train.ddp tokens_per_second_per_gpu"]
    assert training.spread < 0.01  # records of another build, or of a slowed machine, are no repeated runs


def test_gpus_of_a_run_count_as_far_as_they_vary_independently() -> None:
    """Three runs of 4 GPUs: independent speeds have 8 degrees of freedom, speeds that vary together have 2."""
    draw = random.Random(1)
    independent = [[[math.exp(draw.gauss(0, 0.01)) for _ in range(4)] for _ in range(3)] for _ in range(40)]
    together = [[[math.exp(row)] * 4 for row in (draw.gauss(0, 0.01) for _ in range(3))] for _ in range(40)]
    apart, same = pooled(independent), pooled(together)
    assert apart
    assert same
    assert 5 * 40 < apart.freedom <= 8 * 40
    assert same.freedom == 2 * 40
    assert apart.spread == pytest.approx(0.01, rel=0.1)
    assert same.spread == pytest.approx(0.01, rel=0.25)
    assert pooled([[[1.0]], [[]]]) is None


def test_machines_with_different_spreads_count_as_fewer() -> None:
    """What one machine shows is no rule for the next one: the quantile of t gets larger."""
    draw = random.Random(1)
    machines = [[[math.exp(draw.gauss(0, spread))] for _ in range(9)] for spread in [0.001] * 10 + [0.02] * 2]
    alike = [[[math.exp(draw.gauss(0, 0.01))] for _ in range(9)] for _ in range(12)]
    different, same = pooled(machines), pooled(alike)
    assert different
    assert same
    assert different.freedom < 8
    assert same.freedom > 30


def test_a_loss_of_4_percent_of_one_gpu_is_found_and_the_others_are_named() -> None:
    comparison = compare([noisy(1)], [slower_by(0.04, "device.memory", "copy")])
    (loss,) = comparison.losses
    (change,) = loss.changes
    assert (change.check, change.metric, change.part, loss.compared) == ("device.memory", "copy", GPU, 4)
    assert change.serial == "1654024028902"
    assert change.change == pytest.approx(-0.04, abs=0.005)
    assert change.interval
    assert change.interval[0] < -0.04 < change.interval[1]
    assert next(loss_lines(loss)).endswith("; the other 3 did not")


def test_a_loss_within_the_noise_is_none() -> None:
    comparison = compare([noisy(1)], [slower_by(0.04, "device.gemm", "tflops.fp8")])
    change = change_of(comparison, "device.gemm", "tflops.fp8", GPU)
    assert change.effect == "same"
    assert change.detectable
    assert change.detectable > 0.05
    assert not comparison.has_regression
    (note,) = [note for note in comparison.notes if note.startswith("with 1 and 1 records, a loss below these")]
    assert f"{change.detectable:.1%} of device.gemm tflops.fp8" in note
    assert "device.memory copy" not in note


def test_a_planted_loss_of_a_real_run_is_found() -> None:
    """CUDA_LAUNCH_BLOCKING=1 on one H200: the training is 28 % slower, which its limits accept."""
    before, after = (load_trial(record_path(f"2026-11-28-1xh200/{name}")) for name in PLANTED)
    comparison = compare([before], [after])
    (loss,) = comparison.losses
    assert loss.changes[0].speed == "train.ddp tokens_per_second_per_gpu"
    assert any(cause.startswith("variable CUDA_LAUNCH_BLOCKING not set → 1") for cause in loss.causes)


def test_the_noise_of_machines_with_gpus_is_not_that_of_runs_without_gpus() -> None:
    runs = [load_trial(record_path(f"2026-11-28-1xh200/{name}")) for name in PLANTED]
    before, after = (
        run.model_copy(update={"decision": run.decision.model_copy(update={"cpu_only": True})}) for run in runs
    )
    comparison = compare([before], [after])
    assert comparison.changes
    assert (comparison.tested, comparison.has_regression) == (0, False)


def test_a_significant_change_below_2_percent_is_none() -> None:
    comparison = compare([noisy(1)], [slower_by(0.015, "device.memory", "copy")])
    assert not comparison.has_regression


def test_sets_of_records_give_their_own_spread() -> None:
    before = [noisy(seed) for seed in range(5)]
    after = [scaled(noisy(seed), slow_gpu) for seed in range(5, 10)]
    change = change_of(compare(before, after), "device.gemm", "tflops.fp8", GPU)
    single = change_of(compare(before[:1], after[:1]), "device.gemm", "tflops.fp8", GPU)
    assert (single.effect, change.effect) == ("same", "slower")
    assert change.detectable
    assert single.detectable
    assert change.detectable < single.detectable


def test_the_possible_cause_is_the_fact_that_changed_there() -> None:
    def other_driver(facts: dict[str, Any]) -> None:
        if "driver" in facts:
            facts["driver"] = "590.44.01"

    after = with_gpus(
        with_facts(slower_by(0.04, "device.memory", "copy"), other_driver),
        vbios=lambda gpu: "96.00.D0.00.01" if gpu["index"] == 3 else gpu["vbios"],
    )
    (loss,) = compare([noisy(1)], [after]).losses
    vbios, driver = loss.causes[:2]
    assert vbios.startswith("VBIOS 96.00.")
    assert vbios.endswith(f" → 96.00.D0.00.01, {GPU}: 1 of 1 with this change lost speed, 0 of 3 without it")
    assert driver == "driver 580.159.04 → 590.44.01, vm: 1 of 4 with this change lost speed"


def test_a_gpu_that_moved_to_another_node_is_the_same_part() -> None:
    after = renamed(slower_by(0.04, "device.memory", "copy"), {"vm": "node9"})
    comparison = compare([noisy(1)], [after])
    (loss,) = comparison.losses
    assert loss.changes[0].part == "node9/gpu3"
    assert [part.kind for part in comparison.parts] == ["moved"] * 4


def test_a_replaced_gpu_is_another_part() -> None:
    def number(gpu: dict[str, Any]) -> str:
        return "1" if gpu["index"] == 3 else str(gpu["serial"])

    after = with_gpus(slower_by(0.04, "device.memory", "copy"), serial=number, uuid=lambda gpu: f"GPU-{number(gpu)}")
    comparison = compare([noisy(1)], [after])
    assert {(part.kind, part.part.split(" ")[0]) for part in comparison.parts} == {("new", GPU), ("missing", GPU)}
    assert not comparison.has_regression
    assert GPU not in {change.part for change in comparison.changes}


@pytest.mark.parametrize("hidden", ["both", "before", "after"])
def test_gpus_without_serial_numbers_are_matched_by_node_and_index(hidden: str) -> None:
    before, after = noisy(1), slower_by(0.04, "device.memory", "copy")
    if hidden != "after":
        before = with_gpus(before, serial="", uuid="")
    if hidden != "before":
        after = with_gpus(after, serial=None, uuid="")
    comparison = compare([before], [after])
    assert [loss.changes[0].part for loss in comparison.losses] == [GPU]
    assert comparison.parts == ()


def test_equal_serial_numbers_of_several_gpus_identify_none() -> None:
    comparison = compare([with_gpus(noisy(1), serial="0", uuid="")], [with_gpus(noisy(2), serial="0", uuid="")])
    assert comparison.parts == ()
    assert len([each for each in comparison.changes if each.metric == "copy" and each.effect == "same"]) == 4


def test_other_gpus_of_the_same_model_are_not_compared() -> None:
    comparison = compare(repeats()[:1], [load_trial(record_path("2026-11-24-1xh200/quick"))])
    assert comparison.tested == 0
    reason = "no GPU is on both sides, by serial numbers and UUIDs"
    assert {change.reason for change in comparison.changes} == {reason}
    assert any(text.startswith(reason) for text in comparison.not_comparable)
    assert result_text(comparison).startswith("nothing could be compared")


def test_other_hardware_and_another_trial_say_what_is_compared() -> None:
    comparison = compare(
        [load_trial(record_path("2026-11-28-4xh100/acceptance"))],
        [load_trial(record_path("2026-11-28-1xh200/one-cpu"))],
    )
    kinds = [text.partition(":")[0] for text in comparison.not_comparable]
    assert kinds[:2] == ["trial", "only in A"]
    assert "no GPU is on both sides, by serial numbers and UUIDs" in kinds
    assert comparison.tested == 0


def test_a_check_with_other_options_is_not_compared() -> None:
    config = {**four_gpus().config}
    config["checks"] = {**config["checks"], "device.memory": {"options": {"gib": 1}}}
    before = noisy(1)
    after = slower_by(0.04, "device.memory", "copy").model_copy(update={"config": config})
    original = {**config, "checks": {**config["checks"], "device.memory": {"options": {"gib": 2}}}}
    comparison = compare([before.model_copy(update={"config": original})], [after])
    assert change_of(comparison, "device.memory", "copy", GPU).reason == "other options: gib 2 before, gib 1 now"
    assert not comparison.has_regression


def test_a_speed_of_zero_is_a_total_loss_and_nothing_divides_by_zero() -> None:
    lost = compare([noisy(1)], [slower_by(1.0, "device.memory", "copy")])
    assert [(loss.changes[0].part, loss.changes[0].change) for loss in lost.losses] == [(GPU, -1.0)]
    back = compare([slower_by(1.0, "device.memory", "copy")], [noisy(1)])
    assert change_of(back, "device.memory", "copy", GPU).reason.startswith("no speed: 0 before, ")
    assert not back.has_regression
    instant = compare([noisy(1)], [slower_by(1.0, "train.cnn", "seconds")])
    assert change_of(instant, "train.cnn", "seconds", GPU).effect == "not compared"  # a duration of 0 is no loss
    assert not instant.has_regression


def test_a_part_that_fails_now_is_a_regression() -> None:
    rejected = load_trial(record_path("2026-11-23-2xh200/busy-gpu"))
    accepted = rejected.model_copy(update={"verdicts": (), "findings": ()})
    comparison, reverse = compare([accepted], [rejected]), compare([rejected], [accepted])
    assert "fails" in {part.kind for part in comparison.parts}
    assert comparison.has_regression
    assert {part.kind for part in reverse.parts} == {"passes again"}
    assert not reverse.has_regression


def test_markdown_and_html_escape_and_show_the_same_rows() -> None:
    before, after = [noisy(1)], [slower_by(0.04, "device.memory", "copy")]
    hostile = [trial.model_copy(update={"name": "<script>|`x`"}) for trial in after]
    shown = document(compare(before, hostile), before, hostile)
    page, text = html_page.render_document(shown), markdown.render_document(shown)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "\\<script\\>" in text
    for rendered in (page, text):
        assert "device.memory copy" in rendered.replace("\\", "")
        assert "the other 3 did not" in rendered
        assert "device.gemm tflops.fp8" in rendered.replace("\\", "")
    assert '<pre class="table"' in page
