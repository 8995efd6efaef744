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
All chunks of a prompt lie on its own grid, and each goes through the same code, so that states and outputs have the same
bits however a prompt is cut at multiples of 64."""

import jax
import jax.numpy as jnp

from jspec.pallas.delta_net.reference import normed_heads

CHUNK = 64  # tokens
_FULL = jax.lax.Precision.HIGHEST  # not TF32, which is how NVIDIA GPUs multiply float32 otherwise


def chunked(q, k, v, g, beta, S, tokens, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """Outputs float32 ``[B, T, Nv, Dv]``, and the state after the valid tokens: what ``recurrent`` gives, up to rounding.

    Args:
      q, k: ``[B, T, Nk, Dk]``, as the convolution gives them: not normed.
      v: ``[B, T, Nv, Dv]``.
      g, beta: float32 ``[B, T, Nv]``.
      S: float32 ``[B, Nv, Dk, Dv]``, before them.
      tokens: int32 ``[B]``, how many of the T are valid, the first ones. Outputs of the others are 0.
      chunk: Q, how many tokens a chunk has.
    """
    B, T, Nv, Dv = v.shape
    count = -(-T // chunk)
    valid = jnp.arange(T, dtype=jnp.int32)[None] < tokens[:, None]

    def chunks(x) -> jax.Array:
        """``[B, T, heads, ...]`` to float32 ``[chunks, B, Q, heads, ...]``, with zeros for what is not valid."""
        x = jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x.astype(jnp.float32), 0.0)
        x = jnp.pad(x, ((0, 0), (0, count * chunk - T), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(B, count, chunk, *x.shape[2:]), 1, 0)

    inputs = tuple(map(chunks, (q, k, v, g, beta)))

    def body(i, carry):
        S, outputs = carry
        S, o = _chunk(S, tuple(jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in inputs))
        return S, jax.lax.dynamic_update_index_in_dim(outputs, o, i, 0)

    # A number of trips that the compiler does not know: a single one would become other code, which rounds otherwise.
    trips = (jnp.max(tokens, initial=0) + chunk - 1) // chunk
    S, o = jax.lax.fori_loop(0, trips, body, (S, jnp.zeros((count, B, Nv, chunk, Dv), jnp.float32)))
    o = jnp.moveaxis(jnp.moveaxis(o, 2, 3), 0, 1).reshape(B, count * chunk, Nv, Dv)[:, :T]
    return jnp.where(valid[:, :, None, None], o, 0.0), S


def _chunk(S, tokens) -> tuple[jax.Array, jax.Array]:
    """The state after one chunk, and its outputs ``[B, Nv, Q, Dv]``.

    Args:
      S: float32 ``[B, Nv, Dk, Dv]``.
      tokens: q and k float32 ``[B, Q, Nk, Dk]``, not normed; v ``[B, Q, Nv, Dv]``; g and beta ``[B, Q, Nv]``.
    """
    q, k, v, g, beta = tokens
    q, k, v, g, beta = (jnp.moveaxis(x, 1, 2) for x in (*normed_heads(q, k, v.shape[2]), v, g, beta))
    column = lambda x: x[..., None]  # noqa: E731
    total = jnp.cumsum(g, axis=-1)
    last = total[..., -1:]
    later = jnp.tril(jnp.ones((g.shape[-1],) * 2, bool))
    decay = jnp.exp(jnp.where(later[None, None], column(total) - total[..., None, :], -jnp.inf))
    A = jnp.tril(column(beta) * _product("bnik,bnjk->bnij", k, k) * decay, -1)
    read = _product("bnik,bnkv->bniv", column(jnp.exp(total)) * k, S)
    U = jax.lax.linalg.triangular_solve(A, column(beta) * (v - read), left_side=True, lower=True, unit_diagonal=True)
    o = _product("bnik,bnkv->bniv", column(jnp.exp(total)) * q, S)
    o = o + _product("bnij,bnjv->bniv", _product("bnik,bnjk->bnij", q, k) * decay, U)
    S = column(jnp.exp(last)) * S + _product("bnik,bniv->bnkv", column(jnp.exp(last - total)) * k, U)
    return S, o


def _product(subscripts: str, x, y) -> jax.Array:
    return jnp.einsum(subscripts, x, y, precision=_FULL)
