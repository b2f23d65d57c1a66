"""Compares seatrial's measurements of collectives with nccl-tests, on the same GPUs and the same libnccl.

    python benchmarks/against_nccl_tests.py --nccl-tests nccl-tests/build --gpus 8 --out against.json

Runs nccl-tests and seatrial alternately, seven times each, and prints their difference next to the A/A variation of
each: the width of the 95 % confidence interval of its median over the rounds. An operation whose A/A variation is above
the threshold is measured in up to 21 rounds. A row whose A/A variation stays above 1.5 times the threshold is not
comparable. Exit codes: 0 all rows passed, 1 a row failed, 2 the programs cannot be compared, 3 no row failed, but some
are not comparable. By default nccl-tests runs as one process (``-g N``), in which one thread launches the work of all
GPUs, while torch has one process per GPU. With ``--mpirun 'mpirun -np 8'``, and nccl-tests built with MPI=1, it has one
process per GPU too: the stricter comparison, since a single thread takes longer to launch the work of all GPUs.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from seatrial.discover import nccl_tests_output
from seatrial.discover.nccl_tests_output import Timing
from seatrial.util.quantiles import median_interval

if TYPE_CHECKING:
    from seatrial.bench.collectives import CollectiveResult
    from seatrial.bench.operations import Operation

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
}
NCCL_TESTS_OPTIONS = {
    "back_to_back": ("-b", "64M", "-e", "1G", "-f", "4", "-n", "50", "-w", "10"),
    "cuda_graph": ("-b", "8", "-e", "64K", "-f", "2", "-n", "100", "-w", "20", "-G", "20"),
}
IN_PLACE = {"all_reduce"}  # in place in torch, and in seatrial
ROUNDS = 7  # odd, for the median: all-to-all of 64 MiB varies by up to 6 % between rounds (4 H200)
MAX_ROUNDS = 21
THRESHOLDS = {"back_to_back": 0.01, "cuda_graph": 3.0}  # relative; in us
NOT_COMPARABLE = 1.5  # A/A variation in thresholds
Results = Mapping[str, Timing]  # by name, such as "back_to_back all_gather 1073741824"


class CannotCompare(Exception):
    """The two programs cannot be compared; the message states the reason."""


@dataclass(frozen=True)
class Series:
    """The sizes in bytes of one operation in one mode: one run of a program of nccl-tests."""

    mode: str
    operation: str
    sizes: tuple[int, ...]

    def name(self, size: int) -> str:
        """The name of a result."""
        return f"{self.mode} {self.operation} {size}"


SERIES: Sequence[Series] = [
    *(Series("back_to_back", operation, (64 * 2**20, 256 * 2**20, 2**30)) for operation in PROGRAMS),
    Series("cuda_graph", "all_reduce", (8, 2**10, 64 * 2**10)),
]


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
class WorkerOutput:
    """The description of seatrial's process group, and seatrial's results."""

    group: dict[str, object]
    results: dict[str, Timing]


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
    def variations(self) -> tuple[float, float]:
        """The A/A variation of nccl-tests and of seatrial, in the unit of ``difference``; infinite below 6 rounds."""
        return self._variation(self.nccl_tests), self._variation(self.seatrial)

    def _variation(self, values: Sequence[float]) -> float:
        low, high = median_interval(values, independent=True) or (0.0, inf)
        return (high - low) / (median(values) if self.mode == "back_to_back" else 1)

    @property
    def needs_rounds(self) -> bool:
        """Whether the A/A variation is above the threshold."""
        return max(self.variations) > THRESHOLDS[self.mode]

    @property
    def outcome(self) -> str:
        """``passed`` or ``failed``; ``not comparable`` if the A/A variation is too large for either."""
        if max(self.variations) > NOT_COMPARABLE * THRESHOLDS[self.mode]:
            return "not comparable"
        return "passed" if abs(self.difference) <= THRESHOLDS[self.mode] else "failed"


def run_nccl_tests(
    folder: Path, launcher: Launcher, environment: Mapping[str, str], pending: Sequence[Series]
) -> tuple[str, Results]:
    """The NCCL version, and the results of the ``pending`` series."""
    version, results = "", {}
    for series in pending:
        version, table = _run(
            folder / PROGRAMS[series.operation], launcher, NCCL_TESTS_OPTIONS[series.mode], environment
        )
        for row in table.rows:
            timing = row.in_place if series.operation in IN_PLACE else row.out_of_place
            if row.size in series.sizes and timing:
                results[series.name(row.size)] = timing
    return version, results


def _run(
    program: Path, launcher: Launcher, options: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, nccl_tests_output.Table]:
    """The NCCL version and the table of one program. Raises CannotCompare if it fails, or prints something else."""
    command = [*launcher.mpirun, str(program), "-g", str(launcher.gpus_per_process), "-d", "float", "-c", "1", *options]
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompare(f"{' '.join(command)}: {error}") from error
    if process.returncode:
        raise CannotCompare(f"{' '.join(command)} exited with {process.returncode}:\n{process.stdout}{process.stderr}")
    output = nccl_tests_output.parse(process.stdout.splitlines())
    if len(output.tables) != 1 or not output.nccl.version:
        raise CannotCompare(
            f"{' '.join(command)} printed {len(output.tables)} tables, expected 1, and NCCL version "
            f"{output.nccl.version or 'not found'}:\n{process.stdout[-2000:]}"
        )
    return output.nccl.version.partition("+")[0], output.tables[0]


def run_seatrial(ranks: int, buffers: str, device: str, pending: Sequence[Series]) -> WorkerOutput:
    """What ``work`` measures of the ``pending`` series in ``ranks`` processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        series = TypeAdapter(Sequence[Series]).dump_json(pending).decode()
        options = ["--worker", str(out), "--buffers", buffers, "--device", device, "--series", series]
        process = subprocess.run(
            [*torchrun, __file__, *options], capture_output=True, text=True, timeout=600, check=False
        )
        if process.returncode or not out.exists():
            raise CannotCompare(f"seatrial's measurement exited with {process.returncode}:\n{process.stderr[-4000:]}")
        return TypeAdapter(WorkerOutput).validate_json(out.read_bytes())


