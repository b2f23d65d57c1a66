"""A baseline learned from runs: what goes in comes out, and nothing bad is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.hardware.references import Reference, References, skus
from seatrial.judge import site_baseline
from seatrial.judge.plausibility import validate_baseline
from seatrial.judge.rules import judge_check
from seatrial.model import Baseline, Measurement, Metric, Outcome, ReferenceValue, Trial, UsageError
from seatrial.pipeline import rejudge as pipeline
from tests.processes import call as command
from tests.report import samples


def run(*values: float, gpu: str = "NVIDIA Strange") -> Trial:
    """An accepted run with GEMM figures of some GPUs."""
    measurements = tuple(
        Measurement(
            check="device.gemm",
            subject=f"n0/gpu{index}",
            rank=index,
            metrics=(Metric(name="tflops.bf16", value=value, unit="TFLOP/s", subject=f"n0/gpu{index}"),),
            facts={"gpu": gpu, "world_size": 1, "nodes": 1},
        )
        for index, value in enumerate(values)
    )
    return of(*measurements)


def of(*measurements: Measurement, **more: Any) -> Trial:
    """A run that measured these, judged by what is known of the hardware."""
    config = {"name": "t", "checks": {one.check: {} for one in measurements or run(1).measurements}}
    update = {"measurements": measurements, "config": config, "jobs": (), "verdicts": ()} | more
    return pipeline.rejudge(samples.accepted().model_copy(update=update))


def test_the_median_of_all_runs_is_learned_and_survives_its_file(tmp_path: Path) -> None:
    learned = site_baseline.learn("lab", {"a": run(600, 610), "b": run(620, 700)}, catalog())
    (expected,) = learned.expected["gemm.bf16"]
    assert (expected.value, expected.unit, expected.gpu) == (615, "TFLOP/s", "NVIDIA Strange")
    assert expected.source == "median of 4 values in 2 runs, from 600 to 700"
    path = tmp_path / "site.yaml"
    path.write_text(site_baseline.dump(learned))
    assert site_baseline.load(path, catalog()) == learned


def test_a_second_measurement_teaches_nothing() -> None:
    twice = run(600).model_copy(update={"retries": run(900).measurements})
    assert [one.value for one in site_baseline.learn("lab", {"a": twice}, catalog()).expected["gemm.bf16"]] == [600]


def test_what_a_check_measured_before_its_error_teaches_nothing() -> None:
    first, second = run(600, 10).measurements
    broken = second.model_copy(update={"error": "CUDA error: an illegal memory access"})
    half = of(first, broken)
    assert [one.value for one in site_baseline.learn("lab", {"a": half}, catalog()).expected["gemm.bf16"]] == [600]


def test_what_no_hardware_can_do_is_neither_learned_nor_judged_by(tmp_path: Path) -> None:
    """H200's bf16 peak is 989.5 TFLOP/s."""
    impossible = run(5000, gpu="NVIDIA H200")
    (tmp_path / "trial.json").write_text(impossible.model_dump_json())
    with pytest.raises(UsageError, match=r"ERROR, tflops\.bf16 is 5,000 TFLOP/s, .* it was measured wrongly"):
        pipeline.learn("lab", [tmp_path])
    file = tmp_path / "site.yaml"
    learned = site_baseline.dump(site_baseline.learn("lab", {"a": run(700, gpu="NVIDIA H200")}, catalog()))
    file.write_text(learned.replace("value: 700.0", "value: 5000"))
    settings = {"name": "t", "checks": {"device.gemm": {}}}
    with pytest.raises(UsageError, match=r"baseline lab: gemm\.bf16 is 5,000 TFLOP/s"):
        pipeline.rejudge(run(700, gpu="NVIDIA H200").model_copy(update={"config": settings}), file)


def test_figures_across_nodes_are_learned_for_their_network_only() -> None:
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA Strange", "world_size": 16, "nodes": 2}
    busbw = Metric(name="busbw.8GiB", value=320, unit="GB/s", subject="cluster")
    reduced = Measurement(check="collectives.all_reduce", subject="cluster", metrics=(busbw,), facts=facts)
    sockets = Measurement(check="collectives.transport", subject="n0/gpu0", facts={"transports": {"NET/Socket": 2}})
    both = run(600).measurements[0], reduced, sockets
    learned = site_baseline.learn("lab", {"a": of(*both)}, catalog())
    assert [one.fabric for one in learned.expected["all_reduce.busbw.8GiB"]] == ["tcp"]
    assert [one.fabric for one in learned.expected["gemm.bf16"]] == [""]


def test_what_each_node_reaches_is_learned_of_one_node() -> None:
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA Strange", "backend": "nccl", "world_size": 8, "nodes": 1}
    each = [
        Measurement(
            check="collectives.each_node",
            subject=f"{node}/gpu0",
            rank=rank,
            metrics=(
                Metric(name="busbw.8GiB", value=busbw, unit="GB/s", subject=node),
                Metric(name="wrong_elements", value=0, unit="count", subject=node),
            ),
            facts=facts,
        )
        for rank, node, busbw in ((0, "n0", 300.0), (8, "n1", 310.0))
    ]
    (learned,) = site_baseline.learn("lab", {"a": of(*each)}, catalog()).expected["all_reduce.busbw.8GiB"]
    assert (learned.gpus, learned.nodes, learned.value, learned.fabric) == (8, 1, 305, "")


@pytest.mark.parametrize(("backend", "learned"), [("nccl", True), ("gloo", False)])
def test_what_is_only_recorded_while_nobody_knows_it_is_learned_and_then_judges(backend: str, learned: bool) -> None:
    def broadcast(busbw: float) -> Measurement:
        units = {"busbw.1GiB": (busbw, "GB/s"), "wrong_elements": (0, "count"), "sizes_not_allocated": (0, "sizes")}
        return Measurement(
            check="collectives.broadcast",
            subject="n0/gpu0",
            rank=0,
            metrics=tuple(Metric(name=name, value=v, unit=u, subject="cluster") for name, (v, u) in units.items()),
            facts={"gpu": "NVIDIA Strange", "world_size": 8, "nodes": 1, "backend": backend},
        )

    runs = {"a": of(run(600).measurements[0], broadcast(360))}
    found = site_baseline.learn("lab", runs, catalog())
    assert ("broadcast.busbw.1GiB" in found.expected) is learned
    said = judge_check(catalog()["collectives.broadcast"], [broadcast(300)], {}, "t", References(found))
    (verdict,) = [one for one in said if one.metric == "busbw.1GiB"]
    assert verdict.outcome is (Outcome.FAIL if learned else Outcome.SKIP)


def test_models_are_learned_apart() -> None:
    learned = site_baseline.learn("lab", {"a": run(600), "b": run(300, gpu="NVIDIA Small")}, catalog())
    assert [(one.gpu, one.value) for one in learned.expected["gemm.bf16"]] == [
        ("NVIDIA Small", 300),
        ("NVIDIA Strange", 600),
    ]


def test_a_rejected_run_and_runs_without_figures_teach_nothing() -> None:
    with pytest.raises(UsageError, match="b was REJECTED"):
        site_baseline.learn("lab", {"a": run(600), "b": samples.rejected()}, catalog())
    with pytest.raises(UsageError, match="nothing to learn in a"):
        site_baseline.learn("lab", {"a": run()}, catalog())


@pytest.mark.parametrize(
    ("text", "words"),
    [("[", "cannot read the baseline"), ("5", "is no baseline"), ("{name: x}", "learned_from: Field required")],
)
def test_a_damaged_file_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        site_baseline.load(path, {})
    with pytest.raises(UsageError, match="cannot read the baseline"):
        site_baseline.load(tmp_path / "nowhere.yaml", {})


