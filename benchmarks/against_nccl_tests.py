"""Compares seatrial's measurements of collectives with nccl-tests, on the same GPUs and the same libnccl.

    python benchmarks/against_nccl_tests.py --nccl-tests nccl-tests/build --gpus 8 --out against.json

Runs nccl-tests and seatrial alternately, seven times each, and prints their difference next to the variation of each.
Exit codes: 0 all differences within the thresholds, 1 a difference above, 2 not comparable. By default nccl-tests runs
as one process (``-g N``), in which one thread launches the work of all GPUs, while torch has one process per GPU. With
``--mpirun 'mpirun -np 8'``, and nccl-tests built with MPI=1, it has one process per GPU too: the stricter comparison,
since a single thread takes longer to launch the work of all GPUs.
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
IN_PLACE = {"all_reduce"}  # in place in torch, and in seatrial
LARGE, SMALL = (64 * 2**20, 256 * 2**20, 2**30), (8, 2**10, 64 * 2**10)
ROUNDS = 7  # odd, for the median: all-to-all of 64 MiB varies by up to 6 % between rounds (4 H200)
RATIO_THRESHOLD, LATENCY_THRESHOLD_US = 0.01, 3.0

# one line of nccl-tests' table (src/util.cu): size, count, type, redop, root, then out-of-place and in-place results
_COLUMNS = r"\s+([\d.e+]+)\s+([\d.e+]+)\s+([\d.e+]+)\s+(\S+)"
_ROW = re.compile(rf"\s*(\d+)\s+(\d+)\s+[a-z]\w*\s+[a-z]\w*\s+-?\d+{_COLUMNS}{_COLUMNS}")
_LIBRARY = re.compile(r"nccl-library=(\d+)|^NCCL version (\d+)\.(\d+)\.(\d+)", re.MULTILINE)


class CannotCompare(Exception):
    """The two programs cannot be compared; the message states the reason."""


@dataclass(frozen=True)
class Result:
    """One operation at one size: us per operation, busbw in GB/s, number of wrong elements (None: not checked)."""

    us: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True)
class Launcher:
    """How nccl-tests is started: one process for all GPUs, or with ``mpirun`` one process per GPU."""

    gpus: int
    mpirun: tuple[str, ...] = ()

    @property
    def gpus_per_process(self) -> int:
        """The number of GPUs of each process."""
        return 1 if self.mpirun else self.gpus

    def __str__(self) -> str:
        return f"one process per GPU ({' '.join(self.mpirun)})" if self.mpirun else f"-g {self.gpus}, one process"


@dataclass(frozen=True)
class Table:
    """The output of one program of nccl-tests: NCCL version, and out-of-place and in-place results by size."""

    nccl: str
    out_of_place: dict[int, Result]
    in_place: dict[int, Result]


@dataclass(frozen=True)
class Row:
    """One comparison: the values of all rounds, in GB/s (back_to_back) or us (cuda_graph)."""

    operation: str
    size: int
    mode: str
    nccl_tests: tuple[float, ...]
    seatrial: tuple[float, ...]

    @property
    def difference(self) -> float:
        """seatrial minus nccl-tests: relative to nccl-tests in mode back_to_back, in us in mode cuda_graph."""
        nccl_tests, seatrial = median(self.nccl_tests), median(self.seatrial)
        return seatrial / nccl_tests - 1 if self.mode == "back_to_back" else seatrial - nccl_tests

    @property
    def within(self) -> bool:
        """Whether the difference is at most the threshold of the mode."""
        return abs(self.difference) <= (RATIO_THRESHOLD if self.mode == "back_to_back" else LATENCY_THRESHOLD_US)


def parse(text: str) -> Table:
    """Parses the output of nccl-tests. Raises CannotCompare if it has no table or no NCCL version."""
    library = _LIBRARY.search(text)
    rows = [match for line in text.splitlines() if (match := _ROW.match(line))]
    if not library or not rows:
        raise CannotCompare(f"no NCCL version or no table in the output of nccl-tests:\n{text[-2000:]}")
    return Table(
        nccl=_version(int(library[1])) if library[1] else ".".join(library.group(2, 3, 4)),
        out_of_place={int(row[1]): _result(*row.group(3, 4, 5, 6)) for row in rows},
        in_place={int(row[1]): _result(*row.group(7, 8, 9, 10)) for row in rows},
    )


def _version(code: int) -> str:
    """The version of an NCCL_VERSION_CODE (nccl.h, since 2.9): 22809 → 2.28.9."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _result(us: str, _algbw: str, busbw: str, wrong: str) -> Result:
    return Result(float(us), float(busbw), None if wrong == "N/A" else int(float(wrong)))


