"""The process group and the parallelism of a model: single process, DDP, FSDP2, or HSDP (FSDP2 with replicas)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from seatrial.bench import group as bench_group
from seatrial.bench import rank as bench_rank
from seatrial.model import SeatrialError, UsageError
from seatrial.train import fp8, lora, ranks, weights
from seatrial.train.decoder import Block, Decoder, Linear
from seatrial.train.train_config import Parallel, TrainConfig
from seatrial.util.node_name import node_name

T = TypeVar("T")
BACKEND = "cpu:gloo,cuda:nccl"
# Variables that torchrun sets, with the values that apply without torchrun
_TORCHRUN_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
_AUTOTUNE_OPTIONS: dict[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True}
_DTYPES = {"fp32": torch.float, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class World:
    """Rank, device and host of this process, and the number of ranks."""

    rank: int
    size: int
    device: torch.device
    host: str

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """The model of this rank's GPU, or CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def gather(self, value: T) -> list[T]:
        """The ``value`` of every rank, by rank, on all ranks; a single rank needs no process group."""
        return [value] if self.size == 1 else bench_rank.gather(value)

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.gather(None)

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """``value`` summed over ranks in place, queued on the device; a single rank needs no process group."""
        if self.size > 1:
            dist.all_reduce(value)
        return value


def current_world(device: str | torch.device) -> World:
    """The World of the open process group, with this process on ``device``; without a group, of this process only."""
    return World(ranks.rank(), ranks.world_size(), torch.device(device), node_name())


@contextmanager
def process_group(timeout_s: float) -> Iterator[World]:
    """Context manager: the World of the open process group, or of a new group if none is open.

    A new group has torchrun's ranks; without torchrun it has only this process. With GPUs (one per process) its
    backends are NCCL, and gloo for CPU tensors (checkpoints, offloading). Without GPUs its backend is gloo.
    """
    rank, size, local_rank = (int(os.environ.get(name, default)) for name, default in _TORCHRUN_VARIABLES)
    gpu_count = torch.cuda.device_count()
    if gpu_count and local_rank >= gpu_count:
        raise SeatrialError(
            f"no GPU for local rank {local_rank}; GPUs on this node: {gpu_count}. Start one process per GPU"
        )
    device = torch.device("cuda", local_rank) if gpu_count else torch.device("cpu")
    if gpu_count:
        torch.cuda.set_device(device)
    else:
        bench_group.set_cpu_threads()
    already_open = dist.is_initialized()  # child processes of checks open it (train.child, train.variants)
    if not already_open:
        without_torchrun: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1}
        # without device_id, since the gloo group of checkpoints would inherit it
        dist.init_process_group(
            BACKEND if gpu_count else "gloo",
            timeout=timedelta(seconds=timeout_s),
            **({} if "RANK" in os.environ else without_torchrun),
        )
    world = World(rank, size, device, node_name())
    world.all_reduce_sum(torch.ones((), device=device))  # NCCL connects on first use: now, not in the first step
    if gpu_count:
        torch.cuda.synchronize()
    yield world
    # No ``finally``: after an error, peers may be gone, and torchrun ends the remaining ranks.
    if gpu_count:
        torch.cuda.synchronize()
    if not already_open:
        dist.destroy_process_group()


def prepare_kernels(settings: TrainConfig) -> None:
    """Selects the kernels of this process. If the configured attention kernel cannot run, training fails."""
    if not settings.bf16:
        torch.set_float32_matmul_precision("highest")  # some containers enable TF32 by an environment variable
    if settings.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # makes cuBLAS deterministic
    torch.use_deterministic_algorithms(settings.deterministic)
    if settings.attention != "auto":
        torch.backends.cuda.enable_flash_sdp(settings.attention == "flash")
        torch.backends.cuda.enable_cudnn_sdp(settings.attention == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)


@dataclass(frozen=True)
class BuiltModel:
    """``model``: the decoder; ``train_module``: the module to call in training, with DDP a wrapper of ``model``."""

    model: Decoder
    train_module: nn.Module
    trained_parameters: list[nn.Parameter]


def build(settings: TrainConfig, world: World) -> BuiltModel:
    """The model of ``settings``, parallelized, with its initial weights.

    Frozen weights have the compute dtype, trained weights have ``master_dtype``.
    """
    architecture, compute_dtype = settings.architecture(), _DTYPES["bf16" if settings.bf16 else "fp32"]
    master_dtype = _DTYPES[settings.master_dtype]
    if settings.fp8:
        fp8.require_support(world.device, architecture)
    model = weights.build_on_meta(architecture, compute_dtype, compute_dtype if settings.use_lora else master_dtype)
    if settings.use_lora:
        lora.attach(model, settings.lora_targets, settings.lora_r, settings.lora_alpha, settings.lora_dropout)
        for adapter in lora.adapter_parameters(model).values():
            adapter.data = adapter.data.to(master_dtype)
    compiled = settings.compile and world.device.type == "cuda"
    for layer in model.layers.modules():
        if isinstance(layer, Linear):
            layer.uses_fp8 = settings.fp8
    for block in transformer_blocks(model):
        block.checkpoint_activations = settings.gradient_checkpointing
        if compiled:
            options = _AUTOTUNE_OPTIONS if settings.autotune else None
            block.run = torch.compile(block.run, options=options)  # type: ignore[method-assign]
    model.output.compiled = compiled
    sharded = settings.parallel.strategy == "fsdp2"
    if sharded:
        shard(model, settings, world, compute_dtype)
    model.to_empty(device="cpu" if settings.parallel.cpu_offload else world.device)
    random_weights = weights.random_weights(settings.seed, architecture.initializer_range)
    if settings.model.weights == "random":
        source = random_weights
    else:
        source = weights.from_folder(settings.model.weights, adapter_source=random_weights)
    weights.fill(model, source, world.device)
    train_module = model if sharded or world.size == 1 else replicate(model, settings, world)
    return BuiltModel(model, train_module, [parameter for parameter in model.parameters() if parameter.requires_grad])


