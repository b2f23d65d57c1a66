"""Insights: latency fit, bandwidth limit and detectable faults."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.hardware.links import Links
from seatrial.judge.insights import trial_insights
from seatrial.judge.insights.collective import NVLINK, PORT
from seatrial.model import (
    DecisionValue,
    Measurement,
    Metric,
    Outcome,
    Reason,
    Series,
    Threshold,
    Trial,
    size_label,
)
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import render
from tests.hardware.test_links import gpus, hosts, path, port

SIZES = tuple(2.0**power for power in (20, 25, 30, 33))
IB = path("P2P/CUMEM", "NET/IB/GDRDMA")
DEFAULT_SHAPE = {"dtype": "float32", "buffers": "torch's allocator"}


def collective(name: str, top: float, ranks: int, nodes: int, **facts: Any) -> Measurement:
    """An all-reduce with α 30 µs and β ``top`` GB/s of busbw."""
    factor = 2 * (ranks - 1) / ranks
    us = tuple(30 + size * factor / top / 1e3 for size in SIZES)
    busbw = tuple(size * factor / time / 1e3 for size, time in zip(SIZES, us, strict=True))
    common: dict[str, Any] = {"subject": "cluster", "x": SIZES, "x_unit": "B"}
    return Measurement(
        check=f"collectives.{name}",
        subject="n0/gpu0",
        metrics=(Metric(name="busbw.8GiB", value=busbw[-1], unit="GB/s", subject="cluster"),),
        facts={"backend": "nccl", "gpu": "NVIDIA H200", "world_size": ranks, "nodes": nodes, **DEFAULT_SHAPE, **facts},
        series=(
            Series(name="busbw", y=busbw, y_unit="GB/s", **common),
            Series(name="latency", y=us, y_unit="us", **common),
        ),
    )


def insights(*measurements: Measurement, threshold: str = "", nodes: int = 1) -> dict[str, Any]:
    expect = {"busbw.8GiB": Threshold.parse(threshold)} if threshold else {}
    checks = {"collectives.all_reduce": CheckSettings(expect=expect)}
    config = Config(name="mine", cluster=Cluster(nodes=nodes), checks=checks)
    return {insight.title: insight for insight in trial_insights(config, measurements, catalog())}


def settings(algorithm: str, protocol: str = "SIMPLE") -> Measurement:
    chosen = {size_label(size): {"algorithm": algorithm, "protocol": protocol, "channels": 24} for size in SIZES}
    return Measurement(
        check="collectives.nccl_settings", subject="cluster", facts={"path_by_size": {"default": chosen, "no_p2p": {}}}
    )


RING = settings("RING")
TWO_NODES = [*hosts([port()] * 8), gpus(*[18] * 8), IB]


def test_nvlink_limits_within_a_node() -> None:
    insight = insights(collective("all_reduce", 364, 4, 1), gpus(18, 18, 18, 18), RING)["bandwidth limit"]
    assert "363.7 of 478.1 GB/s (76%, 98% of NCCL's planned 370.8 GB/s)" in insight.text
    assert insight.values["algorithm"] == "Ring"
    assert insight.values["limiter"] == NVLINK


def test_links_carry_less_than_busbw_with_nvls() -> None:
    insight = insights(collective("all_reduce", 480, 8, 1), gpus(*[18] * 8), settings("NVLS"))["bandwidth limit"]
    assert insight.values["shares"][NVLINK] == pytest.approx(308.3 / 478.1, rel=1e-3)


def test_ports_limit_across_nodes_with_ring() -> None:
    insight = insights(collective("all_reduce", 370, 16, 2), *TWO_NODES, RING, nodes=2)["bandwidth limit"]
    assert insight.values["shares"][PORT] == pytest.approx(46.22 / 50, rel=1e-3)
    assert insight.values["limiter"] == f"{NVLINK} or {PORT}"
    slow = insights(collective("all_reduce", 180, 16, 2), *TWO_NODES[:-2], gpus(*[18] * 8), IB, RING, nodes=2)
    assert slow["bandwidth limit"].values["limiter"] == "unknown"


@pytest.mark.parametrize(
    ("extra", "limiter"),
    [
        ([gpus(18, 18, 18, 18)], "unknown"),
        ([gpus(18, 18, 18, 18), path("SHM")], "PCIe and host memory (transport SHM)"),
        ([], "unknown"),
    ],
)
def test_limiter_is_named_only_when_it_is_known(extra: list[Measurement], limiter: str) -> None:
    insight = insights(collective("all_reduce", 20, 4, 1), *extra)["bandwidth limit"]
    assert insight.values["limiter"] == limiter


def test_choice_applies_only_to_the_same_operation_dtype_and_buffers() -> None:
    by_size = {"8GiB": {"bytes": 2**33, "algorithm": "NVLS", "protocol": "SIMPLE", "channels": 16}}
    choices = Measurement(
        check="collectives.transport",
        subject="n0/gpu0",
        facts={"nccl_choices": {"all_gather": {**DEFAULT_SHAPE, "by_size": by_size}}},
    )
    assert (
        "with NVLS" in insights(collective("all_gather", 300, 4, 1), gpus(*[18] * 4), choices)["bandwidth limit"].text
    )
    for other in ({"dtype": "bfloat16"}, {"buffers": "NCCL's allocator (ncclMemAlloc)"}):
        assert (
            "assumed"
            in insights(collective("all_gather", 300, 4, 1, **other), gpus(*[18] * 4), choices)["bandwidth limit"].text
        )
    for name in ("all_reduce", "reduce_scatter"):
        assert "assumed" in insights(collective(name, 300, 4, 1), gpus(*[18] * 4), choices)["bandwidth limit"].text
    assert (
        "assumed"
        in insights(collective("all_reduce", 360, 4, 1, dtype="bfloat16"), gpus(*[18] * 4), RING)[
            "bandwidth limit"
        ].text
    )


@pytest.mark.parametrize(
    "fact", ["x", {"unavailable": "rank 1: x"}, {"all_gather": "x"}, {"all_gather": {"by_size": 1}}]
)
def test_unknown_choices_are_assumed(fact: Any) -> None:
    choices = Measurement(check="collectives.transport", subject="n0/gpu0", facts={"nccl_choices": fact})
    assert "assumed" in insights(collective("all_gather", 300, 4, 1), gpus(*[18] * 4), choices)["bandwidth limit"].text


def test_link_limits_only_near_its_achievable_bandwidth() -> None:
    """Two H200s: all-gather at 56 % of the line rate; broadcast reaches 77 % on the same links."""
    below, saturated = (
        insights(collective("all_gather", top, 2, 1), gpus(18, 18))["bandwidth limit"] for top in (268, 368)
    )
    assert below.values["limiter"] == "unknown"
    assert saturated.values["limiter"] == NVLINK


def test_latency_is_fitted_per_regime() -> None:
    sizes = (8.0, 2.0**10, 2.0**14, 2.0**20, 2.0**22, 2.0**23)
    us = tuple(4.5 + size / 50e3 if size < 2**20 else 20 + size / 300e3 for size in sizes)
    common: dict[str, Any] = {"subject": "cluster", "x": sizes, "x_unit": "B"}
    busbw = Series(
        name="cuda_graph_busbw",
        y=tuple(1.5 * x / y / 1e3 for x, y in zip(sizes, us, strict=True)),
        y_unit="GB/s",
        **common,
    )
    latency = Series(name="cuda_graph_latency", y=us, y_unit="us", **common)
    facts = {"backend": "nccl", "gpu": "NVIDIA H200", "world_size": 4, "nodes": 1, **DEFAULT_SHAPE}
    measured = Measurement(check="collectives.all_reduce", subject="n0/gpu0", facts=facts, series=(busbw, latency))
    by_size = {
        size_label(size): {"algorithm": "RING", "protocol": "LL" if size < 2**20 else "SIMPLE"} for size in sizes
    }
    choices = Measurement(
        check="collectives.transport",
        subject="n0/gpu0",
        facts={"nccl_choices": {"all_reduce": {**DEFAULT_SHAPE, "by_size": by_size}}},
    )
    found = insights(measured, choices)
    assert set(found) == {"latency"}
    low, high = found["latency"].values["regimes"]
    assert (low["regime"], low["sizes"], low["alpha_us"]) == ("Ring/LL", list(sizes[:3]), pytest.approx(4.5))
    assert low["gbps"] == pytest.approx(50)
    assert (high["regime"], high["sizes"], high["alpha_us"]) == ("Ring/SIMPLE", list(sizes[3:]), pytest.approx(20))
    assert "α 4.5 µs, β 75 GB/s busbw, max fit error 0.0% over 3 sizes" in found["latency"].text


def test_reference_rule_has_a_detectable_fault() -> None:
    insight = insights(collective("all_reduce", 363.3, 4, 1), gpus(*[18] * 4))["threshold"]
    assert "busbw.8GiB >= 327 GB/s: 90% of the 363.3 GB/s of SKU NVIDIA H200 SXM" in insight.text
    assert insight.values["undetected_nvlinks_down"] == 2
    gathered = insights(collective("all_gather", 269, 2, 1), gpus(18, 18))["threshold"]  # 12 links can carry this rate
    assert "busbw.1GiB >= 242.1 GB/s: 90% of the 269 GB/s" in gathered.text
    assert gathered.values["undetected_nvlinks_down"] == 6


def shares(check: str, facts: dict[str, Any], **values: float) -> Measurement:
    metrics = tuple(Metric(name=name, value=value, unit="x", subject="n0") for name, value in values.items())
    return Measurement(check=f"collectives.{check}", subject="n0/gpu0", metrics=metrics, facts=facts)


def test_comparison_rules_have_a_detectable_fault() -> None:
    insight = insights(shares("rails", {"backend": "nccl"}, rail_share=1.0), *TWO_NODES)["threshold"]
    assert "one rail 10% slower than the others" in insight.text
    assert "360 of 400 Gb/s" in insight.text
    assert insight.values["undetected_shortfall"] == pytest.approx(0.1)
    assert insights(shares("rails", {"backend": "gloo"}, rail_share=1.0)) == {}
    gain = insights(shares("nccl_settings", {"nvlink": "yes", "p2p_available": "yes"}, p2p_gain=15.0), gpus(18, 18))[
        "threshold"
    ]
    assert gain.text.startswith("p2p_gain >= 1.5 x: ")
    assert gain.values["undetected_shortfall"] == 1


def test_sockets_between_nodes_are_the_limiter() -> None:
    insight = insights(collective("all_reduce", 5, 4, 2), gpus(18, 18), path("NET/Socket"), nodes=2)["bandwidth limit"]
    assert insight.values["limiter"] == "the network (TCP sockets)"


def test_threshold_on_two_nodes_hardly_tests_the_network() -> None:
    """364.8 GB/s need 24 of a port's 50 GB/s."""
    insight = insights(collective("all_reduce", 435, 16, 2), *TWO_NODES, threshold="> 350 GB/s", nodes=2)["threshold"]
    assert "hardly tests the network: 364.8 GB/s × 0.533 ÷ 8 ports = 195 of 400 Gb/s" in insight.text
    assert insight.values["port_share_needed"] == pytest.approx(0.486, abs=1e-3)
    assert "NCCL_ALGO=Ring" in insight.text
    assert "Tree (assumed" in insight.text


def test_threshold_tests_the_network_with_ring() -> None:
    insight = insights(collective("all_reduce", 370, 16, 2), *TWO_NODES, RING, threshold="> 350 GB/s", nodes=2)[
        "threshold"
    ]
    assert "hardly" not in insight.text
    assert insight.values["port_share_needed"] == pytest.approx(364.8 / 400)
    slow = [*hosts([port("200 Gb/sec (4X HDR)")] * 8), gpus(*[18] * 8), IB]
    unreachable = insights(collective("all_reduce", 370, 16, 2), *slow, RING, threshold="> 350 GB/s", nodes=2)[
        "threshold"
    ]
    assert unreachable.values["port_share_needed"] > 1


def test_detectable_fault_within_a_node_is_in_nvlinks() -> None:
    insight = insights(collective("all_reduce", 363.3, 4, 1), gpus(*[18] * 4), threshold="> 345 GB/s")["threshold"]
    assert "95% of the 363.3 GB/s of SKU NVIDIA H200 SXM" in insight.text
    assert insight.values["undetected_nvlinks_down"] == 1


def test_stricter_of_rule_and_threshold_of_the_trial_is_the_effective_limit() -> None:
    lax = insights(collective("all_reduce", 363.3, 4, 1), gpus(*[18] * 4), threshold="> 300 GB/s")["threshold"]
    assert lax.text.startswith("busbw.8GiB >= 327 GB/s")