def work(out: Path, buffers: str, device: str, pending: Sequence[Series]) -> None:
    """Measures on one rank of seatrial; rank 0 writes the WorkerOutput to ``out``."""
    from seatrial.bench import collectives, group
    from seatrial.bench.operations import OPERATIONS

    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    group.open_group(device, timeout_s=300)
    description, results = collectives.describe_group(), dict[str, Timing]()
    description["api"] = collectives.describe_api(device)
    measure = {"back_to_back": collectives.measure_back_to_back, "cuda_graph": collectives.measure_cuda_graph}
    for series in pending:
        operation = OPERATIONS[series.operation]
        for size in sorted(series.sizes, reverse=True):  # like the checks: smaller buffers are views of the largest
            result = measure[series.mode](operation, size, "float32", device, 2.0, buffers=buffers)
            results[series.name(size)] = _timing(result, operation)
    if os.environ["RANK"] == "0":
        out.write_bytes(TypeAdapter(WorkerOutput).dump_json(WorkerOutput(description, results)))
    group.close_group()
    group.exit_without_teardown()


def _timing(result: CollectiveResult, operation: Operation) -> Timing:
    from seatrial.bench.collectives import algorithm_bandwidth

    seconds = median(result.timings.window_means)
    algbw = algorithm_bandwidth(result.size, seconds)
    wrong = sum(mismatch.wrong for mismatch in result.mismatches.values())
    return Timing(seconds * 1e6, algbw, algbw * operation.busbw_factor(result.timings.rank_count), wrong)


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


def compare(rounds: Sequence[tuple[Results, Results]]) -> list[Row]:
    """The comparison of ``rounds``, pairs of nccl-tests' and seatrial's results; a round may omit series."""
    rows = []
    for series in SERIES:
        for size in series.sizes:
            name = series.name(size)
            sides = ([results[name] for results in side if name in results] for side in zip(*rounds, strict=True))
            values = (
                tuple(timing.busbw if series.mode == "back_to_back" else timing.time_us for timing in side)
                for side in sides
            )
            rows.append(Row(series.operation, size, series.mode, *values))
    return rows


def require_results(results: Results, pending: Sequence[Series]) -> None:
    """Raises CannotCompare if a result of the ``pending`` series is missing or has wrong or unchecked elements."""
    for name in (series.name(size) for series in pending for size in series.sizes):
        if name not in results:
            raise CannotCompare(f"{name} is missing; available: {', '.join(results)}")
        if results[name].wrong != 0:
            raise CannotCompare(f"{name}: wrong elements: {results[name].wrong}")


