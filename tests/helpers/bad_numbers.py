"""Kernels with arguments of three rows or more, and the places in one of them where a bad number is put."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from expert_layers import layer
from latent_attention import CASES as LATENT
from latent_attention import in_bytes as latents_in_bytes
from latent_attention import problem as latent_problem
from paged_problems import LIVE, SMALL, WHOLE, G, in_bytes
from paged_problems import Case as Paged
from paged_problems import arguments as extension
from paged_problems import problem as paged_problem
from residual_problems import problem as residual_problem
from weight_only_problems import problem as weight_only_problem

from jspec.config import Experts
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import View
from jspec.models.layers import ACTIVATE, ACTIVATED_IN_KERNELS
from jspec.pallas.attention.decode import decode_attention_kernel
from jspec.pallas.attention.paged import paged_attention_kernel, paged_attention_reference
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.matmul.bf16 import bf16_matmul_kernel, bf16_matmul_reference
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.quantize_activations import (
    QuantizedActivations,
    activate_and_quantize_kernel,
    activate_and_quantize_reference,
    quantize_tokens_kernel,
    quantize_tokens_reference,
)
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.matmul.w8a8 import w8a8_matmul_kernel, w8a8_matmul_reference
from jspec.pallas.matmul.weight_only import weight_only_matmul_kernel, weight_only_matmul_reference
from jspec.pallas.mla.absorb_queries import absorb_queries_kernel, absorb_queries_reference
from jspec.pallas.mla.attention import latent_attention_kernel, latent_attention_reference
from jspec.pallas.mla.project_values import project_values_kernel, project_values_reference
from jspec.pallas.moe.grouped_mlp import grouped_mlp_kernel, grouped_mlp_reference
from jspec.pallas.moe.router import choose_kernel
from jspec.pallas.moe.router_reference import choose_reference, route_reference
from jspec.pallas.moe.router_small_batch import route_small_batch_kernel
from jspec.pallas.norm.qk_norm import qk_norm_kernel, qk_norm_reference
from jspec.pallas.norm.rms_norm import add_norm_kernel, add_norm_reference
from jspec.pallas.sampling.residual import residual_masses_kernel, residual_masses_reference
from jspec.pallas.sampling.sample import log_weights, sample_kernel, sample_reference
from jspec.quantization.formats import known_format
from jspec.quantization.weight import Weight

ROW = 1  # has the bad number
NAN = (np.nan, -np.nan)  # with either sign bit
EVERY = (*NAN, np.inf, -np.inf)


class Spot(NamedTuple):
    """``args[operand]`` gets a number at the indices ``at``."""

    operand: int
    at: tuple[int, ...]
    number: float


class Problem(NamedTuple):
    """A kernel and its arguments.

    Attributes:
      reference, kernel: functions of ``args``; the kernel also of ``interpret``.
      args: trees of arrays, those with spots arrays of floats.
      spots: where bad numbers are put, all of them in row ``row``.
      row: of the arrays in ``rows``.
      rows: what of the results belongs to rows, arrays whose first axis is that of rows.
    """

    reference: Callable
    kernel: Callable
    args: tuple
    spots: list[Spot]
    row: int = ROW
    rows: Callable = jax.tree.leaves


def uncached(kernel: Callable) -> Callable:
    """The kernel without ``jax.jit``, whose trace would be that of an earlier test."""
    return getattr(kernel, "__wrapped__", kernel)


def spots(operand: int, shape, before: tuple[int, ...], numbers=EVERY) -> list[Spot]:
    """The first and the last element of ``array[before]``, the one where its last power of two ends, and two others."""
    rest = shape[len(before) :]
    size = int(np.prod(rest))
    rng = np.random.default_rng([operand, *shape, *before])
    flat = {0, size - 1, min(1 << (size.bit_length() - 1), size - 1), *rng.integers(size, size=2).tolist()}
    places = [(*before, *map(int, np.unravel_index(i, rest))) for i in sorted(flat)]
    return [Spot(operand, at, number) for at in places for number in numbers]


def normal(*shape: int, seed: int = 0, dtype="float32"):
    return jax.device_put(np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(jnp.dtype(dtype)))


def simple(reference, kernel, x, *args, rows: Callable = jax.tree.leaves, numbers=EVERY, **how) -> Problem:
    """A kernel whose first argument ``[M, ...]`` has the bad number, and whose results are those of the M."""
    reference, kernel = (functools.partial(f, **how) for f in (reference, uncached(kernel)))
    return Problem(reference, kernel, (x, *args), spots(0, x.shape, (ROW,), numbers), rows=rows)


def quantizing(dtype: str, kind: str) -> Problem:
    return simple(quantize_tokens_reference, quantize_tokens_kernel, normal(3, 320, dtype=dtype), kind=kind)


def activation(name: str) -> Problem:
    how = {"activate": ACTIVATE[name]}
    return simple(activate_and_quantize_reference, activate_and_quantize_kernel, normal(3, 2 * 100), **how)


def residual_sum(kind: str, quantize: str | None, summands: int | None) -> Problem:
    """Both summands get bad numbers."""
    x, y = (
        normal(3, 200, dtype="bfloat16"),
        normal(*((3, 200) if summands is None else (3, summands, 200)), dtype="bfloat16"),
    )
    weight, bias = (normal(200, seed=seed, dtype="bfloat16") for seed in (1, 2))
    how = {"eps": 1e-5, "kind": kind, "quantize": quantize}
    problem = simple(add_norm_reference, add_norm_kernel, x, y, weight, bias if kind == "layer" else None, **how)

    def adding(function):
        return lambda x, y, *vectors, **more: function(x, y if summands is None else PartialSums(y), *vectors, **more)

    reference, kernel = adding(problem.reference), adding(problem.kernel)
    return problem._replace(reference=reference, kernel=kernel, spots=problem.spots + spots(1, y.shape, (ROW,)))


def heads() -> Problem:
    weights = normal(16, seed=1), normal(16, seed=2)
    how = {"num_heads": (2, 1), "eps": 1e-5, "kind": "rms"}
    return simple(qk_norm_reference, qk_norm_kernel, normal(3, 2, 4, 16), weights, (None, None), **how)


def valid_rows(out, valid) -> list[jax.Array]:
    """Attention ``[B, T, N, H]`` with zeros for invalid query tokens, which it means nothing of."""
    return [jnp.where(valid[:, :, None, None], out, jnp.zeros((), out.dtype))]


def everywhere_seen(pool):
    """Keys whose first numbers are positive: if that of a query is -inf, so are all of its scores."""
    return pool.at[..., 0].set(jnp.abs(pool[..., 0]))


def slots_seen(case, queries) -> list[tuple[int, int]]:
    """Pages and slots of row ``LIVE`` that its newest query token sees: the newest, and the oldest of the text or window."""
    newest = int(queries.positions[LIVE, -1])
    oldest = 0 if case.window is None else newest - case.window + 1
    return [(int(queries.table[LIVE, slot // case.P]), slot % case.P) for slot in (oldest, newest)]


def attention(case: Paged) -> Problem:
    (q, k, v, queries), _ = paged_problem(case)
    places = spots(0, q.shape, (LIVE, case.T - 1))
    if case.sink is None and case.softcap is None:
        k = everywhere_seen(k)
        places.append(Spot(0, (LIVE, case.T - 1, 0, 0), -np.inf))
    for operand, g, slot in itertools.product((1, 2), range(G), slots_seen(case, queries)):
        places += spots(operand, k.shape, (g, *slot))
    return Problem(
        functools.partial(paged_attention_reference, spec=case.spec),
        functools.partial(uncached(paged_attention_kernel), tiling=case.tiling, spec=case.spec),
        (q, k, v, queries),
        places,
        LIVE,
        lambda out: valid_rows(out, queries.valid),
    )


def decoding(case: Paged, rounding: str | None = None) -> Problem:
    """With ``rounding``, over a cache in bytes, with scales of ``heads`` or ``tokens``."""
    qkv, rotation, kv, view = extension(case)
    assert isinstance(rotation, Rotation)
    kv = kv if rounding is None else in_bytes(kv, rounding)

    def reference(qkv, k, v):
        out, _ = View.extend(view, qkv, rotation, LayerKV(k, v, kv.scales), G, case.spec)
        return out

    def kernel(qkv, k, v, interpret=False):
        how = {"tiling": case.tiling, "interpret": interpret, "scales": kv.scales}
        return uncached(decode_attention_kernel)(qkv, rotation, k, v, view.queries, case.spec, **how)[0]

    places = spots(0, qkv.shape, (LIVE, 0)) + spots(0, qkv.shape, (LIVE, case.T - 1))
    [oldest, _] = slots_seen(case, view.queries)
    for operand in (1, 2) if case.window is None and rounding is None else ():
        places += spots(operand, kv.k.shape, (0, *oldest))
    return Problem(reference, kernel, (qkv, *kv[:2]), places, LIVE, lambda out: valid_rows(out, view.valid))


def latents(rounding: str | None = None) -> Problem:
    """With ``rounding``, over a cache in bytes, with scales of ``heads`` or ``tokens``."""
    case, scales = LATENT[1], None
    (q, pool, queries), _ = latent_problem(case)
    pool, how = everywhere_seen(pool), {"rank": case.rank, "scale": 0.1}
    places = [*spots(0, q.shape, (0, case.T - 1)), Spot(0, (0, case.T - 1, 0, 0), -np.inf)]
    if rounding is None:
        places += spots(1, pool.shape, (0, int(queries.table[0, 0]), 3))
    else:
        pool, scales = latents_in_bytes(pool, rounding)
    return Problem(
        functools.partial(latent_attention_reference, **how),
        functools.partial(uncached(latent_attention_kernel), tiling=case.tiling, **how),
        (q, pool, queries, scales),
        places,
        0,
        lambda out: valid_rows(out, queries.valid),
    )


def latent_heads() -> Problem:
    q, weight = normal(3, 2, 2, 48 + 16), normal(2, 48, 32)
    angles = Rotation(*(normal(3, 2, 8, seed=seed) for seed in (1, 2)))
    return simple(absorb_queries_reference, absorb_queries_kernel, q, Weight(weight), angles)


def latent_values() -> Problem:
    attended, weight = normal(3, 2, 2, 144), normal(2, 48, 144).astype("float8_e4m3fn")
    values = Weight(weight, jnp.abs(normal(2, 48, 2)), form=known_format("fp8_block"))
    return simple(project_values_reference, project_values_kernel, attended, values)


def routing(way: dict[str, Any], M: int, X: int) -> Problem:
    """Weights are what a bad number has to reach."""
    both = (route_reference, route_small_batch_kernel) if M <= 4 else (choose_reference, choose_kernel)
    reference, kernel = (functools.partial(uncached(f), bias=normal(X), routing=Experts(X, 2, 1, **way)) for f in both)
    return simple(reference, kernel, 2 * normal(M, X), rows=lambda routed: [routed[1]])


def mixture(quantization: str | None, clamp: float | None) -> Problem:
    dtype = "bfloat16" if quantization == "fp8_block" else "float32"
    x, routed, *weights = layer(5, 64, 32, 6, 2, dtype, quantization)
    return simple(grouped_mlp_reference, grouped_mlp_kernel, x, routed, *weights, clamp=clamp)


def weight_only(kind: str) -> Problem:
    (x, weight), _ = weight_only_problem(3, 64, 200, kind)
    return simple(weight_only_matmul_reference, weight_only_matmul_kernel, x, weight)


def bf16(dtype: str) -> Problem:
    x, weight, tiling = (normal(3, 200, dtype=dtype), normal(64, 200, dtype=dtype), MatmulTiling(64, 32, 64, 4, 3))
    kernel = functools.partial(uncached(bf16_matmul_kernel), tiling=tiling)
    return simple(bf16_matmul_reference, kernel, x, weight)


def w8a8() -> Problem:
    """The scale of a token carries what was bad in it."""
    numbers, weight = ((50 * normal(rows, 200)).astype("int8") for rows in (3, 64))
    scale, of_weight = (jnp.abs(normal(rows)) for rows in (3, 64))

    def of_scale(product):
        x = functools.partial(QuantizedActivations, numbers, dtype=jnp.dtype("bfloat16"))
        return lambda scale, *weight, **how: product(x(scale), *weight, **how)

    return simple(of_scale(w8a8_matmul_reference), of_scale(uncached(w8a8_matmul_kernel)), scale, weight, of_weight)


def sampling(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Problem:
    """The tokens of a row that makes no distribution mean nothing, and its normaliser tells."""
    settings = (jnp.full(3, x) for x in (temperature, jnp.int32(top_k), top_p, min_p))
    keys = jax.random.key_data(jax.random.split(jax.random.key(5), 6)).reshape(3, 2, 2)
    found = lambda drawn: [drawn[1].lse, drawn[0]]  # noqa: E731
    return simple(sample_reference, sample_kernel, 3 * normal(3, 2, 257), *settings, keys, rows=found)


def masses(scattered: bool) -> Problem:
    """The target's logits, the draft's, and the weights of the drafts get bad numbers, in distributions that count."""
    residual, *_ = residual_problem(257, 200, "float32", scattered=scattered)

    def of_logits(masses):
        def run(p, q, log_weight, **how):
            both = []
            for logits, like in ((p, residual.p), (q, residual.q)):
                flat = (x.reshape(-1, *x.shape[2:]) for x in (logits, like.scale, like.cutoff))
                *_, lse = log_weights(*flat)
                both.append(like._replace(logits=logits, lse=lse.reshape(like.lse.shape)))
            return masses(residual._replace(p=both[0], q=both[1], log_weight=log_weight), **how)

        return run

    assert residual.log_weight is not None
    args = residual.p.logits, residual.q.logits, residual.log_weight
    places = [*spots(0, args[0].shape, (2, 0)), *spots(1, args[1].shape, (2, 0)), *spots(2, args[2].shape, (2, 0), NAN)]
    return Problem(of_logits(residual_masses_reference), of_logits(residual_masses_kernel), args, places, 2)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    **{f"quantizing {dtype}": functools.partial(quantizing, dtype, "int8") for dtype in ("float32", "bfloat16")},
    "quantizing to FP8": functools.partial(quantizing, "bfloat16", "fp8"),
    **{f"quantizing after {name}": functools.partial(activation, name) for name in ACTIVATED_IN_KERNELS},
    **{
        f"norm {kind}{', quantised' if quantize else ''}{'' if summands is None else ', partial sums'}": functools.partial(
            residual_sum, kind, quantize, summands
        )
        for kind, quantize, summands in (("rms", None, None), ("rms", "int8", 3), ("layer", "int8", None))
    },
    "norm of heads": heads,
    "attention, split": functools.partial(attention, Paged(T=3, R=2, H=32, P=16, pages=8)),
    "attention, whole": functools.partial(attention, Paged(T=3, R=2, H=32, P=16, pages=4, tiling=WHOLE)),
    "attention, window": functools.partial(
        attention, Paged(T=3, R=2, H=32, P=16, pages=4, window=20, dtype="bfloat16", tiling=WHOLE)
    ),
    "attention, sinks": functools.partial(attention, Paged(T=3, R=2, H=32, P=16, pages=4, sink=1.0)),
    "attention, soft cap": functools.partial(
        attention, Paged(T=1, R=2, H=32, P=16, pages=4, scale=0.3, softcap=2.0, tiling=WHOLE)
    ),
    "decode, split": functools.partial(decoding, Paged(T=3, R=2, H=32, P=16, pages=8, tiling=SMALL)),
    "decode, window": functools.partial(
        decoding, Paged(T=3, R=2, H=32, P=16, pages=4, window=20, dtype="bfloat16", tiling=WHOLE)
    ),
    **{
        f"decode, scales of {kind}": functools.partial(
            decoding, Paged(T=3, R=2, H=32, P=16, pages=8, tiling=SMALL), kind
        )
        for kind in ("heads", "tokens")
    },
    "latent attention": latents,
    **{f"latent attention, scales of {kind}": functools.partial(latents, kind) for kind in ("heads", "tokens")},
    "latent queries": latent_heads,
    "latent values": latent_values,
    **{
        f"routing of {M} among {X}: {name}": functools.partial(routing, way, M, X)
        for M, X in ((3, 6), (5, 16))
        for name, way in {
            "softmax": {},
            "softmax among all": {"renormalise": False},
            "sigmoid, shared": {"scores": "sigmoid", "shared": 1},
            "groups": {"groups": 2},
        }.items()
    },
    "experts": functools.partial(mixture, None, None),
    "experts, clamped": functools.partial(mixture, "int8", 2.0),
    "experts, FP8 in blocks": functools.partial(mixture, "fp8_block", None),
    **{f"weight-only product, {kind}": functools.partial(weight_only, kind) for kind in ("int8", "int4", "fp8_block")},
    "bf16 product": functools.partial(bf16, "bfloat16"),
    "W8A8 product": w8a8,
    "greedy sample": functools.partial(sampling, 0.0),
    "sample": functools.partial(sampling, 0.8),
    "sample, top-k": functools.partial(sampling, 0.8, top_k=5),
    "sample, top-p": functools.partial(sampling, 0.8, top_p=0.7),
    "sample, min-p": functools.partial(sampling, 0.8, min_p=0.01),
    "residual masses": functools.partial(masses, False),
    "residual masses of a draft vocabulary": functools.partial(masses, True),
}
