"""Verdicts on the output of nccl-tests: published outputs, and tables that cannot be judged."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import published_figures
from seatrial.discover import nccl_tests_output
from seatrial.model import BasisKind, Outcome, Reason, UsageError
from seatrial.model.benchmark import BenchmarkJudgement, BenchmarkResult
from seatrial.pipeline.benchmark_hardware import HardwareOptions
from seatrial.pipeline.judge_nccl_tests import judge_output
from seatrial.util import data_files
from tests.paths import FIXTURES

FOLDER = FIXTURES / "nccl-tests"
PUBLISHED: list[dict[str, Any]] = data_files.parse((FOLDER / "published" / "sources.yaml").read_text(encoding="utf-8"))
COLUMNS = "time algbw busbw #wrong"


def judged(text: str, operation: str = "", **options: Any) -> BenchmarkJudgement:
    return judge_output(nccl_tests_output.parse(text.splitlines()), HardwareOptions(**options), "file", operation)


def published(entry: dict[str, Any]) -> BenchmarkJudgement:
    text = (FOLDER / "published" / entry["file"]).read_text(encoding="utf-8")
    names = ("gpus", "nodes", "nics", "algorithm")
    return judged(text, **{name: entry[name] for name in names if name in entry})


def only_result(judgement: BenchmarkJudgement) -> BenchmarkResult:
    (result,) = judgement.results
    return result


def table(
    busbw: float,
    *,
    size: int = 2**33,
    ranks: int = 16,
    operation: str = "all_reduce",
    wrong: str = "0",
    footer: str = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 1\n",
) -> str:
    """A table with one row, as nccl-tests 2.19 prints it."""
    factor = 2 * (ranks - 1) / ranks if operation == "all_reduce" else (ranks - 1) / ranks
    algbw = busbw / factor
    count = size // 4 if operation == "all_reduce" else size // 4 // ranks
    redop = "sum" if operation in ("all_reduce", "reduce_scatter") else "none"
    place = f"{size / algbw / 1e3:.1f} {algbw:.2f} {busbw:.2f} {wrong}"
    return (
        f"# size count type redop root {COLUMNS} {COLUMNS}\n{size} {count} float {redop} -1 {place} {place}\n{footer}"
    )


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: str(entry["file"]))
def test_published_output(entry: dict[str, Any]) -> None:
    judgement = published(entry)
    result = only_result(judgement)
    assert result.name == entry["operation"]
    assert judgement.hardware.ranks == entry["ranks"]
    assert result.measured[-1].out_of_place == entry["busbw"]
    assert (result.outcome, judgement.outcome) == (entry["outcome"], entry["outcome"])
    if entry["published"] == "healthy":
        assert result.outcome is not Outcome.FAIL
    else:
        assert result.outcome is not Outcome.PASS


def test_agrees_with_the_published_figures() -> None:
    """Each figure of benchmarks/published_figures.yaml that a fixture contains has the same outcome."""
    figures = data_files.parse(published_figures.FIGURES.read_text(encoding="utf-8"))
    expected = {
        (row.figure["op"], row.figure["busbw"]): row.outcome
        for row in map(published_figures.judged, figures)
        if row.outcome
    }
    compared = 0
    for entry in PUBLISHED:
        result = only_result(published(entry))
        for verdict in (*result.verdicts, *result.other_sizes):
            key = (result.name, verdict.value)
            if Reason.ALGORITHM_UNKNOWN in verdict.reasons:  # the model of the figures assumes NCCL's usual algorithm
                assert (entry["file"], verdict.metric.partition(".")[2], expected[key]) == ("03.txt", "1GiB", "FAIL")
            elif verdict.metric.startswith("busbw_out_of_place") and key in expected:
                assert verdict.outcome == expected[key], (entry["file"], verdict.metric)
                compared += 1
    assert compared >= 33


def test_unjudged_results_state_why() -> None:
    for entry in PUBLISHED:
        result = only_result(published(entry))
        assert bool(result.problems) is (result.outcome is Outcome.UNJUDGED), entry["file"]


def test_unknown_model_is_not_sent_to_other_sizes() -> None:
    (unknown, known) = (judged(table(100), gpus=gpus) for gpus in ("2xRTX 5090", "2xH200"))
    steps = [verdict.fix for verdict in only_result(unknown).verdicts if verdict.outcome is Outcome.UNJUDGED]
    assert steps
    assert all("--baseline" in step and "seatrial show skus" not in step for step in steps)
    steps = [verdict.fix for verdict in only_result(known).verdicts if verdict.outcome is Outcome.UNJUDGED]
    assert all("seatrial show skus" in step for step in steps)


def test_wrong_elements_fail_whatever_the_bandwidth() -> None:
    result = only_result(judged(table(470, wrong="3"), gpus="8xH100", nodes=2, nics="8x400"))
    assert result.outcome is Outcome.FAIL
    assert [verdict.metric for verdict in result.verdicts if verdict.outcome is Outcome.FAIL] == ["wrong_elements"]
    footer = "# Out of bounds values : 4096 FAILED\n# Avg bus bandwidth    : 1\n"
    assert judged(table(470, footer=footer), gpus="8xH100", nodes=2, nics="8x400").outcome is Outcome.FAIL
    assert judged(table(470, wrong="3")).outcome is Outcome.FAIL  # also on unknown hardware


def test_program_without_a_check() -> None:
    text = f"# Collective test starting: hypercube_perf\n{table(300, operation='all_gather')}"
    result = only_result(judged(text, gpus="8xH100", nodes=2, nics="8x400"))
    assert (result.name, result.check, result.outcome) == ("hypercube", "", Outcome.UNJUDGED)
    wrong = text.replace(" 0\n", " 7\n")
    assert judged(wrong, gpus="8xH100", nodes=2, nics="8x400").outcome is Outcome.FAIL


def test_build_without_mpi() -> None:
    """Each node measures itself: 8 ranks where 16 were asked for, or the tables of both nodes interleaved."""
    alone = only_result(judged(table(470, ranks=8), gpus="8xH100", nodes=2, nics="8x400"))
    assert alone.outcome is Outcome.UNJUDGED
    assert "the columns of the table are those of 8 ranks" in alone.problems[0]
    assert "MPI=1" in alone.problems[0]
    row = table(470, ranks=8).splitlines()[1]
    both = only_result(judged(table(460, ranks=8).replace("# Out", f"{row}\n# Out", 1)))
    assert "appears 2 times, more than once per sweep" in both.problems[0]
    hosts = "".join(
        f"#  Rank  0 Group  0 Pid {pid} on n{pid} device  0 [0x0f] NVIDIA H100 80GB HBM3\n" for pid in (1, 2)
    )
    listed = only_result(judged(hosts + table(470, ranks=8)))
    assert "rank 0 is listed 2 times (n1, n2)" in listed.problems[0]


def test_one_rank_measures_no_communication() -> None:
    text = f"# size count type redop root {COLUMNS} {COLUMNS}\n" + (
        f"{2**33} {2**31} float sum -1 {' '.join(['2952.5 2909.4 0.00 0'] * 2)}\n# Avg bus bandwidth    : 0\n"
    )
    result = only_result(judged(text, gpus="1xH100", nodes=1))
    assert result.outcome is Outcome.UNJUDGED
    assert "measured by one rank" in result.problems[0]


def test_sizes_too_small() -> None:
    result = only_result(judged(table(5.3, size=2**29), gpus="8xH100", nodes=2, nics="8x400"))
    assert result.outcome is Outcome.UNJUDGED
    assert "too small to judge" in result.problems[-1]
    assert result.bound
    assert result.bound.value == 480


def test_truncated_table() -> None:
    head = "# nThread 1 nGpus 1 minBytes 1073741824 maxBytes 17179869184 step: 2(factor) warmup iters: 5 iters: 20\n"
    options: dict[str, Any] = {"gpus": "8xH100", "nodes": 2, "nics": "8x400"}
    truncated = only_result(judged(head + table(470, footer=""), **options))
    assert truncated.outcome is Outcome.UNJUDGED
    assert "it ends at 8 GiB of 16 GiB" in truncated.problems[0]
    assert judged(head + table(470), **options).outcome is Outcome.PASS
    assert judged(head + table(100, footer=""), **options).outcome is Outcome.FAIL  # complete rows are evidence
    empty = only_result(judged(head, **options))
    assert "no complete row" in empty.problems[0]


def test_run_that_ended_with_an_error() -> None:
    text = table(470, footer="") + "n1: Test NCCL failure common.cu:1279 'unhandled system error'\n"
    result = only_result(judged(text, gpus="8xH100", nodes=2, nics="8x400"))
    assert result.outcome is Outcome.UNJUDGED
    assert "unhandled system error" in result.problems[0]


def test_forced_ring_on_two_nodes() -> None:
    """190 GB/s are half of what NCCL's usual algorithm reaches on four ports of 400 Gb/s, and good for Ring."""
    options: dict[str, Any] = {"gpus": "8xH100", "nodes": 2, "nics": "4x400"}
    unknown = only_result(judged(table(190), **options))
    assert unknown.outcome is Outcome.UNJUDGED
    assert all(text in unknown.problems[0] for text in ("NCCL's algorithm", "375 GB/s", "200 GB/s"))
    assert judged(table(190), **options, algorithm="Ring").outcome is Outcome.PASS
    assert judged(table(190), **options, algorithm="nvlstree").outcome is Outcome.FAIL
    command = "NCCL_ALGO=RING mpirun -np 16 all_reduce_perf -b 8G -e 8G\n"
    assert judged(command + table(190), **options).outcome is Outcome.PASS
    assert judged(table(100), **options).outcome is Outcome.FAIL  # too low for any algorithm


