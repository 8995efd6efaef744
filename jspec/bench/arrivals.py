"""When requests are sent."""

import math

import numpy as np

from jspec._validation import require


def send_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the beginning until each of ``count`` requests is sent, ascending.

    The times between requests are drawn from a gamma distribution. Their scale is then such that the last request is sent
    after exactly count / rate seconds, as in vLLM, so that two runs offer the same load.

    Args:
      count: number of requests.
      rate: requests per second; infinity sends all at once.
      burstiness: the shape of the distribution. 1 is a Poisson process; requests come in bursts below 1, and more
        evenly above.
      seed: of the random generator.

    Raises:
      ValueError: a rate or a burstiness that is not above 0.
    """
    require(rate > 0, "request_rate", rate, "a number above 0, or inf")
    require(0 < burstiness < math.inf, "burstiness", burstiness, "a number above 0")
    if math.isinf(rate):
        return [0.0] * count
    times = np.cumsum(np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count))
    if count and times[-1] > 0:  # a very small burstiness may draw nothing but zeros
        times *= count / rate / times[-1]
    return times.tolist()
