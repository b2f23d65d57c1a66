"""Baselines: learned from good runs, written to a file and read back, rejected if invalid."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import JsonValue
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware.links import Links
from seatrial.hardware.references import Reference, References, skus
from seatrial.judge import site_baseline
from seatrial.judge.plausibility import validate_baseline, validate_thresholds
from seatrial.judge.rules import judge_check
from seatrial.model import (
    Baseline,
    BasisKind,
    DecisionValue,
    Measurement,
    Metric,
    Outcome,
    Reason,
    ReferenceValue,
    Trial,
    UsageError,
)
from seatrial.pipeline import rejudge as pipeline
from seatrial.util.input_files import read_text
from tests.baselines import learned_runs
from tests.processes import call as command
from tests.report import samples


def run(*values: float, gpu: str = "NVIDIA Unknown", started: float = 0.0) -> Trial:
    """A trial with the bf16 GEMM results of some GPUs; another time of start makes it another run."""
    measurements = tuple(
        Measurement(
            check="device.gemm",
            subject=f"n0/gpu{index}",
            rank=index,
            metrics=(Metric(name="tflops.bf16", value=value, unit="TFLOP/s", subject=f"n0/gpu{index}"),),
            facts={"backend": "cuda", "has_bf16": "yes", "gpu": gpu, "world_size": 1, "nodes": 1},
        )
        for index, value in enumerate(values)
    )
    return trial_with(*measurements, started=started)


def trial_with(*measurements: Measurement, **more: Any) -> Trial:
    """A trial with these measurements and their verdicts."""
    config = {"name": "t", "checks": {measurement.check: {} for measurement in measurements or run(1).measurements}}
    update = {"measurements": measurements, "config": config, "jobs": (), "verdicts": ()} | more
    return pipeline.rejudge(samples.accepted().model_copy(update=update))


def test_baseline_is_the_median_of_all_runs_and_round_trips(tmp_path: Path) -> None:
    learned = site_baseline.learn("lab", {"a": run(600, 610), "b": run(620, 680, started=1)}, catalog())
    (expected,) = learned.expected["gemm.bf16"]
    assert (expected.value, expected.unit, expected.gpu) == (615, "TFLOP/s", "NVIDIA Unknown")
    assert expected.source == "median of 4 values in 2 runs, from 600 to 680"
    assert expected.runs == 2
    assert [source.path for source in learned.learned_from] == ["a", "b"]
    path = tmp_path / "site.yaml"
    path.write_text(site_baseline.dump(learned))
    assert site_baseline.load(path, catalog()) == learned


def test_retries_are_not_learned() -> None:
    twice = run(600).model_copy(update={"retries": run(900).measurements})
    assert [
        reference.value for reference in site_baseline.learn("lab", {"a": twice}, catalog()).expected["gemm.bf16"]
    ] == [600]


def test_failed_measurement_is_not_learned() -> None:
    first, second = run(600, 590).measurements
    broken = second.model_copy(update={"error": "CUDA error: an illegal memory access"})
    half = trial_with(first, broken)
    assert [
        reference.value for reference in site_baseline.learn("lab", {"a": half}, catalog()).expected["gemm.bf16"]
    ] == [600]


def test_value_above_the_hardware_limit_is_rejected(tmp_path: Path) -> None:
    """H200's bf16 peak is 989.5 TFLOP/s."""
    above_limit = run(5000, gpu="NVIDIA H200")
    (tmp_path / "trial.json").write_text(above_limit.model_dump_json())
    with pytest.raises(UsageError, match=r"ERROR, tflops\.bf16 is 5,000 TFLOP/s"):
        pipeline.learn("lab", [tmp_path])
    file = tmp_path / "site.yaml"
    learned = site_baseline.dump(site_baseline.learn("lab", {"a": run(700, gpu="NVIDIA H200")}, catalog()))
    file.write_text(learned.replace("value: 700.0", "value: 5000"))
    settings = {"name": "t", "checks": {"device.gemm": {}}}
    with pytest.raises(UsageError, match=r"baseline lab: gemm\.bf16: 5,000 TFLOP/s is above"):
        pipeline.rejudge(run(700, gpu="NVIDIA H200").model_copy(update={"config": settings}), file)