A100, H100_EFA = ({"gpus": "8xA100-SXM4-40GB", "nics": "16x100", "fabric": "roce"}, {"gpus": "8xH100", "fabric": "efa"})


@pytest.mark.parametrize(
    ("busbw", "options", "outcome", "expected"),
    [
        (189.5, A100 | {"algorithm": "Ring"}, Outcome.PASS, 200),
        (160, A100 | {"algorithm": "Ring"}, Outcome.WARN, 200),
        (150, A100 | {"algorithm": "Ring"}, Outcome.FAIL, 200),
        (189.5, A100 | {"algorithm": "Tree"}, Outcome.FAIL, 237.9),
        (189.5, A100, Outcome.UNJUDGED, 237.9),
        (150, A100, Outcome.FAIL, 237.9),  # too low for any algorithm
        (230, A100, Outcome.PASS, 237.9),
        (380, H100_EFA | {"nics": "32x100", "algorithm": "Ring"}, Outcome.PASS, 400),
        (380, H100_EFA | {"nics": "32x100", "algorithm": "NVLSTree"}, Outcome.FAIL, 487.1),
        # the algorithm does not explain what half of the ports cannot reach
        (340, H100_EFA | {"nics": "16x100", "algorithm": "NVLSTree"}, Outcome.FAIL, 487.1),
        (380, H100_EFA | {"algorithm": "Ring"}, Outcome.UNJUDGED, 487.1),
        (380, H100_EFA, Outcome.UNJUDGED, 487.1),
        (380, H100_EFA | {"algorithm": "NVLSTree"}, Outcome.FAIL, 487.1),
        (180, H100_EFA, Outcome.FAIL, 487.1),
    ],
)
def test_published_value_of_another_algorithm(
    busbw: float, options: dict[str, str], outcome: Outcome, expected: float
) -> None:
    """A published value above the bound of the algorithm in use is not compared; an unknown algorithm is no FAIL."""
    size = 2**34 if options["fabric"] == "efa" else 2**33
    result = only_result(judged(table(busbw, size=size), nodes=2, **options))
    assert result.outcome is outcome
    verdicts = [verdict for verdict in result.verdicts if verdict.metric.startswith("busbw")]
    assert [verdict.basis and verdict.basis.expected for verdict in verdicts] == [expected, expected]
    is_unknown = outcome is Outcome.UNJUDGED
    assert [Reason.ALGORITHM_UNKNOWN in verdict.reasons for verdict in verdicts] == [is_unknown, is_unknown]
    assert not is_unknown or all(f"{expected:g} GB/s" in text and "Ring" in text for text in result.problems)
    assert not is_unknown or all("--algorithm" in verdict.fix for verdict in verdicts)
    assert not is_unknown or ("nics" in options) is not any("--nics" in verdict.fix for verdict in verdicts)


