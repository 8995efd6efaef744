"""The dense pre-norm decoder: Llama 1 to 3.2, Vicuna, Mistral, Qwen2, Qwen2.5 and Qwen3 are settings of this one.

A call reads T new tokens per row through a *view* (``jspec.models.cache``), which knows where keys and values are kept:

    hidden, cache = model(tokens, positions, cache, view)
    logits = model.logits(hidden)

``jspec.models.contract`` says what the rest of jspec asks of it, so what another object needs to take its place.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig
from jspec.models.layers import Linear, RMSNorm, project, rotation_at
from jspec.models.quantized import random_weight, wide


class Attention(nnx.Module):
    """Grouped-query attention; query, key and value weights are stacked in one ``[(N + 2G) H, D]``.

    ``in_features`` is the width that it reads, D unless said otherwise.
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
    """SwiGLU (Shazeer, 2020); gate and up weights are stacked in one ``[2F, D]``."""

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
    """Attention and MLP, each added to the residual stream; ``norm=False`` leaves out the norm before attention.

    The norm before attention is applied by what comes before the layer, which adds to the stream in the same pass.
    """

    def __init__(self, config: ModelConfig, layer: int, norm: bool = True, *, dtype, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype) if norm else None
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, normed, positions, kv, view, after: RMSNorm | None):
        """Go through the layer.

        Args:
          x: the residual stream ``[B, T, D]``, and
          normed: what attention reads of it.
          after: the norm that reads the stream next.

        Returns:
          the stream, its norm (the stream itself if ``after`` is None), and what the view keeps.
        """
        attended, kv = self.attention(normed, positions, kv, view)
        return *add_mlp(self, x, attended, after), kv


def add_mlp(layer, x, attended, after: RMSNorm | None):
    """The second half of a layer that has ``mlp_norm`` and ``mlp``: the stream and, as ``Layer`` returns it, its
    norm."""
    x, normed = layer.mlp_norm.after_adding(x, attended)
    added = layer.mlp(normed)
    return (x + added, x + added) if after is None else after.after_adding(x, added)


class Decoder(nnx.Module):
    """Embedding, L layers, final norm and head. Layers are unrolled: scanning would copy every weight each step.

    Attributes:
      embedding: ``[V, D]``. A tied one is quantised as the output head that it is, a separate one never.
      embedding_scale: float32 ``[V]``, or None for an embedding that is not quantised.
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
        """int32 ``[B, T] -> [B, T, D]``."""
        rows = self.embedding[...][tokens]
        if self.embedding_scale is None:
            return rows
        return wide(rows, self.embedding_scale[...][tokens]).astype(self.dtype)

    def __call__(self, tokens, positions, cache, view):
        """Read tokens.

        Args:
          tokens: int32 ``[B, T]``.
          positions: int32 ``[B, T]``, the absolute position of each token.
          cache: what ``view`` keeps, one entry per layer.
          view: ``PagedView`` or ``CausalView``.

        Returns:
          hidden states after the final norm ``[B, T, D]``, and the cache with the new keys and values.
        """
        hidden, _, cache = self.with_auxiliary(tokens, positions, cache, view, ())
        return hidden, cache

    def with_auxiliary(self, tokens, positions, cache, view, aux_layers: tuple[int, ...]):
        """Read tokens as ``__call__`` does, and listen to residual streams on the way.

        Args:
          aux_layers: k is the stream after k layers: 0 the embeddings, L what enters the final norm.

        Returns:
          hidden states, the streams joined ``[B, T, len(aux_layers) D]`` (the hidden states if aux_layers is ()), and
          the cache.
        """
        x = self.embed(tokens)
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        normed, streams, written = norms[0](x), [x], []
        for layer, after, kv in zip(self.layers, norms[1:], cache, strict=True):
            x, normed, kv = layer(x, normed, positions, kv, view, after)
            streams.append(x)
            written.append(kv)
        return (
            normed,
            jnp.concatenate([streams[k] for k in aux_layers], axis=-1) if aux_layers else normed,
            tuple(written),
        )

    def feature_size(self, aux_layers: tuple[int, ...]) -> int:
        """E, the numbers per position that ``aux_layers`` ask for; () is the hidden state after the final norm."""
        return max(len(aux_layers), 1) * self.config.hidden_size

    def logits(self, hidden):
        """``[..., D] -> [..., V]``, in the model's dtype: the stored logits that every distribution is defined by."""
        return project(hidden, self.output_weight, self.output_scale)

    @property
    def output_weight(self) -> jax.Array:
        """``[V, D]``, the output head as it is stored; a tied one is the embedding."""
        return self.embedding[...] if self.head is None else self.head.weight[...]

    @property
    def output_scale(self) -> jax.Array | None:
        """float32 ``[V]``, what each row of a quantised ``output_weight`` is to be multiplied by, else None."""
        scale = self.embedding_scale if self.head is None else self.head.scale
        return None if scale is None else scale[...]

    @property
    def output_norm(self) -> jax.Array:
        """``[D]``, the weight of the final norm."""
        return self.norm.weight[...]

    def cache_shape(self) -> tuple[int, int, int]:
        """(L, G, H) of the keys and values that a token leaves behind."""
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim
