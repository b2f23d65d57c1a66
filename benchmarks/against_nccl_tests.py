"""Are seatrial's figures of collective operations those of nccl-tests? On the same GPUs, over the same libnccl.

    python benchmarks/against_nccl_tests.py --nccl-tests nccl-tests/build --gpus 8 --out against.json

It runs nccl-tests and seatrial's own instrument in turn, seven times each, so that how much either repeats itself
stands beside how far the two are apart. It ends with 1 where they differ by more than the gates, with 2 where they
cannot be compared. nccl-tests runs as one process with ``-g N``: one thread starts the work of all GPUs, where torch
has a process for each. With ``--mpirun 'mpirun -np 8'``, and nccl-tests built with MPI=1, it has a process for each as
well: the harder comparison, since one thread takes longer to start the work of all GPUs than each process for its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
}
IN_PLACE = {"all_reduce"}  # what torch does in place, as the operations of seatrial do
LARGE, SMALL = (64 * 2**20, 256 * 2**20, 2**30), (8, 2**10, 64 * 2**10)
ROUNDS = 7  # an odd number, for the median: rounds of all-to-all of 64 MiB are up to 6 % apart, on either side (4 H200)
RATIO_GATE, US_GATE = 0.01, 3.0

# one line of nccl-tests' table (src/util.cu): size, count, type, redop, root, then both placements
_COLUMNS = r"\s+([\d.e+]+)\s+([\d.e+]+)\s+([\d.e+]+)\s+(\S+)"
_ROW = re.compile(rf"\s*(\d+)\s+(\d+)\s+[a-z]\w*\s+[a-z]\w*\s+-?\d+{_COLUMNS}{_COLUMNS}")
_LIBRARY = re.compile(r"nccl-library=(\d+)|^NCCL version (\d+)\.(\d+)\.(\d+)", re.MULTILINE)


class CannotCompare(Exception):
    """Why there is nothing to compare."""


@dataclass(frozen=True)
class Figure:
    """One operation at one size: us per operation, GB/s, and how many elements were wrong (None: not checked)."""

    us: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True)
class Start:
    """How nccl-tests is started: one process for all GPUs, or by ``mpirun`` a process for each."""

    gpus: int
    mpirun: tuple[str, ...] = ()

    @property
    def each(self) -> int:
        """GPUs of a process."""
        return 1 if self.mpirun else self.gpus

    def __str__(self) -> str:
        return f"a process a GPU ({' '.join(self.mpirun)})" if self.mpirun else f"-g {self.gpus}, one process"


@dataclass(frozen=True)
class Table:
    """What one program of nccl-tests printed: NCCL's version, and by size the figures out of place and in place."""

    nccl: str
    out_of_place: dict[int, Figure]
    in_place: dict[int, Figure]


@dataclass(frozen=True)
class Row:
    """One comparison: the rounds of both sides, in GB/s (parity) or us (device)."""

    operation: str
    size: int
    mode: str
    nccl_tests: tuple[float, ...]
    seatrial: tuple[float, ...]

    @property
    def apart(self) -> float:
        """By how much seatrial differs: a share of nccl-tests' figure in mode parity, us in mode device."""
        theirs, ours = median(self.nccl_tests), median(self.seatrial)
        return ours / theirs - 1 if self.mode == "parity" else ours - theirs

    @property
    def within(self) -> bool:
        return abs(self.apart) <= (RATIO_GATE if self.mode == "parity" else US_GATE)


def parse(text: str) -> Table:
    """Read nccl-tests' output. Raises CannotCompare on one that holds no table, or does not say which NCCL it used."""
    library = _LIBRARY.search(text)
    rows = [found for line in text.splitlines() if (found := _ROW.match(line))]
    if not library or not rows:
        raise CannotCompare(f"nccl-tests printed no version of NCCL, or no table:\n{text[-2000:]}")
    return Table(
        nccl=_version(int(library[1])) if library[1] else ".".join(library.group(2, 3, 4)),
        out_of_place={int(row[1]): _figure(*row.group(3, 4, 5, 6)) for row in rows},
        in_place={int(row[1]): _figure(*row.group(7, 8, 9, 10)) for row in rows},
    )