def test_one_node_is_judged_by_the_data_of_the_gpu_model() -> None:
    result = only_result(judged(table(473, ranks=8), gpus="8xH200", nodes=1))
    assert (result.outcome, result.path) == (Outcome.PASS, "inside one node, over NVLink only")
    basis = next(verdict.basis for verdict in result.verdicts if verdict.metric.startswith("busbw"))
    assert basis
    assert (basis.kind, basis.expected) == (BasisKind.SKU, 473)
    assert judged(table(240, ranks=8), gpus="8xH200", nodes=1).outcome is Outcome.FAIL
    between = only_result(judged(table(473, size=2**31, ranks=8), gpus="8xH200", nodes=1))
    assert any("that of 1GiB is used" in note for note in between.notes)


def test_bandwidth_above_the_links_is_no_pass() -> None:
    result = only_result(judged(table(2000, ranks=8), gpus="8xH200", nodes=1))
    assert result.outcome is Outcome.UNJUDGED
    assert result.problems
    between = only_result(judged(table(700), gpus="8xH200", nodes=2, nics="8x400"))
    assert between.outcome is Outcome.UNJUDGED
    assert "implausibly high" in between.problems[0]


def test_operation_from_columns() -> None:
    options: dict[str, Any] = {"gpus": "8xH100", "nodes": 2, "nics": "8x400"}
    unchecked = table(360, operation="all_gather", wrong="N/A")
    assert only_result(judged(unchecked, **options)).name == "all_gather"  # an all-to-all reaches 94 GB/s
    low = only_result(judged(table(60, operation="all_gather", wrong="N/A"), **options))
    assert (low.name, low.outcome) == ("all_gather or all_to_all", Outcome.UNJUDGED)
    named = only_result(judged(table(60, operation="all_gather", wrong="N/A"), "all_to_all", **options))
    assert (named.name, named.outcome) == ("all_to_all", Outcome.FAIL)
    assert only_result(judged(table(360, operation="reduce_scatter"), **options)).name == "reduce_scatter"
    other = "all_gather_perf and all_reduce_perf were run with mpirun, then:\n"  # a line about another program
    assert only_result(judged(other + table(470), **options)).outcome is Outcome.PASS
    command = "mpirun -np 16 all_reduce_perf -b 8G\n"  # the output is more precise than the option
    assert only_result(judged(command + table(470), "all_gather", **options)).name == "all_reduce"
    mismatch = only_result(judged(table(470), "all_gather", **options))
    assert "the columns are not those of all_gather" in mismatch.problems[0]


