"""The gated delta rule for many tokens: chunks of 64, each a few matrix products, one after the other.

Within a chunk, what the tokens add to the state follows from a triangular system of equations (the WY form of Bischof
and Van Loan, 1987; for this rule Yang et al., "Gated Delta Networks", 2024). With G_i the sum of g up to token i of the
chunk, and D_ij = exp(G_i - G_j) for i >= j and 0 elsewhere,

    A = strictly lower part of (beta_i k_i . k_j D_ij)
    U = (I + A)^-1 (beta V - beta exp(G) K S)
    O = exp(G) Q S + (Q K^T * D) U
    S = exp(G_last) S + (exp(G_last - G) K)^T U

Exponents are differences, and those above the diagonal are -inf before exp: exp(G_i) exp(-G_j) would overflow where
states decay fast. Products are in full float32, since keys that are nearly equal make the system ill-conditioned.

A token with g = 0, beta = 0 and k = 0 leaves the state as it is, which is how the last chunk of a prompt is filled up.
All chunks of a prompt lie on its own grid, and each goes through the same code by itself, so that states and outputs have
the same bits however a prompt is cut at multiples of 64, and whatever else is in a batch."""

import jax
import jax.numpy as jnp

from jspec.config.engine import CHUNK_OF_STATES as CHUNK  # tokens, on whose multiples prompts may be cut
from jspec.pallas.delta_net.reference import normed_heads

_FULL = jax.lax.Precision.HIGHEST  # not TF32, which is how NVIDIA GPUs multiply float32 otherwise


def chunked(q, k, v, g, beta, S, tokens, follows) -> tuple[jax.Array, jax.Array]:
    """Outputs float32 ``[B, T, Nv, Dv]``, and the state behind the valid tokens of each segment, float32 ``[B, Nv, Dk,
    Dv]``: what ``recurrent`` gives, up to rounding.

    Args:
      q, k, v, g, beta: as of ``recurrent``.
      S: float32 ``[B, Nv, Dk, Dv]``, before them. That of a segment that follows is not read.
      tokens: int32 ``[B]``, how many of the T are valid, the first ones. Outputs of the others are 0.
      follows: bool ``[B]``, whether a segment begins with the state behind the one before.
    """
    B, T, Nv, Dv = v.shape
    most = -(-T // CHUNK)  # chunks of a segment
    valid = jnp.arange(T, dtype=jnp.int32)[None] < tokens[:, None]

    def chunks(x) -> jax.Array:
        """``[B, T, heads, ...]`` to float32 ``[B most, Q, heads, ...]``, with zeros for what is not valid."""
        x = jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x.astype(jnp.float32), 0.0)
        x = jnp.pad(x, ((0, 0), (0, most * CHUNK - T), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(B * most, CHUNK, *x.shape[2:])

    inputs = tuple(map(chunks, (q, k, v, g, beta)))
    counts = (tokens + (CHUNK - 1)) // CHUNK  # chunks of each segment that have valid tokens
    ends = jnp.cumsum(counts)

    def body(i, carry):
        S, outputs = carry
        b = jnp.sum(ends <= i, dtype=jnp.int32)
        c = i - (ends[b] - counts[b])
        before = jnp.where((c == 0) & follows[b], b - 1, b)
        chunk = (jax.lax.dynamic_index_in_dim(x, b * most + c, keepdims=False) for x in inputs)
        new, o = _chunk(jax.lax.dynamic_index_in_dim(S, before, keepdims=False), *chunk)
        put = jax.lax.dynamic_update_index_in_dim
        return put(S, new, b, 0), put(outputs, o, b * most + c, 0)

    # A number of trips that the compiler does not know: a single one would become other code, which rounds otherwise.
    S, o = jax.lax.fori_loop(0, ends[-1], body, (S, jnp.zeros((B * most, Nv, CHUNK, Dv), jnp.float32)))
    o = jnp.moveaxis(o, 1, 2).reshape(B, most * CHUNK, Nv, Dv)[:, :T]
    return jnp.where(valid[:, :, None, None], o, 0.0), S


def _chunk(S, q, k, v, g, beta) -> tuple[jax.Array, jax.Array]:
    """The state after one chunk, and its outputs ``[Nv, Q, Dv]``.

    Args:
      S: float32 ``[Nv, Dk, Dv]``.
      q, k: float32 ``[Q, Nk, Dk]``, not normed.
      v: float32 ``[Q, Nv, Dv]``.
      g, beta: float32 ``[Q, Nv]``.
    """
    q, k, v, g, beta = (jnp.moveaxis(x, 0, 1) for x in (*normed_heads(q, k, v.shape[1]), v, g, beta))
    column = lambda x: x[..., None]  # noqa: E731
    total = jnp.cumsum(g, axis=-1)
    last = total[:, -1:]
    later = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    decay = jnp.exp(jnp.where(later[None], column(total) - total[:, None, :], -jnp.inf))
    A = jnp.tril(column(beta) * _product("nik,njk->nij", k, k) * decay, -1)
    read = _product("nik,nkv->niv", column(jnp.exp(total)) * k, S)
    U = _substitute(A, column(beta) * (v - read))
    o = _product("nik,nkv->niv", column(jnp.exp(total)) * q, S)
    o = o + _product("nij,njv->niv", _product("nik,njk->nij", q, k) * decay, U)
    S = column(jnp.exp(last)) * S + _product("nik,niv->nkv", column(jnp.exp(last - total)) * k, U)
    return S, o


def _substitute(A, right) -> jax.Array:
    """U of ``(I + A) U = right`` by forward substitution, ``[..., Q, Dv]``, where A ``[..., Q, Q]`` is strictly lower.

    LAPACK's solver is not used: on CPUs a compiled program that calls it crashes where JAX reads it from a file."""

    def line(i, U):
        lines = jax.lax.dynamic_index_in_dim(A, i, axis=-2), jax.lax.dynamic_index_in_dim(right, i, axis=-2)
        return jax.lax.dynamic_update_slice_in_dim(
            U, lines[1] - _product("...ij,...jv->...iv", lines[0], U), i, axis=-2
        )

    return jax.lax.fori_loop(0, A.shape[-1], line, jnp.zeros_like(right))


def _product(subscripts: str, x, y) -> jax.Array:
    return jnp.einsum(subscripts, x, y, precision=_FULL)
