"""What a LiLiCorr head (NVIDIA, 2026) adds to a DFlash head: scores of how well the candidates of neighbouring slots match.

A block has n = ``block_size`` - 1 slots that draft, each with k candidates, the likeliest tokens of its logits, in their
order. Candidate c of slot i becomes a vector of Dl numbers: the sum of maps of the target's embedding of it, of the slot's
hidden state after the final norm, of five features (its log-probability l, exp(l), l less that of the first, c / (k - 1),
whether it is the first), and of the embeddings of i and c. Layers of attention and MLP over all n k candidates, which see
each other in both directions, with a bias by the distance of their slots, make x_ic of them.

Let a be a map of the context's feature before the anchor, normed, and z_ic = silu(F [x_ic, a, x_ic * a]). Of maps A, I, O
to Rf numbers, draft 0 has the score ``scale`` cos(A a, I z_0c) for candidate c, and draft i, after candidate b of slot
j = i - 1, ``scale`` cos(O z_jb, I z_ic). Other tokens have -inf. After a draft that is no candidate of its slot, because a
grammar or a lookup put it there, the scores are the log-probabilities l. All x_ic are known before a draft is drawn, and
need the whole block, for any K.

Source: nvidia-modelopt 0.48.0rc1, ``LiLiCorrHead``, and ``HFLiLiCorrModel`` for the distribution: its loss has the softmax
of the scores. It chooses the likeliest candidate."""

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