def test_one_unjudged_operation_of_several() -> None:
    first = f"mpirun all_reduce_perf\n{table(470)}"
    second = f"mpirun broadcast_perf\n{table(45).replace(' sum -1 ', ' none 0 ')}"
    judgement = judged(first + second, gpus="8xH100", nodes=64, nics="8x400")
    assert [result.name for result in judgement.results] == ["all_reduce", "broadcast"]
    assert judgement.outcome is Outcome.UNJUDGED


def test_second_run_in_a_table_is_not_averaged_with_the_first() -> None:
    """The rate of a slow run that ended early would be raised by the good run after it."""
    options: dict[str, Any] = {"gpus": "8xH100", "nodes": 2, "nics": "8x400"}
    smaller = table(280, size=2**32, footer="").splitlines()[1]
    low, good = (table(busbw, footer="").replace("\n", f"\n{smaller}\n", 1) for busbw in (300, 470))
    mixed = judged(low + good, **options)
    assert mixed.outcome is Outcome.UNJUDGED
    assert "a second table begins before the first one ends" in only_result(mixed).problems[0]
    each = judged(table(300) + table(470), **options)
    assert [result.outcome for result in each.results] == [Outcome.FAIL, Outcome.PASS]
    assert each.outcome is Outcome.FAIL


def test_lines_of_two_jobs_that_alternate() -> None:
    first, second = (
        [f"{prefix}: {line}" for line in table(busbw).splitlines()] for prefix, busbw in (("job1", 470), ("job2", 300))
    )
    alternating = "\n".join(line for lines in zip(first, second, strict=True) for line in lines)
    judgement = judged(alternating, gpus="8xH100", nodes=2, nics="8x400")
    assert judgement.outcome is Outcome.UNJUDGED
    assert "appears 2 times" in only_result(judgement).problems[0]


