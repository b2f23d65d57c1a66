"""What tests of checks that train have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from seatrial.checks.base import Check, Place
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Observation, Outcome
from seatrial.worker import measure
from tests.checks import training_driver
from tests.train.ranks import CORES


def carried_out(check: Check, out: Path, ranks: int = 2) -> list[Measurement]:
    """The measurements of all ranks of a real run on this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ended = subprocess.run(
        [*torchrun, "-m", training_driver.__name__, check.name, str(out)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(CORES)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [Measurement.model_validate_json((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def outcomes(check: Check, measurements: Iterable[Measurement]) -> dict[str, Outcome]:
    """Metric → what the rules say of it."""
    return {verdict.metric: verdict.outcome for verdict in judge_check(check, list(measurements), {}, "t")}


def failed(check: Check, observations: Iterable[Observation], folder: Path) -> set[str]:
    """The metrics that the rules fail, of these observations."""
    told = list(observations)
    found = measure(replace(check, measure=lambda place, options: iter(told)), seat(folder), {})
    assert found.error is None
    judged = outcomes(check, [found])
    return {metric for metric, outcome in judged.items() if outcome is Outcome.FAIL}


def seat(out: Path, ranks: int = 2) -> Place:
    return Place(
        node="n0", rank=0, world_size=ranks, local_rank=0, device="cpu", promised_gpus=None, out=out, run_dir=out
    )