def test_what_no_rule_would_look_at_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    good = site_baseline.dump(site_baseline.learn("lab", {"a": run(600)}, catalog()))
    path.write_text(good.replace("gemm.bf16", "gemm.bf61"))
    with pytest.raises(UsageError, match=r"with gemm.bf61; did you mean gemm.bf16\?"):
        site_baseline.load(path, catalog())
    (twice,) = yaml.safe_load(good)["expected"]["gemm.bf16"]
    path.write_text(yaml.safe_dump(yaml.safe_load(good) | {"expected": {"gemm.bf16": [twice, twice | {"value": 9}]}}))
    with pytest.raises(UsageError, match="two values for the same GPUs"):
        site_baseline.load(path, catalog())


def test_learned_on_the_command_line_and_judged_by(tmp_path: Path) -> None:
    good = run(600, 610)
    (tmp_path / "trial.json").write_text(good.model_dump_json())
    file = tmp_path / "lab.yaml"
    code, out, err = command("baseline", "learn", tmp_path, "--out", file)
    assert (code, out) == (0, f"{file}: 1 values, runs: 1\n"), err
    assert command("baseline", "learn", tmp_path, "--out", file)[0] == 2, "it writes over nothing"
    settings = {"name": "t", "checks": {"device.gemm": {}}}
    slow = run(300, 300).model_copy(update={"config": settings, "jobs": ()})
    (tmp_path / "trial.json").write_text(slow.model_dump_json())
    code, out, _ = command("judge", tmp_path, "--baseline", file, "--json")
    verdicts = [one for one in Trial.model_validate_json(out).verdicts if one.metric == "tflops.bf16"]
    assert code == 1
    assert {one.outcome for one in verdicts} == {Outcome.FAIL}
    assert all(one.basis_text.startswith("site lab: 605 TFLOP/s") for one in verdicts)


def test_what_its_own_judge_warned_of_teaches_nothing() -> None:
    """Learned, 16 GB/s would have been the expected value of the next run."""
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 1, "nodes": 1}
    one = Measurement(
        check="device.memory",
        subject="n0/gpu0",
        rank=0,
        metrics=(Metric(name="copy", value=1600, unit="GB/s", subject="n0/gpu0"),),
        facts=facts,
    )
    with pytest.raises(UsageError, match="was REJECTED"):
        site_baseline.learn("lab", {"a": of(one)}, catalog())
    good = one.model_copy(update={"metrics": (replace(one.metrics[0], value=4300),), "retry": True})
    lifted = of(one, repeats=(good,))
    with pytest.raises(UsageError, match=r"nothing to learn in a: n0/gpu0: WARN, copy is 1,600 GB/s.*not reproduced"):
        site_baseline.learn("lab", {"a": lifted}, catalog())


@pytest.mark.parametrize("ended", [{"stopped": "Ctrl-C"}, {"trouble": "no driver"}])
def test_a_run_that_did_not_come_to_its_end_teaches_nothing(ended: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"a did not come to its end \((Ctrl-C|no driver)\)"):
        site_baseline.learn("lab", {"a": of(*run(600).measurements, **ended)}, catalog())


def test_the_record_is_judged_anew_before_anything_is_learned(tmp_path: Path) -> None:
    """Its stored decision says ACCEPTED."""
    stale = run(600).model_copy(update={"measurements": run(100, gpu="NVIDIA H200").measurements})
    (tmp_path / "trial.json").write_text(stale.model_dump_json())
    with pytest.raises(UsageError, match="was REJECTED"):
        pipeline.learn("lab", [tmp_path])


