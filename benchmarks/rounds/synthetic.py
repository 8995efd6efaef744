"""Acceptance at given rates, for benchmarks with random weights.

Two models of random weights never agree, so their rounds would accept nothing and take another time than real ones.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import Speculation
from jspec.sampling.distribution import leading
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES, VerifyResult


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Accepts each draft with a given probability. NOT lossless; the rule's own decision is still computed.

    Attributes:
      kinds: for each kind of request, the probability that draft i is accepted, given that those before it were. There are
        K of them or fewer; past the end the probability is 0. The last word of a request's key, modulo the number of kinds,
        is the request's kind.
    """

    kinds: tuple[tuple[float, ...], ...]

    def __call__(self, accepted: jax.Array, count: jax.Array, noise: RoundNoise) -> jax.Array:
        K = max(map(len, self.kinds))
        rates = jnp.asarray([[*rates, *[0.0] * (K - len(rates))] for rates in self.kinds], jnp.float32)
        if len(self.kinds) > 1:
            rates = rates[noise.key_data[:, 1] % np.uint32(len(self.kinds))]
        stands = noise.accept_uniforms(K) <= rates
        decided = jnp.minimum(leading(stands), count)
        # No rule accepts more than ``count``, but the compiler cannot know and has to compute ``accepted``.
        return jnp.where(accepted > count, accepted, decided)


def rule_of(speculation: Speculation) -> Callable[..., VerifyResult]:
    """The rule named by ``speculation.verify``; ``synthetic_acceptance`` replaces its decision if it is set."""
    rule, kinds = RULES[speculation.verify], speculation.acceptance_by_kind
    return rule if kinds is None else functools.partial(rule, decide=Synthetic(kinds))