def test_rule_threshold_is_the_required_value_or_a_share_of_the_reference() -> None:
    ninety = insights(collective("all_reduce", 363.3, 4, 1), gpus(*[18] * 4))["threshold"]
    assert ninety.text.startswith("busbw.8GiB >= 327 GB/s: 90% of the 363.3 GB/s of SKU NVIDIA H200 SXM")
    assert ninety.values["undetected_nvlinks_down"] == 2
    required = insights(collective("all_reduce", 473, 8, 1), gpus(*[18] * 8))["threshold"]
    assert required.text.startswith("busbw.8GiB >= 425.7 GB/s: 90% of the 473 GB/s")
    assert "threshold" not in insights(collective("all_reduce", 400, 6, 1), gpus(*[18] * 6))


def test_cpu_run_has_no_insights() -> None:
    assert insights(collective("all_reduce", 2, 4, 1, backend="gloo")) == {}


def shipped_trial() -> Trial:
    return load_trial(record_path("2026-11-21-4xh200/acceptance"))


def trial_with_override() -> Trial:
    """A shipped trial whose threshold of 500 tokens/s per GPU overrides the check's rule."""
    trial = shipped_trial()
    checks = {**trial.config["checks"], "train.ddp": {**trial.config["checks"]["train.ddp"], "override": True}}
    return rejudge(trial.model_copy(update={"config": {**trial.config, "checks": checks}}))


