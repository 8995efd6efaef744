"""The config of gated delta nets: what it refuses, what models may have them, and what a row of them takes."""

import dataclasses

import jax
import pytest
from engines import TARGET

from jspec.config import DeltaNets, Latent
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


def test_those_of_published_models():
    """151 MB of states for a row of Qwen3.5-27B, and 62.9 MB for one of Qwen3.5-35B-A3B."""
    of_27b = DeltaNets(16, 48, 128, 128, 4, (True, True, True, False) * 16)
    of_35b = DeltaNets(16, 32, 128, 128, 4, (True, True, True, False) * 10)
    for nets, states, columns in ((of_27b, 151e6, 2.9e6), (of_35b, 62.9e6, 1.5e6)):
        assert nets.row_bytes(0, 2) == pytest.approx(states + columns, rel=0.01)
