"""The fixtures have the layout of nccl-tests 2.19 (src/util.cu) for four GPUs; their numbers are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.against_nccl_tests import CannotCompare, Figure, Row, Start, compare, main, parse, run_nccl_tests

from benchmarks import against_nccl_tests as script
from tests import paths

FIXTURES = paths.FIXTURES / "nccl-tests"
# A program of nccl-tests that knows two command lines, and no other
FAKE = """#!/bin/sh
printf '%s\\n' "$LD_PRELOAD" > "$0.preloaded"
printf '%s\\n' "$NCCL_GRAPH_MIXING_SUPPORT" > "$0.mixing"
case "$*" in
"-g 4 -d float -c 1 -b 64M -e 1G -f 4 -n 50 -w 10") cat FIXTURE.txt ;;
"-g 4 -d float -c 1 -b 8 -e 64K -f 2 -n 100 -w 20 -G 20") cat FIXTURE-graph.txt ;;
*) echo "invalid option: $*" >&2; exit 3 ;;
esac
"""


def printed(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "build"
    folder.mkdir()
    for program in script.PROGRAMS.values():
        (folder / program).write_text(FAKE.replace("FIXTURE", str(FIXTURES / program)))
        (folder / program).chmod(0o755)
    return folder


def test_a_table_is_read_with_both_placements_and_the_library() -> None:
    table = parse(printed("all_reduce_perf"))
    assert table.nccl == "2.28.9"
    assert list(table.out_of_place) == [64 * 2**20, 256 * 2**20, 2**30]
    assert table.out_of_place[2**30] == Figure(4527.88, 355.71, 0)
    assert table.in_place[2**30] == Figure(4536.94, 355.0, 0)


def test_what_is_not_checked_is_not_right() -> None:
    table = parse(printed("alltoall_perf"))
    assert table.out_of_place[2**30].wrong == 0
    assert table.in_place[2**30].wrong is None


def test_wrong_elements_and_times_of_any_length_are_read() -> None:
    line = "   536870912      67108864     float    none      -1"
    line += "   374425   36.79   18.39   1e+06   9568.2   38.97   1.9e3     N/A"
    table = parse(f"NCCL version 2.21.5+cuda12.4\n{line}\n")
    assert table.nccl == "2.21.5"
    assert table.out_of_place == {536870912: Figure(374425, 18.39, 1_000_000)}
    assert table.in_place == {536870912: Figure(9568.2, 1900, None)}


@pytest.mark.parametrize(
    "text",
    ["", "Test NCCL failure common.cu:1000\n", "\n".join(printed("all_reduce_perf").splitlines()[:12])],
    ids=["nothing", "a failure", "no row"],
)
def test_output_without_a_table_is_no_result(text: str) -> None:
    with pytest.raises(CannotCompare, match="no table"):
        parse(text)


def test_each_program_is_run_as_the_figures_need_it(programs: Path) -> None:
    nccl, figures = run_nccl_tests(programs, Start(4), {"PATH": "/usr/bin:/bin", "LD_PRELOAD": ""})
    assert nccl == "2.28.9"
    assert len(figures) == 4 * 3 + 3
    assert figures["parity all_reduce 67108864"].busbw == 314.0  # in place, as torch does it
    assert figures["parity all_gather 67108864"].busbw == 290.58  # out of place
    assert figures["device all_reduce 8"].us == 10.76


def test_mpirun_starts_a_process_a_gpu(programs: Path) -> None:
    with pytest.raises(CannotCompare, match=r"^env A=1 .*all_reduce_perf -g 1 .*ended with 3:\ninvalid option: -g 1"):
        run_nccl_tests(programs, Start(4, ("env", "A=1")), {"PATH": "/usr/bin:/bin"})


def test_a_program_that_fails_is_told_with_what_it_said(programs: Path) -> None:
    with pytest.raises(CannotCompare, match="ended with 3:\ninvalid option: -g 8"):
        run_nccl_tests(programs, Start(8), {"PATH": "/usr/bin:/bin"})
    with pytest.raises(CannotCompare, match="No such file"):
        run_nccl_tests(programs / "missing", Start(4), {})


@pytest.mark.parametrize(
    ("mode", "theirs", "ours", "within"),
    [
        ("parity", (300.0, 302.0), (304.0, 304.0), True),
        ("parity", (300.0, 302.0), (304.0, 304.1), False),
        ("parity", (300.0, 300.0), (296.9, 297.0), False),
        ("device", (10.0, 11.0), (13.5, 13.5), True),
        ("device", (10.0, 11.0), (13.5, 13.6), False),
        ("device", (10.0, 11.0), (7.4, 7.5), False),
    ],
)
def test_gates(mode: str, theirs: tuple[float, ...], ours: tuple[float, ...], within: bool) -> None:
    assert Row("all_reduce", 2**30, mode, theirs, ours).within is within


def slower(figures: dict[str, Figure], share: float) -> dict[str, Figure]:
    return {name: replace(one, us=one.us * (1 + share), busbw=one.busbw / (1 + share)) for name, one in figures.items()}


@pytest.mark.parametrize(("share", "code"), [(0.009, 0), (0.012, 1)])
def test_the_exit_code_says_whether_all_is_within_the_gates(
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    share: float,
    code: int,
) -> None:
    _, same = run_nccl_tests(programs, Start(4), {"PATH": "/usr/bin:/bin"})
    monkeypatch.delenv("NCCL_GRAPH_MIXING_SUPPORT", raising=False)
    monkeypatch.setattr(script, "torch_nccl", lambda: (Path("/lib/libnccl.so.2"), "2.28.9"))
    monkeypatch.setattr(script, "run_seatrial", lambda gpus, buffers: ({"gpu": "NVIDIA H200"}, slower(same, share)))
    out = tmp_path / "against.json"
    assert main(["--nccl-tests", str(programs), "--gpus", "4", "--out", str(out)]) == code
    record = json.loads(out.read_text())
    assert record["within"] is (code == 0)
    assert [row["within"] for row in record["rows"]] == [code == 0] * 12 + [True] * 3
    assert record["rows"][0]["apart"] == pytest.approx(1 / (1 + share) - 1)
    assert (programs / "alltoall_perf.preloaded").read_text() == "/lib/libnccl.so.2\n"
    assert record["on_both_sides"] == {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
    assert (programs / "all_reduce_perf.mixing").read_text() == "0\n"
    told = capsys.readouterr().out
    assert ("BEYOND" in told) is (code == 1)
    assert "nccl-tests -g 4, one process" in told


def test_another_library_cannot_be_compared(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "torch_nccl", lambda: (Path("/lib/libnccl.so.2"), "2.27.3"))
    assert main(["--nccl-tests", str(programs), "--gpus", "4", "--out", str(tmp_path / "out.json")]) == 2
    assert "nccl-tests used NCCL 2.28.9, torch has 2.27.3" in capsys.readouterr().err


def test_wrong_data_or_a_missing_figure_is_not_compared(programs: Path) -> None:
    _, same = run_nccl_tests(programs, Start(4), {"PATH": "/usr/bin:/bin"})
    name = "parity all_to_all 1073741824"
    with pytest.raises(CannotCompare, match=f"{name}: wrong elements: 3"):
        compare([(same, {**same, name: replace(same[name], wrong=3)})])
    with pytest.raises(CannotCompare, match=f"{name} is missing"):
        compare([(same, {key: one for key, one in same.items() if key != name})])
