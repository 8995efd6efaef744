"""The config of gated delta nets: what it refuses, what models may have them, and what a row of them takes."""

import dataclasses

import jax
import pytest
from engines import TARGET

from jspec.config import DeltaNets, EngineConfig, Latent
from jspec.config.heads import mtp_layers
from jspec.models.cache_pools import cache_shape, init_cache

NETS = DeltaNets(2, 4, 6, 10, 3, (True, False, True))
HYBRID = dataclasses.replace(TARGET, architecture="Qwen3_5ForCausalLM", windows=(), delta_nets=NETS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key_heads": 0}, r"delta_nets\.key_heads=0: expected an integer of at least 1"),
        ({"value_size": 2**31}, r"delta_nets\.value_size=2147483648: expected an integer"),
        ({"key_size": 6.0}, r"delta_nets\.key_size=6\.0: expected an integer"),
        ({"taps": 1}, r"delta_nets\.taps=1: expected at least 2"),
        ({"value_heads": 3}, r"delta_nets\.value_heads=3: expected a multiple of the 2 heads of keys"),
        ({"layers": [True, False, True]}, r"delta_nets\.layers=\[True, False, True\]: expected a tuple"),
        ({"layers": (1, 0, 1)}, r"delta_nets\.layers=\(1, 0, 1\): expected a tuple of True or False"),
    ],
)
def test_invalid_values_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(NETS, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta_nets": dataclasses.replace(NETS, layers=(True, False))}, r"delta_nets\.layers=.*: expected 3 entries"),
        (
            {"delta_nets": dataclasses.replace(NETS, layers=(True,) * 3)},
            "some layers with gated delta nets, and some with",
        ),
        (
            {"delta_nets": dataclasses.replace(NETS, layers=(False,) * 3)},
            "some layers with gated delta nets, and some with",
        ),
        ({"delta_nets": (2, 4)}, r"delta_nets=\(2, 4\): expected DeltaNets or None"),
        ({"architecture": "LlamaForCausalLM"}, r"delta_nets=.*: expected None for a LlamaForCausalLM"),
        ({"windows": (None, 4, None)}, r"delta_nets=.*: expected None beside latents, windows"),
        (
            {"latent": Latent(16, 4, 8, 10), "num_kv_heads": 4, "head_dim": 12},
            r"delta_nets=.*: expected None beside lat",
        ),
    ],
)
def test_models_that_cannot_have_them_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(HYBRID, **changes)


def test_layers_for_multi_token_prediction_have_none():
    layers = mtp_layers(HYBRID, 1)
    assert (layers.delta_nets, layers.num_layers) == (None, 1)
    assert (layers.attention_gate, layers.norm) == (HYBRID.attention_gate, HYBRID.norm)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_the_bytes_of_a_row_are_those_of_its_state(tokens, dtype, itemsize):
    """But for the counts of rows, of four bytes each."""

    def bytes_of(rows: int) -> int:
        made = jax.eval_shape(lambda: init_cache(cache_shape(HYBRID), 3, 4, rows, tokens, dtype))
        states = [made[layer] for layer in (0, 2)]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(states) if leaf.ndim > 1)

    assert bytes_of(3) - bytes_of(2) == NETS.row_bytes(tokens, itemsize)


def test_state_bytes_of_published_models():
    """151 MB of states for a row of Qwen3.5-27B, and 62.9 MB for one of Qwen3.5-35B-A3B."""
    of_27b = DeltaNets(16, 48, 128, 128, 4, (True, True, True, False) * 16)
    of_35b = DeltaNets(16, 32, 128, 128, 4, (True, True, True, False) * 10)
    for nets, states, columns in ((of_27b, 151e6, 2.9e6), (of_35b, 62.9e6, 1.5e6)):
        assert nets.row_bytes(0, 2) == pytest.approx(states + columns, rel=0.01)


