"""Measures training speed for several configs and settings, and compares the stacks native and hf.

    python benchmarks/training.py --out results            all runs in training.yaml
    python benchmarks/training.py --only 'seq 4096' --variant base --variant 'cudnn*' --gpus 4 --set max_steps=20
    python benchmarks/training.py --only 'LoRA r=8, seq 512' --variant base --variant hf --gpus 1

Each run is a new process of `seatrial train run`, with torchrun for several GPUs. The result is a Markdown table. A
failed run has its error in the table, and the exit code is 1. Runs that differ only in the stack are compared below it.
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
COLUMNS = ("run", "variant", "GPUs", "tok/s/GPU", "MFU %", "p50 s", "p99 s", "peak GiB", "compile s", "first step s")


@dataclass(frozen=True)
class Run:
    name: str
    variant: str
    config: Path
    gpus: int
    settings: dict[str, Any]


def planned_runs(plan: Path, only: str, variants: Sequence[str], gpus: Sequence[int]) -> Iterator[Run]:
    """The runs of ``plan`` whose name contains ``only`` and whose variant matches a pattern in ``variants``."""
    for entry in yaml.safe_load(plan.read_text(encoding="utf-8")):
        for count in gpus or entry["gpus"]:
            for variant, settings in entry["variants"].items():
                if only in entry["name"] and any(fnmatch(variant, pattern) for pattern in variants or ("*",)):
                    yield Run(entry["name"], variant, ROOT / entry["config"], count, settings)


def measure(run: Run, overrides: Sequence[str], out: Path) -> dict[str, Any]:
    """The content of metrics.json of one run, or ``error`` with its error message; the log is in the run folder."""
    folder = out / f"{run.name}-{run.variant}-{run.gpus}".replace(" ", "-").replace(",", "").replace("=", "")
    settings = [f"{key}={str(value).lower()}" for key, value in run.settings.items()] + list(overrides)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.gpus)]
    command = [
        *(sys.executable, *(torchrun if run.gpus > 1 else [])),
        *("-m", "seatrial", "train", "run", str(run.config), "--out", str(folder)),
        *(argument for setting in settings for argument in ("--set", setting)),
    ]
    folder.mkdir(parents=True)
    with (folder / "log.txt").open("w") as log:
        print(*command, file=log, flush=True)
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code == 0:
        metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
        return metrics
    errors = [line for line in (folder / "log.txt").read_text().splitlines() if "Error" in line or "seatrial:" in line]
    return {"error": (errors or [f"exit code {code}"])[0][-200:]}


def cells(run: Run, metrics: dict[str, Any]) -> list[str]:
    start = [run.name, run.variant, str(run.gpus)]
    if "error" in metrics:
        return [*start, metrics["error"], *[""] * (len(COLUMNS) - 4)]
    mfu = metrics["mfu_percent"]
    return [
        *start,
        f"{metrics['tokens_per_second_per_gpu']:,.0f}",
        "unknown" if mfu is None else f"{mfu:.1f}",
        f"{metrics['step_p50_s']:.4f}",
        f"{metrics['step_p99_s']:.4f}",
        "–" if metrics["memory_peak_gib"] is None else f"{metrics['memory_peak_gib']:.1f}",
        f"{metrics['compile_s']:.1f}",
        f"{metrics['phases_s']['time_to_first_step']:.1f}",
    ]


def ratios(done: Sequence[tuple[Run, dict[str, Any]]]) -> list[str]:
    """Speed of stack native ÷ hf, for runs that differ only in the stack."""
    speeds: dict[tuple[str, str], dict[str, float]] = {}
    for run, metrics in done:
        if "error" not in metrics:
            others = ", ".join(f"{key} {value}" for key, value in run.settings.items() if key != "stack")
            name_and_gpus = f"{run.name}{f', {others}' if others else ''}", str(run.gpus)
            speeds.setdefault(name_and_gpus, {})[metrics["stack"]] = metrics["tokens_per_second_per_gpu"]
    return [
        f"{name} on {gpus}: native {both['native']:,.0f} against hf {both['hf']:,.0f} tok/s/GPU, "
        f"{both['native'] / both['hf']:.2f} times as fast"
        for (name, gpus), both in speeds.items()
        if len(both) == 2
    ]


def markdown_row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--only", default="", help="only runs whose name contains this text")
    parser.add_argument(
        "--variant", action="append", default=[], help="only variants that match this pattern; repeatable"
    )
    parser.add_argument(
        "--gpus", action="append", type=int, default=[], help="number of GPUs instead of the plan's; repeatable"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="config override for every run; repeatable"
    )
    parser.add_argument("--out", type=Path, default=Path("seatrial-runs", time.strftime("benchmark-%Y%m%d-%H%M%S")))
    options = parser.parse_args()
    rows = [markdown_row(COLUMNS), markdown_row(["---"] * len(COLUMNS))]
    print(*rows, sep="\n", flush=True)
    done = []
    for run in planned_runs(options.plan, options.only, options.variant, options.gpus):
        done.append((run, measure(run, options.set, options.out.absolute())))
        rows.append(markdown_row(cells(*done[-1])))
        print(rows[-1], flush=True)
    ratio_lines = ["", *ratios(done)]
    print(*ratio_lines, sep="\n")
    (options.out / "table.md").write_text("\n".join([*rows, *ratio_lines]) + "\n", encoding="utf-8")
    return int(any("error" in metrics for _, metrics in done))


if __name__ == "__main__":
    sys.exit(main())
