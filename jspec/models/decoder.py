"""The decoder of all families in ``jspec.checkpoints.families``, which differ in the choices of their configs.

A call reads T new tokens of each row through a *view* (``jspec.models.cache``), which knows where keys and values are
kept:

    hidden, cache = model(tokens, positions, cache, view)
    logits = model.logits(hidden)

``jspec.models.contract`` lists the methods that the rest of jspec calls, and that any other target has to have.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig, Shards
from jspec.config.shards import axis_of
from jspec.models.cache import CacheShape
from jspec.models.draft_vocabulary import first_tokens, with_draft_tokens
from jspec.models.experts import Mixture
from jspec.models.latent import LatentAttention
from jspec.models.layers import ACTIVATE, ACTIVATED_IN_KERNELS, Linear, Norm, added_up, project, rotation_at, times
from jspec.models.quantized import random_weight, wide
from jspec.models.rounded_inputs import round_inputs
from jspec.pallas.attention_reference import Scores
from jspec.pallas.norm import whole
from jspec.pallas.norm_heads import norm_heads
from jspec.pallas.rounded_product import rounded_product
from jspec.pallas.rounding import activate_and_round, round_tokens


class Attention(nnx.Module):
    """Grouped-query attention. The weights of queries, keys and values are stacked in one ``[(N + 2G) H, in_features]``.

    ``in_features`` is the width of the input. None means D, the width of the model. With ``shards``, config and
    heads are those of one shard.

    Attributes:
      sinks: ``[N]``, the score of each attention head that its softmaxes run over as well (``Scores``), or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        in_features: int | None = None,
        *,
        shards: Shards | None = None,
        dtype,
        rngs: nnx.Rngs,
    ):
        N, G, H, D = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = N, G, H
        self.rope, self.window = config.rope_of(layer), config.windows[layer]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        linear = functools.partial(Linear, quantization=config.quantization, dtype=dtype, rngs=rngs)
        self.qkv = linear(in_features or D, (N + 2 * G) * H, bias=config.qkv_bias)
        self.out = linear(N * H, D, bias=config.output_bias, over=axis_of(shards))
        self.norm_projection = config.qk_norm_over == "projection"
        sizes = (N * H, G * H) if self.norm_projection else (H, H)
        over = axis_of(shards) if self.norm_projection else None
        make = functools.partial(Norm, eps=config.rms_norm_eps, kind=config.norm, over=over, dtype=dtype)
        self.q_norm, self.k_norm = (make(size) for size in sizes) if config.qk_norm else (None, None)
        self.sinks = nnx.Param(jnp.zeros(N, dtype)) if config.attention_sinks else None

    def __call__(self, x, positions, kv, view):
        """``[B, T, in_features] -> [B, T, D]``, of those tokens alone that ``view`` has attend, and ``kv`` with new ones."""
        qkv = self._queries_keys_values(x)
        scores = Scores(self.scale, self.softcap, None if self.sinks is None else self.sinks[...])
        rotation = rotation_at(positions, self.rope, self.head_dim)
        attended, kv = view.extend(qkv, rotation, kv, self.num_kv_heads, self.window, scores)
        return self.out(attended.reshape(x.shape[0], -1, self.num_heads * self.head_dim)), kv

    def keep(self, x, positions, kv, view):
        """``kv`` with keys and values of tokens ``x [B, T, in_features]``, which attend to nothing."""
        rotation = rotation_at(positions, self.rope, self.head_dim)
        return view.rotate_and_write(self._queries_keys_values(x), rotation, kv, self.num_kv_heads)[1]

    def _queries_keys_values(self, x):
        """``[B, T, N + 2G, H]``, queries and keys normed, not rotated."""
        B, T, _ = x.shape
        qkv = self.qkv(x).reshape(B, T, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        return qkv if self.q_norm is None or self.k_norm is None else self._normed(qkv, self.q_norm, self.k_norm)

    def _normed(self, qkv, q_norm: Norm, k_norm: Norm):
        """``[B, T, N + 2G, H]`` with norms of queries and keys, over each head or over all heads of a token."""
        N, G = self.num_heads, self.num_kv_heads
        if self.norm_projection:
            q, k, v = jnp.split(qkv, [N, N + G], axis=2)
            q, k = (norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape) for norm, x in ((q_norm, q), (k_norm, k)))
            return jnp.concatenate([q, k, v], axis=2)
        weights = q_norm.weight[...], k_norm.weight[...]
        biases = tuple(None if one.bias is None else one.bias[...] for one in (q_norm, k_norm))
        return norm_heads(qkv, weights, biases, (N, G), q_norm.eps, q_norm.kind)


