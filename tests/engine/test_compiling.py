"""What XLA is told, which must be known to the version that is installed."""

import jax
import jax.numpy as jnp
import pytest

from jspec.engine.compiling import MANY_QUERIES, decode_options

SPLIT, GRAPHS = "xla_gpu_experimental_force_split_k", "xla_gpu_enable_command_buffer"
WIDE = [jnp.zeros(3), jnp.zeros((2, 2), jnp.bfloat16)]


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.parametrize("eight_bits", [jnp.int8, jnp.float8_e4m3fn])
def test_products_of_many_query_tokens_are_not_split_unless_weights_are_quantised(eight_bits):
    assert decode_options(WIDE, MANY_QUERIES)[SPLIT] == 1
    assert SPLIT not in decode_options(WIDE, MANY_QUERIES - 1)
    assert SPLIT not in decode_options([*WIDE, jnp.zeros((2, 2), eight_bits)], MANY_QUERIES)


def test_the_loop_is_in_the_graph_unless_flags_say_what_is(monkeypatch):
    assert "WHILE" in str(decode_options(WIDE, 1)[GRAPHS]).split(",")
    monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}=")
    assert decode_options(WIDE, 1) == {}


def test_jax_takes_the_options():
    doubled = jax.jit(lambda x: 2 * x, compiler_options=decode_options(WIDE, MANY_QUERIES))
    assert doubled(1) == 2
    unknown = jax.jit(lambda x: 2 * x, compiler_options={f"{SPLIT}_": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        unknown(1)
