"""The parts of a gated delta net against golden vectors, and whole layers against transformers' modules."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_nets import float64_convolution, float64_recurrence
from tiers import in_tiers

from jspec.pallas.delta_net import chunked as chunks
from jspec.pallas.delta_net.convolution import convolve
from jspec.pallas.delta_net.projections import (
    DeltaHeads,
    decay_and_beta,
    split_heads,
)
from jspec.pallas.delta_net.reference import recurrent
from jspec.pallas.norm.gated_norm import gated_norm
from jspec.pallas.norm.rms_norm import norm

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "delta_net.npz")
GOLDEN_HEADS = DeltaHeads(keys=2, values=4, key_size=8, value_size=12)
EPS = 1e-6


def chunked(q, k, v, g, beta, S):
    B, T = q.shape[:2]
    return chunks.chunked(q, k, v, g, beta, S, jnp.full(B, T, jnp.int32), jnp.zeros(B, bool))


def golden(name: str) -> jax.Array:
    return jnp.asarray(GOLDEN[name], jnp.float32)


def assert_close(x, y):
    """Up to rounding in float32, relative to the largest number."""
    y = np.asarray(y)
    np.testing.assert_allclose(np.asarray(x), y, rtol=0, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("rule", [recurrent, chunked])
@pytest.mark.parametrize("T", [1, 5, 70])
def test_rules_agree_with_golden_vectors(T, rule):
    *tokens, S = (golden(f"T{T}_{name}")[None] for name in ("q", "k", "v", "g", "beta", "S0"))
    o, S = jax.jit(rule)(*tokens, S)
    assert_close(o[0], golden(f"T{T}_o"))
    assert_close(S[0], golden(f"T{T}_S"))


def test_float64_agrees_with_golden_vectors():
    """So that what other tests compare with is right."""
    o, states = float64_recurrence(*(GOLDEN[f"T5_{name}"] for name in ("q", "k", "v", "g", "beta", "S0")))
    np.testing.assert_allclose(o, GOLDEN["T5_o"], atol=1e-14)
    np.testing.assert_allclose(states, GOLDEN["T5_states"], atol=1e-14)
    convolved = float64_convolution(GOLDEN["conv_state"], GOLDEN["conv_x"], GOLDEN["conv_w"].T)
    np.testing.assert_allclose(convolved, GOLDEN["conv_y"], atol=1e-14)


def test_convolution_agrees_with_golden_vectors():
    y = jax.jit(convolve)(golden("conv_state")[None], golden("conv_x")[None], golden("conv_w").T)
    assert_close(y[0], golden("conv_y"))


def of_key_heads(qkvz, ba, heads: DeltaHeads) -> tuple:
    """qkv, z, b and a of Qwen3-Next, whose two projections have the numbers of one key head after those of another: its
    query, its key, and the values and then the gates of the value heads that read it; their b and then their a."""
    width = heads.values // heads.keys * heads.value_size
    by_head = lambda x: x.reshape(*x.shape[:-1], heads.keys, -1)  # noqa: E731
    flat = lambda x: x.reshape(*x.shape[:-2], -1)  # noqa: E731
    ends = [heads.key_size, 2 * heads.key_size, 2 * heads.key_size + width]
    q, k, v, z = map(flat, jnp.split(by_head(qkvz), ends, axis=-1))
    return jnp.concatenate([q, k, v], axis=-1), z, *map(flat, jnp.split(by_head(ba), 2, axis=-1))


@functools.partial(jax.jit, static_argnums=(2, 3))
def mix(y, weights: dict, heads: DeltaHeads, rule) -> tuple[jax.Array, jax.Array]:
    """A gated delta net from normed input ``[B, T, D]`` to output, and its state; names as in a checkpoint's layer."""
    w = {name: jnp.asarray(x) for name, x in weights.items()}
    project = lambda name: jnp.einsum("btd,fd->btf", y, w[f"{name}.weight"])  # noqa: E731
    if "in_proj_qkvz.weight" in w:
        qkv, z, b, a = of_key_heads(project("in_proj_qkvz"), project("in_proj_ba"), heads)
    else:
        qkv, z, b, a = (project(f"in_proj_{name}") for name in ("qkv", "z", "b", "a"))
    taps = w["conv1d.weight"][:, 0].T
    before = jnp.zeros((y.shape[0], len(taps) - 1, heads.channels), y.dtype)
    q, k, v = split_heads(convolve(before, qkv, taps), heads)
    g, beta = decay_and_beta(a, b, w["A_log"], w["dt_bias"])
    S = jnp.zeros((y.shape[0], heads.values, heads.key_size, heads.value_size))
    o, S = rule(q, k, v, g, beta, S)
    normed = gated_norm(o.astype(y.dtype), z, w["norm.weight"], EPS)
    return jnp.einsum("btf,df->btd", normed.reshape(*y.shape[:2], -1), w["out_proj.weight"]), S


@pytest.mark.parametrize("rule", [recurrent, chunked])
def test_a_layer_agrees_with_golden_vectors(rule):
    of = lambda prefix: {  # noqa: E731
        name.removeprefix(prefix): GOLDEN[name] for name in GOLDEN if name.startswith(prefix)
    }
    layer = {name: jnp.asarray(x) for name, x in of("layer.").items()}
    normed = lambda x, name: norm(x, layer[f"{name}.weight"], None, EPS, "rms_offset")  # noqa: E731
    x = golden("layer_x")[None]
    mixed, S = mix(normed(x, "input_layernorm"), of("layer.linear_attn."), GOLDEN_HEADS, rule)
    x = x + mixed
    gate, up, down = (layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    y = normed(x, "post_attention_layernorm")
    assert_close((x + (jax.nn.silu(y @ gate) * (y @ up)) @ down)[0], golden("layer_y"))
    assert_close(S[0], golden("layer_S"))


def transformers_layer(kind: str, heads: DeltaHeads, D: int):
    """A random module of transformers' and its weights by their names in a checkpoint's layer."""
    torch = pytest.importorskip("torch")
    if kind == "qwen3_next":
        from transformers.models.qwen3_next import configuration_qwen3_next as configs
        from transformers.models.qwen3_next import modeling_qwen3_next as models

        config, module = configs.Qwen3NextConfig, models.Qwen3NextGatedDeltaNet
    else:
        from transformers.models.qwen3_5 import configuration_qwen3_5 as configs
        from transformers.models.qwen3_5 import modeling_qwen3_5 as models

        config, module = configs.Qwen3_5TextConfig, models.Qwen3_5GatedDeltaNet
    sizes = {"key_head_dim": heads.key_size, "value_head_dim": heads.value_size, "conv_kernel_dim": 4}
    sizes |= {"num_key_heads": heads.keys, "num_value_heads": heads.values}
    linear = {f"linear_{name}": size for name, size in sizes.items()}
    layer = module(config(hidden_size=D, num_hidden_layers=4, **linear), 0).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
            if name == "norm.weight":
                parameter.add_(1)
    return layer, {name: x.detach().numpy() for name, x in layer.state_dict().items()}


@pytest.mark.parametrize(
    "heads", in_tiers([DeltaHeads(2, 6, 8, 16), DeltaHeads(3, 3, 8, 8)], test=[(2, 6, 8, 16)]), ids=str
)
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_a_layer_agrees_with_transformers(kind, heads):
    """More than a chunk of tokens, of two texts."""
    torch = pytest.importorskip("torch")
    layer, weights = transformers_layer(kind, heads, D=24)
    x = np.random.default_rng(1).normal(size=(2, 70, 24)).astype(np.float32)
    with torch.no_grad():
        wanted = layer(torch.from_numpy(x)).numpy()
    for rule in (recurrent, chunked):
        y, _ = mix(jnp.asarray(x), weights, heads, rule)
        assert_close(y, wanted)


def test_the_rule_agrees_with_transformers_in_bfloat16():
    """Which also computes in float32 what bfloat16 numbers come in."""
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_5 import modeling_qwen3_5 as models

    rng = np.random.default_rng(2)
    tokens = [rng.normal(size=(1, 70, n, size)).astype(np.float32) for n, size in ((2, 8), (2, 8), (4, 12))]
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in tokens)
    g, beta = -np.exp(rng.normal(size=(1, 70, 4))).astype(np.float32), rng.random((1, 70, 4)).astype(np.float32)
    S = rng.normal(size=(1, 4, 8, 12)).astype(np.float32)
    theirs = [torch.from_numpy(np.asarray(x, np.float32)).bfloat16() for x in (q, k, v)]
    numbers = [torch.from_numpy(x) for x in (g, beta)]
    for rule in (models.torch_chunk_gated_delta_rule, models.torch_recurrent_gated_delta_rule):
        how = {"initial_state": torch.from_numpy(S), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        wanted, wanted_S = rule(*theirs, g=numbers[0], beta=numbers[1], **how)
        o, new_S = jax.jit(recurrent)(q, k, v, g, beta, jnp.asarray(S))
        np.testing.assert_allclose(o, wanted.float().numpy(), rtol=2**-8, atol=1e-5)
        assert_close(new_S, wanted_S.numpy())


def test_betas_and_decays_are_in_float32():
    a, b, A_log, dt_bias = (jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
    g, beta = decay_and_beta(a[None].astype(jnp.bfloat16), b[None].astype(jnp.bfloat16), A_log, dt_bias)
    assert g.dtype == beta.dtype == jnp.float32
    a, b = (np.asarray(x.astype(jnp.bfloat16), np.float64)[None] for x in (a, b))
    A_log, dt_bias = np.asarray(A_log)[None], np.asarray(dt_bias)[None]
    np.testing.assert_allclose(g, -np.exp(A_log) * np.log1p(np.exp(a + dt_bias)), rtol=1e-5)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-b)), rtol=1e-6)