def test_value_across_nodes_has_the_network_class() -> None:
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA Unknown", "backend": "nccl", "world_size": 16, "nodes": 2}
    busbw = Metric(name="busbw.8GiB", value=320, unit="GB/s", subject="cluster")
    reduced = Measurement(check="collectives.all_reduce", subject="cluster", metrics=(busbw,), facts=facts)
    sockets = Measurement(check="collectives.transport", subject="n0/gpu0", facts={"transports": {"NET/Socket": 2}})
    both = run(600).measurements[0], reduced, sockets
    learned = site_baseline.learn("lab", {"a": trial_with(*both)}, catalog())
    assert [reference.fabric for reference in learned.expected["all_reduce.busbw.8GiB"]] == ["tcp"]
    assert [reference.fabric for reference in learned.expected["gemm.bf16"]] == [""]


def test_a_low_share_of_the_networks_bound_is_learned() -> None:
    """0.75 of 8 × 400 Gb/s is a WARN: the baseline of a site that reaches no more is a tighter limit."""
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "backend": "nccl", "world_size": 16, "nodes": 2}
    busbw = Metric(name="busbw.1GiB", value=300, unit="GB/s", subject="cluster")
    port: JsonValue = {"port": "1", "state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    rdma: JsonValue = {"devices": [{"name": f"mlx5_{number}", "ports": [port]} for number in range(8)]}
    trial = trial_with(
        Measurement(check="collectives.all_gather", subject="cluster", metrics=(busbw,), facts=facts),
        *(Measurement(check="host.inventory", subject=node, facts={"rdma": rdma}) for node in ("n0", "n1")),
        Measurement(check="collectives.transport", subject="n0", facts={"transports": {"NET/IB/GDRDMA": 2}}),
    )
    (verdict,) = (verdict for verdict in trial.verdicts if verdict.metric == "busbw.1GiB")
    assert verdict.outcome is Outcome.WARN
    (learned,) = site_baseline.learn("lab", {"a": trial}, catalog()).expected["all_gather.busbw.1GiB"]
    assert (learned.value, learned.nodes, learned.fabric) == (300, 2, "ib-8x400")


def test_value_per_node_is_learned_for_one_node() -> None:
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA Unknown", "backend": "nccl", "world_size": 8, "nodes": 1}
    each = [
        Measurement(
            check="collectives.each_node",
            subject=f"{node}/gpu0",
            metrics=(
                Metric(name="busbw.8GiB", value=busbw, unit="GB/s", subject=node),
                Metric(name="wrong_elements", value=0, unit="count", subject=node),
            ),
            facts=facts,
        )
        for node, busbw in (("n0", 300.0), ("n1", 310.0))
    ]
    (learned,) = site_baseline.learn("lab", {"a": trial_with(*each)}, catalog()).expected["all_reduce.busbw.8GiB"]
    assert (learned.gpus, learned.nodes, learned.value, learned.fabric) == (8, 1, 305, "")


@pytest.mark.parametrize(("backend", "learned"), [("nccl", True), ("gloo", False)])
def test_metric_with_optional_reference_is_learned(backend: str, learned: bool) -> None:
    def broadcast(busbw: float) -> Measurement:
        units = {"busbw.1GiB": (busbw, "GB/s"), "wrong_elements": (0, "count"), "sizes_not_allocated": (0, "sizes")}
        return Measurement(
            check="collectives.broadcast",
            subject="n0/gpu0",
            metrics=tuple(Metric(name=name, value=v, unit=u, subject="cluster") for name, (v, u) in units.items()),
            facts={"gpu": "NVIDIA Unknown", "world_size": 8, "nodes": 1, "backend": backend},
        )

    runs = {"a": trial_with(run(600).measurements[0], broadcast(360))}
    learned_baseline = site_baseline.learn("lab", runs, catalog())
    assert ("broadcast.busbw.1GiB" in learned_baseline.expected) is learned
    verdicts = judge_check(catalog()["collectives.broadcast"], [broadcast(300)], {}, "t", References(learned_baseline))
    (verdict,) = [verdict for verdict in verdicts if verdict.metric == "busbw.1GiB"]
    assert verdict.outcome is (Outcome.FAIL if learned else Outcome.SKIP)


def test_each_gpu_model_has_its_own_values() -> None:
    other = run(300, gpu="NVIDIA Small", started=1)
    learned = site_baseline.learn("lab", {"a": run(600), "b": other}, catalog())
    assert [(reference.gpu, reference.value, reference.runs) for reference in learned.expected["gemm.bf16"]] == [
        ("NVIDIA Small", 300, 1),
        ("NVIDIA Unknown", 600, 1),
    ]


def test_rejected_run_and_runs_without_values_raise() -> None:
    with pytest.raises(UsageError, match="b was REJECTED"):
        site_baseline.learn("lab", {"a": run(600), "b": samples.rejected()}, catalog())
    with pytest.raises(UsageError, match="no values to learn in a"):
        site_baseline.learn("lab", {"a": run()}, catalog())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[", "not valid YAML"),
        ("5", "is not a baseline"),
        ("{name: x}", "learned_from: required key is missing"),
        ("{name: x, learned_from: [runs/1], expected: {}}", r"learned_from\.0: expected"),
    ],
)
def test_damaged_file_raises(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=text):
        site_baseline.load(path, {})
    with pytest.raises(UsageError, match="cannot read the baseline"):
        site_baseline.load(tmp_path / "nowhere.yaml", {})


