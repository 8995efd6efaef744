"""Results are put into classes by their bits, and a small run prints a line of each section."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.invariance import __main__ as invariance
from benchmarks.kernels.invariance.run import classes, difference, named


def test_one_bit_parts_two_classes():
    x = np.linspace(-1, 1, 7, dtype=np.float32).astype(jnp.bfloat16)
    y = x.copy()
    y[3] = -0.0  # the same number, and another bit
    assert named(classes({1: x, 5: y, 16: x.copy()})) == "{1 16} {5}"


def test_a_difference_is_counted_in_ulps_of_the_number():
    x = np.array([1, 2, 4, 0], np.float32)
    y = np.array([1, 2 + 2**-22, 4, 0], np.float32)
    found = difference(x, y)
    assert (found["share"], found["ulps"]) == (0.25, 1)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("products", "bf16 down: {"),
        ("attention", "attention, small, one order, length 40: {"),
        ("costs", "cost, bf16 down, fastest: {"),
        ("experts", "experts, bf16: {"),
        ("small_ops", "rule match: {1 rows, row 0 2 rows, row 0 2 rows, row 1}"),
        ("instructions", "instructions, spread, 16 tokens: {XLA, all tokens"),
        ("steps", "step, EAGLE-3, more norms, logits: {"),
        ("states", "states, 27B, logits: {prefill 64 prefill 512 prefill 1024} {1x1 3x2}"),
    ],
)
def test_a_small_run_prints_the_classes_of_each_section(measured, capsys, section, line):
    result = measured(invariance, "--small", "--tokens", "1", "3", "--only", section)
    out = capsys.readouterr().out
    assert line in out
    assert "left out: nothing; failed: nothing" in out
    assert any(key.startswith(line.partition(":")[0]) for key in result.details)


def test_a_run_that_is_over_names_what_it_left_out(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["invariance", "--small", "--only", "products", "--seconds", "0"])
    assert invariance.main() == 0
    assert "left out: products" in capsys.readouterr().out