class MLP(nnx.Module):
    """``down(activation(gate x) * up x)`` (Shazeer, 2020), or ``down(activation(up x))`` without a gate.

    The weights of gate and up are stacked in one ``[2F, D]``. With ``shards``, F is that of one shard."""

    def __init__(self, config: ModelConfig, *, shards: Shards | None = None, dtype, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        linear = functools.partial(
            Linear, bias=config.mlp_bias, quantization=config.quantization, dtype=dtype, rngs=rngs
        )
        self.activation = config.activation
        self.gate_up: Any = linear(D, 2 * F) if config.gated_mlp else None
        self.up: Any = None if config.gated_mlp else linear(D, F)
        self.down = linear(F, D, over=axis_of(shards))

    def __call__(self, x):
        activate = ACTIVATE[self.activation]
        if self.gate_up is None:
            return self.down(activate(self.up(x)))
        if self.down.rounds and self.activation in ACTIVATED_IN_KERNELS:
            return self.down(activate_and_round(self.gate_up(x), activate))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(activate(gate) * up)


class Layer(nnx.Module):
    """Attention and MLP, each added to the residual stream. ``config.norm_placement`` says what is normed.

    The layer does not apply its own ``attention_norm``. The layer before it does, by way of ``after``, because one kernel
    then adds to the residual stream and norms the sum. ``norm=False`` makes a layer without ``attention_norm``. With
    ``shards``, ``config`` and the layer are those of one shard.

    Attributes:
      attention_norm, mlp_norm: what attention and MLP read goes through these. None for placements that have none.
      attention_out_norm, mlp_out_norm: their outputs go through these, or with ``norm_sums`` the residual stream after
        they were added. None for placements that have none.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        norm: bool = True,
        *,
        shards: Shards | None = None,
        dtype,
        rngs: nnx.Rngs,
    ):
        def normed(name: str) -> Norm | None:
            present = name in config.layer_norms
            return Norm(config.hidden_size, config.rms_norm_eps, config.norm, dtype=dtype) if present else None

        self.norm_sums, self.multiplier = config.norm_placement == "after_sum", config.residual_multiplier
        self.attention_norm = normed("attention_norm") if norm else None
        attention = Attention if config.latent is None else LatentAttention
        self.attention: Any = attention(config, layer, shards=shards, dtype=dtype, rngs=rngs)
        self.attention_out_norm, self.mlp_norm = normed("attention_out_norm"), normed("mlp_norm")
        experts = config.experts if config.has_experts(layer) else None
        make = MLP if experts is None else functools.partial(Mixture, experts=experts)
        self.mlp: Any = make(config, shards=shards, dtype=dtype, rngs=rngs)
        self.mlp_out_norm = normed("mlp_out_norm")

    def __call__(self, x, normed, positions, kv, view, after: Norm | None):
        """Apply the layer.

        Args:
          x: the residual stream ``[B, T, D]``.
          normed: the same after this layer's ``attention_norm``, which the attention reads.
          positions: int32 ``[B, T]``.
          kv: the keys and values of this layer that ``view`` keeps.
          view: as for ``Decoder``.
          after: the norm that the residual stream goes through next, such as that of the next layer. None if none does.

        Returns:
          the new residual stream ``[B, T, D]``, the same after ``after`` (or without a norm if that is None), and ``kv``
          with the new keys and values.
        """
        attended, kv = self.attention(normed, positions, kv, view)
        x, normed = self._add(x, attended, self.attention_out_norm, self.mlp_norm)
        return *self._add(x, self.mlp(normed), self.mlp_out_norm, after), kv

    def _add(self, x, y, out_norm: Norm | None, after: Norm | None):
        """The residual stream after y was added, and the same after ``after``; norms of y or of the sum included. What
        experts make comes in parts, which are summed in the launch that adds them where no other step is before it."""
        if self.multiplier != 1:
            y = times(whole(y, x), self.multiplier)
        if out_norm is None:
            return add(x, y, after)
        if not self.norm_sums:
            return add(x, out_norm(whole(y, x)), after)
        _, x = out_norm.after_adding(x, y)
        return x, x if after is None else after(x)


def apply_layer(layer: Layer, x, normed, positions, kv, view, after: Norm | None):
    """``layer(x, normed, positions, kv, view, after)``, as a call of a function that is traced and lowered once for all
    layers that differ in their weights alone. XLA compiles it as if the layer stood there."""
    graph, state = nnx.split((layer, after))
    return _merged_layer(graph, state, x, normed, positions, kv, view)


@functools.partial(jax.jit, static_argnums=0)
def _merged_layer(graph, state, x, normed, positions, kv, view):
    layer, after = nnx.merge(graph, state)
    return layer(x, normed, positions, kv, view, after)


def add(x, y, after: Norm | None):
    """The residual stream ``x + y``, and the same after ``after``, the norm that it goes through next, if there is one.

    y may be in parts, as for ``whole``."""
    if after is not None:
        return after.after_adding(x, y)
    total = x + whole(y, x)
    return total, total


class Decoder(nnx.Module):
    """Embedding, L layers, final norm and output head.

    The layers are unrolled in the compiled program. A scan over them would copy every weight in each step.

    With ``shards`` it is the part of the model that one shard has, to be called inside of ``jax.shard_map``: layers are
    those of ``shards.local(config)``, and embedding and output head have ``shards.vocabulary(V)`` rows. It reads the same
    tokens in every shard, and gives the same hidden states and logits in each.

    Attributes:
      embedding: ``[V, D]``, or ``[V, We]`` with ``project_in`` and ``project_out``. A tied embedding is also the output
        head and is quantised if that is. An embedding that is not tied is never quantised.
      positions: ``[Pe, D]``, the vectors that are added to embeddings, by position. None with rotary embeddings.
      project_in, project_out: the linear maps from embeddings to the layers, and from these to the output head; or None.
      head: the output head, or the rows of a draft vocabulary of it, which every shard has. None if the embedding is tied.
      draft_ids: as ``jspec.models.draft_vocabulary`` has it, of a draft model that knows a part of the vocabulary only; None
        of any other, and of every target.
      embedding_scale: one scale for each token, float32 ``[V]``, or those of its groups. None for an embedding that is not
        quantised.
      rounds: whether the output head rounds hidden states to int8, as a draft model in int8 does.
    """

    def __init__(self, config: ModelConfig, *, shards: Shards | None = None, dtype=jnp.float32, rngs: nnx.Rngs):
        V, D, W = config.vocab_size, config.hidden_size, config.embedding_size
        self.config, self.dtype, self.shards = config, dtype, shards
        local = config if shards is None else shards.local(config)
        V = V if shards is None else shards.vocabulary(V)
        tied = config.tie_embeddings
        linear = functools.partial(Linear, quantization=config.quantization, dtype=dtype, rngs=rngs)
        shape, stored = (V, W or D), config.head_quantization if tied else None
        self.embedding, self.embedding_scale = random_weight(rngs.params(), shape, 0.02, dtype, stored)
        self.layers = nnx.List(
            [Layer(local, i, shards=shards, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = Norm(D, config.rms_norm_eps, config.norm, dtype=dtype) if config.final_norm else None
        rows = config.dimensions["Vd"] if config.reduced else V
        self.head = None if tied else linear(W or D, rows, quantization=config.head_quantization)
        self.draft_ids = nnx.Param(first_tokens(config.vocab_size, rows)) if config.reduced else None
        self.draft_tokens, self.rounds = None, False  # before ``prepare``
        self.project_in, self.project_out = (None, None) if W is None else (linear(W, D), linear(D, W))
        self.multiplier, rows = float(np.asarray(config.embedding_multiplier).astype(dtype)), config.dimensions["Pe"]
        learned = config.position_offset is not None
        self.positions = random_weight(rngs.params(), (rows, D), 0.02, dtype, None)[0] if learned else None

    def prepare(self) -> "Decoder":
        """Make this model a drafter: compute which token each logit of a draft vocabulary is of, and have products with
        weights of int8 round their inputs. Returns the model, changed in place. A target is never prepared."""
        round_inputs(self.layers)
        self.rounds = self.output_weight.dtype == jnp.int8
        return with_draft_tokens(self)

    def embed(self, tokens):
        """The embeddings ``[B, T, D]`` of int32 tokens ``[B, T]``, without multiplier and learned positions.

        Draft heads read these: their own embeddings are copies of them."""
        rows, mine = tokens, None
        if self.shards is not None:
            rows = tokens - jax.lax.axis_index(self.shards.axis) * self.embedding.shape[0]
            mine = (rows >= 0) & (rows < self.embedding.shape[0])
            rows = jnp.where(mine, rows, 0)
        stored = self.embedding[...][rows]
        if self.embedding_scale is not None:
            width = self.config.embedding_size or self.config.hidden_size
            stored = wide(stored, self.embedding_scale[...][rows], width).astype(self.dtype)
        if self.shards is not None and mine is not None:  # one shard has the token, and the others add zeros
            stored = added_up(jnp.where(mine[..., None], stored, 0), self.shards.axis)
        return stored if self.project_in is None else self.project_in(stored)

    def _inputs(self, tokens, positions):
        """What the first layer reads, ``[B, T, D]``; arguments as for ``__call__``."""
        embedded, offset = times(self.embed(tokens), self.multiplier), self.config.position_offset
        if self.positions is None or offset is None:
            return embedded
        inside = jnp.clip(positions, 0, self.config.max_position - 1)  # invalid tokens may be anywhere
        return embedded + self.positions[...][inside + offset]

    def __call__(self, tokens, positions, cache, view):
        """Read tokens.

        Args:
          tokens: int32 ``[B, T]``.
          positions: int32 ``[B, T]``, the absolute position of each token.
          cache: the keys and values that ``view`` keeps, one entry for each layer.
          view: ``PagedView`` or ``CausalView``.

        Returns:
          hidden states after the final norm ``[B, T, D]``, and the cache with the new keys and values.
        """
        hidden, _, cache = self.with_auxiliary(tokens, positions, cache, view, ())
        return hidden, cache

    def with_auxiliary(self, tokens, positions, cache, view, aux_layers: tuple[int, ...]):
        """Read tokens as ``__call__`` does, and also return auxiliary hidden states.

        Args:
          tokens, positions, cache, view: as for ``__call__``.
          aux_layers: which residual streams to return: k is the one after k layers, so 0 is the embeddings and L is the
            input of the final norm.

        Returns:
          hidden states after the final norm ``[B, T, D]``, features ``[B, T, E]``, and the cache. The features are the
          chosen residual streams side by side. If ``aux_layers`` is ``()``, they are the hidden states.
        """
        x = self._inputs(tokens, positions)
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        normed, streams, written = x if norms[0] is None else norms[0](x), [x], []
        for layer, after, kv in zip(self.layers, norms[1:], cache, strict=True):
            x, normed, kv = apply_layer(layer, x, normed, positions, kv, view, after)
            streams.append(x)
            written.append(kv)
        return (
            normed,
            jnp.concatenate([streams[k] for k in aux_layers], axis=-1) if aux_layers else normed,
            tuple(written),
        )

    def feature_size(self, aux_layers: tuple[int, ...]) -> int:
        """E, the size of the features that ``with_auxiliary`` returns for ``aux_layers``."""
        return max(len(aux_layers), 1) * self.config.hidden_size

    def logits(self, hidden):
        """``[..., D] -> [..., V]`` in the model's dtype. These rounded logits define the model's distribution. Those of a
        draft model with a draft vocabulary are over that, ``[..., Vd]``."""
        logits = self._own_logits(hidden)
        if self.shards is None or self.draft_ids is not None:
            return logits
        every = jax.lax.all_gather(logits, self.shards.axis, axis=logits.ndim - 1, tiled=True)
        return every[..., : self.config.vocab_size]

    def logits_of_rows(self, hidden):
        """In shards: the logits of some of the rows, ``[B, ..., D] -> [B / n, ..., V]``; each of n shards has its own."""
        return self.dealt(self._own_logits(hidden))

    def dealt(self, logits):
        """In shards: all logits of some of the rows, ``[B / n, ..., V]``, from those of the shard's part of the vocabulary
        for all rows ``[B, ..., V / n]``; each of n shards has its own rows."""
        assert self.shards is not None
        mine = jax.lax.all_to_all(logits, self.shards.axis, split_axis=0, concat_axis=logits.ndim - 1, tiled=True)
        return mine[..., : self.config.vocab_size]

    def _own_logits(self, hidden):
        """Those of the shard's part of the vocabulary, for all rows."""
        hidden = self.before_head(hidden)
        if self.rounds:
            return self.scaled_logits(rounded_product(round_tokens(hidden), self.output_weight, self.output_scale))
        return self.scaled_logits(project(hidden, self.output_weight, self.output_scale))

    def before_head(self, hidden):
        """What the output head reads of hidden states ``[..., D]``: they themselves, or ``[..., We]``."""
        return hidden if self.project_out is None else self.project_out(hidden)

    def scaled_logits(self, products):
        """Logits ``[..., V]`` from what the output head gives, in its dtype: divided and capped as the config says."""
        cap, divisor = self.config.logit_softcap, self.config.logit_divisor
        if cap is None:
            return products if divisor == 1 else times(products, 1 / divisor)
        return (cap * jnp.tanh(products.astype(jnp.float32) / (divisor * cap))).astype(products.dtype)

    @property
    def output_weight(self) -> jax.Array:
        """The weight ``[V, D]`` of the output head as it is stored, ``[V, We]`` behind ``project_out``, or packed in four
        bits. A tied output head is the embedding."""
        return self.embedding[...] if self.head is None else self.head.weight[...]

    @property
    def output_scale(self) -> jax.Array | None:
        """The scales of a quantised ``output_weight``, float32 ``[V]`` or those of groups, or None."""
        scale = self.embedding_scale if self.head is None else self.head.scale
        return None if scale is None else scale[...]

    @property
    def output_norm(self) -> jax.Array:
        """What the final norm multiplies by, ``[D]``; ones if there is no such norm."""
        return jnp.ones(self.config.hidden_size, self.dtype) if self.norm is None else self.norm.scale

    def cache_shape(self) -> CacheShape:
        """What is cached for a token, in all shards together."""
        return cache_shape(self.config, 1 if self.shards is None else self.shards.count)


def cache_shape(config: ModelConfig, shards: int = 1) -> CacheShape:
    """What decoder layers cache for a token. If there are more shards than KV heads, each has a copy of its own."""
    if config.latent is not None:
        return CacheShape(config.num_layers, 1, config.latent.cached, latents=True)
    return CacheShape(config.num_layers, max(config.num_kv_heads, shards), config.head_dim)
