"""Exposed communication: by intervals made up, and by two ranks whose exchange is slow."""

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
    ("some", "others", "length"),
    [
        ([], [(0, 9)], 0),
        ([(0, 10)], [], 10),
        ([(0, 10)], [(0, 10)], 0),
        ([(0, 10)], [(2, 3), (5, 7)], 7),
        ([(0, 10)], [(-5, 1), (9, 20)], 8),
        ([(0, 4), (2, 6)], [(5, 9)], 5),  # what overlaps counts once
        ([(0, 1), (8, 9)], [(2, 3)], 2),
        ([(3, 3)], [], 0),
    ],
)
def test_what_some_cover_alone(some: list[tuple[int, int]], others: list[tuple[int, int]], length: int) -> None:
    assert exposed_communication.uncovered_length(some, others) == length


def test_any_intervals_come_out_as_if_counted_one_by_one() -> None:
    chance = random.Random(1)
    for _ in range(200):
        some, others = ([_interval(chance) for _ in range(chance.randrange(9))] for _ in "ab")
        alone = {at for begin, end in some for at in range(begin, end)}
        alone -= {at for begin, end in others for at in range(begin, end)}
        assert exposed_communication.uncovered_length(some, others) == len(alone)


def _interval(chance: random.Random) -> tuple[int, int]:
    begin = chance.randrange(40)
    return begin, begin + chance.randrange(12)


def test_kernels_of_nccl_are_told_from_others() -> None:
    step = [(GEMM, 100, 160), (RING, 150, 180), (COPY, 160, 180), (GEMM, 180, 200)]
    assert exposed_communication.exposed_percent(step) == 20.0  # 160 to 180, of 100 to 200: a copy is no computing
    assert exposed_communication.exposed_percent([(RING, 0, 10)]) == 100.0
    assert exposed_communication.exposed_percent([(GEMM, 0, 10)]) == 0.0
    assert exposed_communication.exposed_percent([(COPY, 0, 10)]) is None
    assert exposed_communication.exposed_percent([]) is None


class Event(NamedTuple):
    """What is asked of a raw event of the profiler."""

    said: str
    begin: int
    end: int
    device: DeviceType = DeviceType.CUDA
    annotation: bool = False

    def name(self) -> str:
        return self.said

    def start_ns(self) -> int:
        return self.begin

    def end_ns(self) -> int:
        return self.end

    def device_type(self) -> DeviceType:
        return self.device

    def is_user_annotation(self) -> bool:
        return self.annotation


def test_of_the_profilers_events_the_kernels_count() -> None:
    seen = [
        Event(GEMM, 0, 60),
        Event(RING, 50, 100),
        Event("FSDP::all_gather", 0, 100, annotation=True),  # the GPU's time is annotated as well
        Event("nccl:all_reduce", 0, 500, annotation=True),
        Event("cudaLaunchKernel", 0, 400, device=DeviceType.CPU),
    ]
    assert exposed_communication.exposed_percent(exposed_communication.gpu_kernels(seen)) == 40.0


def _slowed(settings: TrainConfig, out: Path) -> dict[str, Any]:
    """Gradients take half a second to exchange."""
    real = parallel.replicate

    def replicate(*arguments: Any) -> Any:
        replica: Any = real(*arguments)
        replica.register_comm_hook(dist.group.WORLD, lambda state, bucket: late(state, bucket))
        return replica

    def late(state: Any, bucket: Any) -> Any:
        time.sleep(0.5)
        return default_hooks.allreduce_hook(state, bucket)

    parallel.replicate = replicate  # type: ignore[assignment]
    return loop.train(settings, out)


@pytest.mark.training
def test_two_ranks_say_what_their_exchange_costs_and_nothing_kept_changes(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"use_lora": True, "lora_dropout": 0.0, "max_steps": 2}
    wanted = ranks.config(**changes, profile_steps=2)
    first, second = ranks.run(2, _slowed, wanted, tmp_path / "on")
    names = [*exposed_communication.NAMES, "exposed_communication_method"]
    assert [first[name] for name in names] == [second[name] for name in names]
    assert 20 < first["exposed_communication_percent"] <= 100  # a step computes for some hundredths of a second
    assert first["exposed_communication_percent"] == first["exposed_communication_control_percent"]
    assert first["exposed_communication_method"] == "control: 2 steps with and 2 without exchange of gradients"
    assert (first["steps"], len((tmp_path / "on" / "steps.jsonl").read_text().splitlines())) == (2, 2)
    off, _ = ranks.run(2, ranks.train, wanted.model_copy(update={"profile_steps": 0}), tmp_path / "off")
    assert [off[name] for name in names] == [None] * 4
    kept = [(tmp_path / name / "final" / "adapter_model.safetensors").read_bytes() for name in ("on", "off")]
    assert kept[0] == kept[1]
    written = json.loads((tmp_path / "on" / "metrics.json").read_text())
    assert written["exposed_communication_percent"] == first["exposed_communication_percent"]
