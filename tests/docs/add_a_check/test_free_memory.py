from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.checks.check import Context
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.worker import measure

NAME = "device.free_memory"
ON_GPU = {"backend": "cuda", "gpu": "NVIDIA H200", "world_size": 1, "nodes": 1}


def measured(folder: Path, **options: Any) -> Measurement:
    context = Context(
        node="node0",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=folder,
        run_dir=folder,
    )
    return measure(catalog()[NAME], context, options)


@pytest.mark.parametrize(
    ("options", "outcome"),
    [({}, Outcome.SKIP), ({"needed": "1KiB"}, Outcome.PASS), ({"needed": "1000TiB"}, Outcome.FAIL)],
)
def test_whether_a_job_fits(tmp_path: Path, options: dict[str, Any], outcome: Outcome) -> None:
    verdicts = judge_check(catalog()[NAME], [measured(tmp_path, **options)], {}, "trial")
    outcomes = {verdict.metric: verdict.outcome for verdict in verdicts}
    assert outcomes == {"free_memory": Outcome.SKIP, "fits": outcome}  # on a CPU there is nothing to compare


def test_gpu_with_less_free_memory_than_its_peers_fails(tmp_path: Path) -> None:
    on_cpu = measured(tmp_path)
    on_gpus = []
    for index, free in enumerate((140e9, 140e9, 140e9, 80e9)):
        subject = f"node0/gpu{index}"
        metrics = tuple(replace(metric, subject=subject, value=free) for metric in on_cpu.metrics)
        on_gpus.append(on_cpu.model_copy(update={"subject": subject, "metrics": metrics, "facts": ON_GPU}))
    verdicts = judge_check(catalog()[NAME], on_gpus, {}, "trial")
    failed = [verdict.subject for verdict in verdicts if verdict.outcome is Outcome.FAIL]
    assert failed == ["node0/gpu3"]