class LatticeLayer(nnx.Module):
    """Attention over all candidates of a block and an MLP, each after a norm."""

    def __init__(self, width: int, inner: int, num_heads: int, norm, linear):
        self.num_heads, self.attn_norm, self.mlp_norm = num_heads, norm(width), norm(width)
        self.attn = nnx.Dict(in_proj=linear(width, 3 * width), out_proj=linear(width, width))
        self.mlp = nnx.Dict({"0": linear(width, inner), "2": linear(inner, width)})

    def __call__(self, x, bias):
        """``[B, nk, Dl]`` after the layer; ``bias``, float32 ``[B, Nl, nk, nk]``, is added to the attention's logits."""
        (B, S, width), N = x.shape, self.num_heads
        qkv = jnp.swapaxes(self.attn["in_proj"](self.attn_norm(x)).reshape(B, S, 3 * N, width // N), 1, 2)
        q, k, v = jnp.split(qkv.astype(jnp.float32), 3, axis=1)  # [B, Nl, nk, Dl / Nl]
        weights = jax.nn.softmax(rows_product(q, k, -1) * (width // N) ** -0.5 + bias, axis=-1)
        seen = jnp.swapaxes(rows_product(weights, v, -2), 1, 2).astype(x.dtype).reshape(B, S, width)
        x = x + self.attn["out_proj"](seen)
        return x + self.mlp["2"](jax.nn.silu(self.mlp["0"](self.mlp_norm(x))))


class LiLiCorr(nnx.Module):
    """The scores; its parts have the names of their tensors."""

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        D, own, k, n = config.layers.hidden_size, config.lilicorr, config.candidates, config.block_size - 1
        assert own is not None
        self.count, self.scale, self.eps, width = k, own.scale, own.eps, own.hidden_size
        linear = functools.partial(Linear, bias=True, dtype=dtype, rngs=rngs)
        norm = functools.partial(Norm, eps=config.layers.rms_norm_eps, dtype=dtype)
        table = lambda *shape: nnx.Param(jnp.zeros(shape, dtype))  # noqa: E731
        self.token_proj = linear(D, width) if width != D else None
        self.pass_hidden_proj, self.context_proj = linear(D, width), linear(D, width)
        of_features = Norm(5, 1e-5, "layer", dtype=dtype), linear(5, width), linear(width, width)
        self.feature_mlp = nnx.Dict(dict(zip("013", of_features, strict=True)))
        self.slot_embedding, self.rank_embedding = table(1, 1, n, 1, width), table(1, 1, 1, k, width)
        self.relative_slot_bias, self.same_slot_bias = table(own.num_heads, 2 * n + 1), table(own.num_heads)
        sizes = width, own.inner_size, own.num_heads, norm, linear
        self.layers: Any = nnx.List([LatticeLayer(*sizes) for _ in range(own.num_layers)])
        self.output_norm, self.anchor_norm, self.factor_input_proj = norm(width), norm(width), linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (linear(width, own.factor_size) for _ in range(3))

    def start(self, slots: Slots):
        """See ``jspec.models.heads.sequential``."""
        values, tokens = jax.lax.top_k(slots.logits, self.count)
        logits, values = (x.astype(jnp.float32) - values[..., :1].astype(jnp.float32) for x in (slots.logits, values))
        log_probs = values - jnp.log(row_sum(jnp.exp(logits)))  # [B, n, k]
        anchor, outs, ins = self._vectors(slots, tokens, log_probs)

        def read(state, previous, i: int):
            before, chosen = anchor, jnp.ones_like(previous, bool)
            if i:
                chosen = tokens[:, i - 1] == previous  # [B, k]
                before = jnp.sum(jnp.where(chosen[..., None], outs[:, i - 1], 0), axis=1, keepdims=True)
            scores = self.scale * row_sum(before * ins[:, i])[..., 0]
            scores = jnp.where(jnp.any(chosen, axis=1, keepdims=True), scores, log_probs[:, i])
            return state, only_among(tokens[:, i : i + 1], scores[:, None], slots.logits.shape[-1])

        return (), read

    def _vectors(self, slots: Slots, tokens, log_probs):
        """The vectors whose cosines are scores, float32 and of length 1: of the anchor ``[B, 1, Rf]``, and of all candidates
        before and after a transition, ``[B, n, k, Rf]`` each."""
        (B, n, k), known = tokens.shape, slots.known[:, :, None]
        rank = jnp.broadcast_to(jnp.arange(k, dtype=jnp.float32), log_probs.shape)
        gap = log_probs - log_probs[..., :1]
        features = [log_probs, jnp.exp(log_probs), gap, rank / max(k - 1, 1), (rank == 0).astype(jnp.float32)]
        features = jnp.where(known[..., None], jnp.stack(features, axis=-1), 0).reshape(B, n * k, 5)
        x = slots.embed(tokens.reshape(B, n * k))
        normed = self.feature_mlp["0"](features.astype(x.dtype))
        x = x if self.token_proj is None else self.token_proj(x)
        x = x + jnp.repeat(self.pass_hidden_proj(jnp.where(known, slots.hidden, 0)), k, axis=1)
        x = x + self.feature_mlp["3"](jax.nn.silu(self.feature_mlp["1"](normed)))
        x = x + (self.slot_embedding[...] + self.rank_embedding[...]).reshape(1, n * k, -1)
        distance = np.subtract.outer(*[np.repeat(np.arange(n), k)] * 2)
        bias, same = (p[...].astype(jnp.float32) for p in (self.relative_slot_bias, self.same_slot_bias))
        bias = bias[:, distance + n] + jnp.where(distance[None] == 0, same[:, None, None], 0)
        seen = jnp.repeat(slots.known, k, axis=1)[:, None, None]
        bias = jnp.where(seen, bias[None], jnp.finfo(jnp.float32).min)
        for layer in self.layers:
            x = layer(x, bias)
        x, anchor = self.output_norm(x), self.anchor_norm(self.context_proj(slots.context))
        factors = jnp.concatenate([x, jnp.broadcast_to(anchor, x.shape), x * anchor], axis=-1)
        factors = jax.nn.silu(self.factor_input_proj(factors))
        ends = self.anchor_out_head(anchor), self.out_head(factors), self.in_head(factors)
        anchor, outs, ins = (x.astype(jnp.float32) for x in ends)
        anchor, outs, ins = (x / jnp.maximum(jnp.sqrt(row_sum(x * x)), self.eps) for x in (anchor, outs, ins))
        return anchor, outs.reshape(B, n, k, -1), ins.reshape(B, n, k, -1)
