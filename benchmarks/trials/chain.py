"""The products of a decoder layer, and the next layer's first, in one launch: a stream of weights that never stops.

One program per multiprocessor takes an equal share of the rows of every weight. Its warpgroups have a task each:

    weights   copies its weights, one after another, into a ring in shared memory, as fast as the ring empties; weights
              depend on nothing, so it runs ahead of the others, across the ends of products
    tokens    copies what the products read, once every program has written its share of it
    norms     computes the scale of each token's norm meanwhile
    products  multiplies, and writes the program's share of each result

A norm's weight is multiplied in where its input is made, its scale where its output is used. Needs jax 0.11: Pallas'
Mosaic GPU lowering for Hopper.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a tile that a warpgroup multiplies: the tokens, padded
_COLUMNS = 128  # of a weight in a slot
_SLOT = 64  # rows of a weight in a slot, at most
PRODUCTS, WEIGHTS, TOKENS, NORMS = range(4)  # warpgroups


class Chain(NamedTuple):
    """What the products read: weights ``[out, in]`` and norms ``[D]``, bfloat16.

    Attributes:
      out, gate_up, down: of the layer.
      following: the product after it, the next layer's qkv.
      mlp_norm: before gate_up.
      following_norm: before ``following``.
    """

    out: jax.Array
    gate_up: jax.Array
    down: jax.Array
    following: jax.Array
    mlp_norm: jax.Array
    following_norm: jax.Array


@dataclasses.dataclass(frozen=True)
class Rings:
    """Slots of shared memory: of weights, 16 KiB each, and of tokens, as much."""

    weights: int = 9
    tokens: int = 3


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of the chain, by the names of its arrays.

    Attributes:
      weight, reads, makes: names.
      outputs: how many.
      normed: the stream whose norm scales the result, or None.
      residual: the stream that the result is added to, or None.
      norm: the norm that reads the sum next, or None.
      gated: the weight has two rows for each output, gate and up.
    """

    weight: str
    reads: str
    makes: str
    outputs: int
    normed: str | None = None
    residual: str | None = None
    norm: str | None = None
    gated: bool = False


def products(D: int, F: int, following: int) -> list[Product]:
    """The chain in order."""
    return [
        Product("out", "attended", "h", D, residual="x", norm="mlp_norm"),
        Product("gate_up", "h_scaled", "gated", F, normed="h", gated=True),
        Product("down", "gated", "y", D, residual="h", norm="following_norm"),
        Product("following", "y_scaled", "result", following, normed="y"),
    ]


@functools.partial(jax.jit, static_argnames=("tokens", "eps", "programs", "rings", "apart", "interpret"))
def run_chain(
    attended,
    x,
    weights: Chain,
    *,
    tokens: int,
    eps: float,
    programs: int = 132,
    rings: Rings = Rings(),
    apart: bool = False,
    interpret=None,
):
    """Run the chain.

    Args:
      attended: ``[ROWS, N H]`` bfloat16, of which ``tokens`` (a multiple of 8) mean something.
      x: ``[ROWS, D]``, the stream before the layer.
      apart: a launch for each product, as it can be interpreted.

    Returns:
      the stream after the layer ``[ROWS, D]`` and what the following product makes of it ``[ROWS, outputs]``.
    """
    steps = products(x.shape[1], weights.down.shape[1], weights.following.shape[0])
    launch = functools.partial(_launch, tokens=tokens, eps=eps, programs=programs, rings=rings, interpret=interpret)
    known = {"attended": attended, "x": x, **weights._asdict()}
    for part in [[step] for step in steps] if apart else [steps]:
        known |= launch(part, known)
    return known["y"], known["result"]