@pytest.fixture(scope="module")
def renamed() -> Trial:
    """An accepted run on H200, as a run on an unknown model: its metrics have no published value."""
    text = read_text(record_path("2026-11-22-2xh200-restructured/final-acceptance"))
    return Trial.model_validate_json(text.replace("NVIDIA H200", "NVIDIA Unknown"))


def site_file(folder: Path, *runs: Trial) -> Path:
    """The file of a baseline learned from these runs."""
    paths = [folder / f"run-{number}.json" for number in range(len(runs))]
    for path, trial in zip(paths, runs, strict=True):
        path.write_text(trial.model_dump_json())
    file = folder / "site.yaml"
    file.write_text(pipeline.learn("lab", paths))
    return file


def test_baseline_learned_from_a_run_does_not_accept_that_run(renamed: Trial, tmp_path: Path) -> None:
    unknown = pipeline.rejudge(renamed)
    assert unknown.decision.value is DecisionValue.INCOMPLETE
    file = site_file(tmp_path, renamed)
    itself = pipeline.rejudge(renamed, file)
    assert itself.decision.value is DecisionValue.INCOMPLETE
    assert "baseline lab, learned from 1 run" in itself.decision.reason
    by_site = [verdict for verdict in itself.verdicts if verdict.basis and verdict.basis.kind is BasisKind.SITE]
    assert len(by_site) > 20
    assert {verdict.outcome for verdict in by_site} == {Outcome.UNJUDGED}
    assert {verdict.reasons[-1] for verdict in by_site} == {Reason.WEAK_BASELINE}
    for copy in ({"host": "other", "name": "copy"}, {"started": 1.0}):
        assert pipeline.rejudge(renamed.model_copy(update=copy), file).decision.value is DecisionValue.INCOMPLETE


def rerun(trial: Trial, started: float, speed: float = 1.0) -> Trial:
    """Another run on the same machine whose TFLOP/s differ by a factor."""

    def scaled(metric: Metric) -> Metric:
        factor = speed if metric.unit == "TFLOP/s" else 1
        samples = tuple(factor * sample for sample in metric.samples)
        return replace(metric, value=factor * metric.value, samples=samples)

    measurements = tuple(
        measurement.model_copy(update={"metrics": tuple(map(scaled, measurement.metrics))})
        for measurement in trial.measurements
    )
    return trial.model_copy(update={"started": started, "measurements": measurements})


