"""The search for slow nodes: reasons for it, its findings and its notes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.diagnose import diagnose
from seatrial.diagnose.causes import Run
from seatrial.diagnose.slow_nodes import reasons_to_search, search_findings, search_notes
from seatrial.hardware.pair_rates import PAIR_RATES, RANKS_BY_NODE
from seatrial.model import CLUSTER, Finding, Measurement, Metric, Outcome, Reason, Verdict
from tests.hardware.test_pair_search import Factor, search, slow
from tests.paths import ROOT

SEARCH = next(name for name, check in catalog().items() if check.localizes)
ALL_REDUCE, PAIRS = "collectives.all_reduce", "collectives.pairs"


def verdict(
    check: str = ALL_REDUCE, metric: str = "busbw.8GiB", outcome: Outcome = Outcome.FAIL, subject: str = CLUSTER
) -> Verdict:
    return Verdict(check, subject, outcome, metric, (Reason.THRESHOLD_VIOLATED,), value=1, unit="GB/s")


def measured(check: str, name: str, value: float, subject: str = CLUSTER, **facts: JsonValue) -> Measurement:
    metric = Metric(name=name, value=value, unit=catalog()[check].units.get(name, "GB/s"), subject=subject)
    return Measurement(check=check, subject="n0000/rank0", rank=0, metrics=(metric,), facts=facts)


def searched(factor: Factor, count: int = 8, backend: str = "nccl", transports: str = "NET/IB") -> Measurement:
    """The measurement of a search on ``count`` nodes with four GPUs."""
    rates = search(count, factor)[1]
    facts: dict[str, JsonValue] = {
        "backend": backend,
        "transports": {transports: 1},
        PAIR_RATES: [rate.model_dump(mode="json") for rate in rates],
        RANKS_BY_NODE: {f"n{node:04}": [f"n{node:04}/gpu{gpu}" for gpu in (0, 1, 2, 3)] for node in range(count)},
    }
    return Measurement(check=SEARCH, subject="n0000/gpu0", rank=0, facts=facts)


def found(
    search: Measurement, verdicts: Sequence[Verdict] = (), measurements: Sequence[Measurement] = (), prefix: str = ""
) -> list[Finding]:
    return search_findings(Run(verdicts, measurements, catalog(), prefix, [search]))


@pytest.mark.parametrize(
    ("check", "metric", "outcome", "expected"),
    [
        (ALL_REDUCE, "busbw.8GiB", Outcome.FAIL, True),
        (ALL_REDUCE, "busbw.8GiB", Outcome.WARN, True),
        ("train.ddp", "scaling_efficiency", Outcome.FAIL, True),
        (ALL_REDUCE, "busbw.8GiB", Outcome.PASS, False),
        (ALL_REDUCE, "wrong_elements", Outcome.FAIL, False),
        ("collectives.each_node", "node_share", Outcome.FAIL, False),
        ("collectives.gpu_pairs", "path_share", Outcome.FAIL, False),
        ("device.gemm", "tflops.bf16", Outcome.FAIL, False),
        (SEARCH, "slow_ranks", Outcome.FAIL, False),
    ],
)
def test_performance_of_several_nodes_below_a_threshold_is_a_reason(
    check: str, metric: str, outcome: Outcome, expected: bool
) -> None:
    reasons = reasons_to_search(Run([verdict(check, metric, outcome)], [], catalog()), 4)
    assert list(reasons) == ([check] if expected else [])


@pytest.mark.parametrize(("share", "expected"), [(0.1, [PAIRS]), (0.6, [])])
def test_large_difference_between_nodes_without_a_threshold_is_a_reason(share: float, expected: list[str]) -> None:
    measurements = [measured(PAIRS, "gpu_share", share, "n0002/rank4"), measured(ALL_REDUCE, "busbw.1MiB", 0.02)]
    assert list(reasons_to_search(Run([], measurements, catalog()), 4)) == expected
    judged = verdict(PAIRS, "gpu_share", Outcome.PASS)
    assert reasons_to_search(Run([judged], measurements, catalog()), 4) == {}


def test_no_reference_and_no_comparison_of_nodes_is_a_reason() -> None:
    measurements = [measured(ALL_REDUCE, "busbw.1MiB", 0.02)]
    assert list(reasons_to_search(Run([], measurements, catalog()), 4)) == [ALL_REDUCE]
    assert reasons_to_search(Run([], measurements, catalog()), 2) == {}, "one pair: nothing to compare it with"
    assert reasons_to_search(Run([verdict(outcome=Outcome.PASS)], measurements, catalog()), 4) == {}
    assert reasons_to_search(Run([], [measured("train.ddp", "step_time", 1)], catalog()), 4) == {}


def test_slow_node_explains_the_cluster_and_its_own_gpus_only() -> None:
    verdicts = [
        verdict(),
        verdict(PAIRS, "gpu_share", subject="n0003/gpu1"),
        verdict(PAIRS, "gpu_share", subject="n0005/gpu1"),
        verdict(metric="wrong_elements"),
        verdict("device.gemm", "tflops.bf16", subject="n0003/gpu1"),
    ]
    (finding,) = found(searched(slow("n0003", share=0.62)), verdicts, prefix="srun --nodelist={node}")
    assert (finding.cause, finding.subject, finding.confidence) == ("slow_node", "n0003", "high")
    assert {(key.check, key.subject) for key in finding.explains} == {(ALL_REDUCE, CLUSTER), (PAIRS, "n0003/gpu1")}
    assert {key.metric for key in finding.explains} == {"busbw.8GiB", "gpu_share"}
    assert finding.first_command.startswith("srun --nodelist=n0003 sh -c ")
    assert "ibstat" in finding.first_command
    assert "n0003 is 3" in finding.evidence
    assert "slower in every pair, in both directions (n0003-n0004 29.8 GB/s, " in finding.evidence
    assert "within 2." in finding.evidence or "within 1." in finding.evidence
    assert (finding.action, finding.source) == ("check-cable", f"{PAIR_RATES} of {SEARCH}")


def test_slow_node_that_loses_packets_has_its_share_of_retransmitted_segments() -> None:
    record = searched(slow("n0003", share=0.1), backend="gloo")
    rows = record.facts[PAIR_RATES]
    assert isinstance(rows, list)
    lossy = [
        {**row, "retransmitted": 0.11 if "n0003" in (row["first"], row["second"]) else 0.004}
        for row in rows
        if isinstance(row, dict)
    ]
    (finding,) = found(record.model_copy(update={"facts": {**record.facts, PAIR_RATES: lossy}}))
    assert "11% of TCP segments sent again" in finding.evidence
    (finding,) = found(record)
    assert "TCP segments" not in finding.evidence


def test_setting_that_differs_on_the_slow_node_is_the_likely_cause() -> None:
    settings = {"n0003": {"speed": "200000 Mb/s, majority: 400000 Mb/s"}, "n0001": {"MTU": "1500 B, majority: 9000 B"}}
    connectivity = Measurement(check="nodes.connectivity", subject="n0000", facts={"network_minority": settings})
    (finding,) = found(searched(slow("n0003")), (), [connectivity])
    assert "Likely cause: speed is 200000 Mb/s, majority: 400000 Mb/s." in finding.evidence
    assert "MTU" not in finding.evidence


def test_sockets_have_commands_for_tcp() -> None:
    (finding,) = found(searched(slow("n0003", share=0.05), backend="gloo"))
    assert "tc qdisc show" in finding.first_command
    (finding,) = found(searched(slow("n0003"), transports="NET/Socket"))
    assert "tc qdisc show" in finding.first_command


@pytest.mark.parametrize("network", ["Foo", "Libfabric (cxi)"])
def test_a_network_that_the_table_does_not_list_is_named(network: str) -> None:
    (finding,) = found(searched(slow("n0003"), transports=f"NET/{network}/GDRDMA"))
    assert network in finding.fix
    assert all(command in finding.first_command for command in ("tc qdisc show", "ibstat"))


def test_gpu_path_and_rail_have_findings_of_their_own() -> None:
    def gpu(a: str, b: str, rail: int) -> float:
        return 0.8 if rail == 2 and "n0003" in (a, b) else 1.0

    (finding,) = found(searched(gpu))
    assert (finding.cause, finding.subject) == ("slow_gpu", "n0003/gpu2")
    (finding,) = found(searched(lambda a, b, _rail: 0.8 if (a, b) == ("n0000", "n0007") else 1.0))
    assert (finding.cause, finding.subject) == ("slow_path", "n0000->n0007")
    assert "only from n0000 to n0007" in finding.evidence
    (finding,) = found(searched(lambda _a, _b, rail: 0.8 if rail == 1 else 1.0), [verdict()])
    assert (finding.cause, finding.subject, len(finding.explains)) == ("slow_rail", CLUSTER, 1)


def test_healthy_nodes_have_a_note_and_no_finding() -> None:
    search = searched(slow())
    assert found(search, [verdict()]) == []
    (note,) = search_notes(Run([verdict()], [], catalog(), searches=[search]), ())
    assert note.check == ALL_REDUCE
    assert note.text.startswith("no slow node, GPU, rail or path")
    assert search_notes(Run([], [], catalog(), searches=[search]), ()) == ()
    assert search_notes(Run([verdict()], [], catalog(), searches=[]), ()) == ()


def test_finding_of_two_nodes_names_the_pair_but_no_node() -> None:
    differing = {"n0001": {"speed": "200000 Mb/s, majority: 400000 Mb/s"}}
    connectivity = Measurement(check="nodes.connectivity", subject="n0000", facts={"network_minority": differing})
    search = searched(lambda a, _b, rail: 0.8 if a == "n0001" and rail == 2 else 1.0, count=2)
    (finding,) = found(search, [verdict()], [connectivity])
    assert (finding.cause, finding.subject, len(finding.explains)) == ("slow_path", "n0000->n0001", 1)
    assert "n0000/gpu2 and n0001/gpu2 are " in finding.evidence
    assert "only from n0001 to n0000" in finding.evidence
    assert "does not show which node is at fault" in finding.evidence
    assert "On n0001: Likely cause: speed is 200000 Mb/s" in finding.evidence


def test_two_equally_slow_nodes_have_a_note_and_no_finding() -> None:
    search = searched(slow("n0001", share=0.5), count=2)
    assert found(search, [verdict()]) == []
    (note,) = search_notes(Run([verdict()], [], catalog(), searches=[search]), ())
    assert "a node that is slow on all rails is not visible" in note.text


def test_search_that_failed_has_a_note_with_its_error() -> None:
    failed = Measurement(check=SEARCH, subject=CLUSTER, error="node2: time limit")
    (note,) = search_notes(Run([verdict()], [], catalog(), searches=[failed]), ())
    assert "node2: time limit" in note.text
    assert found(failed, [verdict()]) == []


@pytest.mark.parametrize(
    "rows",
    [
        [{"stage": "rounds", "first": "a", "second": "a", "gb_s": [1.0]}],
        [{"stage": "rounds", "first": "a", "second": "b", "gb_s": []}],
        [{"stage": "rounds", "first": "a", "second": "b", "gb_s": [-1.0]}],
        [{"stage": "suspects", "first": "a", "second": "b", "gb_s": [1.0]}],
        [{"stage": "rounds", "first": "a", "second": "b", "gb_s": [0.0, 1.0]}],
        ["a"],
        {"a": 1},
    ],
)
def test_damaged_record_has_no_finding(rows: JsonValue) -> None:
    assert found(Measurement(check=SEARCH, subject="a/gpu0", facts={"backend": "nccl", PAIR_RATES: rows})) == []


def test_diagnose_has_the_located_node_before_causes_that_are_less_certain() -> None:
    variable = Measurement(check="collectives.transport", subject="n0000", facts={"variables": {"NCCL_IB_TC": "106"}})
    search = searched(slow("n0003"))
    findings = diagnose(Run([verdict()], [variable], catalog(), searches=[search]), [], [], ROOT)
    assert findings[0].cause == "slow_node"
    assert [finding.cause for finding in diagnose(Run([verdict()], [variable], catalog()), [], [], ROOT)].count(
        "slow_node"
    ) == 0