def test_lax_threshold_is_in_every_report() -> None:
    """Threshold 500 tokens/s per GPU, measured 499,156."""
    trial = trial_with_override()
    lax = {
        (verdict.check, verdict.metric): verdict.basis.lax_reason
        for verdict in trial.verdicts
        if verdict.basis and verdict.basis.lax_reason
    }
    assert lax.keys() == {("train.ddp", "tokens_per_second_per_gpu")}
    for format in ("html", "markdown", "junit"):
        assert "a 998x slowdown would pass" in render(trial, format), format
    assert 'seatrial_lax_thresholds{trial="acceptance"} 1' in render(trial, "prometheus")


def test_lax_threshold_is_in_the_terminal_summary(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from seatrial.report.terminal import summary

    summary(trial_with_override(), Console(width=200))
    assert "LAX THRESHOLD  train.ddp tokens_per_second_per_gpu" in capsys.readouterr().out


def test_rejudging_keeps_every_verdict_of_a_shipped_trial() -> None:
    trial = load_trial(record_path("2026-11-23-2xh200/quick-1"))
    rejudged = rejudge(trial)
    before, after = (
        Counter((verdict.check, verdict.subject, verdict.metric, verdict.outcome) for verdict in each.verdicts)
        for each in (trial, rejudged)
    )
    assert before <= after
    assert {outcome for *_, outcome in (after - before)} <= {Outcome.PASS, Outcome.SKIP}, "rules added since"
    assert rejudged.decision.value is trial.decision.value is DecisionValue.ACCEPTED


def test_trial_without_error_counters_is_incomplete() -> None:
    """The shipped trial is older than the error counters; each of its checks on GPUs reports that."""
    trial = rejudge(shipped_trial())
    unread = {verdict.check for verdict in trial.verdicts if Reason.ERROR_COUNTERS in verdict.reasons}
    assert {"transfer.peers", "collectives.all_reduce", "train.ddp"} <= unread
    assert trial.decision.value is DecisionValue.INCOMPLETE


def test_links_without_network_have_no_fabric() -> None:
    assert Links().fabric == ""