@pytest.mark.parametrize(("count", "outcome"), [(1, Outcome.WARN), (2, Outcome.WARN), (3, Outcome.PASS)])
def test_baseline_warns_until_it_is_learned_from_three_other_runs(
    renamed: Trial, tmp_path: Path, count: int, outcome: Outcome
) -> None:
    file = site_file(tmp_path, *(rerun(renamed, number, 1 + number / 1000) for number in range(1, count + 1)))
    judged = pipeline.rejudge(renamed, file)
    speeds = [verdict for verdict in judged.verdicts if verdict.metric == "tflops.bf16"]
    assert speeds
    assert {verdict.outcome for verdict in speeds} == {outcome}
    assert judged.decision.value is DecisionValue.ACCEPTED
    assert f"baseline lab, learned from {count} run" in judged.decision.reason
    slow = pipeline.rejudge(rerun(renamed, 99, 0.85), file)
    assert slow.decision.value is DecisionValue.REJECTED


def test_runs_judged_by_a_baseline_can_be_learned(renamed: Trial, tmp_path: Path) -> None:
    lab = site_baseline.load(site_file(tmp_path, renamed), catalog())
    judged = [
        pipeline.rejudge(rerun(renamed, number, 1 + number / 1000).model_copy(update={"baseline": lab}))
        for number in range(3)
    ]
    learned = site_baseline.learn("lab", {str(number): run for number, run in enumerate(judged)}, catalog())
    assert {value.runs for value in learned.expected["gemm.bf16"]} == {3}
    again = pipeline.rejudge(renamed.model_copy(update={"baseline": lab}))
    assert "gemm.bf16" in site_baseline.learn("lab", {"itself": again}, catalog()).expected


def test_records_of_one_run_are_not_learned_as_several(renamed: Trial) -> None:
    good = pipeline.rejudge(renamed)
    edited = good.model_copy(update={"host": "other", "started": 1.0})
    with pytest.raises(UsageError, match="a and b are records of one run"):
        site_baseline.learn("lab", {"a": good, "b": edited}, catalog())


def test_baseline_of_another_gpu_model_is_a_usage_error(renamed: Trial, tmp_path: Path) -> None:
    file = site_file(tmp_path, renamed)
    h200 = run(650, gpu="NVIDIA H200")
    with pytest.raises(UsageError, match=r"baseline lab applies: it is for NVIDIA Unknown.*NVIDIA H200"):
        pipeline.rejudge(h200, file)
    embedded = pipeline.rejudge(h200.model_copy(update={"baseline": site_baseline.load(file, catalog())}))
    assert "no value of baseline lab applies" in embedded.decision.reason
    lab = site_baseline.load(file, catalog())
    config = Config(name="t", checks={"device.gemm": CheckSettings()})
    for gpus, is_valid in ((("NVIDIA H200",) * 8, False), (("NVIDIA Unknown",) * 8, True), ((), True)):
        with nullcontext() if is_valid else pytest.raises(UsageError, match="no value of baseline lab applies"):
            validate_thresholds(config, catalog(), gpus, lab)


