"""Medusa heads (Cai et al., 2024): all read the same hidden state, each predicts one token further ahead.

Nothing is cached.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.heads import MedusaConfig
from jspec.models.layers import Linear


class MedusaHead(nnx.Module):
    """One Medusa head: residual blocks x + silu(W x + b), then its own output head or the target's."""

    def __init__(self, config: MedusaConfig, *, dtype, rngs: nnx.Rngs):
        D, V = config.hidden_size, config.vocab_size
        self.blocks = nnx.List([Linear(D, D, bias=True, dtype=dtype, rngs=rngs) for _ in range(config.num_blocks)])
        self.head = Linear(D, V, dtype=dtype, rngs=rngs) if config.own_head and V is not None else None

    def __call__(self, hidden, target):
        for block in self.blocks:
            hidden = hidden + jax.nn.silu(block(hidden))
        return target.logits(hidden) if self.head is None else self.head(hidden)


class Medusa(nnx.Module):
    """All Medusa heads of a target.

    Medusa head i reads the target's hidden state at position t, after the final norm, and predicts token t + 2 + i.
    """

    def __init__(self, config: MedusaConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.heads = nnx.List([MedusaHead(config, dtype=dtype, rngs=rngs) for _ in range(config.num_heads)])

    def prepare(self):
        """Return this module, because nothing has to be computed before serving."""
        return self

    def logits(self, hidden, target, K: int):
        """Logits of the first K Medusa heads: ``[B, T, D] -> [B, T, K, V]``."""
        return jnp.stack([head(hidden, target) for head in self.heads[:K]], axis=2)
