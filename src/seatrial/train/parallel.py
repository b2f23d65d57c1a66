"""Who trains together, and how a model is spread over them: one process, DDP, FSDP2, or several replicas of FSDP2."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from seatrial.bench import rank
from seatrial.model import SeatrialError, UsageError
from seatrial.train import fp8, lora, weights
from seatrial.train.decoder import Block, Decoder, Linear
from seatrial.train.train_config import TrainConfig

T = TypeVar("T")
_AUTOTUNE: dict[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True}
_TYPES = {"fp32": torch.float, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    rank: int
    size: int
    device: torch.device
    host: str

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank, on every rank. One that is alone needs no group."""
        return [value] if self.size == 1 else rank.gather(value)

    def barrier(self) -> None:
        """Wait for all, without a kernel: a GPU may be busy, or not be there."""
        self.gather(None)

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place; queued on the device, not waited for. One that is alone needs no group."""
        if self.size > 1:
            dist.all_reduce(value)
        return value


@contextmanager
def process_group(timeout_s: float) -> Iterator[World]:
    """The group that is open, or that torchrun's environment describes; without one, a group of this process alone.

    NCCL where there are GPUs, one a process, and gloo beside it for what is on the CPU: checkpoints and offloading.
    """
    rank, size, local_rank = (int(os.environ.get(name, default)) for name, default in _ENVIRONMENT)
    gpus = torch.cuda.device_count()
    if gpus and local_rank >= gpus:
        raise SeatrialError(f"local rank {local_rank}, but this machine has {gpus} GPUs: start one process a GPU")
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
    # no device_id: it would be handed down to the checkpoints' group, which is gloo's
    theirs = dist.is_initialized()  # of who has opened it: a check, in train.child
    if not theirs:
        dist.init_process_group(BACKEND if gpus else "gloo", timeout=timedelta(seconds=timeout_s), **alone)
    world = World(rank, size, device, socket.gethostname())
    world.all_reduce_sum(torch.ones((), device=device))  # NCCL connects at the first use: not in the first step
    if gpus:
        torch.cuda.synchronize()
    yield world
    # Not after an error: others may never come, and torchrun ends what is left of them.
    if gpus:
        torch.cuda.synchronize()
    if not theirs:
        dist.destroy_process_group()


BACKEND = "cpu:gloo,cuda:nccl"
_ENVIRONMENT = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def prepare_kernels(settings: TrainConfig) -> None:
    """Choose kernels for the whole process. One of attention that cannot serve is an error then, not a slower one."""
    if not settings.bf16:
        torch.set_float32_matmul_precision("highest")  # some containers set TF32 by a variable: that is not fp32
    if settings.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or cuBLAS may choose otherwise the next time
    torch.use_deterministic_algorithms(settings.deterministic)
    if settings.attention != "auto":
        torch.backends.cuda.enable_flash_sdp(settings.attention == "flash")
        torch.backends.cuda.enable_cudnn_sdp(settings.attention == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)


@dataclass(frozen=True)
class BuiltModel:
    """``model`` holds the weights; ``call`` is what trains it, which under DDP is another module around it."""

    model: Decoder
    train_module: nn.Module
    trained_parameters: list[nn.Parameter]


def build(settings: TrainConfig, world: World) -> BuiltModel:
    """The model that ``settings`` describe, spread and filled with its first weights.

    What is frozen is held in the type that is computed in; what trains, in ``master_dtype``.
    """
    shape, compute = settings.architecture(), _TYPES["bf16" if settings.bf16 else "fp32"]
    master = _TYPES[settings.master_dtype]
    if settings.fp8:
        fp8.require_support(world.device, shape)
    model = weights.build_on_meta(shape, compute, compute if settings.use_lora else master)
    if settings.use_lora:
        dropout = settings.lora_dropout
        lora.attach(model, settings.lora_targets, settings.lora_r, settings.lora_alpha, dropout)
        for adapter in lora.adapter_parameters(model).values():
            adapter.data = adapter.data.to(master)
    compiled = settings.compile and world.device.type == "cuda"
    for layer in model.layers.modules():
        if isinstance(layer, Linear):
            layer.fp8 = settings.fp8
    for block in blocks(model):
        block.checkpoint_activations = settings.gradient_checkpointing
        if compiled:
            options = _AUTOTUNE if settings.autotune else None
            block.run = torch.compile(block.run, options=options)  # type: ignore[method-assign]
    model.output.compiled = compiled
    sharded = settings.parallel.strategy == "fsdp2"
    if sharded:
        shard(model, settings, world, compute)
    model.to_empty(device="cpu" if settings.parallel.cpu_offload else world.device)
    drawn = weights.random_weights(settings.seed, shape.initializer_range)
    folder = settings.model.weights
    weights.fill(model, drawn if folder == "random" else weights.from_folder(folder, drawn), world.device)
    call = model if sharded or world.size == 1 else replicate(model, settings, world)
    return BuiltModel(model, call, [parameter for parameter in model.parameters() if parameter.requires_grad])


def blocks(model: Decoder) -> list[Block]:
    return [cast(Block, block) for block in model.layers]


def shard(model: Decoder, settings: TrainConfig, world: World, compute: torch.dtype) -> None:
    """FSDP2: a group for each block, one for norm and head, which backward needs first, one for the embedding.

    With tied weights head and embedding are one, in the outermost group. Raises UsageError where ranks do not divide
    into replicas.
    """
    parallel = settings.parallel
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": _mesh(world, parallel.replicas),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=_TYPES[parallel.reduce_dtype]),
        "offload_policy": offload if parallel.cpu_offload else OffloadPolicy(),
    }
    groups: list[nn.Module] = [*blocks(model)]
    for block in groups:
        fully_shard(block, reshard_after_forward=parallel.reshard_after_forward, **options)
    if model.output.lm_head is not None:
        fully_shard(model.output, reshard_after_forward=False, **options)
        groups.append(model.output)
    fully_shard(model, reshard_after_forward=False, **options)
    if ahead := parallel.prefetch:  # while a group computes, the weights of the next are gathered, in both directions
        wrapped = cast("list[FSDPModule]", groups)
        for place, group in enumerate(wrapped):
            group.set_modules_to_forward_prefetch(wrapped[place + 1 : place + 1 + ahead])
            group.set_modules_to_backward_prefetch(wrapped[max(0, place - ahead) : place][::-1])


def _mesh(world: World, replicas: int) -> DeviceMesh:
    """One dimension, over which weights are spread; with replicas (HSDP) a dimension of them before it.

    Ranks that follow one another share a replica: torchrun and srun number those of a node so.
    """
    if replicas == 1:
        return init_device_mesh(world.device.type, (world.size,))
    shards, rest = divmod(world.size, replicas)
    if rest or shards == 1:
        raise UsageError(f"parallel.replicas {replicas} must divide {world.size} ranks, and leave each two or more")
    return init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def replicate(model: Decoder, settings: TrainConfig, world: World) -> nn.Module:
    """DDP: every rank the whole model, gradients averaged."""
    replica = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    if settings.parallel.reduce_dtype == "bf16":
        replica.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return replica


def tensor_counts(model: nn.Module) -> dict[str, int]:
    """How many parameter tensors there are, and how many of them are sharded, by FSDP2 or by ZeRO-3 (``ds_id``)."""
    found = list(model.parameters())
    sharded = sum(isinstance(one, DTensor) or hasattr(one, "ds_id") for one in found)
    return {"parameter_tensors": len(found), "sharded_tensors": sharded}


def sharding_errors(model: nn.Module, ranks: int, replicas: int = 1) -> list[str]:
    """What is not spread as FSDP2 promises: every parameter by its rows, and no rank with more than its share.

    ``ranks`` in all; each of ``replicas`` is spread over as many as it has.
    """
    faults = []
    shards = ranks // replicas
    sizes, placements = ((shards,), (Shard(0),)) if replicas == 1 else ((replicas, shards), (Replicate(), Shard(0)))
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // shards)
        if not isinstance(parameter, DTensor):
            faults.append(f"{name} is whole")
        elif parameter.placements != placements or parameter.device_mesh.shape != sizes:
            faults.append(
                f"{name} is {parameter.placements} over {' × '.join(map(str, parameter.device_mesh.shape))} ranks"
            )
        elif len(parameter.to_local()) > rows:
            faults.append(f"{name}: {len(parameter.to_local())} of {parameter.shape[0]} rows here, at most {rows} due")
    return faults


def optimizer(settings: TrainConfig, trained: list[nn.Parameter]) -> torch.optim.AdamW:
    """Fused AdamW. Call it after sharding: it must hold the shares, not the whole weights."""
    options = settings.optimizer
    return torch.optim.AdamW(
        trained,
        lr=settings.learning_rate.peak,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )


@contextmanager
def gradient_sync(call: nn.Module, last: bool) -> Iterator[None]:
    """Within, DDP exchanges gradients in the ``last`` micro-batch only. FSDP2 does in each: it has no room to wait."""
    if isinstance(call, DistributedDataParallel) and not last:
        with call.no_sync():
            yield
    else:
        yield


def unshard(value: Tensor) -> Tensor:
    """A sharded result, such as a norm, as every rank needs it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
