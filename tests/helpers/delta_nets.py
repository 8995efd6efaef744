"""Gated delta nets for tests: the rule in float64, random texts, and texts decoded in verify passes of any kind."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.pallas.delta_net.projections import DeltaHeads, split_heads
from jspec.pallas.delta_net.state import DeltaState, VerifyRows, init_state

HEADS = DeltaHeads(keys=2, values=4, key_size=32, value_size=32)
W = 4


class Texts(NamedTuple):
    """Tokens of some texts as the input projections give them.

    Attributes:
      x: ``[R, N, Cc]``, not convolved.
      g, beta: float32 ``[R, N, Nv]``.
      weight: ``[W, Cc]``, of the convolution, which all texts share.
    """

    x: Any
    g: Any
    beta: Any
    weight: Any


@jax.jit
def advanced(rows: VerifyRows, accepted) -> tuple[jnp.ndarray, jnp.ndarray]:
    """``accepted`` and ``half`` of the next pass, if so many tokens of this one, int32 ``[B]``, are committed."""
    ran = rows.tokens > 0
    return jnp.where(ran, accepted, rows.accepted), jnp.where(ran, 1 - rows.half, rows.half)


def random_texts(R: int, N: int, seed: int, heads: DeltaHeads = HEADS, dtype="float32") -> Texts:
    """Texts whose decays go from almost none to exp(-20) a token."""
    rng = np.random.default_rng(seed)
    shapes = (R, N, heads.channels), (W, heads.channels)
    x, weight = (jax.device_put(rng.normal(size=shape).astype(jnp.dtype(dtype))) for shape in shapes)
    g = -np.exp(2.5 * rng.normal(size=(R, N, heads.values)) - 1.5)
    beta = 1 / (1 + np.exp(-2 * rng.normal(size=g.shape)))
    return Texts(x, *(jax.device_put(a.astype(np.float32)) for a in (np.maximum(g, -20), beta)), weight)


def float64_recurrence(q, k, v, g, beta, S) -> tuple[np.ndarray, np.ndarray]:
    """Outputs ``[T, Nv, Dv]`` and states ``[T, Nv, Dk, Dv]`` after each token, in float64.

    Args:
      q, k: ``[T, Nk, Dk]``, not normed.
      v: ``[T, Nv, Dv]``.
      g, beta: ``[T, Nv]``.
      S: ``[Nv, Dk, Dv]``.
    """
    q, k, v, g, beta, S = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, S))
    q, k = (np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), S.shape[0] // x.shape[1], 1) for x in (q, k))
    outputs, states = [], []
    for t in range(len(q)):
        S = np.exp(g[t])[:, None, None] * S
        u = beta[t][:, None] * (v[t] - np.einsum("nkv,nk->nv", S, k[t]))
        S = S + np.einsum("nk,nv->nkv", k[t], u)
        states.append(S)
        outputs.append(np.einsum("nkv,nk->nv", S, q[t]) / np.sqrt(q.shape[-1]))
    return np.stack(outputs), np.stack(states)


def float64_convolution(before, x, weight) -> np.ndarray:
    """silu of the convolution ``[T, Cc]``, of inputs ``[T, Cc]`` and the ``[W - 1, Cc]`` before them, in float64."""
    inputs, weight = (np.asarray(a, np.float64) for a in (np.concatenate([before, x]), weight))
    total = np.stack([(inputs[t : t + len(weight)] * weight).sum(0) for t in range(len(x))])
    return total / (1 + np.exp(-total))


class Pass(NamedTuple):
    """One verify pass over R texts.

    Attributes:
      T: query tokens of the pass.
      order: the texts, as the pass has them in its rows.
      tokens: ``[R]``, how many of the query tokens of each text are valid.
      accepted: ``[R]``, how many of these the verification rule lets stand.
    """

    T: int
    order: np.ndarray
    tokens: np.ndarray
    accepted: np.ndarray


def one_by_one(R: int, N: int) -> list[Pass]:
    """Plain decoding."""
    return [Pass(1, np.arange(R), np.ones(R, int), np.ones(R, int))] * N


def random_passes(R: int, N: int, seed: int, sizes=(1, 2, 5)) -> list[Pass]:
    """Passes of such sizes, with any number of valid and of accepted tokens, until every text has N committed tokens."""
    rng, left, passes = np.random.default_rng(seed), np.full(R, N), []
    while left.any():
        T = int(rng.choice(sizes))
        tokens = np.where(rng.random(R) < 0.8, T, rng.integers(0, T + 1, R)) * (left > 0)
        accepted = np.minimum(rng.integers(1, T + 1, R), np.minimum(tokens, left))
        passes.append(Pass(T, rng.permutation(R), tokens, accepted))
        left = left - accepted
    return passes


@dataclasses.dataclass
class Decoder:
    """Decodes texts by verify passes; the rows of the state are those of the texts, in reverse, and one more.

    Attributes:
      convolve, verify: of ``jspec.pallas.delta_net``, jitted.
      tamper: what a fault makes of the state and the rows before each pass.
    """

    convolve: Callable
    verify: Callable
    tamper: Callable = lambda state, rows: (state, rows)
    heads: DeltaHeads = HEADS
    most_tokens: int = 5

    def run(self, texts: Texts, passes: list[Pass]) -> tuple[np.ndarray, np.ndarray]:
        """Outputs ``[R, N, Nv, Dv]`` and at last the states ``[R, Nv, Dk, Dv]``, with all N tokens folded in.

        Query tokens behind the accepted ones are no tokens of the text. The rows have held another text before."""
        R, N, _ = texts.x.shape
        state = init_state(R + 1, self.heads, W, self.most_tokens, texts.x.dtype)
        state = DeltaState(*(x + 7 for x in vars(state).values()))
        done, accepted, half = np.zeros(R, int), np.full(R, 2, np.int32), np.zeros(R, np.int32)
        outputs = np.zeros((R, N, self.heads.values, self.heads.value_size), np.float32)
        last = Pass(1, np.arange(R), np.ones(R, int), np.zeros(R, int))
        for number, (T, order, tokens, stand) in enumerate([*passes, last]):
            queries = self._queries(texts, done, stand, T, number)
            row, count = ((x).astype(np.int32) for x in (R - 1 - order, tokens[order]))
            rows = VerifyRows(*map(jax.device_put, (row, count, accepted[order], half[order], (done == 0)[order])))
            state, tampered = self.tamper(state, rows)
            o, state = self._step(state, tampered, Texts(*(x[order] for x in queries[:3]), queries.weight))
            o = np.asarray(o)
            for b, r in enumerate(order):
                outputs[r, done[r] : done[r] + stand[r]] = o[b, : stand[r]]
            done = done + stand
            accepted[order], half[order] = advanced(rows, stand[order].astype(np.int32))
        return outputs, np.asarray(state.S)[R - 1 :: -1][:R]

    def _step(self, state: DeltaState, rows: VerifyRows, queries: Texts):
        qkv, columns = self.convolve(state.columns, rows, queries.x, queries.weight)
        return self.verify(dataclasses.replace(state, columns=columns), rows, qkv, queries.g, queries.beta)

    def _queries(self, texts: Texts, done, stand, T: int, seed: int) -> Texts:
        """The next ``stand`` tokens of each text, and drafts that will be rejected."""
        R = len(done)
        drafts = random_texts(R, T, 1000 + seed, self.heads, texts.x.dtype)

        def filled(text, draft) -> Any:
            draft, text = np.array(draft), np.asarray(text)
            for r in range(R):
                draft[r, : stand[r]] = text[r, done[r] : done[r] + stand[r]]
            return draft

        return Texts(*map(filled, texts[:3], drafts[:3]), texts.weight)


def assert_same_bits(decoder: Decoder, plain: Decoder, texts: Texts, passes: list[Pass]):
    """Texts that are decoded in these passes have the outputs and the states of plain decoding, bit for bit."""
    wanted = _plain(plain, texts)
    for x, y in zip(decoder.run(texts, passes), wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def _plain(decoder: Decoder, texts: Texts):
    return decoder.run(texts, one_by_one(*texts.x.shape[:2]))


def wanted_of(text: int, texts: Texts, heads: DeltaHeads = HEADS) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and states of one text from its beginning, in float64, but for the dtype of what the convolution gives."""
    convolved = float64_convolution(np.zeros((W - 1, heads.channels)), texts.x[text], texts.weight)
    qkv = split_heads(jnp.asarray(convolved, texts.x.dtype), heads)
    S = np.zeros((heads.values, heads.key_size, heads.value_size))
    return float64_recurrence(*qkv, texts.g[text], texts.beta[text], S)
