"""What a report says beside the verdicts: the line, the link that binds, and what a gate can see."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from seatrial.analysis import trial_insights
from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.hardware.links import Links
from seatrial.model import (
    DecisionValue,
    Insight,
    Measurement,
    Metric,
    Series,
    Threshold,
    Trial,
    format_bytes,
)
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import render
from tests.hardware.test_links import gpus, hosts, path, port
from tests.paths import RESULTS

SHIPPED = RESULTS
SIZES = tuple(2.0**power for power in (20, 25, 30, 33))
IB = path("P2P/CUMEM", "NET/IB/GDRDMA")
AS_USUAL = {"dtype": "float32", "buffers": "torch's allocator"}


def collective(name: str, top: float, ranks: int, nodes: int, **facts: Any) -> Measurement:
    """α 30 µs and β ``top`` GB/s of busbw, by the factor of an all-reduce."""
    factor = 2 * (ranks - 1) / ranks
    us = tuple(30 + size * factor / top / 1e3 for size in SIZES)
    busbw = tuple(size * factor / one / 1e3 for size, one in zip(SIZES, us, strict=True))
    common: dict[str, Any] = {"subject": "cluster", "x": SIZES, "x_unit": "B"}
    return Measurement(
        check=f"collectives.{name}",
        subject="n0/gpu0",
        metrics=(Metric(name="busbw.8GiB", value=busbw[-1], unit="GB/s", subject="cluster"),),
        facts={"backend": "nccl", "gpu": "NVIDIA H200", "world_size": ranks, "nodes": nodes, **AS_USUAL, **facts},
        series=(
            Series(name="busbw", y=busbw, y_unit="GB/s", **common),
            Series(name="latency", y=us, y_unit="us", **common),
        ),
    )


def told(*measurements: Measurement, limit: str = "", nodes: int = 1) -> dict[str, Insight]:
    expect = {"busbw.8GiB": Threshold.parse(limit)} if limit else {}
    checks = {"collectives.all_reduce": CheckSettings(expect=expect)}
    config = Config(name="mine", cluster=Cluster(nodes=nodes), checks=checks)
    return {one.title: one for one in trial_insights(config, measurements, catalog())}


def contrast(algorithm: str, protocol: str = "SIMPLE") -> Measurement:
    chosen = {format_bytes(size): {"algorithm": algorithm, "protocol": protocol, "channels": 24} for size in SIZES}
    return Measurement(
        check="collectives.nccl_settings", subject="cluster", facts={"path_by_size": {"default": chosen, "no_p2p": {}}}
    )


RING = contrast("RING")
TWO_NODES = [*hosts([port()] * 8), gpus(*[18] * 8), IB]


def test_inside_a_node_nvlink_binds_and_the_line_rate_is_the_discovered_one() -> None:
    found = told(collective("all_reduce", 364, 4, 1), gpus(18, 18, 18, 18), RING)["binding link"]
    assert "NVLink of a GPU carries 363.7 of 478.1 GB/s (76%, 98% of the 370.8 that NCCL plans with)" in found.text
    assert "by Ring:" in found.text
    assert found.values["limiter"] == "NVLink of a GPU"


def test_in_the_switch_the_links_carry_less_than_busbw() -> None:
    found = told(collective("all_reduce", 480, 8, 1), gpus(*[18] * 8), contrast("NVLS"))["binding link"]
    assert "carries 308.3 of 478.1 GB/s (64%, 83% of the 370.8 that NCCL plans with)" in found.text


def test_across_nodes_the_rail_binds_under_ring() -> None:
    found = told(collective("all_reduce", 370, 16, 2), *TWO_NODES, RING, nodes=2)["binding link"]
    assert "network port carries 46.22 of 50 GB/s (92%)" in found.text
    assert found.values["limiter"] == "NVLink of a GPU or network port"
    slow = told(collective("all_reduce", 180, 16, 2), *TWO_NODES[:-2], gpus(*[18] * 8), IB, RING, nodes=2)
    assert slow["binding link"].values["limiter"] == "unknown"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([gpus(18, 18, 18, 18)], "no known link is near what NCCL reaches on it"),
        ([gpus(18, 18, 18, 18), path("SHM")], "limited by PCIe and host memory (transport SHM)"),
        ([], "is not known: no line rate of NVLinks or network ports is known"),
    ],
)
def test_what_holds_it_up_is_named_only_when_it_is_known(extra: list[Measurement], words: str) -> None:
    assert words in told(collective("all_reduce", 20, 4, 1), *extra)["binding link"].text


def test_what_nccl_chose_is_of_the_operation_the_type_and_the_buffers_that_were_measured() -> None:
    by_size = {"8GiB": {"bytes": 2**33, "algorithm": "NVLS", "protocol": "SIMPLE", "channels": 16}}
    asked = Measurement(
        check="collectives.transport",
        subject="n0/gpu0",
        facts={"choices": {"all_gather": {**AS_USUAL, "by_size": by_size}}},
    )
    assert "by NVLS:" in told(collective("all_gather", 300, 4, 1), gpus(*[18] * 4), asked)["binding link"].text
    for other in ({"dtype": "bfloat16"}, {"buffers": "NCCL's allocator (ncclMemAlloc)"}):
        assert (
            "assumed" in told(collective("all_gather", 300, 4, 1, **other), gpus(*[18] * 4), asked)["binding link"].text
        )
    for name in ("all_reduce", "reduce_scatter"):
        assert "assumed" in told(collective(name, 300, 4, 1), gpus(*[18] * 4), asked)["binding link"].text
    assert (
        "assumed"
        in told(collective("all_reduce", 360, 4, 1, dtype="bfloat16"), gpus(*[18] * 4), RING)["binding link"].text
    )


@pytest.mark.parametrize(
    "choices", ["x", {"not_told": "rank 1: x"}, {"all_gather": "x"}, {"all_gather": {"by_size": 1}}]
)
def test_choices_that_nobody_knows_are_assumed(choices: Any) -> None:
    asked = Measurement(check="collectives.transport", subject="n0/gpu0", facts={"choices": choices})
    assert "assumed" in told(collective("all_gather", 300, 4, 1), gpus(*[18] * 4), asked)["binding link"].text


def test_a_link_binds_only_near_what_nccl_reaches_on_it() -> None:
    """Two H200: all-gather at 56 % of the line rate, where broadcast reaches 77 % on the same links."""
    held_up, bound = (told(collective("all_gather", top, 2, 1), gpus(18, 18))["binding link"] for top in (268, 368))
    assert held_up.values["limiter"] == "unknown"
    assert "the protocol, the GPUs' own pace or something unknown" in held_up.text
    assert bound.values["limiter"] == "NVLink of a GPU"


def test_the_latency_is_that_of_the_device() -> None:
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
    facts = {"backend": "nccl", "gpu": "NVIDIA H200", "world_size": 4, "nodes": 1, **AS_USUAL}
    measured = Measurement(check="collectives.all_reduce", subject="n0/gpu0", facts=facts, series=(busbw, latency))
    ways = {format_bytes(size): {"algorithm": "RING", "protocol": "LL" if size < 2**20 else "SIMPLE"} for size in sizes}
    asked = Measurement(
        check="collectives.transport",
        subject="n0/gpu0",
        facts={"choices": {"all_reduce": {**AS_USUAL, "by_size": ways}}},
    )
    found = told(measured, asked)
    assert set(found) == {"latency"}
    assert found["latency"].text.startswith(
        "T = α + S/β, in a CUDA graph: Ring/LL, 8B to 16KiB: α 4.5 µs, β 75 GB/s busbw, max fit error 0.0% over 3 sizes"
    )
    assert "Ring/SIMPLE, 1MiB to 8MiB: α 20 µs" in found["latency"].text


def test_a_rule_on_known_figures_says_what_it_sees_as_well() -> None:
    found = told(collective("all_reduce", 363.3, 4, 1), gpus(*[18] * 4))["gate"]
    assert "busbw.8GiB >= 327 GB/s: 90% of the 363.3 GB/s of SKU NVIDIA H200 SXM" in found.text
    assert "the least that it sees is 3 of a GPU's 18 NVLinks down" in found.text
    gathered = told(collective("all_gather", 269, 2, 1), gpus(18, 18))["gate"]  # 16 links carry more than that, too
    assert "busbw.1GiB >= 242.1 GB/s: 90% of the 269 GB/s" in gathered.text
    assert "the least that it sees is 7 of a GPU's 18 NVLinks down" in gathered.text


def shares(check: str, facts: dict[str, Any], **values: float) -> Measurement:
    metrics = tuple(Metric(name=name, value=value, unit="x", subject="n0") for name, value in values.items())
    return Measurement(check=f"collectives.{check}", subject="n0/gpu0", metrics=metrics, facts=facts)


def test_rules_on_shares_say_what_they_see() -> None:
    comparable = {"backend": "nccl", "comparable": "yes"}
    found = told(shares("rails", comparable, rail_share=1.0), *TWO_NODES)["gate"]
    assert "the least that it sees is a rail 10% slower than the others, one at 360 of 400 Gb/s" in found.text
    assert "does not see what slows all of them alike" in found.text
    assert told(shares("rails", {**comparable, "comparable": "no"}, rail_share=1.0)) == {}
    gain = told(shares("contrast", {"nvlink": "yes", "peers": "yes"}, p2p_gain=15.0), gpus(18, 18))["gate"]
    assert gain.text == "p2p_gain >= 1.5 x: it sees peer-to-peer missing, not slow"


def test_sockets_between_nodes_are_named() -> None:
    found = told(collective("all_reduce", 5, 4, 2), gpus(18, 18), path("NET/Socket"), nodes=2)["binding link"]
    assert "limited by the network (TCP sockets)" in found.text


def test_the_gate_of_two_nodes_hardly_tests_the_network_and_the_arithmetic_says_so() -> None:
    """350 GB/s need 23 of a port's 50 GB/s (research: 29 for 435)."""
    found = told(collective("all_reduce", 435, 16, 2), *TWO_NODES, limit="> 350 GB/s", nodes=2)["gate"]
    assert "it hardly tests the network: 350 GB/s × 0.533 ÷ 8 ports = 187 of 400 Gb/s a port" in found.text
    assert "with every port, or one of them, at 47% of its line rate it is passed" in found.text
    assert "force NCCL_ALGO=Ring" in found.text
    assert "by Tree (assumed: no log says which)" in found.text


