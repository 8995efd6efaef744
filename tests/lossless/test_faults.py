"""Tests of the suite: two known ways to break losslessness silently must make it fail."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.sampling.threefry import threefry_bits, uniform_of_bits
from jspec.sampling.streams import RoundNoise, Stream, draw_key
from lossless import rounds, steps
from lossless.checks import p_values
from lossless.oracle import Oracle
from lossless.statistics import LEVEL, p_value
from lossless.table_model import TABLES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneStream(RoundNoise):
    """Draft and residual share a stream: the noise of a residual draw is known to have favoured the rejected draft."""

    def residual_key(self, index):
        return self.draft_key(index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionKeyed(RoundNoise):
    """Accept noise by position: ``block`` looks past its rejection, and the next round reads the same uniforms."""

    def accept_uniforms(self, K):
        position = self.length[:, None] + jnp.arange(K, dtype=jnp.int32)[None]
        words = self.key_data[:, :1], self.key_data[:, 1:]
        keys = draw_key(words, Stream.ACCEPT, position, jnp.zeros_like(position))
        return uniform_of_bits(threefry_bits(*keys, jnp.uint32(0)))


def reversed_draft(tables):
    """The draft likes least what the target likes best: many rejections."""
    return tables[0], np.ascontiguousarray(tables[0][:, ::-1])


class TestRules:
    CASES = (rounds.Case(), rounds.Case(temperature=0.6), rounds.Case("argmax"))

    def p_values(self, rule, noise, tables, samples):
        """Of the first round and of the texts, ``[2, cases]``."""
        tallies = rounds.play(rule, self.CASES, tables, samples, seed=31, noise=noise)
        distributions = [rounds.predicted(rule, case, tables) for case in self.CASES]
        pairs = [
            zip(tally, distribution, strict=True) for tally, distribution in zip(tallies, distributions, strict=True)
        ]
        return np.array([[p_value(counts, distribution) for counts, distribution in pair] for pair in pairs]).T

    @pytest.mark.parametrize("rule", ["rejection", "block"])
    def test_one_stream_for_draft_and_residual_is_detected(self, rule):
        tables = reversed_draft(rounds.random_tables(1))
        first_round, texts = self.p_values(rule, OneStream, tables, 40_000)
        assert first_round[:2].max() < LEVEL
        assert texts[:2].max() < LEVEL
        assert min(first_round[2], texts[2]) >= LEVEL, "argmax drafts use no draft noise"
        assert self.p_values(rule, RoundNoise, tables, 40_000).min() >= LEVEL

    @pytest.mark.nightly
    def test_position_keyed_block_in_a_later_round_is_detected(self):
        tables = rounds.random_tables(1)
        first_round, texts = self.p_values("block", PositionKeyed, tables, 150_000)
        assert first_round.min() >= LEVEL
        assert texts.max() < LEVEL
        assert self.p_values("block", RoundNoise, tables, 150_000).min() >= LEVEL


class TestSteps:
    def p_values(self, program, tables, samples):
        """Of the last three tokens of each ask."""
        tallies = steps.play(program, tables, samples, seed=41)
        return p_values([(Oracle(program, ask, tables), tally) for ask, tally in zip(steps.ASKS, tallies, strict=True)])

    @pytest.mark.nightly
    @pytest.mark.parametrize("rule", ["rejection", "block"])
    def test_one_stream_for_draft_and_residual_is_detected(self, rule):
        program = steps.Program(rule, noise=OneStream)
        *sampled, greedy = self.p_values(program, reversed_draft(TABLES), 100_000)
        assert max(sampled) < LEVEL
        assert greedy == 1.0

    def test_position_keyed_block_is_detected(self):
        program = steps.Program("block", draft_sampling="argmax", noise=PositionKeyed)
        *sampled, greedy = self.p_values(program, TABLES, 12_000)
        assert max(sampled) < LEVEL
        assert greedy == 1.0
