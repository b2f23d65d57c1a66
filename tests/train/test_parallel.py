"""Parallelism of a model on one rank; test_loop.py and test_checkpoint.py have several ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from seatrial.model import SeatrialError, UsageError
from seatrial.train import loop, parallel
from seatrial.train.parallel import World
from tests.train.ranks import config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_group() -> None:
    """Close the process group that a failed training of another test has left open."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def world() -> Iterator[World]:
    with parallel.process_group(60) as world:
        yield world


def test_group_without_torchrun_is_one_rank_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with parallel.process_group(60) as world:
        assert (world.rank, world.size, world.is_rank_0) == (0, 1, True)
        assert dist.get_backend() == "gloo"
        assert world.gather("x") == ["x"]
        with parallel.process_group(60):
            pass
        assert dist.is_initialized(), "a group that was open before stays open"
    assert not dist.is_initialized()


def test_single_rank_gathers_and_reduces_without_a_group() -> None:
    alone, value = World(0, 1, CPU, "n0"), torch.tensor([2.0])
    assert not dist.is_initialized()
    alone.barrier()
    assert (alone.gather(3), alone.all_reduce_sum(value) is value, value.tolist()) == ([3], True, [2.0])


def test_sharded_model_has_all_parameters_in_shards(world: World) -> None:
    built = parallel.build(config(parallel={"strategy": "fsdp2"}), world)
    counts = parallel.tensor_counts(built.model)
    assert counts["sharded_tensors"] == counts["parameter_tensors"] == len(built.trained_parameters) > 0
    assert built.train_module is built.model
    assert not any(isinstance(parallel.unshard(tensor), DTensor) for tensor in built.model.parameters())


@pytest.mark.parametrize(
    ("wrap", "groups"),
    [
        ({}, ["layers.0", "layers.1", "output"]),
        ({"wrap": "none"}, []),
        # attention has 12,288 parameters, the MLP 30,720, the head with its norm 16,448, other weights of a block 128
        ({"wrap": "size", "wrap_min_parameters": 30_000}, ["layers.0.mlp", "layers.1.mlp"]),
        (
            {"wrap": "size", "wrap_min_parameters": 12_288},
            ["layers.0.self_attn", "layers.0.mlp", "layers.1.self_attn", "layers.1.mlp", "output"],
        ),
        (
            {"wrap": "size", "wrap_min_parameters": 12_289},
            ["layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "output"],
        ),
        ({"wrap": "size", "wrap_min_parameters": 50_000}, []),
    ],
)
def test_groups_of_fsdp2(world: World, wrap: dict[str, Any], groups: list[str]) -> None:
    settings = config(parallel={"strategy": "fsdp2", **wrap})
    model = parallel.build(config(), world).model
    names = {module: name for name, module in model.named_modules()}
    assert [names[module] for module in parallel.fsdp_groups(model, settings.parallel)] == groups


@pytest.mark.parametrize(("placement", "sharded"), [(None, 0), (Replicate(), 0), (Shard(1), 0), (Shard(0), 1)])
def test_only_parameters_in_rows_count_as_sharded(world: World, placement: Any, sharded: int) -> None:
    layer = nn.Linear(2, 4, bias=False)
    if placement is not None:
        weight = distribute_tensor(layer.weight.data, init_device_mesh("cpu", (1,)), [placement])
        layer.weight = nn.Parameter(weight)
    assert parallel.tensor_counts(layer) == {"parameter_tensors": 1, "sharded_tensors": sharded}


def test_unsharded_model_is_an_error_with_fsdp2(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parallel, "shard", lambda *_: None)
    with pytest.raises(SeatrialError, match=r"FSDP2 sharded 0 of \d+ parameters"):
        loop.train(config(parallel={"strategy": "fsdp2"}), tmp_path)


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 3), (4, 4)])
def test_replicas_need_a_divisor_with_two_ranks_each(ranks: int, replicas: int) -> None:
    with pytest.raises(UsageError, match=f"parallel.replicas {replicas}: expected a divisor of {ranks} "):
        parallel._mesh(World(0, ranks, CPU, "n0"), replicas)


def test_gradient_sync_is_off_in_ddp_only(world: World) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    for enabled in (True, False):
        with parallel.gradient_sync(model, enabled):
            assert model.require_backward_grad_sync is enabled
        assert model.require_backward_grad_sync
    with parallel.gradient_sync(nn.Linear(1, 1), enabled=False):
        pass


def test_deterministic_run_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: precisions.append(precision))
    precisions: list[str] = []
    try:
        parallel.prepare_kernels(config(deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert precisions == ["highest"]
        parallel.prepare_kernels(config(bf16=True))
        assert not torch.are_deterministic_algorithms_enabled()
        assert precisions == ["highest"]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("sharded", [False, True])
def test_norm_of_large_cpu_gradients_is_exact(world: World, sharded: bool) -> None:
    """Torch's fp32 norm of 10 million elements on a CPU is 4e-4 too small, and clips too little."""
    values = torch.randn(2_500, 4_000, generator=torch.Generator().manual_seed(0))
    expected = math.sqrt(5) * values.double().norm().item()
    gradients = [values, 2 * values]
    if sharded:
        mesh = init_device_mesh("cpu", (world.size,))
        gradients = [distribute_tensor(gradient, mesh, [Shard(0)]) for gradient in gradients]
    assert parallel.gradient_norm(gradients).item() == pytest.approx(expected, rel=1e-6)