def test_under_ring_the_same_gate_tests_it() -> None:
    found = told(collective("all_reduce", 370, 16, 2), *TWO_NODES, RING, limit="> 350 GB/s", nodes=2)["gate"]
    assert "hardly" not in found.text
    assert "= 350 of 400 Gb/s a port" in found.text
    slow = [*hosts([port("200 Gb/sec (4X HDR)")] * 8), gpus(*[18] * 8), IB]
    beyond = told(collective("all_reduce", 370, 16, 2), *slow, RING, limit="> 350 GB/s", nodes=2)["gate"]
    assert "more than the network can carry" in beyond.text


def test_inside_a_node_a_gate_is_told_in_links() -> None:
    found = told(collective("all_reduce", 363.3, 4, 1), gpus(*[18] * 4), limit="> 300 GB/s")["gate"]
    assert "83% of the 363.3 GB/s of SKU NVIDIA H200 SXM" in found.text
    assert "the least that it sees is 4 of a GPU's 18 NVLinks down" in found.text
    assert found.values["undetected_nvlinks_down"] == 3


def test_the_gate_of_a_check_itself_is_told_too() -> None:
    """Its floor, or else the share of what is known under which it fails."""
    ninety = told(collective("all_reduce", 363.3, 4, 1), gpus(*[18] * 4))["gate"]
    assert ninety.text.startswith("busbw.8GiB >= 327 GB/s: 90% of the 363.3 GB/s of SKU NVIDIA H200 SXM")
    assert "the least that it sees is 3 of a GPU's 18 NVLinks down" in ninety.text
    floor = told(collective("all_reduce", 473, 8, 1), gpus(*[18] * 8))["gate"]
    assert floor.text.startswith("busbw.8GiB >= 350 GB/s: 74% of the 473 GB/s")
    assert "gate" not in told(collective("all_reduce", 400, 6, 1), gpus(*[18] * 6))


