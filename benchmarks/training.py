"""How fast a model trains, which lever gave what, and native against Hugging Face: a table for docs/results.

    python benchmarks/training.py --out results            everything in training.yaml
    python benchmarks/training.py --only 'seq 4096' --lever plain --lever 'cudnn*' --gpus 4 --set max_steps=20
    python benchmarks/training.py --only 'LoRA r=8, seq 512' --lever plain --lever hf --gpus 1

Each run is one `seatrial train`, under torchrun where it takes several GPUs: nothing of one is left in the next. One
that fails is a line of the table with its reason; the exit code is then 1. Where the same was run with both stacks,
the table is followed by their ratio.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
COLUMNS = ("run", "lever", "GPUs", "tok/s/GPU", "MFU %", "p50 s", "p99 s", "peak GiB", "compile s", "first step s")


@dataclass(frozen=True)
class Run:
    name: str
    lever: str
    config: Path
    gpus: int
    settings: dict[str, Any]


def planned(plan: Path, only: str, levers: Sequence[str], gpus: Sequence[int]) -> Iterator[Run]:
    """What ``plan`` asks for, of runs whose name holds ``only`` and levers that match one of ``levers``."""
    for entry in yaml.safe_load(plan.read_text(encoding="utf-8")):
        for count in gpus or entry["gpus"]:
            for lever, settings in entry["levers"].items():
                if only in entry["name"] and any(fnmatch(lever, pattern) for pattern in levers or ("*",)):
                    yield Run(entry["name"], lever, ROOT / entry["config"], count, settings)


def measure(run: Run, everywhere: Sequence[str], out: Path) -> dict[str, Any]:
    """metrics.json of one run; or ``error``, the end of what it said. Its log is kept beside it."""
    folder = out / f"{run.name}-{run.lever}-{run.gpus}".replace(" ", "-").replace(",", "").replace("=", "")
    settings = [f"{key}={str(value).lower()}" for key, value in run.settings.items()] + list(everywhere)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.gpus)]
    command = [
        *(sys.executable, *(torchrun if run.gpus > 1 else [])),
        *("-m", "seatrial", "train", str(run.config), "--out", str(folder)),
        *(word for setting in settings for word in ("--set", setting)),
    ]
    folder.mkdir(parents=True)
    with (folder / "log.txt").open("w") as log:
        print(*command, file=log, flush=True)
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code == 0:
        found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
        return found
    said = [line for line in (folder / "log.txt").read_text().splitlines() if "Error" in line or "seatrial:" in line]
    return {"error": (said or [f"exit code {code}"])[0][-200:]}


def row(run: Run, found: dict[str, Any]) -> list[str]:
    start = [run.name, run.lever, str(run.gpus)]
    if "error" in found:
        return [*start, found["error"], *[""] * (len(COLUMNS) - 4)]
    mfu = found["mfu_percent"]
    return [
        *start,
        f"{found['tokens_per_second_per_gpu']:,.0f}",
        "unknown" if mfu is None else f"{mfu:.1f}",
        f"{found['step_p50_s']:.4f}",
        f"{found['step_p99_s']:.4f}",
        "–" if found["memory_peak_gib"] is None else f"{found['memory_peak_gib']:.1f}",
        f"{found['compile_s']:.1f}",
        f"{found['phases_s']['time_to_first_step']:.1f}",
    ]


def ratios(done: Sequence[tuple[Run, dict[str, Any]]]) -> list[str]:
    """Native against stack hf, of those runs that differ in nothing else."""
    speeds: dict[tuple[str, str], dict[str, float]] = {}
    for run, found in done:
        if "error" not in found:
            others = ", ".join(f"{key} {value}" for key, value in run.settings.items() if key != "stack")
            alike = f"{run.name}{f', {others}' if others else ''}", str(run.gpus)
            speeds.setdefault(alike, {})[found["stack"]] = found["tokens_per_second_per_gpu"]
    return [
        f"{name} on {gpus}: native {both['native']:,.0f} against hf {both['hf']:,.0f} tok/s/GPU, "
        f"{both['native'] / both['hf']:.2f} times as fast"
        for (name, gpus), both in speeds.items()
        if len(both) == 2
    ]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--only", default="", help="runs whose name holds this")
    parser.add_argument("--lever", action="append", default=[], help="levers that match; may be given again")
    parser.add_argument("--gpus", action="append", type=int, default=[], help="in place of what the plan says")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--out", type=Path, default=Path("seatrial-runs", time.strftime("benchmark-%Y%m%d-%H%M%S")))
    options = parser.parse_args()
    said = [line(COLUMNS), line(["---"] * len(COLUMNS))]
    print(*said, sep="\n", flush=True)
    done = []
    for run in planned(options.plan, options.only, options.lever, options.gpus):
        done.append((run, measure(run, options.set, options.out.absolute())))
        said.append(line(row(*done[-1])))
        print(said[-1], flush=True)
    compared = ["", *ratios(done)]
    print(*compared, sep="\n")
    (options.out / "table.md").write_text("\n".join([*said, *compared]) + "\n", encoding="utf-8")
    return int(any("error" in found for _, found in done))


if __name__ == "__main__":
    sys.exit(main())
