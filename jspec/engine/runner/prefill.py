"""Committed tokens that go through target and drafter: prefill, and the drafter's catch-up after plain rounds."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.drafting.base import Drafter, Prompt, Text
from jspec.engine.runner.state import DecodeState
from jspec.engine.runner.step_io import PrefillInputs
from jspec.models.kv_cache import PagedView
from jspec.models.protocols import Target
from jspec.models.ragged_view import RaggedView
from jspec.sampling.logprobs import as_float32, token_logprobs

CHUNKS_AT_A_TIME = 8  # whose logits are computed together


def prefill(
    target: Target, drafter: Drafter, state: DecodeState, inputs: PrefillInputs, expand_latents: bool
) -> tuple[DecodeState, jax.Array]:
    """Read n chunks of c tokens, of one prompt or of several, into the caches of target and drafter.

    In each layer all keys and values are written before any query attends, so a batch may hold consecutive chunks of one
    prompt. Recurrent states read the chunks of a prompt one after the other. The chunks of a prompt cover all of its tokens
    but the last, which the target reads as query token 0 of the first round. The feature of the last token read goes to
    ``features[row, 0]``, where the first round finds it.

    Args:
      target: the target.
      drafter: the drafter.
      state: the batch. Only the caches change, and the features of rows whose prompt ends in this batch.
      inputs: the chunks.
      expand_latents: whether keys and values of all heads may be computed from latents, as
        ``EngineConfig.expand_latents`` says.

    Returns:
      the new state, and the target's hidden states ``[n, c, D]``.
    """
    c = inputs.tokens.shape[1] - 1
    offset = jnp.arange(c, dtype=jnp.int32)[None]
    valid = offset < inputs.count[:, None]
    positions = inputs.start[:, None] + offset
    recurrent = inputs.recurrent_rows(len(state.outcome)) if state.has_states else None
    view = PagedView(inputs.table, positions, valid, shared=True, may_up_project=expand_latents, recurrent=recurrent)
    tokens, following = inputs.tokens[:, :c], inputs.tokens[:, 1:]
    hidden, features, cache = run_target(target, drafter, tokens, state.cache, view)
    draft = drafter.prefill(state.drafter_state, Prompt(tokens, following, features, view))
    state = dataclasses.replace(state, cache=cache).with_drafter_state(draft)
    if features is None or state.features is None:
        return state, hidden
    newest = jnp.take_along_axis(features, jnp.maximum(inputs.count - 1, 0)[:, None, None], axis=1)[:, 0]
    features = state.features.at[inputs.row, 0].set(newest, mode="drop")
    return dataclasses.replace(state, features=features), hidden


def prompt_logprobs(target: Target, hidden, tokens) -> jax.Array:
    """``TokenLogprobs.packed`` of tokens int32 ``[n, c]``, each after its hidden state ``[n, c, D]``: ``[n, c, PACKED]``."""

    def of_chunks(chunks):
        hidden, following = chunks
        return token_logprobs(as_float32(target.logits(hidden)), following).packed()

    # Few chunks at a time, because the logits of all of them would not fit. Not vectorised: a target in shards counts its
    # exchanges in a reference.
    n, some = len(tokens), min(CHUNKS_AT_A_TIME, len(tokens))
    whole = n - n % some
    groups = (x[:whole].reshape(-1, some, *x.shape[1:]) for x in (hidden, tokens))
    packed = jax.lax.map(of_chunks, tuple(groups))
    packed = packed.reshape(whole, *packed.shape[2:])
    return packed if whole == n else jnp.concatenate([packed, of_chunks((hidden[whole:], tokens[whole:]))])


def catch_up(drafter: Drafter, state: DecodeState, slots: int) -> DecodeState:
    """Let the drafter read the committed tokens that it has not read, or that it has read only as its own drafts.

    A drafter normally does that at the start of a round, in a window whose length its own K sets. After plain rounds, and
    before rounds of a smaller K, that window would be too short. After this call the drafter's caches and features are those
    of a request that was just admitted, so a round of any K may follow.

    The drafter reads the tokens at positions ``previous - 1`` to ``length - 2``. The feature at ``length - 2``, the
    last that the target has computed, becomes the first entry of ``features``, and ``previous`` becomes
    ``length - 1``.

    Args:
      drafter: the drafter.
      state: the batch. Only the drafter's state, ``features`` and ``previous`` change.
      slots: the most positions that a row may have to read, which fixes the shape of the pass. If the drafter
        reads features, it is also their number, ``state.features.shape[1]``.
    """
    request, live = state.request, state.live
    behind = request.length - 1 - state.previous
    positions = state.previous[:, None] - 1 + jnp.arange(slots, dtype=jnp.int32)[None]
    valid = live[:, None] & (positions >= 0) & (positions < request.length[:, None] - 1)
    tokens = jnp.take_along_axis(state.tokens, jnp.clip(positions, 0, state.tokens.shape[1] - 1), axis=1)
    following = jnp.take_along_axis(state.tokens, jnp.clip(positions + 1, 0, state.tokens.shape[1] - 1), axis=1)
    view = PagedView(request.table, positions, valid)
    text = Text(state.tokens, request.length, state.rows) if state.has_states else None
    draft = drafter.prefill(state.drafter_state, Prompt(tokens, following, state.features, view, text))
    previous = jnp.where(live, request.length - 1, state.previous)
    state = dataclasses.replace(state, previous=previous).with_drafter_state(draft)
    if state.features is None:
        return state
    newest = jnp.take_along_axis(state.features, jnp.clip(behind, 0, slots - 1)[:, None, None], axis=1)
    return dataclasses.replace(state, features=jnp.concatenate([newest, state.features[:, 1:]], axis=1))


def run_target(target: Target, drafter: Drafter, tokens, cache, view: PagedView | RaggedView):
    """Let the target read tokens ``[B, T]`` at the positions of ``view``, or of its tree.

    Returns:
      hidden states ``[B, T, D]``; the features ``[B, T, E]`` that the drafter needs, or None; and the new cache.
    """
    tree = view.tree if isinstance(view, PagedView) else None
    positions = view.positions if tree is None else tree.positions
    if drafter.aux_layers is None:
        hidden, cache = target(tokens, positions, cache, view)
        return hidden, None, cache
    return target.with_auxiliary(tokens, positions, cache, view, drafter.aux_layers)
