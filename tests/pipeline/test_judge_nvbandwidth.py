"""Verdicts on the output of nvbandwidth."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.discover import nvbandwidth_output
from seatrial.model import BasisKind, Outcome
from seatrial.model.benchmark import BenchmarkJudgement
from seatrial.pipeline.benchmark_hardware import HardwareOptions
from seatrial.pipeline.judge_nvbandwidth import judge_output
from tests.discover.test_nvbandwidth_output import report
from tests.paths import FIXTURES

FOLDER = FIXTURES / "nvbandwidth"
PEERS = (FOLDER / "h100-peers-0.4.txt").read_text()


def judged(text: str, **options: Any) -> BenchmarkJudgement:
    return judge_output(nvbandwidth_output.parse(text.splitlines()), HardwareOptions(**options), "file")


def test_every_pair_of_a_good_node() -> None:
    judgement = judged(PEERS)
    (result,) = judgement.results
    assert (judgement.outcome, result.check, len(result.verdicts)) == (Outcome.PASS, "transfer.peers", 56)
    assert result.bound
    assert result.bound.value == 450


def test_number_of_nodes_comes_from_the_output_only_if_it_names_hosts() -> None:
    assert judged(PEERS).hardware.sources["nodes"] == "nvbandwidth measures one"
    named = PEERS.replace("Device 0: ", "Process 0 (node7): device 0: ", 1)
    assert nvbandwidth_output.parse(named.splitlines()).hosts == {"node7": None}
    assert judged(named).hardware.sources["nodes"] == "output"


def test_slow_pair_is_named() -> None:
    slow = PEERS.replace("372.96", "162.45")  # the fault that the source of the file describes
    (result,) = judged(slow).results
    assert result.outcome is Outcome.FAIL
    assert [verdict.subject for verdict in result.verdicts if verdict.outcome is Outcome.FAIL] == ["node/gpu2->gpu4"]


def test_direction_of_the_arrow() -> None:
    """GPU(row) <- GPU(column): the copy goes from the GPU of the column to that of the row."""
    slow = PEERS.replace("372.96", "162.45").replace("GPU(row) -> GPU(column)", "GPU(row) <- GPU(column)")
    (result,) = judged(slow.replace("memcpy_read_ce", "memcpy_write_ce")).results
    assert [verdict.subject for verdict in result.verdicts if verdict.outcome is Outcome.FAIL] == ["node/gpu4->gpu2"]


def test_pair_without_access_is_not_judged() -> None:
    (result,) = judged(PEERS.replace("372.96", "   N/A")).results
    assert result.outcome is Outcome.UNJUDGED


def test_copies_between_host_and_gpu() -> None:
    text = (FOLDER / "a100-host-and-peers.txt").read_text()
    host, peers = judged(text, gpus="8xA100 SXM 80GB").results
    assert (host.outcome, host.check, len(host.verdicts)) == (Outcome.PASS, "transfer.host", 8)
    assert (peers.outcome, len(peers.verdicts)) == (Outcome.PASS, 56)
    assert {verdict.basis and verdict.basis.kind for verdict in peers.verdicts} == {BasisKind.PHYSICAL_LIMIT}, (
        "no reference value of A100: compared with its NVLinks"
    )
    slow, _ = judged(text.replace("26.19", "12.90"), gpus="8xA100 SXM 80GB").results
    assert [verdict.subject for verdict in slow.verdicts if verdict.outcome is Outcome.FAIL] == ["node/gpu4"]


def test_wrong_data_fails() -> None:
    judgement = judged((FOLDER / "wrong-data-0.7.txt").read_text())
    assert judgement.outcome is Outcome.FAIL
    assert "differs from its source" in judgement.results[0].verdicts[0].summary


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        (PEERS, {"gpus": "4xH100"}, "nvbandwidth measured 8 GPUs"),
        (PEERS, {"nodes": 2}, "measures one node"),
        ("\n".join(PEERS.splitlines()[:26]), {}, "truncated"),
        (PEERS.replace("Device ", "Dev "), {}, "does not name the GPU model"),
    ],
)
def test_output_that_cannot_be_judged(text: str, options: dict[str, Any], problem: str) -> None:
    judgement = judged(text, **options)
    assert judgement.outcome is Outcome.UNJUDGED
    assert problem in judgement.results[0].problems[0]


def test_testcases_without_a_reference_value() -> None:
    text = PEERS.replace("device_to_device_memcpy_read_ce", "device_to_device_memcpy_read_sm")
    judgement = judged(text)
    assert (judgement.outcome, judgement.results) == (Outcome.UNJUDGED, ())
    assert any("device_to_device_memcpy_read_sm" in note for note in judgement.notes)
    assert judged(PEERS + text).outcome is Outcome.PASS


def test_json_report() -> None:
    judgement = judge_output(nvbandwidth_output.parse_json(report()), HardwareOptions(), "file")
    host, total, failed = judgement.results
    assert [result.outcome for result in (host, total, failed)] == [Outcome.PASS, Outcome.PASS, Outcome.UNJUDGED]
    assert judgement.outcome is Outcome.UNJUDGED