def expected(value: float, **more: Any) -> Baseline:
    one = {"gpus": 8, "nodes": 1, "value": value, "unit": "GB/s", "gpu": "NVIDIA H200", "source": "a person", **more}
    return Baseline(
        name="s", learned_from=(), expected={"all_gather.busbw.1GiB": (ReferenceValue.model_validate(one),)}
    )


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        (expected(2), r"all_gather\.busbw\.1GiB: 2 GB/s is 1/\d+ of .*: is it meant in another unit\?"),
        (expected(326, floor=0.5), r"the floor 0.5 GB/s is 0.0015 of its 326 GB/s"),
        (expected(40, nodes=2, gpus=16), "40 GB/s is of 2 nodes and says no fabric"),
    ],
)
def test_a_value_that_lets_anything_pass_is_refused(baseline: Baseline, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        validate_baseline(baseline, catalog())
    validate_baseline(expected(320, floor=300), catalog())
    validate_baseline(
        expected(0.5, nodes=2, gpus=16, fabric="tcp"), catalog()
    )  # of a network whose speed we do not know


@pytest.mark.parametrize(("value", "floor", "weak"), [(20, None, True), (440, 100, True), (440, 300, False)])
def test_a_weak_value_is_marked_where_it_judges(value: float, floor: float | None, weak: bool) -> None:
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 8, "nodes": 1, "backend": "nccl"}
    busbw = Metric(name="busbw.1GiB", value=value, unit="GB/s", subject="cluster")
    one = Measurement(check="collectives.all_gather", subject="n0/gpu0", rank=0, metrics=(busbw,), facts=facts)
    known = References(expected(value, floor=floor), skus())
    (said,) = [v for v in judge_check(catalog()[one.check], [one], {}, "t", known) if v.metric == "busbw.1GiB"]
    assert said.outcome is Outcome.PASS
    assert said.basis is not None
    assert bool(said.basis.lax_reason) is weak


def test_a_training_is_not_weak_for_being_far_from_its_bound() -> None:
    """None comes near an MFU of 100 %: a third of it is what many good ones reach."""
    one = {"gpus": 8, "nodes": 1, "value": 10_000, "unit": "tokens/s/GPU", "gpu": "NVIDIA H200", "source": "a person"}
    lab = Baseline(name="s", learned_from=(), expected={"train.lora.native": (ReferenceValue.model_validate(one),)})
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 8, "nodes": 1}
    facts["run.native"] = {"precision": "bf16 compute", "flops_per_token": 29.77e9}
    speed = Metric(name="tokens_per_second_per_gpu.native", value=10_000, unit="tokens/s/GPU", subject="cluster")
    measured = Measurement(check="train.lora", subject="n0/gpu0", rank=0, metrics=(speed,), facts=facts)
    said = judge_check(catalog()["train.lora"], [measured], {}, "t", References(lab, skus()))
    (verdict,) = [one for one in said if one.metric == speed.name]
    assert verdict.outcome is Outcome.PASS
    assert verdict.basis is not None
    assert not verdict.basis.lax_reason


def test_a_figure_across_nodes_is_of_its_own_network() -> None:
    across: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 16, "nodes": 2}
    for fabric, seen in (("", ""), ("tcp", ""), ("tcp", "ib-8x400")):
        known = References(expected(5, nodes=2, gpus=16, fabric=fabric), (), seen)
        assert isinstance(known.site_or_sku_reference("all_gather.busbw.1GiB", across), str), (fabric, seen)
    known = References(expected(5, nodes=2, gpus=16, fabric="tcp"), (), "tcp")
    assert isinstance(known.site_or_sku_reference("all_gather.busbw.1GiB", across), Reference)


def test_without_a_network_nothing_across_nodes_is_learned() -> None:
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA Strange", "world_size": 16, "nodes": 2}
    busbw = Metric(name="busbw.8GiB", value=5, unit="GB/s", subject="cluster")
    reduced = Measurement(check="collectives.all_reduce", subject="n0/gpu0", rank=0, metrics=(busbw,), facts=facts)
    with pytest.raises(
        UsageError, match=r"all_reduce\.busbw\.8GiB is across 2 nodes, and it is not known over which network"
    ):
        site_baseline.learn("lab", {"a": of(reduced)}, catalog())
