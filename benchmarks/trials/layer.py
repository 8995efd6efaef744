"""A decoder layer over few tokens in one launch, which reads the weights and the live cache once, at the memory's pace.

One program per multiprocessor stays for the whole layer and takes an equal share of the rows of every weight. Between
phases all programs meet; while they wait, and while attention runs, which moves few bytes, the next weights are fetched
into the second-level cache, so that the memory never idles. Separate launches leave it idle at each of their ends.

The phases can be launched one by one as well, which is how they run interpreted.
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from benchmarks.trials import grid, phases
from benchmarks.trials.plan import Plan, Tiling, padded
from jspec.pallas.triton import kernel_call

_TILING = Tiling()


class LayerWeights(NamedTuple):
    """Weights of a layer, ``[out, in]``, as ``models.decoder.Layer`` has them; None where it has none.

    ``next_norm`` is that of whatever reads the stream after the layer.
    """

    qkv: jax.Array
    out: jax.Array
    mlp_norm: jax.Array
    gate_up: jax.Array
    down: jax.Array
    next_norm: jax.Array
    qkv_bias: jax.Array | None = None
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None


class Stream(NamedTuple):
    """The residual stream between layers.

    Attributes:
      value: bfloat16 ``[B, T, D]``.
      scaled: the same times the weight of the norm that reads it next.
      squares: float32 ``[programs, padded B T]``, parts of each token's sum of squares; None if no norm reads it.
    """

    value: jax.Array
    scaled: jax.Array
    squares: jax.Array | None

    @classmethod
    def of(cls, x, norm, tiling: Tiling) -> "Stream":
        """A stream of ``[B, T, D]`` that a norm of weight ``[D]`` reads."""
        M = x.shape[0] * x.shape[1]
        squares = jnp.sum(x.astype(jnp.float32) ** 2, axis=-1).reshape(1, M)
        squares = jnp.pad(squares, ((0, _programs(tiling) - 1), (0, padded(M) - M)))
        return cls(x, x * norm.reshape(1, 1, -1), squares)


def _programs(tiling: Tiling) -> int:
    return tiling.programs or tiling.per_core * grid.num_cores()


@functools.partial(jax.jit, static_argnames=("heads", "eps", "window", "tiling", "interpret"))  # layers share one trace
def decoder_layer_kernel(
    stream: Stream,
    weights: LayerWeights,
    k_pool,
    v_pool,
    table,
    positions,
    valid,
    rotation,
    arrivals,
    *,
    heads: int,
    eps: float,
    window: int | None,
    tiling: Tiling = _TILING,
    interpret: bool = False,
):
    """One layer over the T new tokens of each row.

    Args:
      stream: what enters; attention reads ``scaled`` (of any width, and normed if there are ``squares``), and its result
        is added to ``value``.
      weights: of the layer.
      k_pool, v_pool: ``[G, pages, P, H]``.
      table: int32 ``[B, M]``, the pages of each row.
      positions: int32 ``[B, T]``, consecutive, and
      valid: bool ``[B, T]``, the real ones, without a gap; others are written nowhere and what they get means nothing.
      rotation: cosines and sines, float32 ``[B, T, H / 2]`` each, of each position.
      arrivals: int32 ``[1]``, zero before the first layer, then what the layer before returned.
      heads: N.
      eps: of the norms.
      window: None, or W: a query sees W slots, its own included.

    Returns:
      the stream after the layer, the two pools, and arrivals.
    """
    B, T, D = stream.value.shape
    plan, where = _plan_of(k_pool, v_pool, table, positions, valid, rotation, heads, D, eps, window, tiling)
    known = where | {
        "x": stream.scaled.reshape(B * T, -1),
        "residual": stream.value.reshape(B * T, D),
        **({} if stream.squares is None else {"squares": stream.squares}),
        "arrivals": arrivals,
        **{f"w_{name}": weight for name, weight in weights._asdict().items() if weight is not None},
    }
    steps = {phases.attention_in: ["qkv"]} | _attention_steps(plan)
    steps |= {
        phases.attention_out: ["h", "h_scaled", "h_squares"],
        phases.mlp_in: ["gated"],
        phases.mlp_out: ["y", "y_scaled", "y_squares"],
    }
    made = _run(steps, plan, known, _shapes(plan, known), interpret)
    new_k, new_v = (made[name].reshape(k_pool.shape) for name in ("new_k", "new_v"))
    y, scaled = (made[name].reshape(B, T, D) for name in ("y", "y_scaled"))
    return Stream(y, scaled, made["y_squares"]), new_k, new_v, made["met"]


@functools.partial(jax.jit, static_argnames=("heads", "rows", "window", "tiling", "interpret"))
def attention_kernel(
    qkv,
    k_pool,
    v_pool,
    table,
    positions,
    valid,
    rotation,
    arrivals,
    *,
    heads: int,
    rows: int,
    window: int | None,
    tiling: Tiling = _TILING,
    interpret: bool = False,
):
    """Rotation, cache writes and attention; arguments as for ``decoder_layer_kernel``, and

    Args:
      qkv: bfloat16 ``[B T or more, (N + 2 G) H]``, before the rotation.
      rows: of the result.

    Returns:
      ``[rows, N H]``, of which the first B T are written, the pools, and arrivals.
    """
    plan, where = _plan_of(k_pool, v_pool, table, positions, valid, rotation, heads, 0, 0.0, window, tiling)
    known = where | {"qkv": qkv, "arrivals": arrivals}
    shapes = _shapes(plan, known) | {"attended": jax.ShapeDtypeStruct((rows, heads * plan.H), qkv.dtype)}
    made = _run(_attention_steps(plan), plan, known, shapes, interpret)
    new_k, new_v = (made[name].reshape(k_pool.shape) for name in ("new_k", "new_v"))
    return made["attended"], new_k, new_v, made["met"]


def _plan_of(k_pool, v_pool, table, positions, valid, rotation, heads, D, eps, window, tiling: Tiling):
    """A plan, and by name where its tokens stand."""
    (B, T), (G, pages, P, H) = positions.shape, k_pool.shape
    programs = _programs(tiling)
    plan = Plan(
        B=B,
        T=T,
        D=D,
        N=heads,
        G=G,
        H=H,
        P=P,
        programs=programs,
        splits=_splits(programs, B * G, pl.cdiv(table.shape[1] * P, tiling.slots)),
        eps=eps,
        window=window,
        dtype=k_pool.dtype,
        tiling=tiling,
    )
    inside = (positions >= 0) & (positions < table.shape[1] * P)
    where = {
        "k": k_pool.reshape(G, pages * P, H),
        "v": v_pool.reshape(G, pages * P, H),
        "table": table,
        "slot": jnp.where(valid & inside, positions, -1),
        "cos": rotation[0].reshape(B * T, H // 2),
        "sin": rotation[1].reshape(B * T, H // 2),
    }
    return plan, where


def _splits(programs: int, cells: int, tiles: int) -> int:
    """Programs that share the slots, up to ``tiles`` tiles, of one of ``cells`` (row of the batch, KV head)."""
    return min(1 << (max(programs // cells, 1).bit_length() - 1), pl.next_power_of_2(tiles))


def _attention_steps(plan: Plan) -> dict:
    """The phases of attention, and what each makes."""
    if plan.splits == 1:
        return {phases.attend: ["attended", "new_k", "new_v"]}
    return {phases.attend: ["part", "peak", "total", "new_k", "new_v"], phases.merge: ["attended"]}


def _shapes(plan: Plan, known) -> dict[str, jax.ShapeDtypeStruct]:
    """Of whatever phases make."""
    M, NH, f32, of = plan.tokens, plan.N * plan.H, jnp.float32, jax.ShapeDtypeStruct
    parts = (plan.splits, M * plan.N)
    return {
        "qkv": of((M, NH + 2 * plan.G * plan.H), plan.dtype),
        "attended": of((M, NH), plan.dtype),
        **{name: of((M, plan.D), plan.dtype) for name in ("h", "h_scaled", "y", "y_scaled")},
        **{name: of((plan.programs, plan.block), f32) for name in ("h_squares", "y_squares")},
        "gated": of((M, known["w_down"].shape[1] if "w_down" in known else 0), plan.dtype),
        **{f"new_{name}": of(known[name].shape, known[name].dtype) for name in ("k", "v")},
        **{"part": of((*parts, plan.H), f32), "peak": of(parts, f32), "total": of(parts, f32)},
        "met": of((1,), jnp.int32),
        "sink": of((plan.programs,), f32),
    }


def _run(steps: dict, plan: Plan, known, shapes, interpret: bool) -> dict:
    """The phases in one launch, or in one each; what they make, and ``met``."""
    if plan.tiling.fused and not interpret and len(steps) > 1:
        names = [name for made in steps.values() for name in made]
        names += ["met", *(["sink"] if "w_out" in known else [])]
        return _launch(functools.partial(_whole, tuple(steps)), plan, known, names, shapes, interpret)
    made = {"met": known["arrivals"]}
    for phase, names in steps.items():
        made |= _launch(functools.partial(_one, phase), plan, known | made, names, shapes, interpret)
    return made


def _launch(kernel, plan: Plan, known, names, shapes, interpret):
    inputs = list(known)
    sources = {"new_k": "k", "new_v": "v", "met": "arrivals"}  # written in place
    aliases = {inputs.index(sources[name]): i for i, name in enumerate(names) if name in sources}
    made = kernel_call(
        _with_names,
        *known.values(),
        grid=(plan.programs,),
        out_shape=[shapes[name] for name in names],
        num_warps=plan.tiling.warps,
        num_stages=plan.tiling.stages,
        aliases=aliases,
        interpret=interpret,
        kernel=kernel,
        names=(*inputs, *names),
        plan=plan,
    )
    return dict(zip(names, made, strict=True))


def _with_names(*refs, kernel, names, plan):
    kernel(SimpleNamespace(**dict(zip(names, refs, strict=True))), plan)


def _one(phase, r, plan: Plan):
    phase(r, plan)()


def _whole(steps, r, plan: Plan):
    first, *others = steps
    first(r, plan)()
    for phase in others:
        rest = grid.meet(r.met, plan.programs, lambda phase=phase: phase(r, plan))
        rest()
