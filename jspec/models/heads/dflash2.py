"""What a DFlash2 head (2026) adds to a DFlash head: convolutions over the slots of a block, and a candidate selector.

A DFlash head fills all slots of a block at once, so slot t cannot know what became of slot t - 1. The convolutions let it
see the hidden states before it, and the selector the draft before it.

**Convolutions.** Attention and MLP of each layer have one each, with two sides: side 0 changes what the sublayer reads, side
1 what it returns. For the normed input a of the sublayer, slot t of the block, number c of the hidden state in group g(c) of
``conv_group`` neighbouring numbers, and Tc taps,

    delta = P a_t                                                         # P is kernel_projection, [2, Tc, Gc] numbers
    x'_t[c] = sum over u = 0 .. min(Tc - 1, t) of (base[side, u, c] + delta_t[side, u, g(c)]) x_{t - u}[c]

where x is a on side 0, and on side 1 the output of the sublayer, before it is added to the residual stream. Both deltas are
of the same a. Taps do not reach before the block: the context goes through no convolution.

**Candidate selector.** Let u_i be the logits of draft i, h_i the hidden state after the final norm, p the draft before it,
or the anchor, and C the ``candidates`` likeliest tokens of u_i. With A, B ``[V, Rs]`` and W ``[Rs, D]``,

    score(c) = u_i[c] + sum over r of A[p, r] (W h_i)[r] B[c, r]    for c in C, and -inf for any other token

and draft i is drawn from the softmax of score / temperature: its distribution is exactly that.

Sources: speculators 0.9.0, ``models/dflash2/model_definitions.py`` (after z-lab/dflash 07ebd93, ``dflash/model.py``), for
the modules; vLLM 030da624, ``qwen3_dflash2.py`` and ``spec_decode/dflash2/speculator.py``, for how drafts are drawn: scores
in float32, the candidates fixed before the selector adds anything."""

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import BlockConfig
from jspec.models.decoder_layer import Layer, add
from jspec.models.heads.sequential import Slots, only_among
from jspec.models.layers import Linear, Norm
from jspec.pallas.matmul.partial_sums import reduce_partial_sums
from jspec.pallas.sums import row_sum


class Convolution(nnx.Module):
    """The convolution around attention or MLP, over the slots of a block. It is computed in float32.

    Attributes:
      base_kernel: ``[2, Tc, D]``, the fixed part of the kernels of both sides.
      kernel_projection: ``[D] -> [2 Tc Gc]``, the part that depends on the hidden state.
    """

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        D, self.taps, self.group = config.layers.hidden_size, config.conv_taps, config.conv_group
        identity = jnp.zeros((2, self.taps, D), dtype).at[:, 0].set(1)
        self.base_kernel = nnx.Param(identity)
        self.kernel_projection = Linear(D, 2 * self.taps * (D // self.group), dtype=dtype, rngs=rngs)

    def before(self, x):
        """The inputs of the sublayer from normed slots ``[B, n, D]``, and what ``after`` needs."""
        B, n, D = x.shape
        deltas = self.kernel_projection(x).reshape(B, n, 2, self.taps, D // self.group)
        return self._convolve(x, deltas[:, :, 0], 0), deltas[:, :, 1]

    def after(self, y, deltas):
        """The outputs ``[B, n, D]`` of the sublayer, which may be ``PartialSums``, convolved."""
        return self._convolve(y, deltas, 1)

    def _convolve(self, x, deltas, side: int):
        n, kernels = x.shape[1], self.base_kernel[...][side].astype(jnp.float32)
        total = jnp.zeros(x.shape, jnp.float32)
        for tap in range(min(self.taps, n)):
            moved = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, :n].astype(jnp.float32)
            delta = jnp.repeat(deltas[:, :, tap].astype(jnp.float32), self.group, axis=-1)
            total += (kernels[tap][None, None] + delta) * moved
        return total.astype(x.dtype)


class ConvolvedLayer(Layer):
    """A decoder layer with convolutions around attention and MLP, which reads a context and a block behind it."""

    def __init__(self, config: BlockConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        super().__init__(config.layers, layer, dtype=dtype, rngs=rngs)
        self.attention_conv = Convolution(config, dtype=dtype, rngs=rngs)
        self.mlp_conv = Convolution(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, normed, positions, kv, view, after: Norm | None, own_inputs=None, peers=None):
        """Apply the layer; results as of ``Layer``.

        Args:
          x: the residual stream of the block, ``[B, n, D]``.
          normed: the context ``[B, C, D]``, and behind it the block after ``attention_norm``.
          positions: int32 ``[B, C + n]``.
          kv, after: as for ``Layer``. There are no per-layer inputs, and no peers, since heads are not in shards.
          view: a ``BlockView``.
        """
        assert (own_inputs, peers) == (None, None)
        context, slots = jnp.split(normed, [normed.shape[1] - x.shape[1]], axis=1)
        slots, deltas = self.attention_conv.before(slots)
        attended, kv = self.attention(jnp.concatenate([context, slots], axis=1), positions, kv, view)
        attended = self.attention_conv.after(reduce_partial_sums(attended, x.dtype), deltas)
        x, normed = add(x, attended, self.mlp_norm)
        slots, deltas = self.mlp_conv.before(normed)
        out = self.mlp_conv.after(reduce_partial_sums(self.mlp(slots), x.dtype), deltas)
        return *add(x, out, after), kv


class CandidateSelector(nnx.Module):
    """Scores the likeliest tokens of a slot by the draft before it.

    Attributes:
      predecessors: A, ``[V, Rs]``.
      successors: B, ``[V, Rs]``.
      project: W, ``[D] -> [Rs]``.
    """

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        V, D, self.count = config.layers.vocab_size, config.layers.hidden_size, config.candidates
        shape = V, config.selector_rank
        self.predecessors = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))
        self.successors = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))
        self.project = Linear(D, config.selector_rank, dtype=dtype, rngs=rngs)

    def start(self, slots: Slots):
        """See ``jspec.models.heads.sequential``. What tokens are candidates depends on no draft."""
        values, tokens = self.candidates(slots.logits)

        def read(state, previous, i: int):
            hidden, *candidates = (x[:, i : i + 1] for x in (slots.hidden, values, tokens))
            scores = self.scores(hidden, previous, *candidates)
            return state, only_among(candidates[1], scores, slots.logits.shape[-1])

        return (), read

    def candidates(self, logits) -> tuple[jax.Array, jax.Array]:
        """The largest of logits ``[B, K, V]``, float32 ``[B, K, count]``, and their tokens, int32."""
        values, tokens = jax.lax.top_k(logits, self.count)
        return values.astype(jnp.float32), tokens

    def scores(self, hidden, previous, values, tokens) -> jax.Array:
        """The scores of the candidates of one slot, float32 ``[B, 1, count]``.

        Args:
          hidden, previous: as of ``MarkovHead``.
          values, tokens: ``[B, 1, count]``, as ``candidates`` returns them.
        """
        read = self.predecessors[...][previous].astype(jnp.float32) * self.project(hidden).astype(jnp.float32)
        return values + row_sum(read[:, :, None] * self.successors[...][tokens].astype(jnp.float32))[..., 0]
