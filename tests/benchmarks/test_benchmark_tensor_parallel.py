"""Rounds of a target in shards, and ways to add up over its devices, on simulated ones."""

import jax.numpy as jnp
import pytest

from benchmarks.kernels.sums import largest_difference
from benchmarks.rounds import tensor_parallel


def test_a_smoke_run_over_two_devices_measures_more_than_the_floor(measured):
    result = measured(tensor_parallel, "--smoke")
    sums = [f"5, {tokens} tokens, sum" for tokens in tensor_parallel.ROWS]
    assert list(result.measured) == ["1, batch 2", "2", "3, draft in shards", "7, batch 2", *sums]
    assert all(result.measured[key] > result.floors[key] for key in result.measured)
    assert [*result.goals] == sums


def test_a_smoke_run_of_one_shard_alone_has_no_goals(measured):
    result = measured(tensor_parallel, "--smoke", "--alone")
    assert list(result.measured) == ["1, batch 2"]
    assert result.settings["alone"]
    assert result.goals == {}


def test_a_smoke_run_over_four_devices_in_eight_bits(measured):
    options = ("--smoke", "--gpus", "4", "--quantization", "int8", "--batches", "2")
    result = measured(tensor_parallel, *options)
    assert [key for key in result.measured if not key.startswith("5,")] == ["1, batch 2 int8", "7, batch 2 int8"]
    assert result.goals == {}


@pytest.mark.parametrize(("tokens", "gpus"), [(1, 2), (4, 2), (5, 4)], ids=["1", "4", "5"])
def test_ways_to_add_up_agree(tokens, gpus):
    assert largest_difference("scattered", tokens, 64, jnp.float32, gpus) < 1e-5
