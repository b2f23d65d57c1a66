from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seatrial.model import SeatrialError
from seatrial.train import memory, metrics
from seatrial.train.blocks import DatasetInfo
from seatrial.train.parallel import World
from tests.train.ranks import config


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {},
            [
                "4 × 16 tokens",
                "Adam 0.0 GiB;",
                "bsz=2 and grad_accum=2",
                "gradient_checkpointing=true",
                "strategy=fsdp2",
            ],
        ),
        ({"use_lora": True, "bsz": 1}, ["weights 0.0 GiB; the rest", "seq_len=8"]),
        ({"gradient_checkpointing": True}, ["loss_chunks=16"]),
        ({"gradient_checkpointing": True, "stack": "hf"}, ["stack=native"]),
        ({"parallel": {"strategy": "fsdp2"}}, ["before sharding", "parallel.cpu_offload=true"]),
        ({"parallel": {"strategy": "fsdp2", "cpu_offload": True}}, ["use_lora=true"]),
        ({"parallel": {"strategy": "zero3", "deepspeed": "ds.json"}, "stack": "hf"}, ["offload_optimizer", "ds.json"]),
    ],
)
def test_out_of_memory_errors_list_applicable_remedies(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SeatrialError) as caught, metrics.explain_out_of_memory(config(**changes), torch.device("cpu")):
        torch.empty(2**60)  # a real error of the CPU allocator
    assert "you tried to allocate" in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_other_runtime_errors_are_unchanged() -> None:
    with pytest.raises(RuntimeError, match="other"), metrics.explain_out_of_memory(config(), torch.device("cpu")):
        raise RuntimeError("other")


def test_peak_tflops_of_known_and_unknown_gpus() -> None:
    assert metrics.peak_tflops("NVIDIA H200") == 989.5
    assert metrics.peak_tflops("NVIDIA H2000") is None


def test_the_slowest_rank_has_the_longest_compute_time() -> None:
    entries: list[dict[str, Any]] = [
        {"rank": rank, "host": f"n{rank // 2}", "device": "CPU", "compute_s": [1.0 + (rank == 2)] * 8}
        for rank in range(4)
    ]
    assert metrics.slowest_rank(entries) == {"rank": 2, "host": "n1", "ratio_to_median": 2.0, "interval": [2.0, 2.0]}
    untimed = [{"rank": 0, "host": "n0", "device": "CPU", "compute_s": []}]
    assert metrics.slowest_rank(untimed) is None  # as with ZeRO-3


class Zero3(nn.Module):
    """A module as ZeRO-3 leaves it: empty tensors with the size in ``ds_numel``."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
        self.sharded.ds_numel = 40  # type: ignore[attr-defined]
        self.frozen = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)


def run_of(model: nn.Module, strategy: str = "ddp", optimizer: Any = None) -> metrics.TrainingRun:
    info = DatasetInfo(source="generated", rows=1, tokens=1, vocabulary=257)
    return metrics.TrainingRun([], model, optimizer, strategy, "bf16", info, trained_tokens=0, checkpoints=[])


def test_parameter_counts_are_unsharded() -> None:
    assert metrics.parameter_counts(Zero3()) == (40, 45)


def test_precision_lists_dtypes_of_weights_and_adam() -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    model.bias.requires_grad_(False)
    master = torch.zeros(2, 2, requires_grad=True)
    optimizer = torch.optim.AdamW([master])
    assert metrics.describe_precision(run_of(model, optimizer=optimizer)) == (
        "bf16 compute, bf16 frozen weights, bf16 trained weights, unknown Adam"
    )
    master.grad = torch.ones(2, 2)
    optimizer.step()
    assert metrics.describe_precision(run_of(model, optimizer=optimizer)) == (
        "bf16 compute, bf16 frozen weights, bf16 trained weights, fp32 master weights, fp32 Adam"
    )
    assert metrics.dtype_name(torch.int8) == "torch.int8"


@pytest.mark.parametrize(
    ("strategy", "parallel", "expected"),
    [
        ("ddp", {"strategy": "ddp"}, 3 * 4000 + 400),  # trained: weights and two moments; frozen: weights
        ("fsdp2", {"strategy": "fsdp2"}, (3 * 4000 + 400) / 4),
        ("fsdp2", {"strategy": "fsdp2", "replicas": 2}, (3 * 4000 + 400) / 2),
        ("fsdp2", {"strategy": "fsdp2", "cpu_offload": True}, 0.0),
        ("zero3", {"strategy": "ddp"}, None),  # determined by DeepSpeed's config
    ],
)
def test_expected_memory_of_weights_and_adam(strategy: str, parallel: dict[str, Any], expected: float | None) -> None:
    model = nn.Linear(10, 100)  # 1000 weights
    model.bias.requires_grad_(False)
    world = World(0, 4, torch.device("cpu"), "n0")
    gib = metrics._expected_state_gib(config(parallel=parallel), world, run_of(model, strategy))
    assert gib == (None if expected is None else pytest.approx(expected / memory.GIB))


REPORT: dict[str, Any] = {
    "run_name": "night",
    "model": "qwen2-7b",
    "stack": "native",
    "strategy": "fsdp2",
    "replicas": 1,
    "precision": "bf16 compute",
    "mfu_percent": 41.26,
    "peak_tflops": 989.5,
    "exposed_communication_percent": None,
    "exposed_communication_method": "profile",
    "loss_first": 5.0,
    "loss_last": 1.5,
    "loss_entropy_bound": 1.25,
    "memory_peak_gib": 70.04,
    "allocation_retries": 0,
    "tokens_per_second_per_gpu": 12345.6,
    "world_size": 16,
    "gpu0": "NVIDIA H200",
    "step_p50_s": 0.5,
    "step_p99_s": 0.6,
    "steps_measured": 20,
    "compile_s": 30.0,
    "weights": "random",
    "data": {"source": "generated"},
    "phases_s": {"import": 2.0, "first_step": 31.5},
}


def test_summary_text() -> None:
    assert metrics.summary_text(REPORT).splitlines() == [
        "night: qwen2-7b, stack native, fsdp2, bf16 compute",
        "12,346 tok/s/GPU on 16 × NVIDIA H200, MFU 41.3 % of 989.5 TFLOP/s",
        "step p50 0.5000 s, p99 0.6000 s over 20 steps; compile 30.0 s; peak memory 70.0 GiB",
        "loss 5.0000 → 1.5000 (entropy bound 1.2500); weights random, data generated",
        "startup: import 2.0 s, first step 31.5 s",
    ]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"mfu_percent": None}, "no MFU: peak unknown"),
        ({"replicas": 2}, "fsdp2 with 2 replicas (HSDP)"),
        ({"strategy": "ddp", "replicas": 2}, "stack native, ddp, bf16"),
        ({"allocation_retries": 3}, "3 allocator retries"),
        ({"exposed_communication_percent": 7.25}, "exposed communication 7.2 % of a step (profile)"),
        ({"loss_entropy_bound": None}, "→ 1.5000; weights"),
    ],
)
def test_summary_text_of_special_cases(changes: dict[str, Any], part: str) -> None:
    assert part in metrics.summary_text(REPORT | changes)
    assert part not in metrics.summary_text(REPORT)


def test_metrics_are_written_as_json_and_as_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.write(REPORT, tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text()) == REPORT
    assert (tmp_path / "summary.txt").read_text() == metrics.summary_text(REPORT) == capsys.readouterr().err
