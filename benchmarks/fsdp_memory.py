"""Memory that a rank holds with DDP and FSDP2, by wrapping and number of ranks, as a table in Markdown.

    python benchmarks/fsdp_memory.py --ranks 1 2 4          # CPU: the config tiny/parity over gloo
    python benchmarks/fsdp_memory.py --ranks 1 2 4 8        # a node with GPUs: the config parity

The trainings are those of the check train.parity. Weights, gradients and Adam state are counted from the tensors of the
fullest rank; the peak is that of CUDA's allocator and unknown on CPUs. The loss difference is the largest relative
difference from the training of one process with the same batches, over all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from seatrial.checks.training.parity import STRATEGIES, VARIANTS, training_configs
from seatrial.train import compare, train_config

RUNS = (*STRATEGIES, *VARIANTS)
HEADING = (
    "ranks",
    "run",
    "groups",
    "largest group, MiB",
    "weights, MiB",
    "gradients, MiB",
    "Adam, MiB",
    "held per rank, MiB",
    "relative to DDP",
    "in memory of",
    "GPU peak, MiB",
    "loss difference",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks on this machine")
    parser.add_argument("--config", help="training config; default: parity on GPUs, tiny/parity without")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.config, arguments.worker)
        return
    print("| " + " | ".join(HEADING) + " |\n" + "| --- " * len(HEADING) + "|")
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            command = [*torchrun(ranks), __file__, "--worker", folder]
            command += ["--config", arguments.config] if arguments.config else []
            result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if result.returncode:
                sys.exit(f"{' '.join(command)}: exit code {result.returncode}\n{result.stderr[-3000:]}")
            for cells in rows(Path(folder), ranks):
                print("| " + " | ".join(cells) + " |", flush=True)


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def train(config_name: str | None, folder: Path) -> None:
    """Trains all runs on the ranks of this torchrun; rank 0's process also trains the reference, alone."""
    import torch
    import torch.distributed as dist

    from seatrial.train import loop, parallel

    name = config_name or ("parity" if torch.cuda.is_available() else "tiny/parity")
    dist.init_process_group(parallel.BACKEND if torch.cuda.is_available() else "gloo")
    configs = training_configs(train_config.load(name), dist.get_world_size(), folder / "data")
    for run in RUNS:
        loop.train(configs[run], folder / run)
    is_rank0 = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    if is_rank0:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(variable, None)
        loop.train(configs["single_process"], folder / "single_process")


def rows(folder: Path, ranks: int) -> Iterator[list[str]]:
    """The cells of each run in ``folder``, which has one folder per run and that of the single process."""
    reports = {run: json.loads((folder / run / "metrics.json").read_text()) for run in RUNS}
    last = len((folder / "single_process" / "steps.jsonl").read_text().splitlines())
    single = compare.read_steps(folder / "single_process", 0, last)
    ddp_gib = max(map(held_gib, reports["ddp"]["ranks"]))
    for run, report in reports.items():
        fullest = max(report["ranks"], key=held_gib)
        difference = compare.max_relative_difference(compare.read_steps(folder / run, 0, last), single, "loss").value
        yield [
            str(ranks),
            run.replace("_", " "),
            str(report["fsdp_groups"]),
            mib(report["fsdp_largest_group_gib"]),
            *(mib(fullest[f"{kind}_gib"]) for kind in ("parameters", "gradients", "optimizer")),
            mib(held_gib(fullest)),
            f"{held_gib(fullest) / ddp_gib:.3f}",
            "the host" if fullest["state_device"] == "cpu" else "the GPU",
            mib(report["memory_peak_gib"]),
            f"{difference:.1e}",
        ]


def held_gib(rank: Mapping[str, Any]) -> float:
    """Weights, gradients and Adam state of an entry of ``ranks`` in metrics.json."""
    return float(sum(rank[f"{kind}_gib"] for kind in ("parameters", "gradients", "optimizer")))


def mib(gib: float | None) -> str:
    return "–" if gib is None else f"{gib * 1024:,.3f}"


if __name__ == "__main__":
    main()