def _launch(steps: list[Product], known, *, tokens, eps, programs, rings, interpret):
    makes = {}
    for step in steps:
        for name in [step.makes, *([f"{step.makes}_scaled"] if step.norm else [])]:
            makes[name] = jax.ShapeDtypeStruct((ROWS, step.outputs), jnp.bfloat16)

    def body(*refs):
        named = dict(zip([*known, *makes], refs, strict=True))
        wide = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        narrow = plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)
        pl.run_scoped(
            functools.partial(_program, named, steps, tokens, eps, programs),
            ring=plgpu.SMEM((rings.weights, _SLOT, _COLUMNS), jnp.bfloat16, transforms=wide),
            token_ring=plgpu.SMEM((rings.tokens, ROWS, _COLUMNS), jnp.bfloat16, transforms=wide),
            tile=plgpu.SMEM((ROWS, _SLOT), jnp.bfloat16, transforms=narrow),
            scales=plgpu.SMEM((ROWS,), jnp.float32),
            full=plgpu.Barrier(num_barriers=rings.weights),
            empty=plgpu.Barrier(num_barriers=rings.weights),
            tokens_full=plgpu.Barrier(num_barriers=rings.tokens),
            tokens_empty=plgpu.Barrier(num_barriers=rings.tokens),
            tile_full=plgpu.Barrier(),
            scaled=plgpu.Barrier(),
            unscaled=plgpu.Barrier(),
            collective_axes="group",
        )

    made = plgpu.kernel(
        body,
        out_type=list(makes.values()),
        grid=(programs,),
        grid_names=("program",),
        num_threads=4,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*known.values())
    return dict(zip(makes, made, strict=True))