class TestEngineConfig:
    """The engine's config for a target with gated delta nets."""

    @pytest.mark.parametrize("reproducible", [True, False])
    def test_defaults(self, reproducible):
        asked = EngineConfig(reproducible=reproducible, max_len=8192)
        config = asked.for_target(HYBRID)
        assert (config.chunk, config.snapshot_every) == (64, 1024)
        assert config.chunk_buckets[-1] * config.chunk == asked.chunk_buckets[-1] * asked.chunk
        assert config.for_target(HYBRID) == config
        assert asked.for_target(TARGET) == asked
        assert asked.for_target(TARGET, HYBRID) == config
        assert asked.for_target(TARGET, TARGET) == asked

    def test_settings_that_are_given_stay(self):
        asked = EngineConfig(prefill_chunk=128, prefill_tokens=128, snapshot_every=100)
        assert asked.for_target(HYBRID) == asked

    def test_without_a_prefix_cache_there_are_no_snapshots(self):
        for every in (None, 100):
            config = EngineConfig(prefix_cache=False, snapshot_every=every).for_target(HYBRID)
            assert (config.chunk, config.snapshot_every) == (64, None)
            assert config.next_snapshot(0, 2000) is None

    @pytest.mark.parametrize("chunk", [1, 32, 63, 65, 96])
    def test_chunks_that_end_within_those_of_the_states_are_refused(self, chunk):
        words = f"prefill_chunk={chunk}: expected a multiple of 64, for a model with gated delta nets"
        with pytest.raises(ValueError, match=words):
            EngineConfig(prefill_chunk=chunk).for_target(HYBRID)

    @pytest.mark.parametrize(("chunk", "tokens"), [(None, 63), (None, 32), (128, 127)])
    def test_a_prefill_batch_has_room_for_a_chunk(self, chunk, tokens):
        with pytest.raises(ValueError, match=f"prefill_tokens={tokens}: expected "):
            EngineConfig(prefill_chunk=chunk, prefill_tokens=tokens).for_target(HYBRID)

    def test_snapshots_of_another_target_are_refused(self):
        with pytest.raises(ValueError, match="snapshot_every=512: expected None without recurrent states"):
            EngineConfig(snapshot_every=512).for_target(TARGET)

    def test_a_short_max_len_has_one_chunk(self):
        """A prompt that is shorter than a chunk is never cut, so that its length is no multiple of 64."""
        config = EngineConfig(max_len=40, page_size=8).for_target(HYBRID)
        assert (config.chunk, config.chunk_buckets[-1]) == (40, config.num_rows)
        assert config.snapshot_step == 40


@pytest.mark.parametrize(
    ("start", "last", "expected"),
    [
        (0, 63, None),  # no page and chunk ends within the prompt
        (0, 64, 64),
        (0, 191, 128),  # the last place before its end
        (64, 191, 128),
        (128, 191, None),
        (0, 256, 256),
        (0, 1000, 256),
        (128, 1000, 256),
        (256, 1000, 512),  # it begins where a snapshot is
        (512, 1000, 768),
        (768, 1000, 960),  # no multiple of 256, but the last place
        (960, 1000, None),
        (0, 0, None),
    ],
)
def test_where_the_next_snapshot_is(start, last, expected):
    config = EngineConfig(page_size=32, prefill_chunk=64, snapshot_every=256)
    assert config.next_snapshot(start, last) == expected
    assert dataclasses.replace(config, snapshot_every=None).next_snapshot(start, last) is None


@pytest.mark.parametrize(
    ("page", "chunk", "every", "places"),
    [
        (64, 64, 1024, [1024, 2048, 2944]),
        (64, 64, 1, [64 * i for i in range(1, 47)]),  # as often as chunks and pages end together
        (48, 64, 100, [192 * i for i in range(1, 16)]),  # rounded up to multiples of 192
        (64, 128, 1000, [1024, 2048, 2944]),
        (64, 64, 10_000, [2944]),
    ],
)
def test_snapshots_of_a_prompt(page, chunk, every, places):
    """Of a prompt of 3,000 tokens, one after another."""
    config, found, start = EngineConfig(page_size=page, prefill_chunk=chunk, snapshot_every=every), [], 0
    while (place := config.next_snapshot(start, 2999)) is not None:
        found.append(start := place)
    assert found == places
