"""What an XPress head (2026) adds to a DFlash head: a refiner, which corrects the drafts of a block by each other.

A DFlash head fills all slots of a block at once, so no draft knows the others. The refiner reads the drafts of the whole
block and adds to the logits of every slot, from which all drafts are chosen anew. A block has a few such passes (Jacobi
passes): the first reads the drafts of the DFlash head, and each later one those of the pass before. A slot depends on slots
before it alone, so draft i stands after i + 1 passes, and more passes than drafts change nothing.

For slot t of the block, its hidden state h_t ``[D]`` after the final norm, the mean m of these over the whole block, and the
token p_t in front of what slot t predicts, with maps A and B ``[D] -> [Rx]``, a token embedding E ``[V, Rx]`` and mixing
weights M ``[Rx, n, n]``,

    a_t = join [A h_t, B m, E p_t]                                                # [3 Rx] -> [Rx]
    c_t[r] = a_t[r] + sum over s <= t of M[r, t, s] a_s[r]
    added logits of slot t = out (c_t + MLP(c_t))                                 # [Rx] -> [Vd]
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import BlockConfig
from jspec.models.layers import Linear, looked_up
from jspec.pallas.sums import column_sum


class Refiner(nnx.Module):
    """The logits that a pass adds to those of the slots of a block.

    Attributes:
      embedding: E, ``[V, Rx]``.
      read: A and B, one behind the other, ``[D] -> [2 Rx]``.
      mix: M, ``[Rx, n, n]``; only its lower triangles, diagonals included, are read.
      gate_up, down: the MLP, a gated one with SiLU.
      join, out: ``[3 Rx] -> [Rx]``, and the map to logits ``[Rx] -> [Vd]``.
    """

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        self.rank, n = config.refiner_rank, config.block_size
        R, inner, linear = self.rank, config.dimensions["Fx"], functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.layers.vocab_size, R), dtype))
        self.read = linear(config.layers.hidden_size, 2 * R)
        self.join = linear(3 * R, R)
        self.mix = nnx.Param(jnp.zeros((R, n, n), dtype))
        self.gate_up, self.down = linear(R, 2 * inner), linear(inner, R)
        self.out = linear(R, config.draft_vocab_size)

    def inputs(self, hidden, valid):
        """What all passes read of the hidden states of a block, ``[B, n, D] -> [B, n, 2 Rx]``.

        The mean is that of the valid slots, bool ``[B, n]``: at the end of the positions a block is shorter. Other slots may
        hold NaN, which a weight of 0 would not take out of a sum."""
        hidden, count = jnp.where(valid[:, :, None], hidden, 0), jnp.sum(valid, axis=1, keepdims=True)
        mean = (column_sum(hidden.astype(jnp.float32)) / jnp.maximum(count, 1)).astype(hidden.dtype)
        read = self.read(jnp.concatenate([hidden, mean[:, None]], axis=1))
        own, of_block = read[:, :-1, : self.rank], read[:, -1:, self.rank :]
        return jnp.concatenate([own, jnp.broadcast_to(of_block, own.shape)], axis=-1)

    def __call__(self, inputs, previous, first: int):
        """The logits to be added in a pass, ``[B, m - first, Vd]``.

        Args:
          inputs: of the block, as the method ``inputs`` returns them.
          previous: int32 ``[B, m]``, the token in front of what each of the first m slots predicts.
          first: the first slot whose logits are wanted.
        """
        m = previous.shape[1]
        x = self.join(jnp.concatenate([inputs[:, :m], looked_up(self.embedding[...], previous)], axis=-1))
        weights = jnp.moveaxis(jnp.tril(self.mix[...].astype(jnp.float32))[:, :m, :m], 0, 2)  # [t, s, Rx]
        # Term by term, in one order. Of a sum over an axis, XLA of jax 0.10 makes a CPU kernel with wrong results here.
        terms = (weights[None, :, s] * x[:, s : s + 1].astype(jnp.float32) for s in range(m))
        x += jnp.asarray(sum(terms), x.dtype)
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.out((x + self.down(jax.nn.silu(gate) * up))[:, first:])
