"""A decoder for the Llama, Mistral and Qwen2 architectures.

``weights.huggingface_name`` maps a weight name of this decoder to Hugging Face's. Weights are cast to the dtype of the
activations at each use. Logits equal those of transformers (tests/train/test_decoder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from seatrial.train import fp8
from seatrial.train.architecture import Architecture
from seatrial.train.loss import summed_loss


class Adapter(nn.Module):
    """The LoRA matrices A and B of a frozen layer (arXiv 2106.09685).

    ``apply_linears`` adds scale · B(A(dropout(x))) to the layer's output.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank))
        self.scale, self.dropout = alpha / rank, dropout


class Linear(nn.Linear):
    """A linear layer, x [..., in] → [..., out].

    Call apply_linears instead of forward(), which ignores the LoRA adapter.
    """

    uses_fp8 = False  # whether base_forward computes the product in fp8

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        self.adapter: Adapter | None = None

    def base_forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out] without the adapter."""
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        if self.uses_fp8:
            return fp8.linear(x, weight) if bias is None else fp8.linear(x, weight) + bias
        return F.linear(x, weight, bias)


def apply_linears(x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
    """The outputs of ``layers`` for the same input x [batch, length, in].

    The layers' adapters share the dropout mask, and one product of x with all A matrices. Separate products of rank 8
    would each read x from memory and be memory-bound.
    """
    adapters = [layer.adapter for layer in layers if layer.adapter is not None]
    if not adapters:
        return [layer.base_forward(x) for layer in layers]
    # scaling A is cheaper than scaling the result
    all_a = torch.cat([adapter.lora_A * adapter.scale for adapter in adapters]).to(x.dtype)
    dropped = dropout(x, adapters[0].dropout if layers[0].training else 0.0)
    down_projections = iter(torch.split(F.linear(dropped, all_a), [len(a.lora_A) for a in adapters], dim=-1))
    outputs = []
    for layer in layers:
        output = layer.base_forward(x)
        if layer.adapter is not None:
            output = output + F.linear(next(down_projections), layer.adapter.lora_B.to(x.dtype))
        outputs.append(output)
    return outputs


def dropout(x: Tensor, p: float) -> Tensor:
    """x with elements set to 0 with probability ``p`` and the others scaled by 1/(1 - p).

    The mask is an int32 hash of the element index and of a seed from torch's generator; the hash uses the factors of
    murmur3. The hash takes a tenth of the operations of F.dropout's generator, and the compiler can recompute the mask
    in backward instead of saving it.
    """
    if not p:
        return x
    seed = torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=x.device)
    hashed = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ seed[0]
    # "- 2**32" makes the factors fit into int32. ">>" of an int32 inserts copies of the sign bit; "&" removes them
    for factor in (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32):
        hashed = (hashed ^ ((hashed >> 15) & 0x1FFFF)) * factor + seed[1]
    kept = ((hashed >> 8) & 0xFFFFFF) >= round(p * 2**24)
    return torch.where(kept, x * (1 / (1 - p)), 0.0)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention. It uses no mask tensor, so that torch can choose fused kernels."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        shapes, bias = architecture.linear_shapes, architecture.attention_bias
        self.q_proj = Linear(*shapes["q_proj"], bias=bias)
        self.k_proj = Linear(*shapes["k_proj"], bias=bias)
        self.v_proj = Linear(*shapes["v_proj"], bias=bias)
        self.o_proj = Linear(*shapes["o_proj"])
        self.head_dim = architecture.head_dim

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        parts = apply_linears(x, (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (part.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(
            apply_rotary(queries, cosine, sine),
            apply_rotary(keys, cosine, sine),
            values,
            is_causal=True,
            enable_gqa=True,
        )
        return apply_linears(attended.transpose(1, 2).flatten(2), (self.o_proj,))[0]


class MLP(nn.Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        shapes = architecture.linear_shapes
        self.gate_proj = Linear(*shapes["gate_proj"])
        self.up_proj = Linear(*shapes["up_proj"])
        self.down_proj = Linear(*shapes["down_proj"])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = apply_linears(x, (self.gate_proj, self.up_proj))
        return apply_linears(F.silu(gate) * up, (self.down_proj,))[0]


class Block(nn.Module):
    """A transformer block.

    If the model is compiled, only ``run`` is. Hooks of FSDP and activation checkpointing run around it, uncompiled.
    """

    checkpoint_activations = False  # whether activations are recomputed in backward

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps)
        self.self_attn = Attention(architecture)
        self.post_attention_layernorm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps)
        self.mlp = MLP(architecture)

    def run(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        if self.checkpoint_activations and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(self.run, x, cosine, sine, use_reentrant=False))
        return self.run(x, cosine, sine)


class Output(nn.Module):
    """The last norm, the head, and the loss. Chunks of the loss ensure that not all logits are in memory at once."""

    compiled = False  # whether the loss is compiled

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps)
        tied = architecture.tie_word_embeddings
        self.lm_head = None if tied else Linear(architecture.hidden_size, architecture.vocab_size)

    def forward(self, x: Tensor, tied: Tensor | None, targets: Tensor | None, chunks: int) -> Tensor:
        """The logits; if ``targets`` are given, the summed loss. ``tied``: embedding weights shared with the head."""
        x = self.norm(x)
        weight = cast(Tensor, tied if self.lm_head is None else self.lm_head.weight).to(x.dtype)
        if targets is None:
            return F.linear(x, weight)
        return summed_loss(x.flatten(0, 1), weight, targets.flatten(), chunks, self.compiled)


class Decoder(nn.Module):
    """Tokens [batch, length] → logits [batch, length, vocabulary]; if targets are given, the summed loss in nats.

    Computes in ``dtype``. ``gradient_hook`` is called in each backward pass with the gradient at the first block's
    output. This gradient is never communicated, and NaN and infinity from any later block reach it. It therefore shows
    whether this rank computed a NaN or infinity.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        super().__init__()
        self.architecture, self.dtype = architecture, dtype
        self.embed_tokens = nn.Embedding(architecture.vocab_size, architecture.hidden_size)
        self.layers = nn.ModuleList(Block(architecture) for _ in range(architecture.num_hidden_layers))
        self.output = Output(architecture)
        self.gradient_hook: Callable[[Tensor], Tensor | None] | None = None
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor, targets: Tensor | None = None, chunks: int = 1) -> Tensor:
        x = F.embedding(tokens, self.embed_tokens.weight).to(self.dtype)
        cosine, sine = self._rotation(tokens.shape[1], tokens.device)
        for number, block in enumerate(self.layers):
            x = block(x, cosine, sine)
            if number == 0 and self.gradient_hook is not None and x.requires_grad:
                x.register_hook(self.gradient_hook)
        tied = self.embed_tokens.weight if self.architecture.tie_word_embeddings else None
        return cast(Tensor, self.output(x, tied, targets, chunks))

    def _rotation(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, head_dim] of the rotary embedding (arXiv 2104.09864), cached."""
        if self._cos_sin is None or len(self._cos_sin[0]) < length or self._cos_sin[0].device != device:
            size = self.architecture.head_dim
            frequencies = self.architecture.rope_theta ** -(
                torch.arange(0, size, 2, dtype=torch.float, device=device) / size
            )
            angles = torch.outer(torch.arange(length, dtype=torch.float, device=device), frequencies).repeat(1, 2)
            self._cos_sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return self._cos_sin[0][:length], self._cos_sin[1][:length]


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x with each pair (i, i + half) of its last dimension rotated by the angle of its position."""
    left, right = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-right, left), dim=-1) * sine
