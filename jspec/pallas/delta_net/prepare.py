"""What chunks contribute to the prefill of a gated delta net without regard to the state: two kernels, for all at once.

With the formulas and letters of ``jspec.pallas.delta_net.chunked``, the first makes -A and Q K^T * D, and factors of the
lines of Q and K; the second makes (I + A)^-1.

Tensor cores multiply bfloat16 numbers. A float32 number is the sum of three of them, and a product of two takes the six
products that count. Queries, keys and values are mostly bfloat16 already, and kernels multiply them as they are, not
normed: that takes three products with float32, and one between them. What norms and decays multiply them by is a factor of
each token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.delta_net.chunked import CHUNK
from jspec.pallas.delta_net.reference import NORM_EPS
from jspec.pallas.triton import is_interpreted, kernel_call, multiply_add, tile_indices, to_bfloat16

PARTS = 3  # bfloat16 numbers that add up to one of float32
_BLOCK = 16  # lines of the blocks of a matrix that are inverted a line at a time; of tensor cores
_BLOCKS = CHUNK // _BLOCK


class Prepared(NamedTuple):
    """What does not depend on the state, of every chunk and head.

    Attributes:
      inverse: (I + A)^-1, ``[B, Nv, PARTS, padded, CHUNK]``, where ``padded`` is T rounded up to whole chunks.
      scores: Q K^T * D, likewise.
      factors: float32 ``[B, Nv, 5, padded]``, of each token: what its query is multiplied by where it reads S; what its
        key is, beta included; what its key is where it is written into S behind the chunk; how far S has decayed since the
        chunk began; and beta.
    """

    inverse: Any
    scores: Any
    factors: Any


def prepare(
    tokens, qkv, g, beta, key_heads: tuple[int, int], *, keys: int, num_warps: int, interpret: bool
) -> Prepared:
    """Chunks without a valid token are left out: their numbers mean nothing.

    Args:
      tokens: int32 ``[B]``, how many are valid.
      qkv, g, beta: as for ``prefill_reference``.
      key_heads: Nk and Dk.
      keys: places of keys that the first kernel reads at a time, a power of two.
      num_warps: warps of 32 threads that run one instance of the first kernel.
    """
    (B, T, _), Nv, Nk = qkv.shape, g.shape[2], key_heads[0]
    count = pl.cdiv(T, CHUNK)
    number = jnp.float32 if interpret else jnp.bfloat16
    split = jax.ShapeDtypeStruct((B, Nv, 1 if interpret else PARTS, count * CHUNK, CHUNK), number)
    N, scores, factors = kernel_call(
        _prepare_chunks,
        *(tokens, qkv, g, beta),
        grid=(count, Nk, B),
        out_shape=[
            jax.ShapeDtypeStruct((B, Nv, count * CHUNK, CHUNK), jnp.float32),
            split,
            jax.ShapeDtypeStruct((B, Nv, 5, count * CHUNK), jnp.float32),
        ],
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        keys=keys,
        sizes=key_heads,
    )
    inverse = kernel_call(
        _invert_chunks,
        *(tokens, N),
        grid=(count, Nv, B),
        out_shape=split,
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )
    return Prepared(inverse, scores, factors)


def _prepare_chunks(
    tokens_ref, qkv_ref, g_ref, beta_ref, N_ref, scores_ref, factors_ref, *, keys: int, sizes: tuple[int, int]
):
    """A chunk of the value heads that share a key head.

    N is -A below the diagonal. On it N means nothing, and blocks above those on the diagonal are not written."""
    (Nk, Dk), shared, start = sizes, N_ref.shape[1] // sizes[0], pl.program_id(0) * CHUNK
    key_head, b, tokens = pl.program_id(1), pl.program_id(2), tokens_ref[pl.program_id(2)]
    token = start + jnp.arange(CHUNK, dtype=jnp.int32)

    @pl.when(start < tokens)
    def _():
        products, lengths = _products_of_keys(qkv_ref, (b, token, key_head * Dk, tokens), keys, (Nk, Dk))
        of_q, of_k = (jax.lax.rsqrt(x + NORM_EPS) for x in lengths)
        of_q = of_q * Dk**-0.5
        of_queries, of_keys = (
            x[:, None] * product * of_k[None, :] for x, product in zip((of_q, of_k), products, strict=True)
        )
        line, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
        at = tile_indices(token, token - start)

        def prepare_head(i, nothing):
            head = key_head * shared + i
            of_token = lambda ref: pltriton.load(ref.at[b, token, head], mask=token < tokens, other=0.0)  # noqa: E731
            g, beta = of_token(g_ref), of_token(beta_ref)
            total, last = jnp.cumsum(g), jnp.sum(g)
            decay = jnp.exp(jnp.where(column <= line, total[:, None] - total[None, :], -jnp.inf))
            N = (beta * -1.0)[:, None] * of_keys * decay
            pltriton.store(N_ref.at[(b, head, *at)], N, mask=_block(column) <= _block(line))
            for part, number in enumerate(split(of_queries * decay)):
                pltriton.store(scores_ref.at[(b, head, part, *at)], number)
            grown = jnp.exp(total)
            factors = grown * of_q, grown * of_k * beta, jnp.exp(last - total) * of_k, grown, beta
            for kind, x in enumerate(factors):
                pltriton.store(factors_ref.at[b, head, kind, token], x)
            return nothing

        jax.lax.fori_loop(0, shared, prepare_head, jnp.int32(0))


def _products_of_keys(qkv_ref, at, keys: int, sizes: tuple[int, int]):
    """In a kernel: ``Q K^T`` and ``K K^T`` of a chunk, and the sums of squares of its queries and keys, none of them normed.

    Args:
      at: the entry of the pass, the tokens, the first channel of the keys' head, and how many tokens are valid.
      keys: how many places of a key are read at a time.
      sizes: Nk and Dk.
    """
    (b, token, first_key, tokens), (Nk, Dk) = at, sizes
    products: list[Any] = [None, None]
    squares: list[Any] = [0.0, 0.0]
    for start in range(0, Dk, keys):
        channel = first_key + start + jnp.arange(keys, dtype=jnp.int32)
        parts = [load_tokens(qkv_ref, b, token, first + channel, tokens) for first in (0, Nk * Dk)]
        right = split(parts[1])
        for i, x in enumerate(parts):
            numbers = x.astype(jnp.float32)
            squares[i] = multiply_add(numbers, numbers, squares[i])
            products[i] = dot(split(x), right, onto=products[i])
    return products, [jnp.sum(x, axis=1) for x in squares]


def _invert_chunks(tokens_ref, N_ref, X_ref):
    """X = (I - N)^-1 of a chunk of one head, in blocks of 16 x 16, where N is -A.

    Forward substitution inverts the blocks on the diagonal. Those below follow from them, from the diagonal outwards:
    ``X_ij = X_ii (N_ij X_jj + ... + N_i,i-1 X_i-1,j)``. They are computed transposed, so that what was computed last is a
    left factor, which stays in registers, and what comes from memory is a right one. One warp does all of it, which has
    nobody to wait for."""
    start, before = pl.program_id(0) * CHUNK, (pl.program_id(2), pl.program_id(1))
    place, whole = jnp.arange(_BLOCK, dtype=jnp.int32), jnp.arange(CHUNK, dtype=jnp.int32)

    def block_at(i: int, j: int):
        """Lines and columns of a block."""
        return tile_indices(start + i * _BLOCK + place, j * _BLOCK + place)

    def block_transposed_at(i: int, j: int):
        return tuple(reversed(tile_indices(j * _BLOCK + place, start + i * _BLOCK + place)))

    def read_X(at):
        return tuple(pltriton.load(X_ref.at[(*before, part, *at)]) for part in range(X_ref.shape[2]))

    def write_X(at, parts, mask=None):
        for part, number in enumerate(parts):
            pltriton.store(X_ref.at[(*before, part, *at)], number, mask=mask)

    @pl.when(start < tokens_ref[before[0]])
    def _():
        lines, columns = tile_indices(whole, whole)
        zeros = split(jnp.zeros((CHUNK, CHUNK), jnp.float32))
        write_X((start + lines, columns), zeros, mask=_block(columns) > _block(lines))
        lines, columns = tile_indices(place, whole)
        first = start + _block(columns) * _BLOCK
        write_X((first + lines, columns), split(_invert_blocks(N_ref, before, start)))
        if not is_interpreted():
            pltriton.debug_barrier()  # other threads read what one has written
        right = {
            (i, j): split(pltriton.load(N_ref.at[(*before, *block_at(i, j))])) for i in range(_BLOCKS) for j in range(i)
        }
        on_diagonal = [read_X(block_at(i, i)) for i in range(_BLOCKS)]
        for j in range(_BLOCKS - 1):
            column = [read_X(block_transposed_at(j, j))]
            for i in range(j + 1, _BLOCKS):
                total: Any = None
                for k, X in enumerate(column, j):
                    total = dot(X, right[i, k], onto=total)
                column.append(split(dot(split(total), on_diagonal[i])))
                write_X(block_transposed_at(i, j), column[-1])


def _invert_blocks(N_ref, before, start):
    """In a kernel: the inverses of the blocks on the diagonal of ``I - N``, side by side, ``[16, 64]``.

    Eliminates one place of all blocks after the other. Above their diagonal, N is not read."""
    line, column = (jax.lax.broadcasted_iota(jnp.int32, (_BLOCK, CHUNK), axis) for axis in (0, 1))
    first = _block(column) * _BLOCK  # line and column of the block
    X = jnp.where(line == column - first, 1.0, 0.0)
    for i in range(_BLOCK - 1):
        at = (*before, start + first + line, first + i)
        of_column = pltriton.load(N_ref.at[at], mask=line > i, other=0.0)
        of_line = jnp.sum(jnp.where(line == i, X, -0.0), axis=0)
        X = multiply_add(of_column, of_line[None, :], X)
    return X


def _block(place):
    return jax.lax.div(place, jnp.int32(_BLOCK))


def split(x) -> tuple:
    """In a kernel: what products on tensor cores read in place of x, of any shape.

    That are bfloat16 numbers which add up to x: x itself, or three if it is float32. An interpreted kernel multiplies
    float32 numbers as they are."""
    if x.dtype == jnp.bfloat16 or is_interpreted():
        return (x,)
    parts = []
    for _ in range(PARTS):
        parts.append(to_bfloat16(x))
        x = x - parts[-1].astype(jnp.float32)
    return tuple(parts)


def dot(a: tuple, b: tuple, b_axis: int = 1, onto: Any = None) -> Any:
    """In a kernel: the product of two matrices that are split, as exact as products of float32 are.

    Products of parts that are less than the rounding of float32 are left out, and the smallest come first.

    Args:
      a, b: as ``split`` gives them; a is summed along its lines.
      b_axis: along which b is summed.
      onto: float32, what the product is added to, or None.
    """
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < PARTS]
    precision = jax.lax.Precision.HIGHEST if is_interpreted() else None
    for i, j in sorted(pairs, key=lambda pair: -sum(pair)):
        x, y = (z.astype(jnp.float32) if is_interpreted() else z for z in (a[i], b[j]))
        axes = (((1,), (b_axis,)), ((), ()))
        product = jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)
        onto = product if onto is None else product + onto
    return onto


def load_tokens(qkv_ref, b, token, channel, tokens):
    """In a kernel: some channels of some tokens, ``[tokens, channels]``; zeros for tokens that are not valid."""
    token, channel = tile_indices(token, channel)
    return pltriton.load(qkv_ref.at[b, token, channel], mask=token < tokens, other=0.0)
