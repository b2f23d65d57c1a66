"""Measures the effect of the sampler on all-reduce and training, alternately without and with it.

    python benchmarks/telemetry.py --gpus-per-node 4 --out telemetry.json

Runs on one node. Each round measures everything once without and once with a sampler at 1 Hz next to rank 0, as in a
trial, in alternating order. ``change`` is the median over the rounds of with ÷ without - 1, with its 95 % confidence
interval. Exits with 1 unless this interval is within ±1 % for every metric of all-reduce and training on GPUs. A run on
CPUs is CPU ONLY and has no threshold. It takes ``--seconds``, and about 20 s to start torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import fmean, median

from seatrial.util import processes
from seatrial.util.quantiles import median_interval

MAX_CHANGE = 0.01
HZ = 1.0
GPU_SIZES, CPU_SIZES = ("64MiB", "1GiB"), ("1MiB", "10MiB")
Values = Mapping[str, float]  # by metric; higher is better


@dataclass(frozen=True)
class Row:
    """One metric: medians over the rounds, and the relative change with the sampler (0.01: 1 % better)."""

    name: str
    without: float
    with_it: float
    change: float
    interval: tuple[float, float] | None

    @property
    def remark(self) -> str:
        """Why the change is not proven to be small; empty if it is."""
        if abs(self.change) >= MAX_CHANGE:
            return "CHANGE TOO LARGE"
        small = self.interval and max(map(abs, self.interval)) < MAX_CHANGE
        return "" if small else "NOT SIGNIFICANT: increase --seconds"


def compare(off: Sequence[Values], on: Sequence[Values]) -> list[Row]:
    """The comparison of equally many rounds without (``off``) and with (``on``) the sampler."""
    rows = []
    for name in off[0]:
        pairs = [(a[name], b[name]) for a, b in zip(off, on, strict=True)]
        ratios = [b / a - 1 for a, b in pairs]
        without, with_it = (median(values) for values in zip(*pairs, strict=True))
        rows.append(Row(name, without, with_it, median(ratios), median_interval(ratios, independent=True)))
    return rows


def table(rows: Sequence[Row], judged: bool) -> Iterator[str]:
    yield f"{'metric':<28} {'without':>12} {'with':>12} {'change':>8}  95 % interval"
    for row in rows:
        interval = f"{row.interval[0]:+.2%} to {row.interval[1]:+.2%}" if row.interval else "too few rounds"
        remark = f"  {row.remark}" if judged and row.remark else ""
        yield f"{row.name:<28} {row.without:12.2f} {row.with_it:12.2f} {row.change:+8.2%}  {interval}{remark}"


@contextmanager
def sampled(folder: Path, shares: list[float]) -> Iterator[None]:
    """Context manager: a sampler runs, from its second sample on; appends its share of a CPU core to ``shares``."""
    samples = folder / f"{len(shares)}.samples"
    argv = [sys.executable, "-m", "seatrial.telemetry.sampler", str(samples), str(HZ)]
    child = processes.start(argv, env={}, stdout=folder / "sampler.log", stderr=folder / "sampler.err")
    try:
        while len(_rows(samples)) < 2:
            if child.process.poll() is not None:
                raise SystemExit(f"the sampler exited: {(folder / 'sampler.err').read_text(encoding='utf-8')}")
            time.sleep(0.05)
        yield
    finally:
        processes.terminate(child)
    (start, cpu_start), *_, (end, cpu_end) = ((row[0], row[1]) for row in _rows(samples))
    shares.append((cpu_end - cpu_start) / (end - start))


def _rows(samples: Path) -> list[list[float]]:
    """The complete rows of a samples file; each starts with time and CPU seconds (telemetry/sampler.py)."""
    lines = samples.read_text(encoding="utf-8").split("\n")[:-1] if samples.exists() else []
    return [row for row in map(json.loads, lines) if isinstance(row, list)]


def instruments(device: str, window_s: float) -> Callable[[], Values]:
    """A function that measures every metric once, on all ranks."""
    from torch import distributed as dist

    from seatrial.bench import collectives
    from seatrial.bench.operations import OPERATIONS
    from seatrial.model import parse_bytes
    from seatrial.train import ddp, parallel, train_config

    sizes = GPU_SIZES if device != "cpu" else CPU_SIZES
    all_reduce, ranks = OPERATIONS["all_reduce"], dist.get_world_size()
    world = parallel.current_world(device)
    settings = train_config.load("ddp" if device != "cpu" else ddp.SMALL_CONFIG, [f"data.samples={4 * ranks}"])
    trainer = ddp.create_trainer(settings, world)

    def step_s(steps: int) -> float:
        return max(
            world.gather(
                fmean(
                    step.seconds
                    for step in trainer.run_steps(ddp.UNTIMED_STEPS_PER_WINDOW + steps)[ddp.UNTIMED_STEPS_PER_WINDOW :]
                )
            )
        )

    step_s(ddp.UNTIMED_STEPS)
    steps = ceil(window_s / step_s(ddp.UNTIMED_STEPS))

    def measure() -> Values:
        values = {}
        for size in sizes:
            timings = collectives.measure_back_to_back(
                all_reduce, parse_bytes(size), "float32", device, window_s, window_s
            ).timings
            gbps = collectives.algorithm_bandwidth(parse_bytes(size), fmean(timings.window_means))
            values[f"busbw.{size}"] = gbps * 2 * (ranks - 1) / ranks  # nccl-tests, doc/PERFORMANCE.md
        world.barrier()
        return values | {"tokens_per_second_per_gpu": settings.bsz * settings.seq_len / step_s(steps)}

    return measure


def work(options: argparse.Namespace) -> int:
    """Runs one rank; rank 0 prints the result. Returns 1 if a metric has a remark, on GPUs."""
    from seatrial.bench import group
    from seatrial.bench.rank import describe_devices, gather, store_barrier

    rank = int(os.environ["RANK"])
    device = f"cuda:{os.environ['LOCAL_RANK']}" if options.gpus_per_node else "cpu"
    group.open_group(device, 120)
    measure, facts = instruments(device, options.window), describe_devices(device)
    measure()  # connections and buffers
    rounds: dict[bool, list[Values]] = {False: [], True: []}
    shares: list[float] = []
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="seatrial-telemetry-") as folder:
        while len(rounds[True]) < options.rounds or gather(time.monotonic() < end)[0]:
            for enabled in (False, True) if len(rounds[True]) % 2 == 0 else (True, False):
                with sampled(Path(folder), shares) if enabled and rank == 0 else nullcontext():
                    store_barrier()  # not a collective, which would keep the GPUs busy
                    rounds[enabled].append(measure())
            if rank == 0:
                print(f"round {len(rounds[True])} …", file=sys.stderr)
    code = report(compare(rounds[False], rounds[True]), shares, facts, options) if rank == 0 else 0
    group.close_group()
    return code


def report(
    rows: Sequence[Row], shares: Sequence[float], facts: Mapping[str, object], options: argparse.Namespace
) -> int:
    judged = bool(options.gpus_per_node)
    if options.out:
        record: dict[str, object] = {
            "facts": facts,
            "rounds": len(shares),
            "hz": HZ,
            "sampler_cpu_share": max(shares),
            "judged": judged,
        }
        record["metrics"] = [asdict(row) for row in rows]
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    where = f"{options.processes} × {facts['gpu'] or 'CPU processes, CPU ONLY, no threshold'}"
    print(f"{where}; {len(shares)} rounds; sampler {max(shares):.2%} of one core at most")
    print("\n".join(table(rows, judged)), flush=True)
    return int(judged and any(row.remark for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: two processes on the CPU")
    parser.add_argument("--seconds", type=float, default=60, help="total duration of the rounds")
    # the smallest sample whose median has a 95 % confidence interval
    parser.add_argument("--rounds", type=int, default=6, help="minimum number of rounds")
    # long enough for a sample in most windows
    parser.add_argument("--window", type=float, default=1.0, help="seconds per metric and half round")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    options.processes = options.gpus_per_node or 2
    if "LOCAL_RANK" in os.environ:
        return work(options)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    return subprocess.run([*torchrun, *sys.argv], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
