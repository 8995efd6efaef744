"""What every kind of head should propose, worked out without a cache: whole texts, causal passes, nothing kept."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.heads import EagleConfig, HeadConfig, MedusaConfig, MLPConfig, PardConfig
from jspec.models.cache import CausalView


class Drafts(NamedTuple):
    """What is drafted after some tokens of a text.

    Attributes:
      logits: ``[B, K, V]``, of draft i if the drafts before it are those in the text.
      kv: keys and values of the head's slots, ``[G, B, S, H]`` a layer; () for a head that keeps none.
      real: int32 ``[B]``, how many of them, from the first on, were made of committed tokens and features of the
      target.
    """

    logits: jax.Array
    kv: Any
    real: jax.Array


def causal_drafts(config: HeadConfig, head, of, text, length, K: int) -> Drafts:
    """Drafts after the first ``length`` int32 ``[B]`` tokens of texts int32 ``[B, S]``, S at least length + K - 1.

    ``of`` is the target. After a single token there is no feature yet and the logits mean nothing, but those of PARD.
    """
    if isinstance(config, PardConfig):
        return _pard(config, head, text, length, K)
    features = _features(config, of, text)
    if isinstance(config, MLPConfig):
        return _mlp(head, features, text, length, K)
    if isinstance(config, MedusaConfig):
        return Drafts(head.logits(_at(features, length - 2), of, K)[:, 0], (), length - 1)
    following = jnp.roll(text, -1, axis=1)  # slot i reads token i + 1
    if isinstance(config, EagleConfig) or config.mask_token_id is None:
        return _chain(head, of, features, following, length, K)
    return _masked(config, head, of, features, following, length, K)


def _chain(head, of, features, following, length, K: int) -> Drafts:
    """The whole head once per draft, each time with one more of its own outputs in the place of a feature."""
    embedded, rows, slot = head.embed(following, of), jnp.arange(len(length)), _positions(following)[:, :, None]

    def draft(fused, i):
        newest = length - 2 + i
        known = jnp.where(slot <= newest[:, None, None], embedded, 0)  # 0 x NaN is NaN, also from slots to come
        hidden, kv = _read(head, known, fused)
        hidden = _at(hidden, newest)
        return fused.at[rows, newest + 1].set(head.recycle(hidden)[:, 0]), (head.logits(hidden, of)[:, 0], kv)

    _, (logits, written) = jax.lax.scan(draft, head.fuse(features), jnp.arange(K, dtype=jnp.int32))
    return Drafts(jnp.moveaxis(logits, 0, 1), jax.tree.map(lambda kv: kv[0], written), length - 1)


def _masked(config, head, of, features, following, length, K: int) -> Drafts:
    mask = jnp.arange(following.shape[1], dtype=jnp.int32)[None] > length[:, None] - 2
    embedded = head.embed(jnp.where(mask, config.mask_token_id, following), of)
    fused = jnp.where(mask[:, :, None], head.fuse(head.mask_hidden[...].reshape(1, 1, -1)), head.fuse(features))
    hidden, kv = _read(head, embedded, fused)
    hidden = jnp.concatenate([_at(hidden, length - 2 + i) for i in range(K)], axis=1)
    return Drafts(head.logits(hidden, of), kv, length - 1)


def _pard(config, model, text, length, K: int) -> Drafts:
    positions = _positions(text)
    tokens = jnp.where(positions >= length[:, None], config.mask_token_id, text)
    hidden, kv = model(tokens, positions, (None,) * config.model.num_layers, CausalView(positions))
    hidden = jnp.concatenate([_at(hidden, length - 1 + i) for i in range(K)], axis=1)
    return Drafts(model.logits(hidden), kv, length)


def _mlp(head, features, text, length, K: int) -> Drafts:
    state, logits = head.start(_at(features, length - 2)), []
    for i in range(K):
        state = head.stage(i, state, _at(text, length - 1 + i))
        logits.append(head.logits(i, state))
    return Drafts(jnp.concatenate(logits, axis=1), (), length - 1)


def _features(config, of, text):
    """What the target knows at every position, ``[B, S, E]``."""
    positions = _positions(text)
    aux_layers = config.resolved_aux_layers(of.config) if config.decoder else ()
    view = CausalView(positions)
    return of.with_auxiliary(text, positions, (None,) * of.config.num_layers, view, aux_layers)[1]


def _read(head, embedded, fused):
    positions = _positions(embedded)
    return head(embedded, fused, positions, (None,) * head.config.layers.num_layers, CausalView(positions))


def _positions(like):
    return jnp.broadcast_to(jnp.arange(like.shape[1], dtype=jnp.int32)[None], like.shape[:2])


def _at(values, index):
    """``[B, S, ...], [B] -> [B, 1, ...]``; an index before the first gives some entry."""
    return jnp.take_along_axis(values, jnp.maximum(index, 0).reshape(-1, *(1,) * (values.ndim - 1)), axis=1)
