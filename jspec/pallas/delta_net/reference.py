"""The gated delta rule token by token, and verify passes of it: the specification of the kernels.

The state changes in one place, ``step``, which folding, verifying and plain decoding share. Therefore tokens that are
decoded one by one, or in verify passes of any T with any drafts rejected, give the same bits."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.pallas.delta_net.projections import split_heads
from jspec.pallas.delta_net.state import DeltaState, VerifyRows, per_row
from jspec.pallas.sums import add, column_sum, row_sum

NORM_EPS = 1e-6  # added to the sum of squares of a query or a key


def l2_norm(x) -> jax.Array:
    """Vectors ``[..., Dk]`` of length 1, in float32. Epsilon is added to the sum of squares, not to their mean."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(row_sum(x * x) + NORM_EPS)


def normed_heads(q, k, num_value_heads: int) -> tuple[jax.Array, jax.Array]:
    """Queries and keys of each value head, float32 ``[..., Nv, Dk]``, of length 1; queries divided by sqrt(Dk).

    Args:
      q, k: ``[..., Nk, Dk]``, as the convolution gives them.
      num_value_heads: Nv.
    """
    repeated = lambda x: jnp.repeat(x, num_value_heads // x.shape[-2], axis=-2)  # noqa: E731
    return repeated(l2_norm(q) * q.shape[-1] ** -0.5), repeated(l2_norm(k))


def step(S, q, k, v, g, beta, known=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token: the state after it, what was added to the state along the key, and the token's output.

    Args:
      S: float32 ``[..., Dk, Dv]``.
      q, k: float32 ``[..., Dk]``, as ``normed_heads`` gives them.
      v: float32 ``[..., Dv]``.
      g, beta: float32 ``[...]``.
      known: u float32 ``[..., Dv]``, and bool ``[]``, whether that is what is added; None if it is to be computed.

    Returns:
      S, u, and the output ``[..., Dv]``.
    """
    column = lambda x: x[..., :, None]  # noqa: E731
    decayed = jnp.exp(g)[..., None, None] * S
    computed = beta[..., None] * (v - column_sum(decayed * column(k)))
    u = computed if known is None else jnp.where(known[1], known[0], computed)
    S = add(decayed, column(k) * u[..., None, :])
    return S, u, column_sum(S * column(q))


def recurrent(q, k, v, g, beta, S) -> tuple[jax.Array, jax.Array]:
    """Outputs float32 ``[B, T, Nv, Dv]``, and the state after T tokens.

    Args:
      q, k: ``[B, T, Nk, Dk]``, as the convolution gives them: not normed.
      v: ``[B, T, Nv, Dv]``.
      g, beta: float32 ``[B, T, Nv]``.
      S: float32 ``[B, Nv, Dk, Dv]``, before them.
    """
    q, k = normed_heads(q, k, v.shape[2])
    tokens_first = lambda x: jnp.moveaxis(x.astype(jnp.float32), 1, 0)  # noqa: E731

    def body(S, token):
        S, _, o = step(S, *token)
        return S, o

    S, o = jax.lax.scan(body, S, tuple(map(tokens_first, (q, k, v, g, beta))))
    return jnp.moveaxis(o, 0, 1), S


def verify_reference(state: DeltaState, rows: VerifyRows, qkv, g, beta) -> tuple[jax.Array, DeltaState]:
    """Fold what was accepted of the last verify pass into S, then run T query tokens without committing any of them.

    Args:
      state: of the layer; its columns belong to ``convolve_verify`` and stay as they are.
      rows: of the pass.
      qkv: ``[B, T, Cc]``, queries, keys and values as the convolution gives them: not normed. T is at most Tm.
      g, beta: float32 ``[B, T, Nv]``.

    Returns:
      outputs ``[B, T, Nv, Dv]`` in the dtype of qkv, and the state with the folded S and the triples of these tokens.
    """
    Bs, (B, T), Tm = state.S.shape[0], qkv.shape[:2], state.k.shape[2]
    q, k, v = split_heads(qkv, state.heads)
    Nv, Nk = state.heads.values, state.heads.keys
    at = jnp.clip(rows.row, 0, Bs - 1)
    written, ran = rows.written(Bs), rows.is_live(Bs)
    pending_k, pending_u, pending_g = (x[rows.half, at] for x in (state.k, state.u, state.g))

    def joined(pending, new) -> jax.Array:
        """The Tm pending tokens and then the T new ones, ``[Tm + T, B, ...]``, in float32."""
        pending = jnp.zeros((B, Tm, *new.shape[2:]), jnp.float32) if pending is None else pending
        return jnp.moveaxis(jnp.concatenate([pending, new.astype(jnp.float32)], axis=1), 1, 0)

    # One loop over both kinds of token, so that the compiler makes one piece of code for them and rounds alike.
    tokens = joined(None, q), joined(pending_k, k), joined(None, v), joined(pending_g, g), joined(None, beta)
    count = jnp.where(rows.fresh, 0, rows.accepted)

    def body(carry, token):
        (S, folded), (i, u, q, k, *rest) = carry, token
        is_new, t = i >= Tm, i - Tm
        k = jnp.where(is_new, l2_norm(k), k)
        heads = (jnp.repeat(x, Nv // Nk, axis=1) for x in (l2_norm(q) * q.shape[-1] ** -0.5, k))
        after, u, o = step(S, *heads, *rest, known=(u, ~is_new))
        S = jnp.where(per_row(jnp.where(is_new, t < rows.tokens, i < count), S), after, S)
        return (S, jnp.where(is_new, folded, S)), (k, u, o)

    S = jnp.where(per_row(rows.fresh, state.S), 0.0, state.S[at])
    known = joined(pending_u, jnp.zeros_like(v))
    order = jnp.arange(Tm + T, dtype=jnp.int32)
    (_, folded), made = jax.lax.scan(body, (S, S), (order, known, *tokens))

    valid = (jnp.arange(T)[None] < rows.tokens[:, None]) & ran[:, None]
    k, u, o = (jnp.moveaxis(x[Tm:], 0, 1) for x in made)
    at = 1 - rows.half, written, slice(T)
    if rows.append:
        slot = rows.accepted[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        at = rows.half[:, None], written[:, None], slot
    put = lambda x, new: x.at[at].set(new, mode="drop")  # noqa: E731
    return jnp.where(valid[:, :, None, None], o, 0.0).astype(v.dtype), dataclasses.replace(
        state,
        S=state.S if rows.append else state.S.at[written].set(folded, mode="drop"),
        k=put(state.k, k),
        u=put(state.u, u),
        g=put(state.g, g),
    )
