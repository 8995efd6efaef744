"""What a LiLiCorr head (NVIDIA, 2026) adds to a DFlash head: scores of how well the candidates of neighbouring slots match.

A block has n = ``block_size`` - 1 slots that draft, each with k candidates, the likeliest tokens of its logits, in their
order. Candidate c of slot i becomes a vector of Dl numbers: the sum of maps of its embedding (the target's), of the slot's
hidden state after the final norm, and of five features (its log-probability l, exp(l), l less that of the first, c / (k - 1),
whether it is the first), and of the learnt embeddings of i and c. Layers of attention and MLP over all n k candidates of a
block, which see each other in both directions with a bias by the distance of their slots, make x_ic of them.

Let a be a map of the context's feature before the anchor, normed, and z_ic = silu(F [x_ic, a, x_ic * a]). With maps O, I, A
and cos the cosine of two vectors of Rf numbers,

    score(c) = scale cos(A a, I z_0c)                  for draft 0
    score(c) = scale cos(O z_jb, I z_ic), j = i - 1    for draft i after candidate b of slot j

and -inf for any other token. Draft i is drawn from the softmax of score / temperature: its distribution is exactly that. A
draft before that is no candidate of its slot, because a grammar or a lookup put it there, has no vector; the candidates
after it are scored by their log-probabilities l.

The scores of all slots need the whole block, whatever K is, and no draft.

Source: nvidia-modelopt 0.48.0rc1, ``LiLiCorrHead``, and ``HFLiLiCorrModel`` for how scores become a distribution. It chooses
the likeliest candidate; its loss has the softmax at temperature 1."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config.heads import BlockConfig
from jspec.models.heads.sequential import Slots, only_among
from jspec.models.layers import Linear, Norm
from jspec.pallas.sums import row_sum, rows_product

EPS_OF_FEATURES = 1e-5  # PyTorch's, of a norm with a mean


class LatticeLayer(nnx.Module):
    """Attention over all candidates of a block and an MLP, each after a norm."""

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        assert (own := config.lilicorr) is not None
        width, self.num_heads = own.hidden_size, own.num_heads
        linear = functools.partial(Linear, bias=True, dtype=dtype, rngs=rngs)
        self.attn_norm, self.mlp_norm = (Norm(width, config.layers.rms_norm_eps, dtype=dtype) for _ in range(2))
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, own.inner_size), linear(own.inner_size, width)

    def __call__(self, x, bias):
        """``[B, nk, Dl]`` after the layer; ``bias``, float32 ``[B, Nl, nk, nk]``, is added to the attention's logits."""
        (B, S, width), N = x.shape, self.num_heads
        qkv = jnp.swapaxes(self.qkv(self.attn_norm(x)).reshape(B, S, 3 * N, width // N), 1, 2)
        q, k, v = jnp.split(qkv.astype(jnp.float32), 3, axis=1)  # [B, Nl, nk, Dl / Nl]
        weights = jax.nn.softmax(rows_product(q, k, -1) * (width // N) ** -0.5 + bias, axis=-1)
        x = x + self.out(jnp.swapaxes(rows_product(weights, v, -2), 1, 2).astype(x.dtype).reshape(B, S, width))
        return x + self.down(jax.nn.silu(self.up(self.mlp_norm(x))))


class LiLiCorr(nnx.Module):
    """A ``Sequential`` of the scores. Attributes have the names of their tensors, but for the maps of features."""

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        assert (own := config.lilicorr) is not None
        self.slots, self.count, self.scale, self.eps = config.block_size - 1, config.candidates, own.scale, own.eps
        D, width, ranks = config.layers.hidden_size, own.hidden_size, config.candidates
        linear = functools.partial(Linear, bias=True, dtype=dtype, rngs=rngs)
        table = lambda *shape: nnx.Param(jnp.zeros(shape, dtype))  # noqa: E731
        self.token_proj = linear(D, width) if D != width else None
        self.pass_hidden_proj, self.context_proj = linear(D, width), linear(D, width)
        self.feature_norm = Norm(5, EPS_OF_FEATURES, "layer", dtype=dtype)
        self.feature_in, self.feature_out = linear(5, width), linear(width, width)
        self.slot_embedding, self.rank_embedding = table(1, 1, self.slots, 1, width), table(1, 1, 1, ranks, width)
        self.relative_slot_bias = table(own.num_heads, 2 * config.block_size - 1)
        self.same_slot_bias = table(own.num_heads)
        self.layers: Any = nnx.List([LatticeLayer(config, dtype=dtype, rngs=rngs) for _ in range(own.num_layers)])
        norms = (Norm(width, config.layers.rms_norm_eps, dtype=dtype) for _ in range(2))
        self.output_norm, self.anchor_norm = norms
        self.factor_input_proj = linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (linear(width, own.factor_size) for _ in range(3))

    def start(self, slots: Slots):
        """See ``Sequential``."""
        values, tokens = jax.lax.top_k(slots.logits, self.count)
        logits, values = (x.astype(jnp.float32) - values[..., :1].astype(jnp.float32) for x in (slots.logits, values))
        log_probs = values - jnp.log(row_sum(jnp.exp(logits)))  # [B, n, k]
        first, outs, ins = self._vectors(slots, tokens, log_probs)

        def read(state, previous, i: int):
            before, chosen = first[:, None], None
            if i:
                chosen = tokens[:, i - 1] == previous  # [B, k]
                before = jnp.sum(jnp.where(chosen[..., None], outs[:, i - 1], 0), axis=1, keepdims=True)
            scores = self.scale * row_sum(before * ins[:, i])[..., 0]
            if chosen is not None:
                scores = jnp.where(jnp.any(chosen, axis=1, keepdims=True), scores, log_probs[:, i])
            return state, only_among(tokens[:, i : i + 1], scores[:, None], slots.logits.shape[-1])

        return (), read

    def _vectors(self, slots: Slots, tokens, log_probs):
        """The vectors whose cosines are scores, float32 and of length 1: of the anchor ``[B, Rf]``, and of all candidates
        before and after a transition, ``[B, n, k, Rf]`` each."""
        (B, n, k), known = tokens.shape, slots.known[:, :, None]
        hidden = jnp.where(known, slots.hidden, 0)
        x = self._inputs(slots.embed(tokens.reshape(B, n * k)), hidden, jnp.where(known, log_probs, 0))
        bias = self._bias(known, k)
        for layer in self.layers:
            x = layer(x, bias)
        x, anchor = self.output_norm(x), self.anchor_norm(self.context_proj(slots.context))
        factors = jnp.concatenate([x, jnp.broadcast_to(anchor, x.shape), x * anchor], axis=-1)
        factors = jax.nn.silu(self.factor_input_proj(factors))
        outs, ins = (self._unit(head(factors)).reshape(B, n, k, -1) for head in (self.out_head, self.in_head))
        return self._unit(self.anchor_out_head(anchor))[:, 0], outs, ins

    def _inputs(self, embedded, hidden, log_probs):
        """What the layers read, ``[B, nk, Dl]``, by the embeddings of the candidates ``[B, nk, D]``."""
        B, n, k = log_probs.shape
        rank = jnp.broadcast_to(jnp.arange(k, dtype=jnp.float32) / max(k - 1, 1), log_probs.shape)
        first = (rank == 0) if k > 1 else jnp.ones_like(rank)
        gap = log_probs - log_probs[..., :1]
        features = jnp.stack([log_probs, jnp.exp(log_probs), gap, rank, first.astype(jnp.float32)], axis=-1)
        features = self.feature_norm(features.reshape(B, n * k, 5).astype(embedded.dtype))
        x = embedded if self.token_proj is None else self.token_proj(embedded)
        places = (self.slot_embedding[...] + self.rank_embedding[...]).reshape(1, n * k, -1)
        x = x + jnp.repeat(self.pass_hidden_proj(hidden), k, axis=1)
        return x + self.feature_out(jax.nn.silu(self.feature_in(features))) + places

    def _bias(self, known, k: int):
        """What is added to the logits of attention, float32 ``[B, Nl, nk, nk]``: candidates of unknown slots are unseen."""
        slot = np.repeat(np.arange(self.slots), k)
        distance = slot[:, None] - slot[None]
        bias = self.relative_slot_bias[...][:, distance + self.slots].astype(jnp.float32)
        bias = bias + jnp.where(distance == 0, self.same_slot_bias[...].astype(jnp.float32)[:, None, None], 0)
        seen = jnp.repeat(known[:, :, 0], k, axis=1)[:, None, None]
        return jnp.where(seen, bias[None], jnp.finfo(jnp.float32).min)

    def _unit(self, x):
        x = x.astype(jnp.float32)
        return x / jnp.maximum(jnp.sqrt(row_sum(x * x)), self.eps)
