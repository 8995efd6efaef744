"""The phases of ``decoder_layer_kernel``.

A phase is called with references by name, ``r``, to every array that it reads or makes, before what it reads is there. It
does what needs no other phase, has its next weights fetched, and returns the rest of the work, to be called after that.

M = B T tokens are the rows of every product, padded to ``Plan.block``. A norm's weight is multiplied in where its input is
made and its scale where its output is used, so that the loops over weights do nothing but multiply.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from benchmarks.trials import grid
from benchmarks.trials.plan import Plan, padded

_FAR = 2**30  # past every slot

Rest = Callable[[], None]


def attention_in(r, plan: Plan) -> Rest:
    """Queries, keys and values, before their rotation: ``qkv``."""

    def rest():
        width = r.x.shape[1]
        outputs, real = plan.share(r.w_qkv.shape[0])
        (y,) = _products(r.w_qkv, r.w_qkv.shape[0], 1, r.x, plan)
        if hasattr(r, "squares"):
            y = y * _scale(r.squares, width, plan)[:, None]
        y = y.astype(plan.dtype)
        if hasattr(r, "w_qkv_bias"):
            y += pltriton.load(r.w_qkv_bias.at[outputs], mask=real, other=0)[None]
        _put(r.qkv, y, outputs, real, plan)

    return rest


def attend(r, plan: Plan) -> Rest:
    """``attended``, or its parts (``part``, ``peak``, ``total``) if slots are split; new keys and values enter the cache."""
    fetched = _fetch(r, getattr(r, "w_out", None), plan.D, plan.tiling.ahead_of_attention, plan)
    program, units = pl.program_id(0), plan.B * plan.G * plan.splits

    def unit(at) -> Rest:
        split, cell = jax.lax.rem(at, jnp.int32(plan.splits)), jax.lax.div(at, jnp.int32(plan.splits))
        b, g = jax.lax.div(cell, jnp.int32(plan.G)), jax.lax.rem(cell, jnp.int32(plan.G))
        return _attend_unit(r, plan, b, g, split, at < units)

    if units <= plan.programs:
        attended = unit(program)

        def rest():
            fetched()
            attended()

    else:

        def one_more(i, carry):
            unit(program + i * plan.programs)()
            return carry

        def rest():
            fetched()
            jax.lax.fori_loop(0, pl.cdiv(units, plan.programs), one_more, jnp.int32(0))

    return rest


def _attend_unit(r, plan: Plan, b, g, split, exists) -> Rest:
    """Part ``split`` of the slots of one KV head ``g`` of row ``b``."""
    N, H, T, R, slots = plan.N, plan.H, plan.T, plan.N // plan.G, plan.tiling.slots
    row = jnp.arange(padded(T * R), dtype=jnp.int32)  # query r of token t is row t R + r
    token = jax.lax.div(row, jnp.int32(R))
    real = (row < T * R) & exists
    head = g * R + row - token * R
    last = pltriton.load(r.slot.at[b, token], mask=real, other=-1)  # the last slot that a query sees
    first = jnp.min(jnp.where(last < 0, _FAR, last))  # older slots are in the cache
    cached = jnp.minimum(first, jnp.max(last) + 1)
    oldest = 0 if plan.window is None else jnp.maximum(cached - (plan.window - 1), 0)
    begin = oldest // slots
    tiles = (cached + slots - 1) // slots - begin
    begin, end = (begin + tiles * part // plan.splits for part in (split, split + 1))
    scale = H**-0.5 * math.log2(math.e)

    def read(i):
        """Keys (two halves of each), values and slots of a tile, and which of them are live."""
        slot = i * slots + jnp.arange(slots, dtype=jnp.int32)
        live = (slot < cached) & (i < end)
        at = _place(r.table, b, slot, live, plan)
        keys = [_tile(r.k, at, columns, live, g) for columns in _halves(H)]
        return keys, _tile(r.v, at, jnp.arange(H, dtype=jnp.int32), live, g), slot, live

    oldest_tile = read(begin)
    turn = [_tile(ref, b * T + token, _halves(H)[0], real) for ref in (r.cos, r.sin)]

    def rest():
        q = _rotated(r, b * T + token, head * H, real, turn, getattr(r, "w_q_norm", None), plan)

        def fold(carry, keys, values, slot, live):
            """One more tile: the running softmax."""
            acc, peak, total = carry
            seen = (slot[None, :] <= last[:, None]) & live[None, :]
            if plan.window is not None:
                seen &= slot[None, :] > last[:, None] - plan.window
            scores = sum(pltriton.dot(a, b, trans_b=True) for a, b in zip(q, keys, strict=True)) * scale
            scores = jnp.where(seen, scores, -jnp.inf)
            raised = jnp.maximum(peak, jnp.max(scores, axis=1))
            shift = jnp.where(raised > -jnp.inf, raised, 0.0)
            weights, kept = jnp.exp2(scores - shift[:, None]), jnp.exp2(peak - shift)
            acc = acc * kept[:, None] + pltriton.dot(weights.astype(values.dtype), values)
            return acc, raised, total * kept + jnp.sum(weights, axis=1)

        carry = jnp.zeros((row.size, H), jnp.float32), jnp.full(row.size, -jnp.inf), jnp.zeros(row.size, jnp.float32)
        carry = fold(carry, *oldest_tile)
        carry = fold(carry, *_new_tile(r, plan, b, g, (split == 0) & exists))
        acc, peak, total = jax.lax.fori_loop(begin + 1, end, lambda i, carry: fold(carry, *read(i)), carry)
        columns, m = jnp.arange(H, dtype=jnp.int32)[None], b * T + token
        if plan.splits == 1:
            _put_at(
                r.attended, (acc / _divisor(total)[:, None]).astype(plan.dtype), m, head[:, None] * H + columns, real
            )
            return
        at = m * N + head
        _put_at(r.part, acc, at, columns, real, split)
        pltriton.store(r.peak.at[split, at], peak, mask=real)
        pltriton.store(r.total.at[split, at], total, mask=real)

    return rest


def _new_tile(r, plan: Plan, b, g, mine):
    """Keys, values and slots of the new tokens, for the one program that attends over them and writes them to the cache."""
    N, G, H, T = plan.N, plan.G, plan.H, plan.T
    token = jnp.arange(padded(T), dtype=jnp.int32)
    slot = pltriton.load(r.slot.at[b, token], mask=token < T, other=-1)
    real = (slot >= 0) & mine
    m, columns = b * T + token, jnp.arange(H, dtype=jnp.int32)
    turn = [_tile(ref, m, _halves(H)[0], real) for ref in (r.cos, r.sin)]
    keys = _rotated(r, m, jnp.full_like(token, (N + g) * H), real, turn, getattr(r, "w_k_norm", None), plan)
    values = _tile(r.qkv, m, (N + G + g) * H + columns, real)
    at = _place(r.table, b, slot, real, plan)
    kept = real & (at >= plan.P)  # nothing is ever written to the null page
    for key, half in zip(keys, _halves(H), strict=True):
        _put_at(r.new_k, key, at, half[None], kept, g)
    _put_at(r.new_v, values, at, columns[None], kept, g)
    return keys, values, slot, real


def merge(r, plan: Plan) -> Rest:
    """``attended`` from its parts."""
    program, rows, H = pl.program_id(0), plan.tokens * plan.N, plan.H
    split, columns = jnp.arange(plan.splits, dtype=jnp.int32), jnp.arange(H, dtype=jnp.int32)

    def row(i, carry):
        at = program + i * plan.programs
        peak = pltriton.load(r.peak.at[split, jnp.full_like(split, at)])
        top = jnp.max(peak)
        weight = jnp.exp2(peak - jnp.where(top > -jnp.inf, top, 0.0))
        total = jnp.sum(pltriton.load(r.total.at[split, jnp.full_like(split, at)]) * weight)
        index = jnp.broadcast_to(split[:, None], (plan.splits, H)), jnp.full((plan.splits, H), at, jnp.int32)
        part = pltriton.load(r.part.at[*index, jnp.broadcast_to(columns[None], (plan.splits, H))])
        out = jnp.sum(part * weight[:, None], axis=0) / _divisor(total)
        token, head = jax.lax.div(at, jnp.int32(plan.N)), jax.lax.rem(at, jnp.int32(plan.N))
        pltriton.store(r.attended.at[jnp.full_like(columns, token), head * H + columns], out.astype(plan.dtype))
        return carry

    mine = jax.lax.div(rows - program + plan.programs - 1, jnp.int32(plan.programs))
    return lambda: jax.lax.fori_loop(0, mine, row, jnp.int32(0))


def attention_out(r, plan: Plan) -> Rest:
    """The stream after attention: ``h``, ``h_scaled`` and ``h_squares``."""

    def rest():
        (y,) = _products(r.w_out, plan.D, 1, r.attended, plan)
        _put_stream(r.h, r.h_scaled, r.h_squares, y, r.residual, r.w_mlp_norm, plan)

    return rest


def mlp_in(r, plan: Plan) -> Rest:
    """SwiGLU of the normed stream: ``gated``."""
    F = r.w_down.shape[1]
    fetched = _fetch(r, r.w_gate_up, F, plan.tiling.ahead, plan)

    def rest():
        fetched()
        gate, up = _products(r.w_gate_up, F, 2, r.h_scaled, plan)
        scale = _scale(r.h_squares, plan.D, plan)[:, None]
        gate, up = (_rounded(y * scale, plan) for y in (gate, up))
        silu = _rounded(gate / (1 + jnp.exp(-gate)), plan)
        _put(r.gated, (silu * up).astype(plan.dtype), *plan.share(F), plan)

    return rest


def mlp_out(r, plan: Plan) -> Rest:
    """The stream after the layer: ``y``, ``y_scaled`` and ``y_squares``."""
    fetched = _fetch(r, r.w_down, plan.D, plan.tiling.ahead, plan)

    def rest():
        fetched()
        (y,) = _products(r.w_down, plan.D, 1, r.gated, plan)
        _put_stream(r.y, r.y_scaled, r.y_squares, y, r.h, r.w_next_norm, plan)

    return rest


def _fetch(r, weight, outputs: int, size: int, plan: Plan) -> Rest:
    """Have what the program reads first of a weight fetched."""
    if not size or not hasattr(r, "sink"):
        return lambda: None
    return grid.touch(weight, *plan.share(outputs), size, r.sink)


def _products(weight, outputs: int, parts: int, x, plan: Plan):
    """The program's share of ``parts`` times ``outputs`` rows of a weight, times the tokens: fp32 ``[block, n]`` each."""
    width, (mine, real), chains = weight.shape[1], plan.share(outputs), plan.tiling.chains
    step = slab(width, plan.tiling.tile // (plan.each(outputs) * weight.dtype.itemsize)) // chains
    token = jnp.arange(plan.block, dtype=jnp.int32)

    def add(i, sums):
        summed = []
        for chain in range(chains):
            column = (i * chains + chain) * step + jnp.arange(step, dtype=jnp.int32)
            read = _tile(x, token, column, token < plan.tokens)
            for part in range(parts):
                tile = _tile(weight, part * outputs + mine, column, real).astype(plan.dtype)
                pair = (tile, read) if plan.tiling.swapped else (read, tile)
                summed.append(sums[len(summed)] + pltriton.dot(*pair, trans_b=True))
        return tuple(summed)

    shape = (mine.size, plan.block) if plan.tiling.swapped else (plan.block, mine.size)
    sums = (jnp.zeros(shape, jnp.float32),) * (parts * chains)
    sums = jax.lax.fori_loop(0, width // (step * chains), add, sums)
    sums = [sum(sums[part::parts][1:], sums[part]) for part in range(parts)]
    return [y.T if plan.tiling.swapped else y for y in sums]


def slab(width: int, most: int) -> int:
    """Columns of a weight to load at a time: the largest power of two up to ``most`` that divides ``width``."""
    return min(width & -width, 1 << (most.bit_length() - 1))


def _scale(squares, width: int, plan: Plan):
    """What a norm multiplies each token with: fp32 ``[block]``, from the parts of its sum of squares."""
    program = jnp.arange(pl.next_power_of_2(plan.programs), dtype=jnp.int32)
    parts = _tile(squares, program, jnp.arange(plan.block, dtype=jnp.int32), program < plan.programs)
    return jax.lax.rsqrt(jnp.sum(parts, axis=0) / width + plan.eps)


def _put_stream(ref, scaled_ref, squares_ref, y, residual, norm, plan: Plan):
    """The program's share of a stream: as it is, times the weight of the norm that reads it, and its squares' sum."""
    outputs, real = plan.share(plan.D)
    token = jnp.arange(plan.block, dtype=jnp.int32)
    at = _grid_of(token, outputs)
    before = pltriton.load(residual.at[at], mask=(token < plan.tokens)[:, None] & real[None], other=0)
    y = (_rounded(y, plan) + before.astype(jnp.float32)).astype(plan.dtype)
    _put(ref, y, outputs, real, plan)
    _put(scaled_ref, y * pltriton.load(norm.at[outputs], mask=real, other=0)[None], outputs, real, plan)
    squares = jnp.where(real[None, :], y.astype(jnp.float32) ** 2, 0.0)
    pltriton.store(squares_ref.at[jnp.full_like(token, pl.program_id(0)), token], jnp.sum(squares, axis=1))


def _rounded(y, plan: Plan):
    """fp32 with what the model's dtype leaves of it."""
    return y.astype(plan.dtype).astype(jnp.float32)


def _rotated(r, m, column, real, turn, norm, plan: Plan):
    """The two halves of a head of some tokens, normed if the layer norms heads, and rotated to their positions."""
    halves = _halves(plan.H)
    x = []
    for half in halves:
        at = jnp.broadcast_to(m[:, None], (m.size, half.size)), column[:, None] + half[None]
        x.append(pltriton.load(r.qkv.at[at], mask=_each(real, half.size), other=0).astype(jnp.float32))
    if norm is not None:
        scale = jax.lax.rsqrt(sum(jnp.sum(part * part, axis=1) for part in x) / plan.H + plan.eps)
        x = [
            _rounded((part * scale[:, None]).astype(plan.dtype) * pltriton.load(norm.at[half])[None], plan)
            for part, half in zip(x, halves, strict=True)
        ]
    cos, sin = turn
    return [y.astype(plan.dtype) for y in (x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin)]


def _halves(H: int):
    half = jnp.arange(H // 2, dtype=jnp.int32)
    return half, H // 2 + half


def _place(table, b, slot, real, plan: Plan):
    """Where slots of a row lie in a pool; 0 for those that are not real."""
    slot = jnp.where(real, slot, 0)
    page = pltriton.load(table.at[b, jax.lax.div(slot, jnp.int32(plan.P))], mask=real, other=0)
    return page * plan.P + jax.lax.rem(slot, jnp.int32(plan.P))


def _tile(ref, rows, columns, real, *lead):
    return pltriton.load(ref.at[*lead, *_grid_of(rows, columns)], mask=_each(real, columns.size), other=0)


def _put(ref, y, outputs, real, plan: Plan):
    token = jnp.arange(plan.block, dtype=jnp.int32)
    pltriton.store(ref.at[_grid_of(token, outputs)], y, mask=(token < plan.tokens)[:, None] & real[None])


def _put_at(ref, y, rows, columns, real, *lead):
    """Store ``[n, H]`` at rows ``[n]`` and columns ``[n or 1, H]``."""
    at = jnp.broadcast_to(rows[:, None], y.shape), jnp.broadcast_to(columns, y.shape)
    pltriton.store(ref.at[*lead, *at], y, mask=_each(real, y.shape[1]))


def _grid_of(rows, columns):
    shape = rows.size, columns.size
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None], shape)


def _each(x, n: int):
    """``[rows] -> [rows, n]``."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], n))


def _divisor(total):
    """A sum to divide by: 1 where nothing was seen; NaN stays."""
    return jnp.where(total == 0, 1.0, total)