def test_a_rehearsal_on_cpus_has_no_links() -> None:
    assert told(collective("all_reduce", 2, 4, 1, backend="gloo")) == {}


def shipped() -> Trial:
    return rejudge(load_trial(SHIPPED / "2026-11-21-4xh200" / "acceptance.trial.json"))


def test_a_weak_gate_of_a_real_run_is_marked_in_every_report() -> None:
    """500 tokens/s a GPU, where it was 499,156."""
    trial = shipped()
    lax = {
        (one.check, one.metric): one.basis.lax_reason for one in trial.verdicts if one.basis and one.basis.lax_reason
    }
    assert list(lax) == [("train.ddp", "tokens_per_second_per_gpu")]
    assert "0.1% of the measured 499,156 tokens/s/GPU" in lax["train.ddp", "tokens_per_second_per_gpu"]
    for format in ("html", "markdown", "junit", "json"):
        assert "a 998x slowdown would pass" in render(trial, format), format
    assert 'seatrial_weak_gates{trial="acceptance"} 1' in render(trial, "prometheus")


def test_a_weak_gate_is_marked_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from seatrial.report.terminal import summary

    summary(shipped(), Console(width=200))
    assert "LAX THRESHOLD  train.ddp tokens_per_second_per_gpu" in capsys.readouterr().out


def test_judging_again_changes_no_verdict_of_the_shipped_run() -> None:
    trial = load_trial(SHIPPED / "2026-11-22-4xh200" / "acceptance.trial.json")
    again = rejudge(trial)
    then, now = (
        Counter((one.check, one.subject, one.metric, one.outcome) for one in every.verdicts) for every in (trial, again)
    )
    assert then == now
    assert again.decision.value is trial.decision.value is DecisionValue.ACCEPTED


def test_of_a_run_that_read_no_error_counters_nothing_is_accepted_any_more() -> None:
    """What was newer than that run is not known of it: each of its checks on GPUs says so."""
    again = shipped()
    unread = {one.check for one in again.verdicts if "error counters of this GPU were not read" in one.message}
    assert {"transfer.peers", "collectives.all_reduce", "train.ddp"} <= unread
    assert again.decision.value is DecisionValue.INCOMPLETE


def test_no_links_are_no_fabric() -> None:
    assert Links().fabric == ""
