"""Medusa heads (Cai et al., 2024): all read the same hidden state, each predicts one token further ahead.

Nothing is cached.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import MedusaConfig
from jspec.models.heads.draft_vocabulary import placeholder_ids, rows_of_target, with_draft_tokens
from jspec.models.layers import Linear


class MedusaHead(nnx.Module):
    """One Medusa head: residual blocks x + silu(W x + b), then its own output head or one that all share."""

    def __init__(self, config: MedusaConfig, *, dtype, rngs: nnx.Rngs):
        D = config.hidden_size
        linear = functools.partial(Linear, quantization=config.quantization, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([linear(D, D, bias=True) for _ in range(config.num_blocks)])
        self.head = linear(D, config.dimensions["Vd"]) if config.own_head else None

    def state(self, hidden):
        """What its output head reads, ``[..., D]``, of the target's hidden states."""
        for block in self.blocks:
            hidden = hidden + jax.nn.silu(block(hidden))
        return hidden

    def __call__(self, hidden, shared):
        """Logits ``[..., Vd]`` of hidden states ``[..., D]``; ``shared`` is the output head of heads that have none."""
        return (shared if self.head is None else self.head)(self.state(hidden))


class Medusa(nnx.Module):
    """All Medusa heads of a target.

    Medusa head i reads the target's hidden state at position t, after the final norm, and predicts token t + 2 + i.

    Attributes:
      head: a part of the target's output head, ``[Vd, D]``, which Medusa heads without output heads share. None if they
        use the target's own, or if each has its own.
      draft_ids: as in ``jspec.models.heads.draft_vocabulary``; None if every token can be proposed.
    """

    def __init__(self, config: MedusaConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.heads = nnx.List([MedusaHead(config, dtype=dtype, rngs=rngs) for _ in range(config.num_heads)])
        linear = functools.partial(Linear, quantization=config.quantization, dtype=dtype, rngs=rngs)
        self.head = (
            linear(config.hidden_size, config.dimensions["Vd"]) if config.reduced and not config.own_head else None
        )
        self.draft_ids = placeholder_ids(config)
        self.draft_tokens = None  # before ``prepare``

    def prepare(self):
        """The module that serves, with the same arrays and the token of each logit."""
        return with_draft_tokens(self)

    def logits(self, hidden, target, K: int):
        """Logits of the first K Medusa heads, over the draft vocabulary: ``[B, T, D] -> [B, T, K, Vd]``."""
        rows = self.head
        shared = target.logits if rows is None else functools.partial(rows_of_target, rows, target=target)
        return jnp.stack([head(hidden, shared) for head in self.heads[:K]], axis=2)