def test_unknown_key_and_duplicate_value_raise(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    good = site_baseline.dump(site_baseline.learn("lab", {"a": run(600)}, catalog()))
    path.write_text(good.replace("gemm.bf16", "gemm.bf61"))
    with pytest.raises(UsageError, match=r"gemm.bf61.*did you mean gemm.bf16\?"):
        site_baseline.load(path, catalog())
    (twice,) = yaml.safe_load(good)["expected"]["gemm.bf16"]
    path.write_text(yaml.safe_dump(yaml.safe_load(good) | {"expected": {"gemm.bf16": [twice, twice | {"value": 9}]}}))
    with pytest.raises(UsageError, match="two values for the same GPUs"):
        site_baseline.load(path, catalog())


def test_learn_and_judge_on_the_command_line(tmp_path: Path) -> None:
    good = run(600, 610)
    (tmp_path / "trial.json").write_text(good.model_dump_json())
    file = tmp_path / "lab.yaml"
    code, out, err = command("baseline", "learn", tmp_path, "--out", file)
    assert (code, out) == (0, f"{file}: 1 reference value from 1 run\n"), err
    assert command("baseline", "learn", tmp_path, "--out", file)[0] == 2, "an existing file is not overwritten"
    settings = {"name": "t", "checks": {"device.gemm": {}}}
    slow = run(300, 300).model_copy(update={"config": settings, "jobs": ()})
    (tmp_path / "trial.json").write_text(slow.model_dump_json())
    code, out, _ = command("judge", tmp_path, "--baseline", file, "--json")
    verdicts = [verdict for verdict in Trial.model_validate_json(out).verdicts if verdict.metric == "tflops.bf16"]
    assert code == 1
    assert {verdict.outcome for verdict in verdicts} == {Outcome.FAIL}
    assert {(verdict.basis.name, verdict.basis.expected) for verdict in verdicts if verdict.basis} == {("lab", 605)}


def test_value_with_a_warning_is_not_learned() -> None:
    """Otherwise the low value would become the reference value of the next run."""
    facts: dict[str, JsonValue] = {"backend": "cuda", "gpu": "NVIDIA H200", "world_size": 1, "nodes": 1}
    measurement = Measurement(
        check="device.memory",
        subject="n0/gpu0",
        rank=0,
        metrics=(Metric(name="copy", value=1600, unit="GB/s", subject="n0/gpu0"),),
        facts=facts,
    )
    with pytest.raises(UsageError, match="was REJECTED"):
        site_baseline.learn("lab", {"a": trial_with(measurement)}, catalog())
    good = measurement.model_copy(update={"metrics": (replace(measurement.metrics[0], value=4300),), "retry": 1})
    lifted = trial_with(measurement, retries=(good, good.model_copy(update={"retry": 2})))
    with pytest.raises(UsageError, match=r"no values to learn in a: n0/gpu0: WARN, copy is 1,600 GB/s.*not reproduced"):
        site_baseline.learn("lab", {"a": lifted}, catalog())


@pytest.mark.parametrize("ended", [{"stop_reason": "Ctrl-C"}, {"gpu_error": "no driver"}])
def test_unfinished_run_raises(ended: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"a did not finish \((Ctrl-C|no driver)\)"):
        site_baseline.learn("lab", {"a": trial_with(*run(600).measurements, **ended)}, catalog())


def test_record_is_evaluated_again_before_learning(tmp_path: Path) -> None:
    """The stored decision is ACCEPTED."""
    stale = run(600).model_copy(update={"measurements": run(100, gpu="NVIDIA H200").measurements})
    (tmp_path / "trial.json").write_text(stale.model_dump_json())
    with pytest.raises(UsageError, match="was REJECTED"):
        pipeline.learn("lab", [tmp_path])


def expected(value: float, **more: Any) -> Baseline:
    fields = {"gpus": 8, "nodes": 1, "value": value, "unit": "GB/s", "gpu": "NVIDIA H200", "source": "a person", **more}
    return Baseline(
        name="s",
        learned_from=learned_runs(),
        expected={"all_gather.busbw.1GiB": (ReferenceValue.model_validate(fields),)},
    )


@pytest.mark.parametrize(
    ("baseline", "text"),
    [
        (expected(2), r"all_gather\.busbw\.1GiB: 2 GB/s is 1/\d+ of "),
        (expected(326, required=0.5), r"0.5 GB/s is 0.0015 of the value 326 GB/s"),
        (expected(40, nodes=2, gpus=16), "40 GB/s is for 2 nodes, but fabric is missing"),
    ],
)
def test_lax_value_is_rejected(baseline: Baseline, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        validate_baseline(baseline, catalog())
    validate_baseline(expected(320, required=300), catalog())
    validate_baseline(expected(0.5, nodes=2, gpus=16, fabric="tcp"), catalog())  # unknown speed of the network


@pytest.mark.parametrize(("value", "required", "is_lax"), [(20, None, True), (440, 100, True), (440, 300, False)])
def test_lax_value_is_marked_in_verdicts(value: float, required: float | None, is_lax: bool) -> None:
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 8, "nodes": 1, "backend": "nccl"}
    busbw = Metric(name="busbw.1GiB", value=value, unit="GB/s", subject="cluster")
    ranks = [
        Measurement(check="collectives.all_gather", subject=f"n0/gpu{rank}", rank=rank, facts=facts)
        for rank in range(8)
    ]
    ranks[0] = ranks[0].model_copy(update={"metrics": (busbw,)})
    lab = expected(value, required=required, runs=3).model_copy(update={"override": True})
    references = References(lab, skus())
    (verdict,) = [
        v
        for v in judge_check(catalog()["collectives.all_gather"], ranks, {}, "t", references)
        if v.metric == "busbw.1GiB"
    ]
    assert verdict.outcome is Outcome.PASS
    assert verdict.basis is not None
    assert bool(verdict.basis.lax_reason) is is_lax


def test_training_value_far_below_its_bound_is_not_lax() -> None:
    """Good trainings reach about a third of the peak FLOP/s."""
    fields = {
        "gpus": 8,
        "nodes": 1,
        "value": 10_000,
        "unit": "tokens/s/GPU",
        "gpu": "NVIDIA H200",
        "source": "a person",
        "runs": 3,
    }
    lab = Baseline(
        name="s", learned_from=learned_runs(), expected={"train.lora.native": (ReferenceValue.model_validate(fields),)}
    )
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 8, "nodes": 1}
    facts |= {"device": "cuda", "trained": "yes", "settings": "shipped"}
    facts["run.native"] = {"precision": "bf16 compute", "flops_per_token": 29.77e9}
    speed = Metric(name="tokens_per_second_per_gpu.native", value=10_000, unit="tokens/s/GPU", subject="cluster")
    measurement = Measurement(check="train.lora", subject="n0/gpu0", rank=0, metrics=(speed,), facts=facts)
    verdicts = judge_check(catalog()["train.lora"], [measurement], {}, "t", References(lab, skus()))
    (verdict,) = [verdict for verdict in verdicts if verdict.metric == speed.name]
    assert verdict.outcome is Outcome.PASS
    assert verdict.basis is not None
    assert not verdict.basis.lax_reason


