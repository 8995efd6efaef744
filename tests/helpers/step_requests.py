"""What tests hand to single steps of the engine in ``engines.py``."""

import jax.numpy as jnp
from engines import CONFIG, MAX_LEN

from jspec.engine.runner.state import RequestArrays
from jspec.sampling.distribution import Warp
from jspec.sampling.params import MAX_STOP_TOKENS


def never(*_):
    raise AssertionError("prefill verifies nothing")


def request(row: int, length: int, limit=MAX_LEN, min_length=0, stop_tokens=(), temperature=1.0) -> RequestArrays:
    M = CONFIG.pages_per_row
    return RequestArrays(
        length=jnp.int32(length),
        limit=jnp.int32(limit),
        min_length=jnp.int32(min_length),
        stop_tokens=jnp.array([*stop_tokens, *[-1] * (MAX_STOP_TOKENS - len(stop_tokens))], jnp.int32),
        key_data=jnp.array([row, row], jnp.uint32),
        table=1 + row * M + jnp.arange(M, dtype=jnp.int32),
        max_drafts=jnp.int32(99),
        warp=Warp(jnp.float32(temperature), jnp.int32(0), jnp.float32(1), jnp.float32(0)),
    )
