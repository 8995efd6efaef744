"""The dense pre-norm decoder of Llama 1 to 3.2, Vicuna, Mistral, Qwen2, Qwen2.5 and Qwen3, which differ in settings.

A call reads T new tokens of each row through a *view* (``jspec.models.cache``), which knows where keys and values are
kept:

    hidden, cache = model(tokens, positions, cache, view)
    logits = model.logits(hidden)

``jspec.models.contract`` lists the methods that the rest of jspec calls, and that any other target has to have.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig
from jspec.models.layers import Linear, RMSNorm, project, rotation_at
from jspec.models.quantized import random_weight, wide


class Attention(nnx.Module):
    """Grouped-query attention. The weights of queries, keys and values are stacked in one ``[(N + 2G) H, in_features]``.

    ``in_features`` is the width of the input. None means D, the width of the model.
    """

    def __init__(self, config: ModelConfig, layer: int, in_features: int | None = None, *, dtype, rngs: nnx.Rngs):
        N, G, H, D = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = N, G, H
        self.rope, self.window = config.rope, config.windows[layer]
        linear = functools.partial(Linear, quantization=config.quantization, dtype=dtype, rngs=rngs)
        self.qkv = linear(in_features or D, (N + 2 * G) * H, bias=config.qkv_bias)
        self.out = linear(N * H, D, bias=config.output_bias)
        self.q_norm = RMSNorm(H, config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(H, config.rms_norm_eps, dtype=dtype) if config.qk_norm else None

    def __call__(self, x, positions, kv, view):
        B, T, _ = x.shape
        N, G, H = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = self.qkv(x).reshape(B, T, N + 2 * G, H)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = jnp.split(qkv, [N, N + G], axis=2)
            qkv = jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=2)
        attended, kv = view.extend(qkv, rotation_at(positions, self.rope, H), kv, G, self.window)
        return self.out(attended.reshape(B, T, N * H)), kv


class MLP(nnx.Module):
    """SwiGLU (Shazeer, 2020). The weights of gate and up are stacked in one ``[2F, D]``."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        linear = functools.partial(
            Linear, bias=config.mlp_bias, quantization=config.quantization, dtype=dtype, rngs=rngs
        )
        self.gate_up = linear(D, 2 * F)
        self.down = linear(F, D)

    def __call__(self, x):
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    """Attention and MLP, each added to the residual stream.

    The layer does not apply its own ``attention_norm``. The layer before it does, by way of ``after``, because one kernel
    then adds to the residual stream and norms the sum. ``norm=False`` makes a layer without ``attention_norm``.
    """

    def __init__(self, config: ModelConfig, layer: int, norm: bool = True, *, dtype, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype) if norm else None
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, normed, positions, kv, view, after: RMSNorm | None):
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
        return *add_mlp(self, x, attended, after), kv


def apply_layer(layer: Layer, x, normed, positions, kv, view, after: RMSNorm | None):
    """``layer(x, normed, positions, kv, view, after)``, as a call of a function that is traced and lowered once for all
    layers that differ in their weights alone. XLA compiles it as if the layer stood there."""
    graph, state = nnx.split((layer, after))
    return _merged_layer(graph, state, x, normed, positions, kv, view)


@functools.partial(jax.jit, static_argnums=0)
def _merged_layer(graph, state, x, normed, positions, kv, view):
    layer, after = nnx.merge(graph, state)
    return layer(x, normed, positions, kv, view, after)


def add_mlp(layer, x, attended, after: RMSNorm | None):
    """The second half of a layer: add the attention's output, then apply ``layer.mlp_norm`` and add ``layer.mlp``.

    Args:
      layer: a module with ``mlp_norm`` and ``mlp``.
      x: the residual stream ``[B, T, D]``.
      attended: the output of the attention ``[B, T, D]``.
      after: the norm that the residual stream goes through next, or None.

    Returns:
      the new residual stream, and the same after ``after``: the first two values that ``Layer`` returns.
    """
    x, normed = layer.mlp_norm.after_adding(x, attended)
    added = layer.mlp(normed)
    return (x + added, x + added) if after is None else after.after_adding(x, added)


class Decoder(nnx.Module):
    """Embedding, L layers, final norm and output head.

    The layers are unrolled in the compiled program. A scan over them would copy every weight in each step.

    Attributes:
      embedding: ``[V, D]``. A tied embedding is also the output head and is quantised as such. An embedding that is not
        tied is never quantised.
      embedding_scale: one scale for each token, float32 ``[V]``. None for an embedding that is not quantised.
    """

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.hidden_size
        self.config, self.dtype = config, dtype
        kind, tied = config.quantization, config.tie_embeddings
        self.embedding, self.embedding_scale = random_weight(rngs.params(), (V, D), 0.02, dtype, kind if tied else None)
        self.layers = nnx.List([Layer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)])
        self.norm = RMSNorm(D, config.rms_norm_eps, dtype=dtype)
        self.head = None if tied else Linear(D, V, quantization=kind, dtype=dtype, rngs=rngs)

    def embed(self, tokens):
        """The embeddings ``[B, T, D]`` of int32 tokens ``[B, T]``."""
        stored = self.embedding[...][tokens]
        if self.embedding_scale is None:
            return stored
        return wide(stored, self.embedding_scale[...][tokens]).astype(self.dtype)

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
        x = self.embed(tokens)
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        normed, streams, written = norms[0](x), [x], []
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
        """``[..., D] -> [..., V]`` in the model's dtype. These rounded logits define the model's distribution."""
        return project(hidden, self.output_weight, self.output_scale)

    @property
    def output_weight(self) -> jax.Array:
        """The weight ``[V, D]`` of the output head as it is stored. A tied output head is the embedding."""
        return self.embedding[...] if self.head is None else self.head.weight[...]

    @property
    def output_scale(self) -> jax.Array | None:
        """The scale of each output channel of a quantised ``output_weight``, float32 ``[V]``, or None."""
        scale = self.embedding_scale if self.head is None else self.head.scale
        return None if scale is None else scale[...]

    @property
    def output_norm(self) -> jax.Array:
        """The weight ``[D]`` of the final norm."""
        return self.norm.weight[...]

    def cache_shape(self) -> tuple[int, int, int]:
        """(L, G, H): layers, KV heads and head dimension of the keys and values that are cached for a token."""
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim
