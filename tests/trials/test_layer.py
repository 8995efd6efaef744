"""A decoder layer in one launch, its phases interpreted one by one, against the module that it stands for."""

import contextlib
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.trials.layer import LayerWeights, Stream, decoder_layer_kernel
from benchmarks.trials.phases import slab
from benchmarks.trials.plan import Tiling
from jspec.cache import LayerKV, PagedView
from jspec.config import ModelConfig
from jspec.models.decoder import Layer
from jspec.models.layers import rotary_frequencies

D, F, N, G, H, P, PAGES = 64, 96, 4, 2, 32, 16, 6


@dataclass(frozen=True)
class Case:
    B: int
    T: int
    programs: int
    window: int | None = None
    qk_norm: bool = False
    swapped: bool = False

    def __str__(self):
        return f"{self.B}x{self.T} programs {self.programs} W{self.window} norms {self.qk_norm} swapped {self.swapped}"

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=11,
            hidden_size=D,
            intermediate_size=F,
            num_layers=1,
            num_heads=N,
            num_kv_heads=G,
            head_dim=H,
            max_position=1000,
            windows=(self.window,),
            qk_norm=self.qk_norm,
            qkv_bias=self.qk_norm,
        )


def build(case: Case) -> Layer:
    layer = Layer(case.config, 0, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for i, leaf in enumerate(jax.tree.leaves(nnx.state(layer, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param))):
        if leaf[...].ndim == 1:  # norms and biases are made as ones and zeros
            leaf[...] = (1 + 0.3 * jax.random.normal(jax.random.key(i), leaf.shape)).astype(jnp.bfloat16)
    return layer


def text(case: Case):
    """Rows that begin, go on, are short of valid tokens, and, if there are several, one that is not live."""
    rng, (B, T) = np.random.default_rng(0), (case.B, case.T)
    start = rng.integers(0, PAGES * P - T, size=B)
    start[0] = 0
    valid = np.arange(T)[None] < rng.integers(1, T + 1, size=B)[:, None]
    valid[-1] &= B == 1
    table = 1 + rng.permutation(B * PAGES).reshape(B, PAGES)
    view = PagedView(
        jnp.asarray(table, jnp.int32), jnp.asarray(start[:, None] + np.arange(T), jnp.int32), jnp.asarray(valid)
    )
    pools = rng.normal(size=(2, G, 1 + B * PAGES, P, H))
    return jnp.asarray(rng.normal(size=(B, T, D)), jnp.bfloat16), LayerKV(*jnp.asarray(pools, jnp.bfloat16)), view


def one_launch(layer: Layer, case: Case, x, kv: LayerKV, view: PagedView, tiling: Tiling, interpret: bool):
    attention, config = layer.attention, case.config
    value = lambda module: None if module is None else module.weight[...]  # noqa: E731
    weights = LayerWeights(
        attention.qkv.weight[...],
        attention.out.weight[...],
        layer.mlp_norm.weight[...],
        layer.mlp.gate_up.weight[...],
        layer.mlp.down.weight[...],
        layer.mlp_norm.weight[...],
        None if attention.qkv.bias is None else attention.qkv.bias[...],
        value(attention.q_norm),
        value(attention.k_norm),
    )
    angles = view.positions[..., None].astype(jnp.float32) * rotary_frequencies(config.rope, H).reshape(1, 1, -1)
    return decoder_layer_kernel(
        Stream.of(x, layer.attention_norm.weight[...], tiling),
        *(weights, *kv, view.table, view.positions, view.valid, (jnp.cos(angles), jnp.sin(angles))),
        jnp.zeros(1, jnp.int32),
        heads=N,
        eps=config.rms_norm_eps,
        window=case.window,
        tiling=tiling,
        interpret=interpret,
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 5, 16),
        Case(3, 3, 40, window=7),
        Case(2, 4, 16, qk_norm=True),
        Case(4, 6, 2, swapped=True),
    ],
    ids=str,
)
def test_does_what_the_layer_does(case):
    layer, (x, kv, view) = build(case), text(case)
    expected, written = jax.jit(layer)(x, view.positions, kv, view)
    tiling = Tiling(programs=case.programs, swapped=case.swapped, slots=16, chains=2)
    stream, *pools, _ = one_launch(layer, case, x, kv, view, tiling, interpret=True)
    valid = np.asarray(view.valid)
    error = np.abs(np.asarray(stream.value - expected, np.float32))[valid].max()
    assert error <= 2**-6 * np.abs(np.asarray(expected, np.float32)).max()
    for got, wanted in zip(pools, written, strict=True):  # page 0 is written by neither
        np.testing.assert_allclose(*(np.asarray(pool, np.float32) for pool in (got, wanted)), atol=0.05)
        assert np.array_equal(got[:, 0], wanted[:, 0])
    np.testing.assert_array_equal(stream.scaled, stream.value * layer.mlp_norm.weight[...].reshape(1, 1, -1))
    squares = np.sum(np.asarray(stream.value, np.float32) ** 2, axis=-1).reshape(-1)
    np.testing.assert_allclose(np.sum(stream.squares, axis=0)[: squares.size], squares, rtol=1e-5)


def test_lowers_for_cuda_as_one_kernel():
    case = Case(1, 5, 132)
    layer, (x, kv, view) = build(case), text(case)
    run = functools.partial(one_launch, layer, case, tiling=Tiling(slots=16), interpret=False)
    device = contextlib.nullcontext()
    if jax.__version_info__ >= (0, 11):
        h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        device = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=h200))
    with device:
        lowered = jax.jit(run).trace(x, kv, view).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") == 1


@pytest.mark.parametrize(("width", "most", "columns"), [(4096, 256, 256), (14336, 8192, 2048), (96, 64, 32)])
def test_tiles_divide_a_weight(width, most, columns):
    assert slab(width, most) == columns