def test_columns_of_a_future_version() -> None:
    options: dict[str, Any] = {"gpus": "8xH100", "nodes": 2, "nics": "8x400"}
    header, row, *footer = table(470).splitlines()
    streams = [header.replace(" root", " root streams"), row.replace(" -1 ", " -1 4 "), *footer]
    assert judged("\n".join(streams), **options).outcome is Outcome.PASS
    path = [header.replace(" root", " root path"), row.replace(" -1 ", " -1 ring "), *footer]
    unknown = judged("\n".join(path), **options)
    assert unknown.outcome is Outcome.UNJUDGED
    assert "row of 8589934592 B: incomplete" in only_result(unknown).problems[0]


@pytest.mark.parametrize(("ranks", "nodes"), [(999_999_999, 1), (999_999_999, 999_999_999), (15, 2), (16, 0)])
def test_number_of_ranks_that_no_cluster_has(ranks: int, nodes: int) -> None:
    """The judge gets a measurement of each rank: a number in hostile text must not fill the memory."""
    log = f"n1:9:9 [0] NCCL INFO comm 0x1 rank 0 nRanks {ranks} nNodes {nodes} localRanks 8\n"
    row = "8589934592 2147483648 float none 0 " + " ".join(["20000 429.50 429.50 0"] * 2)
    judgement = judged(
        f"{log}# broadcast_perf\n# size count type redop root {COLUMNS} {COLUMNS}\n{row}\n", gpus="8xH200"
    )
    assert judgement.outcome is Outcome.UNJUDGED
    assert only_result(judgement).problems


def test_only_the_largest_of_many_sizes_are_judged() -> None:
    rows = (table(470, size=2**33 + number * 2**20).splitlines()[1] for number in range(300))
    header, _, *footer = table(470).splitlines()
    result = only_result(judged("\n".join([header, *rows, *footer]), gpus="8xH100", nodes=2, nics="8x400"))
    bandwidths = [verdict for verdict in (*result.verdicts, *result.other_sizes) if verdict.metric != "wrong_elements"]
    assert (len(result.measured), len(bandwidths)) == (300, 2 * 256)
    assert result.outcome is Outcome.PASS


def test_invalid_operation() -> None:
    with pytest.raises(UsageError, match="--operation"):
        judged(table(470), "allreduce")


@pytest.mark.parametrize(
    ("network", "fabric", "outcome", "said"),
    [
        ("FastSocket", "tcp", Outcome.PASS, ""),
        ("FasTrak", "tcpxo", Outcome.FAIL, ""),
        ("GPUDirectTCPX_v7", "tcpx", Outcome.UNJUDGED, "tcpx"),
        ("Foo_v3", "Foo_v3", Outcome.UNJUDGED, "Foo_v3"),
        ("UCX", "UCX", Outcome.UNJUDGED, "UCX"),
        ("IBext_v8", "ib", Outcome.PASS, ""),
    ],
)
def test_the_network_is_the_one_that_the_log_names(network: str, fabric: str, outcome: Outcome, said: str) -> None:
    log = f"n1:9:9 [0] NCCL INFO Using network {network}\n"
    judgement = judged(log + table(22.0), gpus="8xH100", nodes=2, nics="1x100")
    assert (judgement.hardware.fabric, judgement.outcome) == (fabric, outcome)
    assert said in " ".join(only_result(judgement).problems)
    sockets = [text for text in judgement.contradictions if "sockets" in text]
    assert bool(sockets) is (fabric == "tcp")
    assert all(f"NET/{network}" in text for text in sockets)


def test_networks_of_several_kinds() -> None:
    """Neither is assumed to be the one that limits the bandwidth."""
    log = "".join(
        f"n1:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/{name}/0/GDRDMA\n"
        for name in ("IB", "FasTrak")
    )
    judgement = judged(log + table(470), gpus="8xH100", nodes=2, nics="8x400")
    assert (judgement.hardware.fabric, judgement.outcome) == ("FasTrak, IB", Outcome.UNJUDGED)
    assert "FasTrak, IB" in only_result(judgement).problems[0]
