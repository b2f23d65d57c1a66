"""Exposed communication: of given intervals, and of two ranks with a slow all-reduce."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from seatrial.train import exposed_communication, loop, parallel
from seatrial.train.train_config import TrainConfig
from tests.train import ranks

GEMM, RING, COPY = "sm90_xmma_gemm", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", "Memcpy DtoD"


@pytest.mark.parametrize(
    ("intervals", "others", "length"),
    [
        ([], [(0, 9)], 0),
        ([(0, 10)], [], 10),
        ([(0, 10)], [(0, 10)], 0),
        ([(0, 10)], [(2, 3), (5, 7)], 7),
        ([(0, 10)], [(-5, 1), (9, 20)], 8),
        ([(0, 4), (2, 6)], [(5, 9)], 5),  # overlap counts once
        ([(0, 1), (8, 9)], [(2, 3)], 2),
        ([(3, 3)], [], 0),
    ],
)
def test_uncovered_length(intervals: list[tuple[int, int]], others: list[tuple[int, int]], length: int) -> None:
    assert exposed_communication.uncovered_length(intervals, others) == length


def test_uncovered_length_of_random_intervals() -> None:
    generator = random.Random(1)
    for _ in range(200):
        intervals, others = ([_interval(generator) for _ in range(generator.randrange(9))] for _ in "ab")
        uncovered = {at for begin, end in intervals for at in range(begin, end)}
        uncovered -= {at for begin, end in others for at in range(begin, end)}
        assert exposed_communication.uncovered_length(intervals, others) == len(uncovered)


def _interval(generator: random.Random) -> tuple[int, int]:
    begin = generator.randrange(40)
    return begin, begin + generator.randrange(12)


def test_exposed_percent_of_nccl_kernels() -> None:
    step = [(GEMM, 100, 160), (RING, 150, 180), (COPY, 160, 180), (GEMM, 180, 200)]
    assert exposed_communication.exposed_percent(step) == 20.0  # 160 to 180 of 100 to 200; Memcpy does not count
    assert exposed_communication.exposed_percent([(RING, 0, 10)]) == 100.0
    assert exposed_communication.exposed_percent([(GEMM, 0, 10)]) == 0.0
    assert exposed_communication.exposed_percent([(COPY, 0, 10)]) is None
    assert exposed_communication.exposed_percent([]) is None


class Event(NamedTuple):
    """A raw event of the profiler."""

    label: str
    begin: int
    end: int
    device: DeviceType = DeviceType.CUDA
    annotation: bool = False

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.begin

    def end_ns(self) -> int:
        return self.end

    def device_type(self) -> DeviceType:
        return self.device

    def is_user_annotation(self) -> bool:
        return self.annotation


def test_gpu_kernels_of_profiler_events() -> None:
    events = [
        Event(GEMM, 0, 60),
        Event(RING, 50, 100),
        Event("FSDP::all_gather", 0, 100, annotation=True),  # annotations also have GPU time
        Event("nccl:all_reduce", 0, 500, annotation=True),
        Event("cudaLaunchKernel", 0, 400, device=DeviceType.CPU),
    ]
    assert exposed_communication.exposed_percent(exposed_communication.gpu_kernels(events)) == 40.0


def _train_slowly(settings: TrainConfig, out: Path) -> dict[str, Any]:
    """Adds half a second to each gradient all-reduce."""
    original = parallel.replicate

    def replicate(*arguments: Any) -> Any:
        replica: Any = original(*arguments)
        replica.register_comm_hook(dist.group.WORLD, lambda state, bucket: slow_allreduce(state, bucket))
        return replica

    def slow_allreduce(state: Any, bucket: Any) -> Any:
        time.sleep(0.5)
        return default_hooks.allreduce_hook(state, bucket)

    parallel.replicate = replicate  # type: ignore[assignment]
    return loop.train(settings, out)


@pytest.mark.training
def test_two_ranks_report_exposed_communication_without_side_effects(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"use_lora": True, "lora_dropout": 0.0, "max_steps": 2}
    settings = ranks.config(**changes, profile_steps=2)
    first, second = ranks.run(2, _train_slowly, settings, tmp_path / "on")
    names = [*exposed_communication.NAMES, "exposed_communication_method"]
    assert [first[name] for name in names] == [second[name] for name in names]
    assert 20 < first["exposed_communication_percent"] <= 100  # computation takes some 10 ms per step
    assert first["exposed_communication_percent"] == first["exposed_communication_control_percent"]
    assert first["exposed_communication_method"] == "control run: 2 steps with and 2 without gradient communication"
    assert (first["steps"], len((tmp_path / "on" / "steps.jsonl").read_text().splitlines())) == (2, 2)
    off, _ = ranks.run(2, ranks.train, settings.model_copy(update={"profile_steps": 0}), tmp_path / "off")
    assert [off[name] for name in names] == [None] * 4
    exported = [(tmp_path / name / "final" / "adapter_model.safetensors").read_bytes() for name in ("on", "off")]
    assert exported[0] == exported[1]
    written = json.loads((tmp_path / "on" / "metrics.json").read_text())
    assert written["exposed_communication_percent"] == first["exposed_communication_percent"]
