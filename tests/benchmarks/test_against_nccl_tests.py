"""nccl-tests is a program that prints a file: real output of published runs (``published``), or output in the format of
nccl-tests 2.19 (src/util.cu) for four GPUs with invented numbers. seatrial is real, on CPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from benchmarks.against_nccl_tests import (
    SERIES,
    CannotCompare,
    Launcher,
    Results,
    Row,
    Series,
    WorkerOutput,
    main,
    require_results,
    run_nccl_tests,
)

from benchmarks import against_nccl_tests as script
from seatrial.discover.nccl_tests_output import Timing
from tests import paths

FIXTURES = paths.FIXTURES / "nccl-tests"
# Replaces nccl-tests; accepts two command lines
FAKE = """#!/bin/sh
printf '%s\\n' "$LD_PRELOAD" > "$0.preloaded"
printf '%s\\n' "$NCCL_GRAPH_MIXING_SUPPORT" > "$0.mixing"
case "$*" in
"-g 4 -d float -c 1 -b 64M -e 1G -f 4 -n 50 -w 10") cat FIXTURE.txt ;;
"-g 4 -d float -c 1 -b 8 -e 64K -f 2 -n 100 -w 20 -G 20") cat FIXTURE-graph.txt ;;
*) echo "invalid option: $*" >&2; exit 3 ;;
esac
"""
# As FAKE, but prints output of two published runs below the line that NCCL_DEBUG=VERSION adds
PUBLISHED = """#!/bin/sh
case "$*" in
"-g 2 -d float -c 1 -b 64M -e 1G -f 4 -n 50 -w 10") ;;
*) echo "invalid option: $*" >&2; exit 3 ;;
esac
grep -h '^NCCL version' FOLDER/15.txt
cat FOLDER/TABLE.txt
"""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LD_PRELOAD": ""}


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "build"
    folder.mkdir()
    for program in script.PROGRAMS.values():
        write_program(folder / program, FAKE.replace("FIXTURE", str(FIXTURES / program)))
    return folder


@pytest.mark.training
def test_real_seatrial_is_compared_with_published_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published = str(FIXTURES / "published")
    for program, table in (("all_reduce_perf", "01"), ("all_gather_perf", "12")):
        write_program(tmp_path / program, PUBLISHED.replace("FOLDER", published).replace("TABLE", table))
    sizes = (2**10, 2**20)
    monkeypatch.setattr(
        script, "SERIES", [Series("back_to_back", name, sizes) for name in ("all_reduce", "all_gather")]
    )
    monkeypatch.setattr(script, "MAX_ROUNDS", 1)
    monkeypatch.setattr(script, "torch_nccl", lambda: (Path("/lib/libnccl.so.2"), "2.23.4"))
    out = tmp_path / "against.json"
    arguments = ["--nccl-tests", str(tmp_path), "--gpus", "2", "--device", "cpu", "--out", str(out)]
    assert main(arguments) == 3, "one round has no A/A variation"
    record = json.loads(out.read_text())
    assert record["outcomes"] == {"passed": 0, "failed": 0, "not comparable": 4}
    assert [(row["operation"], row["size"], *row["nccl_tests"]) for row in record["rows"]] == [
        ("all_reduce", 2**10, 0.01),
        ("all_reduce", 2**20, 6.4),
        ("all_gather", 2**10, 0.02),
        ("all_gather", 2**20, 12.33),
    ]
    assert all(0 < value < 1000 for row in record["rows"] for value in row["seatrial"])
    assert record["group"]["world_size"] == 2
    assert "0 passed, 0 failed, 4 not comparable" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Test NCCL failure common.cu:1000\n",
        (FIXTURES / "published" / "12.txt").read_text(),
        2 * (FIXTURES / "all_reduce_perf.txt").read_text(),
    ],
    ids=["nothing", "a failure", "no NCCL version", "two tables"],
)
def test_output_without_one_table_and_a_version_is_an_error(programs: Path, text: str) -> None:
    (programs / "output").write_text(text)
    write_program(programs / "all_reduce_perf", f"#!/bin/sh\ncat {programs}/output\n")
    with pytest.raises(CannotCompare, match="tables, expected 1, and NCCL version"):
        run_nccl_tests(programs, Launcher(4), ENVIRONMENT, SERIES)


def test_each_program_runs_with_its_arguments(programs: Path) -> None:
    nccl, results = run_nccl_tests(programs, Launcher(4), ENVIRONMENT, SERIES)
    assert nccl == "2.28.9"
    assert len(results) == 4 * 3 + 3
    assert results["back_to_back all_reduce 67108864"].busbw == 314.0  # in place, as in torch
    assert results["back_to_back all_gather 67108864"].busbw == 290.58  # out of place
    assert results["cuda_graph all_reduce 8"].time_us == 10.76


def test_mpirun_starts_one_process_per_gpu(programs: Path) -> None:
    with pytest.raises(CannotCompare, match=r"^env A=1 .*all_reduce_perf -g 1 .*exited with 3:\ninvalid option: -g 1"):
        run_nccl_tests(programs, Launcher(4, ("env", "A=1")), ENVIRONMENT, SERIES)


def test_errors_of_nccl_tests_are_reported(programs: Path) -> None:
    with pytest.raises(CannotCompare, match="exited with 3:\ninvalid option: -g 8"):
        run_nccl_tests(programs, Launcher(8), ENVIRONMENT, SERIES)
    with pytest.raises(CannotCompare, match="No such file"):
        run_nccl_tests(programs / "missing", Launcher(4), {}, SERIES)


def steady(value: float, rounds: int = 7, variation: float = 0.0) -> tuple[float, ...]:
    """Values with the median ``value``; the smallest and the largest differ by ``variation``."""
    return (value - variation / 2, *[value] * (rounds - 2), value + variation / 2)


@pytest.mark.parametrize(
    ("mode", "nccl_tests", "seatrial", "outcome"),
    [
        ("back_to_back", steady(300), steady(302.9), "passed"),
        ("back_to_back", steady(300), steady(303.1), "failed"),
        ("back_to_back", steady(300), steady(296.9), "failed"),
        ("back_to_back", steady(300, variation=4.5), steady(302.9), "passed"),
        ("back_to_back", steady(300, variation=4.6), steady(300.0), "not comparable"),
        ("back_to_back", steady(300), steady(310.0, variation=4.8), "not comparable"),
        ("back_to_back", steady(300, 5), steady(300.0, 5), "not comparable"),
        ("cuda_graph", steady(10), steady(13.0), "passed"),
        ("cuda_graph", steady(10), steady(13.1), "failed"),
        ("cuda_graph", steady(10), steady(6.9), "failed"),
        ("cuda_graph", steady(10, variation=4.6), steady(10), "not comparable"),
    ],
)
def test_outcome(mode: str, nccl_tests: tuple[float, ...], seatrial: tuple[float, ...], outcome: str) -> None:
    assert Row("all_reduce", 2**30, mode, nccl_tests, seatrial).outcome == outcome


def slower(results: Results, fraction: float) -> dict[str, Timing]:
    return {
        name: replace(result, time_us=result.time_us * (1 + fraction), busbw=result.busbw / (1 + fraction))
        for name, result in results.items()
    }


@pytest.fixture
def same(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    """The results of nccl-tests; the libnccl of torch has its version."""
    monkeypatch.delenv("NCCL_GRAPH_MIXING_SUPPORT", raising=False)
    monkeypatch.setattr(script, "torch_nccl", lambda: (Path("/lib/libnccl.so.2"), "2.28.9"))
    return run_nccl_tests(programs, Launcher(4), ENVIRONMENT, SERIES)[1]


@pytest.mark.parametrize(("fraction", "code"), [(0.009, 0), (0.012, 1)])
def test_exit_code_1_above_a_threshold(
    programs: Path, same: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float, code: int
) -> None:
    output = WorkerOutput({"gpu": "NVIDIA H200", "api": "NCCL"}, slower(same, fraction))
    monkeypatch.setattr(script, "run_seatrial", lambda *_: output)
    out = tmp_path / "against.json"
    assert main(["--nccl-tests", str(programs), "--gpus", "4", "--out", str(out)]) == code
    record = json.loads(out.read_text())
    passed = 3 + 12 * (code == 0)
    assert record["outcomes"] == {"passed": passed, "failed": 15 - passed, "not comparable": 0}
    assert [row["outcome"] for row in record["rows"]][12:] == ["passed"] * 3
    assert {len(row["seatrial"]) for row in record["rows"]} == {7}
    assert record["rows"][0]["difference"] == pytest.approx(1 / (1 + fraction) - 1)
    assert (programs / "alltoall_perf.preloaded").read_text() == "/lib/libnccl.so.2\n"
    assert record["environment_of_both"] == {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
    assert (programs / "all_reduce_perf.mixing").read_text() == "0\n"


@pytest.mark.parametrize(
    ("deviations", "rounds", "outcome"),
    [
        ([0.03], 9, "passed"),  # from the second smallest to the second largest of 9 values: 95 % confidence interval
        ([0.012] * 5, 20, "passed"),
        ([0.013, -0.013] * 11, 21, "not comparable"),
    ],
    ids=["one outlier", "five outliers", "all rounds"],
)
def test_an_operation_that_varies_is_measured_in_more_rounds(
    programs: Path,
    same: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deviations: list[float],
    rounds: int,
    outcome: str,
) -> None:
    number, pending_operations = count(), []

    def run_seatrial(_gpus: int, _buffers: str, _device: str, pending: list[Series]) -> WorkerOutput:
        deviation = dict(enumerate(deviations)).get(next(number), 0.0)
        pending_operations.append([series.operation for series in pending])
        results = {name: same[name] for series in pending for name in map(series.name, series.sizes)}
        varied = slower({name: result for name, result in results.items() if "all_gather" in name}, deviation)
        return WorkerOutput({"gpu": "NVIDIA H200", "api": "NCCL"}, {**results, **varied})

    monkeypatch.setattr(script, "run_seatrial", run_seatrial)
    out = tmp_path / "against.json"
    code = main(["--nccl-tests", str(programs), "--gpus", "4", "--out", str(out)])
    assert code == (0 if outcome == "passed" else 3)
    rows = json.loads(out.read_text())["rows"]
    gathers = [row for row in rows if row["operation"] == "all_gather"]
    assert {(len(row["seatrial"]), row["outcome"]) for row in gathers} == {(rounds, outcome)}
    assert {(len(row["seatrial"]), row["outcome"]) for row in rows if row not in gathers} == {(7, "passed")}
    assert pending_operations[7:] == [["all_gather"]] * (rounds - 7)


def test_different_nccl_versions_are_not_comparable(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "torch_nccl", lambda: (Path("/lib/libnccl.so.2"), "2.27.3"))
    assert main(["--nccl-tests", str(programs), "--gpus", "4", "--out", str(tmp_path / "out.json")]) == 2
    assert "nccl-tests used NCCL 2.28.9, torch has 2.27.3" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [3.0, None])
def test_wrong_elements_or_missing_results_are_not_comparable(same: Results, wrong: float | None) -> None:
    name = "back_to_back all_to_all 1073741824"
    require_results(same, SERIES)
    with pytest.raises(CannotCompare, match=f"{name}: wrong elements: {wrong}"):
        require_results({**same, name: replace(same[name], wrong=wrong)}, SERIES)
    with pytest.raises(CannotCompare, match=f"{name} is missing"):
        require_results({key: result for key, result in same.items() if key != name}, SERIES)
