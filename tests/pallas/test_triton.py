"""Rows that are read and written in blocks: the last block may pass the end of the row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jspec.pallas.triton import block_ids, kernel_call, load_block, store_block

ROWS, WIDTH, SIZE = 2, 11, 4
BLOCKS = pl.cdiv(WIDTH, SIZE)


def _add_one(x_ref, out_ref, *, known: bool):
    """The block number is an int, or what only a running kernel knows."""
    row = (pl.program_id(0),)

    def block_at(block):
        ids = block_ids(block, SIZE)
        x = load_block(x_ref, row, block, ids, WIDTH, other=0.0)
        store_block(out_ref, row, block, ids, WIDTH, x + 1)

    if known:
        for block in range(BLOCKS):
            block_at(block)
    else:
        jax.lax.fori_loop(0, BLOCKS, lambda block, _: block_at(block), None)


def _weigh(x_ref, out_ref, *, known: bool):
    """What is loaded past the end, or where it is not wanted, is ``other``."""
    row = pl.program_id(0)
    block = BLOCKS - 1 if known else jnp.int32(BLOCKS - 1) + 0 * row
    ids = block_ids(block, SIZE)
    inside = load_block(x_ref, (row,), block, ids, WIDTH, other=100.0)
    unwanted = load_block(x_ref, (row,), block, ids, WIDTH, when=row < 0, other=1000.0)
    out_ref[row] = jnp.sum(inside) + jnp.sum(unwanted)


def call(kernel, x, known: bool, interpret: bool, out_shape):
    out = jax.ShapeDtypeStruct(out_shape, x.dtype)
    return kernel_call(kernel, x, grid=(ROWS,), out_shape=out, num_warps=1, interpret=interpret, known=known)


@pytest.mark.parametrize("known", [True, False], ids=["known", "traced"])
@pytest.mark.parametrize(
    "interpret", [pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]
)
class TestBlocks:
    x = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)

    def test_every_element_is_read_and_written_once(self, known, interpret):
        run = jax.jit(functools.partial(call, _add_one, known=known, interpret=interpret, out_shape=self.x.shape))
        np.testing.assert_array_equal(run(self.x), self.x + 1)

    def test_past_the_end_is_the_given_number(self, known, interpret):
        run = jax.jit(functools.partial(call, _weigh, known=known, interpret=interpret, out_shape=(ROWS,)))
        outside = BLOCKS * SIZE - WIDTH
        last = self.x[:, (BLOCKS - 1) * SIZE :].sum(axis=1)
        np.testing.assert_array_equal(run(self.x), last + 100 * outside + 1000 * SIZE)
