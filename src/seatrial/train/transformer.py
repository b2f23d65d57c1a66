"""A small decoder-only transformer: learned positions, pre-norm blocks, causal attention, an untied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seatrial.train.markov import STATES

HEAD = 64  # dimensions of one attention head: every fused attention kernel supports it
INITIAL_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model. ``dim`` is a multiple of HEAD."""

    seq_len: int
    dim: int
    layers: int


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim, bias=False)
        self.mlp_out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + self.mlp_out(hidden)  # type: ignore[no-any-return]

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.queries_keys_values(x).view(batch, length, 3, dim // HEAD, HEAD)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, dim))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Predicts each state of a walk through the Markov chain from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(STATES, shape.dim)
        self.positions = nn.Embedding(shape.seq_len, shape.dim)
        self.blocks = nn.ModuleList(Block(shape.dim) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, STATES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INITIAL_STD)

    def forward(self, walks: Tensor) -> Tensor:
        """The mean loss in nats a token, over walks [batch, seq_len + 1]."""
        inputs, targets = walks[:, :-1], walks[:, 1:]
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(shape: Shape, seed: int, device: str) -> Transformer:
    """A model with weights from ``seed``: the same on every device, as the CPU draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(shape)
    return model.to(device)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
