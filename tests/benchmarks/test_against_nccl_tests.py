"""The fixtures have the format of nccl-tests 2.19 (src/util.cu) for four GPUs, with invented numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.against_nccl_tests import CannotCompare, Launcher, Result, Row, compare, main, parse, run_nccl_tests

from benchmarks import against_nccl_tests as script
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


def fixture(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "build"
    folder.mkdir()
    for program in script.PROGRAMS.values():
        (folder / program).write_text(FAKE.replace("FIXTURE", str(FIXTURES / program)))
        (folder / program).chmod(0o755)
    return folder


def test_parse_reads_both_placements_and_the_nccl_version() -> None:
    table = parse(fixture("all_reduce_perf"))
    assert table.nccl == "2.28.9"
    assert list(table.out_of_place) == [64 * 2**20, 256 * 2**20, 2**30]
    assert table.out_of_place[2**30] == Result(4527.88, 355.71, 0)
    assert table.in_place[2**30] == Result(4536.94, 355.0, 0)


def test_unchecked_results_have_no_error_count() -> None:
    table = parse(fixture("alltoall_perf"))
    assert table.out_of_place[2**30].wrong == 0
    assert table.in_place[2**30].wrong is None


def test_parse_reads_wrong_elements_and_exponents() -> None:
    line = "   536870912      67108864     float    none      -1"
    line += "   374425   36.79   18.39   1e+06   9568.2   38.97   1.9e3     N/A"
    table = parse(f"NCCL version 2.21.5+cuda12.4\n{line}\n")
    assert table.nccl == "2.21.5"
    assert table.out_of_place == {536870912: Result(374425, 18.39, 1_000_000)}
    assert table.in_place == {536870912: Result(9568.2, 1900, None)}


@pytest.mark.parametrize(
    "text",
    ["", "Test NCCL failure common.cu:1000\n", "\n".join(fixture("all_reduce_perf").splitlines()[:12])],
    ids=["nothing", "a failure", "no row"],
)
def test_output_without_a_table_is_an_error(text: str) -> None:
    with pytest.raises(CannotCompare, match="NCCL version or no table"):
        parse(text)


def test_each_program_runs_with_its_arguments(programs: Path) -> None:
    nccl, results = run_nccl_tests(programs, Launcher(4), {"PATH": "/usr/bin:/bin", "LD_PRELOAD": ""})
    assert nccl == "2.28.9"
    assert len(results) == 4 * 3 + 3
    assert results["back_to_back all_reduce 67108864"].busbw == 314.0  # in place, as in torch
    assert results["back_to_back all_gather 67108864"].busbw == 290.58  # out of place
    assert results["cuda_graph all_reduce 8"].us == 10.76


def test_mpirun_starts_one_process_per_gpu(programs: Path) -> None:
    with pytest.raises(CannotCompare, match=r"^env A=1 .*all_reduce_perf -g 1 .*exited with 3:\ninvalid option: -g 1"):
        run_nccl_tests(programs, Launcher(4, ("env", "A=1")), {"PATH": "/usr/bin:/bin"})


def test_errors_of_nccl_tests_are_reported(programs: Path) -> None:
    with pytest.raises(CannotCompare, match="exited with 3:\ninvalid option: -g 8"):
        run_nccl_tests(programs, Launcher(8), {"PATH": "/usr/bin:/bin"})
    with pytest.raises(CannotCompare, match="No such file"):
        run_nccl_tests(programs / "missing", Launcher(4), {})


@pytest.mark.parametrize(
    ("mode", "nccl_tests", "seatrial", "within"),
    [
        ("back_to_back", (300.0, 302.0), (304.0, 304.0), True),
        ("back_to_back", (300.0, 302.0), (304.0, 304.1), False),
        ("back_to_back", (300.0, 300.0), (296.9, 297.0), False),
        ("cuda_graph", (10.0, 11.0), (13.5, 13.5), True),
        ("cuda_graph", (10.0, 11.0), (13.5, 13.6), False),
        ("cuda_graph", (10.0, 11.0), (7.4, 7.5), False),
    ],
)
def test_thresholds(mode: str, nccl_tests: tuple[float, ...], seatrial: tuple[float, ...], within: bool) -> None:
    assert Row("all_reduce", 2**30, mode, nccl_tests, seatrial).within is within


def slower(results: dict[str, Result], fraction: float) -> dict[str, Result]:
    return {
        name: replace(result, us=result.us * (1 + fraction), busbw=result.busbw / (1 + fraction))
        for name, result in results.items()
    }


@pytest.mark.parametrize(("fraction", "code"), [(0.009, 0), (0.012, 1)])
def test_exit_code_1_above_a_threshold(
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fraction: float,
    code: int,
) -> None:
    _, same = run_nccl_tests(programs, Launcher(4), {"PATH": "/usr/bin:/bin"})
    monkeypatch.delenv("NCCL_GRAPH_MIXING_SUPPORT", raising=False)
    monkeypatch.setattr(script, "torch_nccl", lambda: (Path("/lib/libnccl.so.2"), "2.28.9"))
    monkeypatch.setattr(script, "run_seatrial", lambda gpus, buffers: ({"gpu": "NVIDIA H200"}, slower(same, fraction)))
    out = tmp_path / "against.json"
    assert main(["--nccl-tests", str(programs), "--gpus", "4", "--out", str(out)]) == code
    record = json.loads(out.read_text())
    assert record["within"] is (code == 0)
    assert [row["within"] for row in record["rows"]] == [code == 0] * 12 + [True] * 3
    assert record["rows"][0]["difference"] == pytest.approx(1 / (1 + fraction) - 1)
    assert (programs / "alltoall_perf.preloaded").read_text() == "/lib/libnccl.so.2\n"
    assert record["environment_of_both"] == {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
    assert (programs / "all_reduce_perf.mixing").read_text() == "0\n"
    output = capsys.readouterr().out
    assert ("ABOVE THRESHOLD" in output) is (code == 1)
    assert "nccl-tests -g 4, one process" in output


def test_different_nccl_versions_are_not_comparable(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "torch_nccl", lambda: (Path("/lib/libnccl.so.2"), "2.27.3"))
    assert main(["--nccl-tests", str(programs), "--gpus", "4", "--out", str(tmp_path / "out.json")]) == 2
    assert "nccl-tests used NCCL 2.28.9, torch has 2.27.3" in capsys.readouterr().err


def test_wrong_elements_or_missing_results_are_not_comparable(programs: Path) -> None:
    _, same = run_nccl_tests(programs, Launcher(4), {"PATH": "/usr/bin:/bin"})
    name = "back_to_back all_to_all 1073741824"
    with pytest.raises(CannotCompare, match=f"{name}: wrong elements: 3"):
        compare([(same, {**same, name: replace(same[name], wrong=3)})])
    with pytest.raises(CannotCompare, match=f"{name} is missing"):
        compare([(same, {key: result for key, result in same.items() if key != name})])
