"""Medusa heads (Cai et al., 2024): each predicts a token further ahead from one hidden state; nothing is cached."""

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.heads import MedusaConfig
from jspec.models.layers import Linear


class MedusaHead(nnx.Module):
    """Residual blocks x + silu(W x + b), then an output head of its own or the target's."""

    def __init__(self, config: MedusaConfig, *, dtype, rngs: nnx.Rngs):
        D, V = config.hidden_size, config.vocab_size
        self.blocks = nnx.List([Linear(D, D, bias=True, dtype=dtype, rngs=rngs) for _ in range(config.num_blocks)])
        self.head = Linear(D, V, dtype=dtype, rngs=rngs) if config.own_head and V is not None else None

    def __call__(self, hidden, target):
        for block in self.blocks:
            hidden = hidden + jax.nn.silu(block(hidden))
        return target.logits(hidden) if self.head is None else self.head(hidden)


class Medusa(nnx.Module):
    """Head i reads the target's hidden state (after its final norm) at position t and predicts the token at t + 2 +
    i."""

    def __init__(self, config: MedusaConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.heads = nnx.List([MedusaHead(config, dtype=dtype, rngs=rngs) for _ in range(config.num_heads)])

    def prepare(self):
        """Ready to serve: nothing has to be done before."""
        return self

    def logits(self, hidden, target, K: int):
        """Of the first K heads: ``[B, T, D] -> [B, T, K, V]``."""
        return jnp.stack([head(hidden, target) for head in self.heads[:K]], axis=2)