def transformer_blocks(model: Decoder) -> list[Block]:
    """The transformer blocks of ``model``."""
    return [cast(Block, block) for block in model.layers]


def shard(model: Decoder, settings: TrainConfig, world: World, compute_dtype: torch.dtype) -> None:
    """Applies FSDP2 to ``model``: one group per module of ``fsdp_groups``, and the root group with all other weights.

    Raises UsageError if parallel.replicas does not divide the number of ranks, or leaves one rank per replica.
    """
    parallel = settings.parallel
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": _mesh(world, parallel.replicas),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=_DTYPES[parallel.reduce_dtype]),
        "offload_policy": offload if parallel.cpu_offload else OffloadPolicy(),
    }
    groups = fsdp_groups(model, parallel)
    for group in reversed(groups):  # inner modules first: the outer one takes the weights that are left
        reshard = parallel.reshard_after_forward and group is not model.output
        fully_shard(group, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    if depth := parallel.prefetch:  # all-gather the next groups while one computes, forward and backward
        fsdp_modules = cast("list[FSDPModule]", groups)
        for index, module in enumerate(fsdp_modules):
            module.set_modules_to_forward_prefetch(fsdp_modules[index + 1 : index + 1 + depth])
            module.set_modules_to_backward_prefetch(fsdp_modules[max(0, index - depth) : index][::-1])


def fsdp_groups(model: Decoder, parallel: Parallel) -> list[nn.Module]:
    """The modules that become FSDP2 groups according to ``parallel.wrap``, in the order of execution.

    The weights of a group are gathered together. The root group is not in the list. It has all other weights,
    such as those of the embedding, which a tied head uses too.
    """
    if parallel.wrap == "none":
        return []
    head: list[nn.Module] = [model.output] if model.output.lm_head is not None else []
    if parallel.wrap == "block":
        return [*transformer_blocks(model), *head]
    minimum = parallel.wrap_min_parameters or 0
    groups: list[nn.Module] = []
    for block in transformer_blocks(model):
        inner = [module for module in (block.self_attn, block.mlp) if _size(module) >= minimum]
        size_without_inner = _size(block) - sum(map(_size, inner))
        groups += [block, *inner] if size_without_inner >= minimum else inner
    return [*groups, *(module for module in head if _size(module) >= minimum)]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _mesh(world: World, replicas: int) -> DeviceMesh:
    """A mesh of shape (ranks,), or for HSDP of shape (replicas, ranks per replica).

    Consecutive ranks form a replica, so that a replica can be a node: torchrun and srun number the ranks of a node
    consecutively.
    """
    if replicas == 1:
        return init_device_mesh(world.device.type, (world.size,))
    shards, remainder = divmod(world.size, replicas)
    if remainder or shards == 1:
        raise UsageError(
            f"parallel.replicas {replicas}: expected a divisor of {world.size} (ranks), at least 2 ranks per replica"
        )
    return init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def replicate(model: Decoder, settings: TrainConfig, world: World) -> nn.Module:
    """``model`` wrapped in DistributedDataParallel."""
    replica = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    if settings.parallel.reduce_dtype == "bf16":
        replica.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return replica


def tensor_counts(model: nn.Module) -> dict[str, int]:
    """The number of parameter tensors, and how many of them FSDP2 (by rows) or ZeRO-3 (``ds_id``) has sharded."""
    parameters = list(model.parameters())
    sharded = [p for p in parameters if hasattr(p, "ds_id") or (isinstance(p, DTensor) and Shard(0) in p.placements)]
    return {"parameter_tensors": len(parameters), "sharded_tensors": len(sharded)}


def optimizer(settings: TrainConfig, trained: list[nn.Parameter]) -> torch.optim.AdamW:
    """Fused AdamW for the parameters ``trained``. With FSDP2, they must be sharded before this call."""
    options = settings.optimizer
    return torch.optim.AdamW(
        trained,
        lr=settings.learning_rate.peak,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )


def gradient_sync(train_module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Context manager: DDP all-reduces gradients only if ``enabled``; FSDP2 always reduces them, to save memory."""
    if isinstance(train_module, DistributedDataParallel) and not enabled:
        return train_module.no_sync()
    return nullcontext()


def unshard(value: Tensor) -> Tensor:
    """``value``, gathered from all ranks if it is a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all ``gradients`` of all ranks, a scalar on their device; fp64 on a CPU, else in their dtype."""
    if gradients[0].device.type != "cpu":
        return unshard(nn.utils.get_total_norm(gradients))
    # On a CPU torch adds the squares of a tensor in its dtype. In fp32 the norm of 10 million random numbers is 0.04 %
    # too small, and clipping by this norm changes the training (torch 2.13, 2 threads). Rows are short enough.
    row_norms = [torch.linalg.vector_norm(gradient, dim=-1) for gradient in gradients]
    totals = [torch.linalg.vector_norm(norms, dtype=torch.float64) for norms in row_norms]
    return unshard(torch.linalg.vector_norm(torch.stack(totals)))
