"""The likeliest next tokens of a request, for drafts that branch: those that its own draw would take first."""

import jax
import jax.numpy as jnp

from jspec.pallas.sampling.gumbel_max import group_scores, gumbel_noise
from jspec.pallas.sampling.sample import log_weights
from jspec.pallas.sampling.top_k_top_p import cutoff_if_any
from jspec.pallas.sampling.warped_logits import grouped
from jspec.sampling.distribution import Warp


def candidates(logits, warp: Warp, key_data, count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` tokens of each distribution that are closest to being drawn, all different, the best first.

    At temperature 0 they are the likeliest. Otherwise they are ranked by how much the scores of the Gumbel-max trick
    (``jspec.pallas.sampling.gumbel_max``) would have to change for the token to be drawn with this key: what its group lacks
    to the best group, and the token to the best of its group. So the first is the token that ``make_distribution`` draws.
    With the key of the target's own draw, that draw is hardly ever far down the list.

    Args:
      logits: ``[B, J, V]``.
      warp: the requests' settings.
      key_data: uint32 ``[B, J, 2]``.
      count: C.

    Returns:
      tokens, int32 ``[B, J, C]``, and the log of how likely each is to be the target's draw, float32 ``[B, J, C]``: at
      temperature 0 its log-probability, else a softmax of what it lacks, among twice as many. It is -inf where there is no
      such token, or where the logits make no distribution.

    Example::

        warp = Warp(jnp.array([0.0]), jnp.array([0]), jnp.array([1.0]), jnp.array([0.0]))  # greedy
        logits, keys = jnp.arange(16.0).reshape(1, 1, 16), jnp.zeros((1, 1, 2), jnp.uint32)
        tokens, _ = candidates(logits, warp, keys, 3)
        assert tokens.tolist() == [[[15, 14, 13]]]
    """
    B, J, V = logits.shape
    greedy, flat = jnp.repeat(warp.greedy, J), logits.reshape(B * J, V)
    settings = [jnp.repeat(x, J) for x in (warp.temperature, warp.top_k, warp.top_p, warp.min_p)]
    scale = 1.0 / jnp.where(greedy, 1.0, settings[0])
    filters = [jnp.where(greedy, off, x) for x, off in zip(settings[1:], (0, 1.0, 0.0), strict=True)]
    log_weight, log_mass, lse = log_weights(flat, scale, cutoff_if_any(flat, scale, *filters))
    by_group, keys = grouped(log_weight), key_data.reshape(B * J, 2)
    of_groups = jnp.where(greedy[:, None], jnp.max(by_group, axis=2), group_scores(log_mass, keys))
    # The n best tokens lie in the n best groups, each of which has one that is better than all of the groups behind it.
    most = min(2 * count, V)
    best_groups, group = jax.lax.top_k(of_groups, min(most, of_groups.shape[1]))
    plain, size = jnp.take_along_axis(by_group, group[:, :, None], axis=1), by_group.shape[2]
    words = (group[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]).astype(jnp.uint32)
    noise = gumbel_noise(keys, words.reshape(B * J, -1)).reshape(plain.shape)
    scores = jnp.where(greedy[:, None, None], plain, plain + noise)
    lacks = (best_groups[:, :1] - best_groups)[:, :, None] + (jnp.max(scores, axis=2, keepdims=True) - scores)
    lacks = jnp.where(jnp.isfinite(lacks), lacks, jnp.inf).reshape(B * J, -1)
    closeness, place = jax.lax.top_k(-lacks, most)
    token = jnp.take_along_axis(group, place // size, axis=1) * size + place % size
    log_prob = jnp.take_along_axis(plain.reshape(B * J, -1), place, axis=1) - lse[:, None]
    among = closeness - jax.nn.logsumexp(closeness, axis=1, keepdims=True)
    likely = jnp.where(greedy[:, None], log_prob, among)
    likely = jnp.where(jnp.isfinite(closeness) & jnp.isfinite(lse)[:, None], likely, -jnp.inf)
    return token[:, :count].reshape(B, J, count), likely[:, :count].reshape(B, J, count)