def _version(code: int) -> str:
    """NCCL_VERSION_CODE (nccl.h, since 2.9): 22809 is 2.28.9."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _figure(us: str, _algbw: str, busbw: str, wrong: str) -> Figure:
    return Figure(float(us), float(busbw), None if wrong == "N/A" else int(float(wrong)))


def run_nccl_tests(folder: Path, start: Start, environment: Mapping[str, str]) -> tuple[str, dict[str, Figure]]:
    """The NCCL that was used, and the figures by ``parity all_gather 1073741824``."""
    found: dict[str, Figure] = {}
    large, small = ["-b", "64M", "-e", "1G", "-f", "4", "-n", "50", "-w", "10"], ["-b", "8", "-e", "64K", "-f", "2"]
    for operation, program in PROGRAMS.items():
        printed = _run(folder / program, start, large, environment)
        found |= {f"parity {operation} {size}": one for size, one in _of(printed, operation).items() if size in LARGE}
    graph = _run(folder / PROGRAMS["all_reduce"], start, [*small, "-n", "100", "-w", "20", "-G", "20"], environment)
    found |= {f"device all_reduce {size}": one for size, one in _of(graph, "all_reduce").items() if size in SMALL}
    return graph.nccl, found


def _of(table: Table, operation: str) -> dict[int, Figure]:
    return table.in_place if operation in IN_PLACE else table.out_of_place


def _run(program: Path, start: Start, arguments: Sequence[str], environment: Mapping[str, str]) -> Table:
    command = [*start.mpirun, str(program), "-g", str(start.each), "-d", "float", "-c", "1", *arguments]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompare(f"{' '.join(command)}: {error}") from error
    if ended.returncode:
        raise CannotCompare(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return parse(ended.stdout)


def run_seatrial(gpus: int, buffers: str) -> tuple[dict[str, Any], dict[str, Figure]]:
    """What describes the group, and the figures by the same names."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        command = [*torchrun, __file__, "--worker", str(out), "--buffers", buffers]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if ended.returncode or not out.exists():
            raise CannotCompare(f"seatrial's instrument ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
        read = json.loads(out.read_text())
    return read["group"], {name: Figure(**figure) for name, figure in read["figures"].items()}


def work(out: Path, buffers: str) -> None:
    """One rank of seatrial's instrument; rank 0 writes the figures."""
    from seatrial.bench import collectives, group
    from seatrial.bench.operations import OPERATIONS

    device = f"cuda:{os.environ['LOCAL_RANK']}"
    group.open_group(device, timeout_s=300)
    described, found = collectives.describe_group(), {}
    described["called"] = collectives.describe_api(device)
    for name in PROGRAMS:
        for size in sorted(LARGE, reverse=True):  # as the checks do: the smaller are cut from the largest's memory
            result = collectives.measure_back_to_back(OPERATIONS[name], size, "float32", device, 2.0, buffers=buffers)
            found[f"parity {name} {size}"] = _ours(result, OPERATIONS[name].busbw_factor)
    for size in SMALL:
        result = collectives.measure_cuda_graph(OPERATIONS["all_reduce"], size, "float32", device, 2.0, buffers=buffers)
        found[f"device all_reduce {size}"] = _ours(result, OPERATIONS["all_reduce"].busbw_factor)
    if os.environ["RANK"] == "0":
        figures = {name: asdict(figure) for name, figure in found.items()}
        out.write_text(json.dumps({"group": described, "figures": figures}))
    group.close_group()
    group.exit_without_teardown()


def _ours(result: Any, factor: Any) -> Figure:
    seconds = median(result.timings.means)
    wrong = sum(mismatch.wrong for mismatch in result.mismatches.values())
    return Figure(seconds * 1e6, result.size / seconds / 1e9 * factor(result.timings.ranks), wrong)


def torch_nccl() -> tuple[Path, str]:
    """The libnccl that torch loads, and its version. Raises CannotCompare where it loads none."""
    import torch

    if not torch.distributed.is_nccl_available():
        raise CannotCompare(f"torch {torch.__version__} has no NCCL")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    mapped = re.findall(r"(/\S*libnccl\.so\S*)", Path("/proc/self/maps").read_text())
    if not mapped:
        raise CannotCompare(f"torch {torch.__version__} has NCCL {version} built in: no libnccl.so for nccl-tests")
    return Path(mapped[0]), version


def compare(rounds: Sequence[tuple[dict[str, Figure], dict[str, Figure]]]) -> list[Row]:
    """``rounds``: nccl-tests' figures and ours. Raises CannotCompare where one lacks a figure, or data was wrong."""
    rows = []
    for mode, operation, size in [
        *(("parity", operation, size) for operation in PROGRAMS for size in LARGE),
        *(("device", "all_reduce", size) for size in SMALL),
    ]:
        name = f"{mode} {operation} {size}"
        pairs = [(_checked(theirs, name), _checked(ours, name)) for theirs, ours in rounds]
        values = [tuple(one.busbw if mode == "parity" else one.us for one in pair) for pair in pairs]
        sides = [tuple(value[side] for value in values) for side in (0, 1)]
        rows.append(Row(operation, size, mode, *sides))
    return rows


def _checked(figures: Mapping[str, Figure], name: str) -> Figure:
    if name not in figures:
        raise CannotCompare(f"{name} is missing; here are {', '.join(figures)}")
    if figures[name].wrong != 0:
        raise CannotCompare(f"{name}: wrong elements: {figures[name].wrong}")
    return figures[name]


def table(rows: Sequence[Row]) -> str:
    """The comparison for people; A/A: how far the rounds of one side are apart."""
    head = f"{'':30}{'nccl-tests':>12}{'seatrial':>12}{'apart':>11}{'A/A theirs':>12}{'A/A ours':>11}"
    lines = [head]
    for row in rows:
        unit = "GB/s" if row.mode == "parity" else "us"
        name = f"{row.mode} {row.operation} {_short(row.size)}"
        theirs, ours = (f"{median(side):.4g} {unit}" for side in (row.nccl_tests, row.seatrial))
        apart = f"{100 * row.apart:+.2f} %" if row.mode == "parity" else f"{row.apart:+.2f} us"
        repeats = [f"{100 * (max(side) / min(side) - 1):.2f} %" for side in (row.nccl_tests, row.seatrial)]
        verdict = "" if row.within else "  BEYOND"
        lines.append(f"{name:30}{theirs:>12}{ours:>12}{apart:>11}{repeats[0]:>12}{repeats[1]:>11}{verdict}")
    return "\n".join(lines)


def _short(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl-tests", type=Path, metavar="DIR", help="holds all_reduce_perf and its like")
    parser.add_argument("--gpus", type=int, metavar="N")
    parser.add_argument("--mpirun", type=shlex.split, default=[], help="starts nccl-tests, a process a GPU")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--buffers", choices=("torch", "nccl", "registered"), default="torch", help="of seatrial")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        work(given.worker, given.buffers)
        return 0
    if not (given.nccl_tests and given.gpus and given.out):
        parser.error("--nccl-tests, --gpus and --out are needed")
    try:
        return _compare_all(given.nccl_tests, Start(given.gpus, tuple(given.mpirun)), given.out, given.buffers)
    except CannotCompare as reason:
        print(reason, file=sys.stderr)
        return 2


def _compare_all(folder: Path, start: Start, out: Path, buffers: str) -> int:
    from seatrial.bench.group import GRAPH_MIXING

    library, version = torch_nccl()
    # In graphs it makes a difference of over 10 us, and seatrial sets it where nobody else does (bench.group)
    alike = {GRAPH_MIXING: os.environ.get(GRAPH_MIXING, "0")}
    # preloaded, so that no path built into nccl-tests wins
    environment = {**os.environ, "LD_PRELOAD": str(library), "NCCL_DEBUG": "VERSION", **alike}
    rounds, group = [], dict[str, Any]()
    for number in range(1, ROUNDS + 1):
        print(f"round {number} of {ROUNDS}: nccl-tests {start}; then seatrial", file=sys.stderr)
        theirs, figures = run_nccl_tests(folder, start, environment)
        if theirs != version:
            raise CannotCompare(f"nccl-tests used NCCL {theirs}, torch has {version} ({library})")
        group, own = run_seatrial(start.gpus, buffers)
        rounds.append((figures, own))
    rows = compare(rounds)
    within = all(row.within for row in rows)
    gates = f"within {100 * RATIO_GATE:g} % (parity), {US_GATE:g} us (device)"
    print(f"{start.gpus} × {group.get('gpu')}, NCCL {version} ({library}) on both sides; nccl-tests {start}")
    print(f"seatrial: buffers of {buffers}, called by {group.get('called')}; on both sides {alike}")
    print(f"{table(rows)}\n{'all' if within else 'NOT all'} {gates}")
    record = {"gpus": start.gpus, "nccl_tests": str(start), "nccl": version, "library": str(library)}
    record |= {"buffers": buffers, "group": group, "on_both_sides": alike}
    told = [{**asdict(row), "apart": row.apart, "within": row.within} for row in rows]
    out.write_text(json.dumps({**record, "gates": gates, "within": within, "rows": told}, indent=1))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