def run_nccl_tests(folder: Path, launcher: Launcher, environment: Mapping[str, str]) -> tuple[str, dict[str, Result]]:
    """The NCCL version, and the results by name, such as ``back_to_back all_gather 1073741824``."""
    results: dict[str, Result] = {}
    large, small = ["-b", "64M", "-e", "1G", "-f", "4", "-n", "50", "-w", "10"], ["-b", "8", "-e", "64K", "-f", "2"]
    for operation, program in PROGRAMS.items():
        table = _run(folder / program, launcher, large, environment)
        results |= {
            f"back_to_back {operation} {size}": result
            for size, result in _in_or_out_of_place(table, operation).items()
            if size in LARGE
        }
    graph = _run(folder / PROGRAMS["all_reduce"], launcher, [*small, "-n", "100", "-w", "20", "-G", "20"], environment)
    results |= {
        f"cuda_graph all_reduce {size}": result
        for size, result in _in_or_out_of_place(graph, "all_reduce").items()
        if size in SMALL
    }
    return graph.nccl, results


def _in_or_out_of_place(table: Table, operation: str) -> dict[int, Result]:
    return table.in_place if operation in IN_PLACE else table.out_of_place


def _run(program: Path, launcher: Launcher, arguments: Sequence[str], environment: Mapping[str, str]) -> Table:
    command = [
        *launcher.mpirun,
        str(program),
        "-g",
        str(launcher.gpus_per_process),
        "-d",
        "float",
        "-c",
        "1",
        *arguments,
    ]
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompare(f"{' '.join(command)}: {error}") from error
    if process.returncode:
        raise CannotCompare(f"{' '.join(command)} exited with {process.returncode}:\n{process.stdout}{process.stderr}")
    return parse(process.stdout)