def test_value_across_nodes_applies_to_its_network_only() -> None:
    across: dict[str, JsonValue] = {"gpu": "NVIDIA H200", "world_size": 16, "nodes": 2}
    infiniband = Links.of_fabric("ib-8x400")
    for fabric, seen in (("", Links()), ("tcp", Links()), ("tcp", infiniband)):
        references = References(expected(5, nodes=2, gpus=16, fabric=fabric), (), links=seen)
        assert isinstance(references.site_or_sku_reference("all_gather.busbw.1GiB", across), str), (fabric, seen)
    references = References(expected(5, nodes=2, gpus=16, fabric="tcp"), (), links=Links(network="tcp"))
    assert isinstance(references.site_or_sku_reference("all_gather.busbw.1GiB", across), Reference)


def test_value_across_nodes_of_an_unknown_network_is_not_learned() -> None:
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA Unknown", "backend": "nccl", "world_size": 16, "nodes": 2}
    busbw = Metric(name="busbw.8GiB", value=5, unit="GB/s", subject="cluster")
    reduced = Measurement(check="collectives.all_reduce", subject="n0/gpu0", metrics=(busbw,), facts=facts)
    with pytest.raises(UsageError, match=r"all_reduce\.busbw\.8GiB was measured across 2 nodes"):
        site_baseline.learn("lab", {"a": trial_with(reduced)}, catalog())
