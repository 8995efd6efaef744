"""Texts of 10,000 tokens: the error of a recurrent state does not grow with the text, nor with drafts that are rejected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_nets import HEADS, Decoder, Pass, random_texts, wanted_of

from jspec.pallas.delta_net.convolution import convolve_verify_reference
from jspec.pallas.delta_net.verify import verify_reference

N, PART = 10_000, 1_000  # tokens of a text, and of its beginning and end, which are compared
ONE = np.arange(1)


def passes(tokens: int, accepted: int) -> list[Pass]:
    """Verify passes of so many tokens, of each of which so many are accepted."""
    return [Pass(tokens, ONE, np.full(1, tokens), np.full(1, accepted))] * (N // accepted)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tokens", "accepted"), [(5, 5), (5, 1), (1, 1)], ids=["all accepted", "all rejected", "plain"]
)
def test_errors_do_not_grow(tokens, accepted):
    """States that hold on to what they have read for thousands of tokens, beside float64."""
    texts = random_texts(1, N, seed=3)
    slowness = jnp.asarray([1e-4, 1e-3, 1e-2, 1.0]).reshape(1, 1, HEADS.values)
    texts = texts._replace(g=texts.g * slowness)
    decoder = Decoder(jax.jit(convolve_verify_reference), jax.jit(verify_reference))
    outputs, states = decoder.run(texts, passes(tokens, accepted))
    wanted, wanted_states = wanted_of(0, texts)
    errors = np.abs(outputs[0] - wanted).max(axis=-1) / np.abs(wanted).max()
    assert errors[-PART:].max() < 3 * errors[PART : 2 * PART].max()
    assert errors.max() < 1e-5
    np.testing.assert_allclose(states[0], wanted_states[-1], rtol=1e-4, atol=1e-5)
