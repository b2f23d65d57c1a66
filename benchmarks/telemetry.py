"""Does the sampler change what it watches? All-reduce and training without it and with it, in turn, in one start.

    python benchmarks/telemetry.py --gpus-per-node 4 --out telemetry.json

On one node. In each round everything is measured once without and once with a sampler at 1 Hz beside rank 0, as in a
trial, and which comes first alternates. Compared are the rounds: ``change`` is the median over them of with ÷ without,
beside its 95 % interval. It exits with 1 unless that interval, of each figure of all-reduce and training on GPUs, lies
within 1 % either way. A run on CPUs is a rehearsal that judges nothing. It takes ``--seconds``, and about 20 for the
start of torch.
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

MOST = 0.01  # the change that is allowed
HZ = 1.0
GPU_SIZES, CPU_SIZES = ("64MiB", "1GiB"), ("1MiB", "10MiB")
Figures = Mapping[str, float]  # a higher value is better in all of them


@dataclass(frozen=True)
class Row:
    """One figure: medians over the rounds, and how far with is from without (0.01: 1 % better)."""

    name: str
    without: float
    with_it: float
    change: float
    interval: tuple[float, float] | None

    @property
    def remark(self) -> str:
        """Why it is not shown that the change is small; empty where it is."""
        if abs(self.change) >= MOST:
            return "TOO FAR"
        small = self.interval and max(map(abs, self.interval)) < MOST
        return "" if small else "NOT RESOLVED: more --seconds"


def compare(off: Sequence[Figures], on: Sequence[Figures]) -> list[Row]:
    """The figures of as many rounds without and with the sampler."""
    rows = []
    for name in off[0]:
        pairs = [(a[name], b[name]) for a, b in zip(off, on, strict=True)]
        ratios = [b / a - 1 for a, b in pairs]
        medians = (median(values) for values in zip(*pairs, strict=True))
        rows.append(Row(name, *medians, median(ratios), median_interval(ratios)))
    return rows


def table(rows: Sequence[Row], judged: bool) -> Iterator[str]:
    yield f"{'figure':<28} {'without':>12} {'with':>12} {'change':>8}  95 % interval"
    for row in rows:
        interval = f"{row.interval[0]:+.2%} to {row.interval[1]:+.2%}" if row.interval else "too few rounds"
        remark = f"  {row.remark}" if judged and row.remark else ""
        yield f"{row.name:<28} {row.without:12.2f} {row.with_it:12.2f} {row.change:+8.2%}  {interval}{remark}"


@contextmanager
def sampled(folder: Path, shares: list[float]) -> Iterator[None]:
    """With a sampler, from its second sample on: its start is none of what is measured."""
    samples = folder / f"{len(shares)}.samples"
    argv = [sys.executable, "-m", "seatrial.telemetry.sampler", str(samples), str(HZ)]
    child = processes.start(argv, env={}, stdout=folder / "sampler.log", stderr=folder / "sampler.err")
    try:
        while len(_rows(samples)) < 2:
            if child.process.poll() is not None:
                raise SystemExit(f"the sampler ended at once: {(folder / 'sampler.err').read_text(encoding='utf-8')}")
            time.sleep(0.05)
        yield
    finally:
        processes.end(child)
    (first, used_first), *_, (last, used_last) = ((row[0], row[1]) for row in _rows(samples))
    shares.append((used_last - used_first) / (last - first))


def _rows(samples: Path) -> list[list[float]]:
    """Time and seconds of CPU lead each row (telemetry/sampler.py); its last line may not be whole yet."""
    lines = samples.read_text(encoding="utf-8").split("\n")[:-1] if samples.exists() else []
    return [row for row in map(json.loads, lines) if isinstance(row, list)]


def instruments(device: str, window_s: float) -> Callable[[], Figures]:
    """What measures every figure once, on all ranks together."""
    from torch import distributed as dist

    from seatrial.bench import collectives
    from seatrial.bench.operations import OPERATIONS
    from seatrial.model import parse_bytes
    from seatrial.train import ddp, train_config

    sizes = GPU_SIZES if device != "cpu" else CPU_SIZES
    all_reduce, ranks = OPERATIONS["all_reduce"], dist.get_world_size()
    world = ddp.current_world(device)
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

    def measure() -> Figures:
        found = {}
        for size in sizes:
            timings = collectives.measure_back_to_back(
                all_reduce, parse_bytes(size), "float32", device, window_s, window_s
            ).timings
            gbps = collectives.algorithm_bandwidth(parse_bytes(size), fmean(timings.window_means))
            found[f"busbw.{size}"] = gbps * 2 * (ranks - 1) / ranks  # nccl-tests, doc/PERFORMANCE.md
        world.barrier()
        return found | {"tokens_per_second_per_gpu": settings.bsz * settings.seq_len / step_s(steps)}

    return measure


def work(options: argparse.Namespace) -> int:
    """One rank. Rank 0 tells the result; 1 where a figure that is judged moved too far."""
    from seatrial.bench import group
    from seatrial.bench.rank import describe_devices, gather, store_barrier

    rank = int(os.environ["RANK"])
    device = f"cuda:{os.environ['LOCAL_RANK']}" if options.gpus_per_node else "cpu"
    group.open_group(device, 120)
    measure, facts = instruments(device, options.window), describe_devices(device)
    measure()  # connections and buffers
    rounds: dict[bool, list[Figures]] = {False: [], True: []}
    shares: list[float] = []
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="seatrial-telemetry-") as folder:
        while len(rounds[True]) < options.rounds or gather(time.monotonic() < end)[0]:
            for enabled in (False, True) if len(rounds[True]) % 2 == 0 else (True, False):
                with sampled(Path(folder), shares) if enabled and rank == 0 else nullcontext():
                    store_barrier()  # in the store: a collective would keep the GPUs busy
                    rounds[enabled].append(measure())
            if rank == 0:
                print(f"round {len(rounds[True])} …", file=sys.stderr)
    code = tell(compare(rounds[False], rounds[True]), shares, facts, options) if rank == 0 else 0
    group.close_group()
    return code


def tell(rows: Sequence[Row], shares: Sequence[float], facts: Mapping[str, object], options: argparse.Namespace) -> int:
    judged = bool(options.gpus_per_node)
    if options.out:
        found = {"facts": facts, "rounds": len(shares), "hz": HZ, "sampler_cpu_share": max(shares), "judged": judged}
        found["figures"] = [asdict(row) for row in rows]
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    where = f"{options.processes} × {facts['gpu'] or 'CPU processes: a rehearsal, not judged'}"
    print(f"{where}; {len(shares)} rounds; sampler {max(shares):.2%} of one core at most")
    print("\n".join(table(rows, judged)), flush=True)
    return int(judged and any(row.remark for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: two processes on the CPU")
    parser.add_argument("--seconds", type=float, default=60, help="of rounds")
    # six are the fewest of which a median has a 95 % interval
    parser.add_argument("--rounds", type=int, default=6, help="that are made at least")
    # so long that a sample falls into most of them
    parser.add_argument("--window", type=float, default=1.0, help="seconds of each figure, in each half of a round")
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    options = parser.parse_args()
    options.processes = options.gpus_per_node or 2
    if "LOCAL_RANK" in os.environ:
        return work(options)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    return subprocess.run([*torchrun, *sys.argv], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
