"""Programs of these tests run for a moment: what counts is how long they compile."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def compile_in_a_hurry():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