def run_seatrial(gpus: int, buffers: str) -> tuple[dict[str, Any], dict[str, Result]]:
    """The description of the process group, and seatrial's results by the same names."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        command = [*torchrun, __file__, "--worker", str(out), "--buffers", buffers]
        process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if process.returncode or not out.exists():
            raise CannotCompare(f"seatrial's measurement exited with {process.returncode}:\n{process.stderr[-4000:]}")
        output = json.loads(out.read_text())
    return output["group"], {name: Result(**fields) for name, fields in output["results"].items()}


def work(out: Path, buffers: str) -> None:
    """Measures on one rank of seatrial; rank 0 writes the results to ``out``."""
    from seatrial.bench import collectives, group
    from seatrial.bench.operations import OPERATIONS

    device = f"cuda:{os.environ['LOCAL_RANK']}"
    group.open_group(device, timeout_s=300)
    description, results = collectives.describe_group(), {}
    description["api"] = collectives.describe_api(device)
    for name in PROGRAMS:
        for size in sorted(LARGE, reverse=True):  # like the checks: smaller buffers are views of the largest
            result = collectives.measure_back_to_back(OPERATIONS[name], size, "float32", device, 2.0, buffers=buffers)
            results[f"back_to_back {name} {size}"] = _seatrial_result(result, OPERATIONS[name].busbw_factor)
    for size in SMALL:
        result = collectives.measure_cuda_graph(OPERATIONS["all_reduce"], size, "float32", device, 2.0, buffers=buffers)
        results[f"cuda_graph all_reduce {size}"] = _seatrial_result(result, OPERATIONS["all_reduce"].busbw_factor)
    if os.environ["RANK"] == "0":
        fields = {name: asdict(result) for name, result in results.items()}
        out.write_text(json.dumps({"group": description, "results": fields}))
    group.close_group()
    group.exit_without_teardown()


def _seatrial_result(measurement: Any, busbw_factor: Any) -> Result:
    seconds = median(measurement.timings.means)
    wrong = sum(mismatch.wrong for mismatch in measurement.mismatches.values())
    return Result(seconds * 1e6, measurement.size / seconds / 1e9 * busbw_factor(measurement.timings.ranks), wrong)


def torch_nccl() -> tuple[Path, str]:
    """The libnccl.so that torch loads, and its version. Raises CannotCompare if there is none."""
    import torch

    if not torch.distributed.is_nccl_available():
        raise CannotCompare(f"torch {torch.__version__} has no NCCL")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    mapped = re.findall(r"(/\S*libnccl\.so\S*)", Path("/proc/self/maps").read_text())
    if not mapped:
        raise CannotCompare(
            f"torch {torch.__version__} links NCCL {version} statically: no libnccl.so to preload for nccl-tests"
        )
    return Path(mapped[0]), version


def compare(rounds: Sequence[tuple[dict[str, Result], dict[str, Result]]]) -> list[Row]:
    """The comparison of ``rounds``, pairs of nccl-tests' and seatrial's results by name.

    Raises CannotCompare if a result is missing or has wrong elements.
    """
    rows = []
    for mode, operation, size in [
        *(("back_to_back", operation, size) for operation in PROGRAMS for size in LARGE),
        *(("cuda_graph", "all_reduce", size) for size in SMALL),
    ]:
        name = f"{mode} {operation} {size}"
        pairs = [(_checked(nccl_tests, name), _checked(seatrial, name)) for nccl_tests, seatrial in rounds]
        values = [tuple(result.busbw if mode == "back_to_back" else result.us for result in pair) for pair in pairs]
        sides = [tuple(value[side] for value in values) for side in (0, 1)]
        rows.append(Row(operation, size, mode, *sides))
    return rows


def _checked(results: Mapping[str, Result], name: str) -> Result:
    if name not in results:
        raise CannotCompare(f"{name} is missing; available: {', '.join(results)}")
    if results[name].wrong != 0:
        raise CannotCompare(f"{name}: wrong elements: {results[name].wrong}")
    return results[name]


def table(rows: Sequence[Row]) -> str:
    """The comparison as a table; A/A is the range of one side over the rounds, relative to its minimum."""
    header = f"{'':36}{'nccl-tests':>12}{'seatrial':>12}{'difference':>12}{'A/A nccl-tests':>16}{'A/A seatrial':>14}"
    lines = [header]
    for row in rows:
        unit = "GB/s" if row.mode == "back_to_back" else "us"
        name = f"{row.mode} {row.operation} {_format_size(row.size)}"
        nccl_tests, seatrial = (f"{median(side):.4g} {unit}" for side in (row.nccl_tests, row.seatrial))
        difference = f"{100 * row.difference:+.2f} %" if row.mode == "back_to_back" else f"{row.difference:+.2f} us"
        ranges = [f"{100 * (max(side) / min(side) - 1):.2f} %" for side in (row.nccl_tests, row.seatrial)]
        verdict = "" if row.within else "  ABOVE THRESHOLD"
        lines.append(f"{name:36}{nccl_tests:>12}{seatrial:>12}{difference:>12}{ranges[0]:>16}{ranges[1]:>14}{verdict}")
    return "\n".join(lines)


def _format_size(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl-tests", type=Path, metavar="DIR", help="folder of all_reduce_perf, all_gather_perf, …")
    parser.add_argument("--gpus", type=int, metavar="N")
    parser.add_argument(
        "--mpirun", type=shlex.split, default=[], help="command to start nccl-tests with one process per GPU"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--buffers", choices=("torch", "nccl", "registered"), default="torch", help="buffers of seatrial"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, options.buffers)
        return 0
    if not (options.nccl_tests and options.gpus and options.out):
        parser.error("--nccl-tests, --gpus and --out are required")
    try:
        return _compare_all(
            options.nccl_tests, Launcher(options.gpus, tuple(options.mpirun)), options.out, options.buffers
        )
    except CannotCompare as reason:
        print(reason, file=sys.stderr)
        return 2


def _compare_all(folder: Path, launcher: Launcher, out: Path, buffers: str) -> int:
    from seatrial.bench.group import GRAPH_MIXING

    library, version = torch_nccl()
    # In graphs it makes a difference of over 10 us; seatrial sets it if it is not set (bench.group)
    same_environment = {GRAPH_MIXING: os.environ.get(GRAPH_MIXING, "0")}
    # preloaded, since nccl-tests may have an rpath
    environment = {**os.environ, "LD_PRELOAD": str(library), "NCCL_DEBUG": "VERSION", **same_environment}
    rounds, group = [], dict[str, Any]()
    for number in range(1, ROUNDS + 1):
        print(f"round {number} of {ROUNDS}: nccl-tests {launcher}, then seatrial", file=sys.stderr)
        nccl_tests_version, nccl_tests = run_nccl_tests(folder, launcher, environment)
        if nccl_tests_version != version:
            raise CannotCompare(f"nccl-tests used NCCL {nccl_tests_version}, torch has {version} ({library})")
        group, seatrial = run_seatrial(launcher.gpus, buffers)
        rounds.append((nccl_tests, seatrial))
    rows = compare(rounds)
    within = all(row.within for row in rows)
    thresholds = f"within {100 * RATIO_THRESHOLD:g} % (back_to_back), {LATENCY_THRESHOLD_US:g} us (cuda_graph)"
    print(f"{launcher.gpus} × {group.get('gpu')}, NCCL {version} ({library}) in both; nccl-tests {launcher}")
    print(f"seatrial: buffers {buffers}, API {group.get('api')}; environment of both {same_environment}")
    print(f"{table(rows)}\n{'all' if within else 'NOT all'} {thresholds}")
    record = {"gpus": launcher.gpus, "nccl_tests": str(launcher), "nccl": version, "library": str(library)}
    record |= {"buffers": buffers, "group": group, "environment_of_both": same_environment}
    row_records = [{**asdict(row), "difference": row.difference, "within": row.within} for row in rows]
    out.write_text(json.dumps({**record, "thresholds": thresholds, "within": within, "rows": row_records}, indent=1))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
