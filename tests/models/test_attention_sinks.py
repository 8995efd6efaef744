"""A model with attention sinks: what its attention computes, whichever view it reads through, and where its sinks lie in a
checkpoint."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TARGET, V
from flax import nnx

from jspec.checkpoints.export import to_tensors
from jspec.checkpoints.tensors.names import tensor_table
from jspec.models import Decoder
from jspec.models.attention import Attention
from jspec.models.cache_pools import init_pool
from jspec.models.kv_cache import CausalView, PagedView
from jspec.models.params import build, flat_params
from jspec.pallas.attention.reference import grouped_attention
from jspec.pallas.attention.spec import AttentionSpec

CONFIG = dataclasses.replace(TARGET, attention_sinks=True)
N, G, H, D, S = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.hidden_size, 17


def with_sinks(around: float = 0.0) -> Decoder:
    """Random weights, and in each layer other sinks, which lie around a number."""
    params, keys = flat_params(Decoder(CONFIG, rngs=nnx.Rngs(0))), jax.random.split(jax.random.key(1), 3)
    sinks = {f"layers.{i}.attention.sinks": around + jax.random.normal(key, (N,)) for i, key in enumerate(keys)}
    return build(CONFIG, params | sinks)


def read(model: Decoder, tokens):
    """Logits of int32 tokens ``[1, S]``, read at once."""
    positions = jnp.arange(S, dtype=jnp.int32)[None]
    hidden, _ = model(tokens, positions, [None] * CONFIG.num_layers, CausalView(positions))
    return model.logits(hidden)


def read_in_pieces(model: Decoder, tokens):
    """Logits of int32 tokens ``[1, S]``, read in four pieces through pages of 5 slots."""
    cache, logits = init_pool(model.cache_shape(), 6, 5, jnp.float32), []
    for start, end in ((0, 6), (6, 7), (7, 12), (12, S)):
        positions = jnp.arange(start, end, dtype=jnp.int32)[None]
        view = PagedView(jnp.array([[3, 1, 4, 2]], jnp.int32), positions, jnp.ones_like(positions, bool))
        hidden, cache = model(tokens[:, start:end], positions, cache, view)
        logits.append(model.logits(hidden))
    return jnp.concatenate(logits, axis=1)


def test_a_text_read_in_pieces_has_the_logits_of_the_text_read_at_once():
    tokens = jax.random.randint(jax.random.key(2), (1, S), 0, V)
    logits = nnx.jit(read)(with_sinks(), tokens)
    np.testing.assert_allclose(nnx.jit(read_in_pieces)(with_sinks(), tokens), logits, rtol=0, atol=1e-5)
    params = {name: x for name, x in flat_params(with_sinks()).items() if not name.endswith("sinks")}
    plain = nnx.jit(read)(build(TARGET, params), tokens)
    assert jnp.max(jnp.abs(logits - plain)) > 1e-2
    np.testing.assert_allclose(nnx.jit(read)(with_sinks(-40.0), tokens), plain, rtol=0, atol=1e-5)


def test_attention_is_a_softmax_over_scores_and_sink_whose_last_weight_is_dropped():
    config = dataclasses.replace(CONFIG, rope=None, windows=(3, None, None), attention_scale=0.7)
    attention = Attention(config, 0, dtype=jnp.float32, rngs=nnx.Rngs(0))
    sinks, x = jax.random.normal(jax.random.key(3), (N,)), jax.random.normal(jax.random.key(4), (1, S, D))
    attention.sinks = nnx.Param(sinks)
    positions = jnp.arange(S, dtype=jnp.int32)[None]
    got, _ = nnx.jit(lambda attention, x: attention(x, positions, None, CausalView(positions)))(attention, x)

    qkv = np.asarray(x[0], np.float64) @ np.asarray(attention.qkv.weight[...], np.float64).T
    q, k, v = np.split(qkv.reshape(S, N + 2 * G, H), [N, N + G], axis=1)
    out = np.zeros((S, N, H))
    for t in range(S):
        seen = slice(max(0, t - 2), t + 1)
        for n in range(N):
            exponentials = np.exp([*(0.7 * k[seen, n // 2] @ q[t, n]), float(sinks[n])])
            out[t, n] = (exponentials / exponentials.sum())[:-1] @ v[seen, n // 2]
    wanted = out.reshape(S, N * H) @ np.asarray(attention.out.weight[...], np.float64).T
    np.testing.assert_allclose(got[0], wanted, rtol=0, atol=1e-5)


def test_gradients_are_those_of_a_key_whose_value_is_zero():
    """Of queries and sinks. The key is made to have the score of the sink by one more number of every head."""
    keys = jax.random.split(jax.random.key(5), 4)
    q, sinks = jax.random.normal(keys[0], (1, 5, N, H)), jax.random.normal(keys[1], (N,))
    k, v = (jax.random.normal(key, (G, 1, S, H)) for key in keys[2:])
    mask = jnp.arange(S)[None, None] <= 10 + jnp.arange(5)[None, :, None]

    def ours(q, sinks):
        return jnp.sum(grouped_attention(q, k, v, mask, AttentionSpec(scale=1.0, sinks=sinks)) ** 2)

    def with_a_key(q, sinks):
        own = jnp.broadcast_to(sinks[None, None, :, None], (1, 5, N, 1))
        longer = jnp.pad(k, ((0, 0), (0, 0), (0, 1), (0, 1))).at[:, :, -1, -1].set(1.0)
        values = jnp.pad(v, ((0, 0), (0, 0), (0, 1), (0, 1)))
        seen = jnp.pad(mask, ((0, 0), (0, 0), (0, 1)), constant_values=True)
        out = grouped_attention(jnp.concatenate([q, own], axis=-1), longer, values, seen, AttentionSpec(scale=1.0))
        return jnp.sum(out**2)

    got, wanted = (jax.jit(jax.grad(f, argnums=(0, 1)))(q, sinks) for f in (ours, with_a_key))
    for x, y in zip(got, wanted, strict=True):
        assert jnp.max(jnp.abs(y)) > 1e-2
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_are_one_tensor_for_each_layer_of_a_checkpoint(dtype):
    params = {name: x.astype(dtype) for name, x in flat_params(with_sinks()).items()}
    tensors = to_tensors(tensor_table(CONFIG), params)
    for layer in range(CONFIG.num_layers):
        sinks = tensors[f"model.layers.{layer}.self_attn.sinks"]
        assert (sinks.shape, sinks.dtype) == ((N,), jnp.dtype(dtype))
        np.testing.assert_array_equal(sinks, params[f"layers.{layer}.attention.sinks"])
    assert not any("sinks" in name for name in tensor_table(TARGET))
