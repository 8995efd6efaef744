"""The public functions lower to Triton kernels for CUDA on a machine without a GPU, and to their reference
implementations elsewhere."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import for_cuda, kernels_of, shapes_of_queries
from latent_attention import round_of_latents
from matmul_rows import abstract_weight
from stored_head_maps import IN_CODES

from jspec.config import Experts
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.models.ragged_view import RaggedView
from jspec.pallas.attention.fp8 import KVScales
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec, RaggedLayout
from jspec.pallas.attention.table import paged_attention
from jspec.pallas.dispatch import by_platform, one_order
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.mla.absorb_queries import absorb_queries
from jspec.pallas.mla.attention import latent_attention
from jspec.pallas.mla.project_values import project_values
from jspec.pallas.moe.grouped_mlp import grouped_mlp
from jspec.pallas.moe.router import route, route_kernel
from jspec.pallas.moe.router_reference import route_reference
from jspec.pallas.moe.router_small_batch import MOST_TOKENS
from jspec.pallas.moe.tiles import ExpertMap
from jspec.pallas.norm.qk_norm import qk_norm
from jspec.pallas.norm.rms_norm import add_norm
from jspec.pallas.sampling.residual import Residual, residual_masses, residual_sample
from jspec.pallas.sampling.sample import sample
from jspec.pallas.sampling.warped_logits import WarpedLogits, num_groups
from jspec.sampling.streams import RoundNoise

B, K = 2, 4
T = K + 1


def _shapes(V, dtype):
    """name -> (public function, arguments, kernels expected)."""
    array = jax.ShapeDtypeStruct
    f32 = lambda *shape: array(shape, jnp.float32)  # noqa: E731
    i32 = lambda *shape: array(shape, jnp.int32)  # noqa: E731
    flag = lambda *shape: array(shape, jnp.bool_)  # noqa: E731
    keys = lambda *rows: array((*rows, 2), jnp.uint32)  # noqa: E731
    distributions = lambda J, width: WarpedLogits(array((B, J, width), dtype), f32(B, J), f32(B, J), f32(B, J))  # noqa: E731
    settings = f32(B), i32(B), f32(B), f32(B)
    rows = array((B, T, V), dtype)
    residual = Residual(distributions(T, V), distributions(K, V - V // 4), i32(B, K), flag(B, K), i32(B), f32(B, T))
    reduced = residual._replace(draft_ids=i32(V))
    after = residual, f32(B, T, num_groups(V)), i32(B), RoundNoise(keys(B), i32(B)), i32(B, T)
    return {
        "sample": (sample, (rows, *settings, keys(B, T)), {"weigh_groups", "sample"}),
        "sample without noise": (sample, (rows, *settings), {"weigh_groups", "sample"}),
        "residual_masses": (residual_masses, (residual,), {"weigh_residual"}),
        "residual_masses, one row": (residual_masses, (residual._replace(log_weight=None), i32(B)), {"weigh_residual"}),
        "residual_sample": (residual_sample, after, {"sample_residual"}),
        "residual_masses of a draft vocabulary": (residual_masses, (reduced,), {"weigh_residual"}),
        "residual_sample of a draft vocabulary": (residual_sample, (reduced, *after[1:]), {"sample_residual"}),
    }


def _spec(dtype, window=None, scale=None, softcap=None, sinks=False) -> AttentionSpec:
    """The sinks are the shape of those of 32 heads."""
    return AttentionSpec(window, scale, softcap, jax.ShapeDtypeStruct((32,), dtype) if sinks else None)  # pyright: ignore


def _pools(shape, dtype, rounding=None) -> LayerKV:
    """Pools of keys and values ``[G, pages, P, H]``, in bytes with scales of ``heads`` or ``tokens``."""
    pool = jax.ShapeDtypeStruct(shape, dtype if rounding is None else jnp.uint8)
    scale = jax.ShapeDtypeStruct(shape[:1] if rounding == "heads" else shape[:3], jnp.float32)
    return LayerKV(pool, pool, None if rounding is None else KVScales(scale, scale))  # pyright: ignore


def _attention(B, T, H=128, P=64, dtype="bfloat16", rounding=None, **how):
    """``paged_attention`` of 32 heads on 8 over 1,008 slots, and its arguments."""
    array, M = jax.ShapeDtypeStruct, 1008 // P
    k, v, scales = _pools((8, 1 + B * M, P, H), dtype, rounding)
    queries = array((B, T, 32, H), dtype)
    return paged_attention, (queries, k, v, shapes_of_queries(B, T, M), _spec(dtype, **how), scales)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("V", [128256, 1031])
@pytest.mark.parametrize("name", _shapes(1031, "float32"))
def test_sampling_lowers_for_cuda(name, V, dtype):
    function, args, kernels = _shapes(V, jnp.dtype(dtype))[name]
    actual = kernels_of(for_cuda(function, args))
    assert len(actual) == len(kernels)
    assert set(actual) == kernels


@pytest.mark.parametrize("name", _shapes(1031, "float32"))
def test_lowers_to_the_reference_elsewhere(name):
    function, args, _ = _shapes(1031, jnp.dtype("float32"))[name]
    assert "triton" not in jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        *[{"B": 1, "T": 1}, {"B": 1, "T": 5, "H": 64, "P": 16}, {"B": 1, "T": 9, "H": 256, "window": 100}],
        *[{"B": 1, "T": 64, "P": 48}, {"B": 2, "T": 5, "H": 16, "P": 128, "window": 1}],
        {"B": 1, "T": 5, "H": 256, "window": 100, "scale": 1 / 16, "softcap": 50.0},
        {"B": 1, "T": 5, "H": 512, "scale": 1.0},
        {"B": 1, "T": 5, "H": 64, "window": 128, "sinks": True},
    ],
    ids=str,
)
def test_attention_over_pages_lowers_for_cuda(shape, dtype):
    assert sorted(kernels_of(for_cuda(*_attention(**shape, dtype=dtype)))) == ["attend_split", "merge_splits"]


def test_attention_of_many_rows_merges_nothing():
    assert kernels_of(for_cuda(*_attention(B=64, T=5))) == ["attend_split"]


@pytest.mark.parametrize("H", [8, 80, 1024])
def test_attention_without_a_kernel_for_its_heads_is_the_reference(H):
    assert not kernels_of(for_cuda(*_attention(B=1, T=5, H=H)))


def _decode_attention(B, T, H=128, P=64, dtype="bfloat16", rotary=None, slots=1008, rounding=None, **how):
    """``PagedView.extend`` of 32 heads on 8 over so many slots, and its arguments."""
    array, M = jax.ShapeDtypeStruct, slots // P
    kv = _pools((8, 1 + B * M, P, H), dtype, rounding)
    view = PagedView(*shapes_of_queries(B, T, M)[:3])
    rotary = H if rotary is None else rotary
    rotation = Rotation(*[array((B, T, rotary // 2), jnp.float32)] * 2) if rotary else None
    function = lambda view, qkv, rotation, kv, spec: view.extend(qkv, rotation, kv, 8, spec)  # noqa: E731
    return function, (view, array((B, T, 48, H), dtype), rotation, kv, _spec(dtype, **how))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        *[{"B": 1, "T": 1}, {"B": 1, "T": 5, "H": 64, "P": 16}, {"B": 2, "T": 16, "H": 16, "P": 48, "window": 100}],
        *[{"B": 1, "T": 3, "rotary": 96}, {"B": 1, "T": 3, "H": 256, "rotary": 0, "scale": 1 / 16, "softcap": 50.0}],
        {"B": 1, "T": 5, "H": 64, "window": 128, "sinks": True},
        {"B": 1, "T": 5, "H": 512, "scale": 1.0},
        {"B": 64, "T": 5, "slots": 131_072},  # rows with short texts leave most of their splits unused
    ],
    ids=str,
)
def test_decode_attention_lowers_for_cuda(shape, dtype):
    assert sorted(kernels_of(for_cuda(*_decode_attention(**shape, dtype=dtype)))) == ["decode_split", "merge_splits"]


@pytest.mark.parametrize("rounding", ["heads", "tokens"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("T", "kernels"),
    [(5, ["decode_split", "merge_splits"]), (17, ["attend_split", "merge_splits", "rope_and_write_kv"])],
)
def test_attention_over_bytes_lowers_for_cuda(T, kernels, rounding, dtype):
    text = for_cuda(*_decode_attention(B=2, T=T, dtype=dtype, rounding=rounding))
    assert sorted(kernels_of(text)) == kernels
    assert "f8E4M3FN" not in text  # no numbers are made of pools
    assert ("num_stages = 2" in text) == (T == 5 and dtype == "bfloat16")  # the tiling is that of bytes


def _ragged_attention(R, T, dtype="bfloat16", rounding=None):
    """``RaggedView.extend`` of R tokens of 64 rows of up to T each, and its arguments."""
    _, (rows, qkv, _, kv, spec) = _decode_attention(64, T, dtype=dtype, rounding=rounding)
    array = jax.ShapeDtypeStruct
    layout = RaggedLayout(array((65,), jnp.int32), array((R,), jnp.int32))
    ragged = array((1, R, *qkv.shape[2:]), dtype), Rotation(*[array((1, R, 64), jnp.float32)] * 2)
    attend = lambda view, qkv, rotation, kv: view.extend(qkv, rotation, kv, 8, spec)  # noqa: E731
    return attend, (RaggedView(rows, layout), *ragged, kv)


@pytest.mark.parametrize("rounding", ["heads", "tokens"])
def test_attention_over_bytes_of_a_ragged_view_lowers_for_cuda(rounding):
    assert kernels_of(for_cuda(*_ragged_attention(96, 3, rounding=rounding))) == ["decode_split"]


@pytest.mark.parametrize("rotary", [None, 96, 0])
def test_many_tokens_are_written_before_they_attend(rotary):
    assert sorted(kernels_of(for_cuda(*_decode_attention(B=1, T=17, rotary=rotary)))) == [
        "attend_split",
        "merge_splits",
        "rope_and_write_kv",
    ]


@pytest.mark.parametrize(("make", "operands"), [(_attention, 5), (_decode_attention, 7)])
def test_only_kernels_of_models_with_sinks_have_them_as_an_operand(make, operands):
    def num_operands(sinks: bool):
        text = for_cuda(*make(B=64, T=5, sinks=sinks))
        [call] = re.findall(r"@__gpu\$xla\.gpu\.triton\((.*?)\)", text)
        return len(call.split(","))

    assert (num_operands(False), num_operands(True)) == (operands, operands + 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("R", "T", "kernels"), [(96, 3, 1), (100, 5, 1), (40, 17, 2)])
def test_decode_attention_of_a_ragged_view_lowers_for_cuda(R, T, kernels, dtype):
    """Where T is more than the kernel has, tokens are put into rows before."""
    assert len(kernels_of(for_cuda(*_ragged_attention(R, T, dtype)))) == kernels


def test_decode_attention_elsewhere_is_the_reference():
    function, args = _decode_attention(B=1, T=5)
    assert "triton" not in jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [320, 4096])
@pytest.mark.parametrize("kind", ["rms", "rms_wide", "rms_offset", "layer"])
def test_add_norm_lowers_for_cuda(kind, D, dtype):
    x, vector = jax.ShapeDtypeStruct((1, 5, D), dtype), jax.ShapeDtypeStruct((D,), dtype)
    args = x, x, vector, vector if kind == "layer" else None
    assert kernels_of(for_cuda(functools.partial(add_norm, eps=1e-5, kind=kind), args)) == ["add_norm"]
    parts = x, PartialSums(jax.ShapeDtypeStruct((1, 5, 9, D), dtype)), *args[2:]
    assert kernels_of(for_cuda(functools.partial(add_norm, eps=1e-5, kind=kind), parts)) == ["add_norm"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("T", "H", "kernels"), [(1, 128, ["qk_norm"]), (500, 64, ["qk_norm"]), (5, 96, [])])
@pytest.mark.parametrize("kind", ["rms", "rms_wide", "rms_offset", "layer"])
def test_qk_norm_lowers_for_cuda(kind, T, H, kernels, dtype):
    qkv, vector = jax.ShapeDtypeStruct((2, T, 40, H), dtype), jax.ShapeDtypeStruct((H,), dtype)
    biases = (vector, vector) if kind == "layer" else (None, None)
    function = functools.partial(qk_norm, num_heads=(32, 4), eps=1e-5, kind=kind)
    assert kernels_of(for_cuda(function, (qkv, (vector, vector), biases))) == kernels


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 4), (64, 4), (2, 256)])
def test_latent_attention_lowers_for_cuda(B, T, dtype):
    pool = jax.ShapeDtypeStruct((1, 1 + B * 16, 64, 576), dtype)
    actual = sorted(kernels_of(for_cuda(*round_of_latents(B, T, dtype, LayerKV(pool, None)))))
    assert actual == ["attend_split", *(["merge_splits"] if B * T < 100 else []), "norm_rope_write_kv"]


@pytest.mark.parametrize("rank", [256, 512])
def test_tiles_of_latents_of_any_size_lower(rank):
    array, B, T, width = jax.ShapeDtypeStruct, 2, 1, rank + 64
    q, pool = array((B, T, 20, width), "bfloat16"), array((1, 33, 64, width), "bfloat16")
    attend = functools.partial(latent_attention, rank=rank, scale=0.1)
    assert sorted(kernels_of(for_cuda(attend, (q, pool, shapes_of_queries(B, T, 16))))) == [
        "attend_split",
        "merge_splits",
    ]


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8", "fp8", "fp8_block", *IN_CODES])
@pytest.mark.parametrize("M", [1, 64, 300, 513])
def test_maps_of_heads_lower_for_cuda(M, kind):
    """Those of keys, and those of values, which have a kernel with scales of groups only: for any number of tokens."""
    array, dtype = jax.ShapeDtypeStruct, "float32" if kind == "float32" else "bfloat16"
    of = abstract_weight(kind, (20, 192, 512))
    few, rotation = M <= 512 or of.in_groups, Rotation(*[array((M, 1, 32), jnp.float32)] * 2)
    queries, values = array((M, 1, 20, 256), dtype), array((M, 1, 20, 512), dtype)
    assert kernels_of(for_cuda(absorb_queries, (queries, of, rotation))) == (["absorb_queries"] if few else [])
    assert kernels_of(for_cuda(project_values, (values, of))) == (["project_values"] if of.in_groups else [])


@pytest.mark.parametrize(("M", "X"), [(1, 64), (5, 256), (320, 64)])
def test_routing_by_sigmoids_in_groups_lowers_for_cuda(M, X):
    routing = Experts(X, 4, 1, scores="sigmoid", groups=8, chosen_groups=4, scale=2.5, shared=1)
    args = jax.ShapeDtypeStruct((M, X), jnp.float32), jax.ShapeDtypeStruct((X,), jnp.float32)
    actual = kernels_of(for_cuda(functools.partial(route_kernel, routing=routing), args))
    assert sorted(actual) == (["route_small_batch"] if M <= MOST_TOKENS else ["choose", "group"])


@pytest.mark.parametrize("M", [1, 80, 2048])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_routing_of_tokens_lowers_for_cuda(M, dtype):
    args = jax.ShapeDtypeStruct((M, 2880), dtype), jax.ShapeDtypeStruct((32, 2880), dtype), None
    function = functools.partial(route, routing=Experts(32, 4, 1, renormalise=False))
    chosen = ["route_small_batch"] if M <= MOST_TOKENS else ["choose", "group"]
    for wanted in (True, False):  # XLA's product is faster, but its sums follow the number of tokens
        actual = kernels_of(for_cuda(one_order(wanted)(function), args))
        assert sorted(actual) == sorted([*["router_logits"] * wanted, *chosen])


def _mixture(M, X, dtype, stored: str | tuple[str | None, str] | None = None):
    """Eight of X experts for each of M tokens, and its arguments; ``stored`` is the format of both maps, or of each."""
    array, F, D = jax.ShapeDtypeStruct, 768, 2048

    def function(x, logits, gate_up, down):
        ways = (functools.partial(way, routing=Experts(X, 8, F)) for way in (route_kernel, route_reference))
        return grouped_mlp(x, by_platform(*ways, logits, None), gate_up, down)

    both = stored if isinstance(stored, tuple) else (stored, stored)
    maps = (
        ExpertMap(abstract_weight(one or dtype, (X, *shape)))
        for one, shape in zip(both, ((2 * F, D), (D, F)), strict=True)
    )
    return function, (array((M, D), dtype), array((M, X), jnp.float32), *maps)


def launches_of_experts(M: int) -> list[str]:
    """Few tokens are routed in one launch."""
    return ["down", "route_small_batch", "up"] if M <= MOST_TOKENS else ["choose", "down", "group", "up"]


@pytest.mark.parametrize(
    ("M", "dtype"), [(1, "bfloat16"), (16, "bfloat16"), (320, "bfloat16"), (4096, "bfloat16"), (5, "float32")]
)
@pytest.mark.parametrize(
    "stored",
    [
        *("fp8_block", "mxfp8", "int4", "int4_64_float16_zeros", "nvfp4", "int8_64_float16_zeros", "nf4_64"),
        *("int6_16_levels", "int4_32_levels_offsets", "int5_32_float16", "iq4_32_levels", "int8_32_float16"),
    ],
)
def test_experts_in_groups_lower_for_cuda(M, dtype, stored):
    assert sorted(kernels_of(for_cuda(*_mixture(M, 128, dtype, stored)))) == launches_of_experts(M)


@pytest.mark.parametrize(
    "stored", [("int4", "int8"), ("fp8_block", "nvfp4"), ("fp8", "mxfp4"), (None, "int4")], ids=str
)
def test_experts_in_two_formats_lower_for_cuda(stored):
    assert sorted(kernels_of(for_cuda(*_mixture(16, 128, "bfloat16", stored)))) == launches_of_experts(16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("M", "X"), [(1, 128), (4, 128), (16, 128), (5, 60), (320, 128), (4096, 8)])
def test_a_mixture_of_experts_lowers_for_cuda(M, X, dtype):
    assert sorted(kernels_of(for_cuda(*_mixture(M, X, dtype)))) == launches_of_experts(M)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_experts_of_eight_bits_lower_for_cuda(kind, dtype):
    assert sorted(kernels_of(for_cuda(*_mixture(5, 60, dtype, kind)))) == launches_of_experts(5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("M", "X"), [(1, 32), (5, 128), (320, 32)])
def test_experts_of_four_bits_with_biases_lower_for_cuda(M, X, dtype):
    array, D = jax.ShapeDtypeStruct, 2880

    def stacked(out):
        return ExpertMap(abstract_weight("mxfp4_pairs", (X, out, D)), array((X, out), dtype))

    def function(x, logits, bias, gate_up, down):
        return grouped_mlp(x, route_kernel(logits, bias, Experts(X, 4, D)), gate_up, down, clamp=7.0)

    args = array((M, D), dtype), array((M, X), jnp.float32), array((X,), dtype), stacked(2 * D), stacked(D)
    assert sorted(kernels_of(for_cuda(function, args))) == launches_of_experts(M)


def test_a_mixture_of_experts_elsewhere_is_the_reference():
    function, args = _mixture(5, 8, "float32")
    assert not kernels_of(jax.jit(function).lower(*args).as_text())


def test_attention_elsewhere_is_the_reference():
    function, args = _attention(B=1, T=5)
    assert "triton" not in jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",)).as_text()