@dataclasses.dataclass(frozen=True)
class _Share:
    """A program's share of a product: ``n`` outputs from ``first`` on, in tiles (part of the weight, offset, rows)."""

    first: jax.Array
    tiles: list[tuple[int, int, int]]
    steps: int

    @classmethod
    def of(cls, step: Product, width: int, program, programs: int) -> "_Share":
        n = 16 * pl.cdiv(pl.cdiv(step.outputs, programs), 16)
        first = jnp.minimum(program * n, step.outputs - n)  # the last ones overlap, and write the same numbers twice
        tiles = [(part, at, min(_SLOT, n - at)) for part in range(1 + step.gated) for at in range(0, n, _SLOT)]
        return cls(first, tiles, width // _COLUMNS)


def _program(refs, steps, tokens, eps, programs, *, ring, token_ring, full, empty, tokens_full, tokens_empty, **shared):
    program, group = lax.axis_index("program"), lax.axis_index("group")
    shares = [_Share.of(step, refs[step.weight].shape[1], program, programs) for step in steps]
    written = pl.get_global(plgpu.SemaphoreType.REGULAR) if len(steps) > 1 else None

    def wait_for(i):
        if i:
            pl.semaphore_wait(written, value=i * programs, decrement=False)

    @pl.when(group == WEIGHTS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        fill = _Ring(ring, full, empty)
        for step, share in zip(steps, shares, strict=True):
            weight = refs[step.weight]

            def copy(k, _, weight=weight, step=step, share=share):
                for j, (part, at, rows) in enumerate(share.tiles):
                    source = weight.at[
                        pl.ds(part * step.outputs + share.first + at, rows), pl.ds(k * _COLUMNS, _COLUMNS)
                    ]
                    fill.put(source, rows, k * len(share.tiles) + j)

            fill.loop(share.steps, len(share.tiles), copy)
        fill.drain()

    @pl.when(group == TOKENS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        fill = _Ring(token_ring, tokens_full, tokens_empty)
        for i, (step, share) in enumerate(zip(steps, shares, strict=True)):
            wait_for(i)
            source = refs[step.reads]

            def copy(k, _, source=source):
                fill.put(source.at[pl.ds(0, tokens), pl.ds(k * _COLUMNS, _COLUMNS)], tokens, k)

            fill.loop(share.steps, 1, copy)
        fill.drain()

    @pl.when(group == NORMS)
    def _():
        plgpu.set_max_registers(96, action="decrease")
        for i, step in enumerate(steps):
            if step.normed is not None:
                wait_for(i)
                if any(earlier.normed for earlier in steps[:i]):
                    plgpu.barrier_wait(shared["unscaled"])
                _norm_scales(refs[step.normed], shared["scales"], tokens, eps)
                plgpu.barrier_arrive(shared["scaled"])

    @pl.when(group == PRODUCTS)
    def _():
        plgpu.set_max_registers(208, action="increase")
        taken = tokens_taken = 0
        for i, (step, share) in enumerate(zip(steps, shares, strict=True)):
            more_norms = any(later.normed for later in steps[i + 1 :])

            def one(*sums, step=step, share=share, taken=taken, tokens_taken=tokens_taken, more_norms=more_norms):
                def multiply(k, _):
                    token_slot = lax.rem(tokens_taken + k, token_ring.shape[0])
                    plgpu.barrier_wait(tokens_full.at[token_slot])
                    slots = [lax.rem(taken + k * len(sums) + j, ring.shape[0]) for j in range(len(sums))]
                    for total, slot, (_, _, rows) in zip(sums, slots, share.tiles, strict=True):
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(total, token_ring.at[token_slot], ring.at[slot, pl.ds(0, rows)].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    for slot in slots:
                        plgpu.barrier_arrive(empty.at[slot])
                    plgpu.barrier_arrive(tokens_empty.at[token_slot])
                    return ()

                lax.fori_loop(0, share.steps, multiply, ())
                _finish(refs, step, share, [total[...] for total in sums], tokens, more_norms, **shared)

            pl.run_scoped(one, *[plgpu.ACC((ROWS, rows), jnp.float32) for _, _, rows in share.tiles])
            if i + 1 < len(steps):
                pl.semaphore_signal(written)
            taken, tokens_taken = taken + share.steps * len(share.tiles), tokens_taken + share.steps


class _Ring:
    """Filling a ring: slot j is copied to once what was in it has been used."""

    def __init__(self, ring, full, empty):
        self.ring, self.full, self.empty, self.slots, self.begun = ring, full, empty, ring.shape[0], 0

    def put(self, source, rows: int, j):
        """Copy ``rows`` rows, the ``j``-th copy of a loop."""
        at = self.begun + j
        slot = lax.rem(at, jnp.int32(self.slots))

        @pl.when(at >= self.slots)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        plgpu.copy_gmem_to_smem(source, self.ring.at[slot, pl.ds(0, rows)], self.full.at[slot])

    def loop(self, steps: int, copies: int, body):
        """``steps`` trips of ``copies`` copies each."""

        def trip(k, carry):
            body(k, carry)
            return carry

        lax.fori_loop(0, steps, trip, ())
        self.begun += steps * copies

    def drain(self):
        """Wait until all of it has been used."""
        for at in range(self.begun - min(self.slots, self.begun), self.begun):
            plgpu.barrier_wait(self.empty.at[at % self.slots])


def _norm_scales(stream, scales, tokens: int, eps: float):
    """1 / rms of each token."""
    width = stream.shape[1]

    def one(token, _):
        row = plgpu.load(stream.at[token], layout=plgpu.Layout.WG_STRIDED((width,), vec_size=8))
        row = row.astype(jnp.float32)
        scales[token] = lax.rsqrt(jnp.sum(row * row) / width + eps)
        return ()

    lax.fori_loop(0, tokens, one, ())


def _finish(refs, step: Product, share: _Share, sums, tokens, more_norms, *, tile, scales, tile_full, scaled, unscaled):
    """What follows a product: the norm's scale, the gate, the residual, and the copies out."""
    if step.normed is not None:
        plgpu.barrier_wait(scaled)
        scale = plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(1))
        sums = [total * lax.broadcast_in_dim(scale, total.shape, [0]) for total in sums]
        if more_norms:
            plgpu.barrier_arrive(unscaled)
    if step.gated:
        half = len(sums) // 2
        sums = [_silu(_rounded(gate)) * _rounded(up) for gate, up in zip(sums[:half], sums[half:], strict=True)]
    for total, (_, at, rows) in zip(sums, share.tiles, strict=False):
        columns = pl.ds(share.first + at, rows)
        part = tile.at[:, pl.ds(0, rows)]
        if step.residual is not None:
            plgpu.copy_gmem_to_smem(
                refs[step.residual].at[pl.ds(0, tokens), columns], part.at[pl.ds(0, tokens)], tile_full
            )
            plgpu.barrier_wait(tile_full)
            before = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            total = _rounded(total) + before.astype(jnp.float32)
        total = total.astype(jnp.bfloat16)
        _copy_out(total, part, refs[step.makes].at[pl.ds(0, tokens), columns], tokens)
        if step.norm is not None:
            weight = plgpu.load(refs[step.norm].at[columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            weight = lax.broadcast_in_dim(weight.astype(jnp.float32), total.shape, [1])
            scaled_up = (total.astype(jnp.float32) * weight).astype(jnp.bfloat16)
            _copy_out(scaled_up, part, refs[f"{step.makes}_scaled"].at[pl.ds(0, tokens), columns], tokens)


def _copy_out(value, part, destination, tokens: int):
    part[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(part.at[pl.ds(0, tokens)], destination)
    plgpu.wait_smem_to_gmem(0)


def _rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _silu(gate):
    return _rounded(gate / (1 + jnp.exp(-gate)))
