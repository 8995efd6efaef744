"""What a gated delta net keeps of each row, and how drafts that are rejected leave no trace in it.

A verify pass runs T = K + 1 query tokens, of which the verification rule lets the first few stand. With keys and values
the others are forgotten by counting fewer of them. A recurrent state has no such slots, and a copy of it after every
token would be T times as large (151 MB a row of a 27B model). But each token changes S by little:

    S_t = exp(g_t) S_(t-1) + k_t u_t^T,        u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t)

So a verify pass writes none of its states. It leaves the *pending* triples (k_t, u_t, g_t) of its tokens, and the next
pass, which knows how many were accepted, first *folds* those into S. S therefore stands before the tokens of the last
pass, the newest committed token among them, as the KV cache does. Since u_t is kept rather than v_t, folding is the same
product and the same sum as in the pass before, and gives the same bits. One read and one write of S a round is all.

The columns of the convolution work likewise: they hold the W - 1 inputs before the last pass, then its own inputs, and
the next pass begins behind the accepted ones.

A draft model reads its drafts one after another, before any of them is verified. Such a pass *appends*: it computes with S
and everything that is pending, adds its own triples to these, and leaves S alone. So a verify pass, and those behind it that
append, leave together what one verify pass of the same tokens would leave.

The rows of a state are never gathered: a pass says which rows it has, and the kernels read and write them in place."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jspec.pallas.delta_net.projections import DeltaHeads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """The recurrent state of one layer, of all Bs rows.

    Pending triples have two halves: a verify pass reads those of the pass before from one half and writes its own to the
    other, because the program instances that share a key head do not all read before the first of them writes. A row
    whose ``accepted`` is 0 has no pending triples, whatever the arrays hold.

    Attributes:
      S: float32 ``[Bs, Nv, Dk, Dv]``, before the tokens of the last verify pass.
      k: float32 ``[2, Bs, Tm, Nk, Dk]``, keys of that pass, of length 1.
      u: float32 ``[2, Bs, Tm, Nv, Dv]``, what was added to S along them.
      g: float32 ``[2, Bs, Tm, Nv]``, logarithms of decays.
      columns: ``[Bs, W - 1 + Tm, Cc]`` in the dtype of activations, inputs of the convolution: the W - 1 before that
        pass, then those of its tokens.
    """

    S: jax.Array
    k: jax.Array
    u: jax.Array
    g: jax.Array
    columns: jax.Array

    @property
    def heads(self) -> DeltaHeads:
        _, Nv, Dk, Dv = self.S.shape
        return DeltaHeads(self.k.shape[3], Nv, Dk, Dv)

    def with_columns(self, columns) -> "DeltaState":
        """The same with other columns."""
        return replace(self, columns=columns)

    def of_row(self, row) -> "DeltaState":
        """A copy of one row, int32 ``[]``, without the axis of rows."""
        return DeltaState(self.S[row], self.k[:, row], self.u[:, row], self.g[:, row], self.columns[row])

    def with_row(self, row, saved: "DeltaState") -> "DeltaState":
        """The same with such a copy in a row; nothing happens if there is no such row."""

        def put(name: str, *at) -> jax.Array:
            """The array of that name with the saved one at an index, as ``[Bs, ...]`` or as ``[2, Bs, ...]``."""
            return getattr(self, name).at[at].set(getattr(saved, name), mode="drop")

        S, (k, u, g) = put("S", row), (put(name, slice(None), row) for name in ("k", "u", "g"))
        return DeltaState(S, k, u, g, columns=put("columns", row))


@dataclass(frozen=True)
class PassRows:
    """The rows of a pass. All layers of a model share them.

    Attributes:
      row: int32 ``[B]``, the row of the state; Bs where there is none, for which nothing is written.
      tokens: int32 ``[B]``, how many of the T tokens are valid, the first ones. A row with 0 sits the pass out: its state
        stays as it is, what is pending included.
    """

    row: jax.Array
    tokens: jax.Array

    def is_live(self, num_rows: int) -> jax.Array:
        """Which rows have tokens, bool ``[B]``, of a state of so many rows."""
        return (self.row >= 0) & (self.row < num_rows) & (self.tokens > 0)

    def written(self, num_rows: int) -> jax.Array:
        """The row of a state that each row of the pass writes, int32 ``[B]``; ``num_rows``, past the end, where it writes
        none."""
        return jnp.where(self.is_live(num_rows), self.row, num_rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VerifyRows(PassRows):
    """The rows of a verify pass, and where each of them stands.

    Attributes:
      row: each at most once.
      tokens: outputs of query tokens that are not valid are 0.
      accepted: int32 ``[B]``, how many tokens of the row's last verify pass are committed; 0 after prefill.
      half: int32 ``[B]``, 0 or 1, which half has the pending triples of that pass.
      fresh: bool ``[B]``, whether the row begins here, from zero, whatever another text has left in it; None if none does.
      append: whether the tokens join the accepted ones, in the same half and behind their columns, and S stays as it is.
        With those of this pass they are at most Tm.
    """

    accepted: jax.Array
    half: jax.Array
    fresh: Any
    append: bool = field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillRows(PassRows):
    """The segments of a prefill pass.

    A segment is up to T consecutive tokens of one row's prompt. Entries of the pass that stand one behind another may have
    consecutive segments of the same prompt. They are a *chain*, which begins with an entry that does not follow, and is
    read one segment after another: the first goes on from the row's state, each of the others from the state behind the
    one before, and only what is behind the last one is written to the row.

    Attributes:
      row: the same in a chain, and in no other chain.
      tokens: only the last segment of a prompt may have a number that is no multiple of 64.
      fresh: bool ``[B]``, whether the segment is the first of its prompt, and begins from zero.
      follows: bool ``[B]``, whether the segment goes on where the entry before it ended. All T tokens of that entry are
        valid, and T is a multiple of 64. The first entry never follows.
    """

    fresh: jax.Array
    follows: jax.Array

    def written(self, num_rows: int) -> jax.Array:
        is_live = self.is_live(num_rows)
        is_followed = jnp.append((self.follows & is_live)[1:], False)
        return jnp.where(is_live & ~is_followed, self.row, num_rows)

    def chain_lengths(self, num_rows: int) -> jax.Array:
        """How many entries the chain has that begins with each entry, int32 ``[B]``: 0 for entries that follow, and 1 for
        those without tokens or row."""
        begins = ~(self.follows & self.is_live(num_rows))
        chain = jnp.cumsum(begins)
        return jnp.where(begins, jnp.sum(chain[:, None] == chain[None], axis=1, dtype=jnp.int32), 0)


def init_state(num_rows: int, heads: DeltaHeads, taps: int, most_tokens: int, dtype) -> DeltaState:
    """The state of a layer, all zeros.

    Args:
      num_rows: Bs.
      taps: W, of the convolution.
      most_tokens: Tm, K + 1 of the largest K.
      dtype: of activations.
    """
    f32 = lambda *shape: jnp.zeros(shape, jnp.float32)  # noqa: E731
    return DeltaState(
        S=f32(num_rows, heads.values, heads.key_size, heads.value_size),
        k=f32(2, num_rows, most_tokens, heads.keys, heads.key_size),
        u=f32(2, num_rows, most_tokens, heads.values, heads.value_size),
        g=f32(2, num_rows, most_tokens, heads.values),
        columns=jnp.zeros((num_rows, taps - 1 + most_tokens, heads.channels), dtype),
    )


def per_row(flags, like) -> jax.Array:
    """Flags ``[B]`` with as many axes as ``like`` ``[B, ...]``."""
    return flags.reshape(flags.shape + (1,) * (like.ndim - 1))
