"""Compares a CPU trial in a container with the same trial outside: pairs of runs, one directly after the other.

    python benchmarks/container_against_bare.py --folder /tmp/pairs \\
        --bare .venv/bin/seatrial --container 'docker run --rm --user 0 --volume /tmp/pairs:/tmp/pairs seatrial:full'

Prints JSON: for each figure the median ratio container / bare over the pairs, its range, and the spread of the bare
runs, which shows how far other load on the machine disturbs the comparison. ``cpu_s`` is the CPU time of child
processes: it does not include containers of a daemon, such as docker's.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from seatrial.model import Trial
from seatrial.pipeline.run_directory import load_trial

Figures = dict[str, float]

_METRICS = {
    ("collectives.all_reduce", "busbw.10MiB"): "all_reduce_GB_per_s",
    ("train.cnn", "images_per_second"): "cnn_images_per_s",
    ("train.ddp", "tokens_per_second"): "ddp_tokens_per_s",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bare", required=True, type=shlex.split, help="the command of seatrial outside a container")
    parser.add_argument("--container", required=True, type=shlex.split, help="the command of seatrial in a container")
    parser.add_argument("--folder", required=True, type=Path, help="new folder, under the same path in the container")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args(argv)
    pairs = []
    for number in range(options.pairs):
        # every second pair starts with the container: load that grows or shrinks favours neither
        order = ("bare", "container") if number % 2 == 0 else ("container", "bare")
        pairs.append({kind: _run(getattr(options, kind), options.folder / f"{number}-{kind}") for kind in order})
        print(f"pair {number + 1} of {options.pairs}: {json.dumps(pairs[-1])}", file=sys.stderr, flush=True)
    print(json.dumps({"pairs": pairs, "summary": summary(pairs)}, indent=1))
    return 0


def summary(pairs: list[dict[str, Figures]]) -> dict[str, dict[str, float]]:
    """Return of each figure: median, smallest and largest ratio container / bare, and the bare runs' range / median."""
    rows = {}
    for name in pairs[0]["bare"]:
        bare = [pair["bare"][name] for pair in pairs]
        if 0 in bare:  # no ratio
            continue
        ratios = [pair["container"][name] / pair["bare"][name] for pair in pairs]
        rows[name] = {
            "ratio": round(median(ratios), 3),
            "smallest_ratio": round(min(ratios), 3),
            "largest_ratio": round(max(ratios), 3),
            "bare_spread": round((max(bare) - min(bare)) / median(bare), 3),
        }
    return rows


def figures(trial: Trial) -> Figures:
    """Return the rates of a record; of several ranks: the smallest. Raises ValueError if the trial lacks one."""
    found: Figures = {}
    for measurement in trial.measurements:
        for metric in measurement.metrics:
            if name := _METRICS.get((measurement.check, metric.name)):
                found[name] = min(metric.value, found.get(name, metric.value))
    if missing := set(_METRICS.values()) - found.keys():
        raise ValueError(f"the trial has no {', '.join(sorted(missing))}")
    return found


def _run(command: list[str], out: Path) -> Figures:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    trial = ["run", "quick", "--gpus-per-node", "0", "--set", "retry=false", "--out", str(out)]
    done = subprocess.run([*command, *trial], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not (out / "trial.json").exists():
        sys.exit(
            f"{shlex.join(command)} left no {out / 'trial.json'}: exit code {done.returncode}\n{done.stderr[-2000:]}"
        )
    record = load_trial(out)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"trial_s": record.seconds, "cpu_s": round(cpu, 1), **figures(record)}


if __name__ == "__main__":
    sys.exit(main())
