"""The likeliest next tokens of a request, for drafts that branch: those that its own draw would take first."""

import jax

from jspec.pallas.sampling.candidates import closest
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
      count: C, at most V.

    Returns:
      tokens, int32 ``[B, J, C]``, and the log of how likely each is to be the target's draw, float32 ``[B, J, C]``: at
      temperature 0 its log-probability, else a softmax of what it lacks, among twice as many. It is -inf where there is no
      such token, or where the logits make no distribution.

    Example::

        import jax.numpy as jnp

        warp = Warp(jnp.array([0.0]), jnp.array([0]), jnp.array([1.0]), jnp.array([0.0]))  # greedy
        logits, keys = jnp.arange(16.0).reshape(1, 1, 16), jnp.zeros((1, 1, 2), jnp.uint32)
        tokens, _ = candidates(logits, warp, keys, 3)
        assert tokens.tolist() == [[[15, 14, 13]]]
    """
    return closest(logits, warp.temperature, warp.top_k, warp.top_p, warp.min_p, key_data, count)
