"""What benchmarks say of mixtures of experts: how many experts a pass hits, and the floor that follows."""

import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import experts
from benchmarks.random_modules import random_module
from benchmarks.rounds import floors, mixtures
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.experts_hit import experts_hit
from benchmarks.rounds.programs import Decoding
from benchmarks.shapes import GPT_OSS_20B, GPT_OSS_120B, QWEN3_30B_A3B, TINY, TINY_MIXTURE
from benchmarks.shapes import SHAPES as PAIRS
from jspec.models.cache_pools import init_pool


@pytest.fixture(scope="module")
def target():
    return random_module(TINY_MIXTURE, dtype="float32")


def hit(target, B: int, T: int) -> float | None:
    """How many experts random tokens at the start of texts hit."""
    tokens = jax.random.randint(jax.random.key(3), (B, T), 0, target.config.vocab_size, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    cache = init_pool(target.cache_shape(), 1 + B, 16, target.dtype)
    return experts_hit(target, tokens, positions, cache, 1 + jnp.arange(B, dtype=jnp.int32)[:, None])


def test_one_token_hits_as_many_experts_as_it_goes_through(target):
    assert hit(target, 1, 1) == TINY_MIXTURE.experts.chosen
    assert TINY_MIXTURE.experts.chosen < hit(target, 8, 4) <= TINY_MIXTURE.experts.count
    assert hit(random_module(TINY, dtype="float32"), 1, 1) is None


def test_texts_that_random_weights_write_go_on_hitting_experts_evenly():
    """As many as if each token chose its experts at random, after rounds of decoding too."""
    bench, what = Bench(PAIRS["tiny-mixture"], "float32", 1e12, 1), Decoding(None, 0, 6, 16, 24)
    chosen, count = TINY_MIXTURE.experts.chosen, TINY_MIXTURE.experts.count
    expected = count * (1 - (1 - chosen / count) ** what.batch)
    assert bench.time(what).experts == pytest.approx(expected, rel=0.15)


def test_the_floor_counts_the_experts_that_were_hit(target):
    everything, half = floors.language_model(target, 8), floors.language_model(target, 4)
    experts = sum(
        floors.weights_of(part).bytes for layer in target.layers for part in (layer.mlp.gate_up, layer.mlp.down)
    )
    assert everything.bytes == floors.weights_of(target, ("embedding",)).bytes
    assert everything.bytes - half.bytes == experts / 2
    # Products: two of eight experts whatever was hit, and all that is no expert.
    assert everything.numbers == half.numbers
    dense = floors.weights_of(target, ("embedding", "gate_up", "down")).numbers
    assert half.numbers == dense + TINY_MIXTURE.num_layers * 2 * 3 * 32 * 64


def test_windows_bound_the_slots_that_are_read(target):
    assert floors.target_pass(target, 1, 1, 8, 2).kv_bytes == floors.kv_bytes(target, 8)
    assert floors.target_pass(target, 1, 1, 80, 2).kv_bytes == floors.kv_bytes(target, (4 * 8 + 3 * 80) / 7)


@pytest.mark.parametrize(
    ("config", "billions", "gigabytes"),
    # Those of gpt-oss are 13.8 and 65.2 in its checkpoints, which have a byte for each scale where jspec has two.
    [(QWEN3_30B_A3B, 30.5, 61.1), (GPT_OSS_20B, 20.9, 14.4), (GPT_OSS_120B, 116.8, 68.8)],
)
def test_shapes_have_the_published_sizes(config, billions, gigabytes):
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert config.weight_bytes(2) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_a_smoke_run_of_rounds_measures_more_than_the_floor(measured, capsys):
    result = measured(mixtures, "--smoke", "--lines", "2")
    assert result.measured["2"] > result.floors["2"] > 0
    assert "of 8 experts" in capsys.readouterr().out


@pytest.mark.parametrize("layer", ["gpt-oss-20b", pytest.param("qwen3-30b-a3b", marks=pytest.mark.long)])
def test_a_smoke_run_of_a_layer_is_the_same_beside_others(measured, capsys, layer):
    result = measured(experts, "--smoke", "--layer", layer)
    assert capsys.readouterr().out.count("beside others the same") == 2
    assert result.details["1 tokens"]["experts"] == 2
    assert all(result.measured[key] > result.floors[key] > 0 for key in result.measured)


@pytest.mark.long
def test_a_sweep_of_tilings_times_either_product(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experts", "--smoke", "--layer", "qwen3.6-35b-a3b", "--sweep", "1"])
    assert experts.main() == 0
    printed = capsys.readouterr().out
    assert all(f"1 tokens, 2 experts, {part}" in printed for part in ("up  ", "down"))


def test_every_line_has_a_key_of_its_own():
    keys = [(line.number, line.variant) for lines in mixtures.LINES.values() for line in lines]
    assert len(set(keys)) == len(keys)