def table(rows: Sequence[Row]) -> str:
    """The comparison as a table."""
    header = f"{'':36}{'nccl-tests':>12}{'seatrial':>12}{'difference':>12}{'A/A nccl-tests':>16}{'A/A seatrial':>14}"
    lines = [f"{header}{'rounds':>8}  outcome"]
    for row in rows:
        unit, change = ("GB/s", "{:.2%}") if row.mode == "back_to_back" else ("us", "{:.2f} us")
        name = f"{row.mode} {row.operation} {_format_size(row.size)}"
        nccl_tests, seatrial = (f"{median(side):.4g} {unit}" for side in (row.nccl_tests, row.seatrial))
        difference = change.replace(":", ":+").format(row.difference)
        variations = [change.format(variation) for variation in row.variations]
        line = f"{name:36}{nccl_tests:>12}{seatrial:>12}{difference:>12}{variations[0]:>16}{variations[1]:>14}"
        lines.append(f"{line}{len(row.seatrial):>8}  {row.outcome}")
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
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)  # cpu: in tests
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--series", type=TypeAdapter(list[Series]).validate_json, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, options.buffers, options.device, options.series)
        return 0
    if not (options.nccl_tests and options.gpus and options.out):
        parser.error("--nccl-tests, --gpus and --out are required")
    launcher = Launcher(options.gpus, tuple(options.mpirun))
    try:
        return _compare_all(options.nccl_tests, launcher, options.out, options.buffers, options.device)
    except CannotCompare as reason:
        print(reason, file=sys.stderr)
        return 2


def _compare_all(folder: Path, launcher: Launcher, out: Path, buffers: str, device: str) -> int:
    from seatrial.bench.group import GRAPH_MIXING

    library, version = torch_nccl()
    # In graphs it makes a difference of over 10 us; seatrial sets it if it is not set (bench.group)
    same_environment = {GRAPH_MIXING: os.environ.get(GRAPH_MIXING, "0")}
    # preloaded, since nccl-tests may have an rpath
    environment = {**os.environ, "LD_PRELOAD": str(library), "NCCL_DEBUG": "VERSION", **same_environment}
    record = {"gpus": launcher.gpus, "nccl_tests": str(launcher), "nccl": version, "library": str(library)}
    record |= {"buffers": buffers, "environment_of_both": same_environment, "thresholds": THRESHOLDS}
    rounds, rows, pending = list[tuple[Results, Results]](), list[Row](), SERIES
    while pending and len(rounds) < MAX_ROUNDS:
        names = ", ".join(f"{series.mode} {series.operation}" for series in pending)
        print(f"round {len(rounds) + 1}: nccl-tests {launcher}, then seatrial: {names}", file=sys.stderr)
        nccl_tests_version, nccl_tests = run_nccl_tests(folder, launcher, environment, pending)
        if nccl_tests_version != version:
            raise CannotCompare(f"nccl-tests used NCCL {nccl_tests_version}, torch has {version} ({library})")
        seatrial = run_seatrial(launcher.gpus, buffers, device, pending)
        require_results(nccl_tests, pending)
        require_results(seatrial.results, pending)
        rounds.append((nccl_tests, seatrial.results))
        rows = compare(rounds)
        _write_record(out, {**record, "group": seatrial.group}, rows)  # each round: a time limit does not lose it
        if len(rounds) >= ROUNDS:
            unsteady = {(row.mode, row.operation) for row in rows if row.needs_rounds}
            pending = [series for series in SERIES if (series.mode, series.operation) in unsteady]
    outcomes = _outcomes(rows)
    print(f"{launcher.gpus} × {seatrial.group.get('gpu')}, NCCL {version} ({library}); nccl-tests {launcher}")
    print(f"seatrial: buffers {buffers}, API {seatrial.group['api']}; environment of both {same_environment}")
    print(table(rows))
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()), end="; threshold ")
    print(f"{THRESHOLDS['back_to_back']:.0%} (back_to_back), {THRESHOLDS['cuda_graph']:g} us (cuda_graph)")
    return 1 if outcomes["failed"] else 3 if outcomes["not comparable"] else 0


def _write_record(out: Path, record: Mapping[str, object], rows: Sequence[Row]) -> None:
    row_records = [{**asdict(row), "difference": row.difference, "outcome": row.outcome} for row in rows]
    out.write_text(json.dumps({**record, "outcomes": _outcomes(rows), "rows": row_records}, indent=1) + "\n")


def _outcomes(rows: Sequence[Row]) -> dict[str, int]:
    """The number of rows by outcome."""
    counts = Counter(row.outcome for row in rows)
    return {outcome: counts[outcome] for outcome in ("passed", "failed", "not comparable")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
