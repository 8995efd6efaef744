"""Drafters in int8: which of their maps quantise their inputs, and how little that changes their drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import HYBRID_DRAFT, LATENTS, TARGET, causal, in_shards, spread_logits
from flax import nnx
from heads import LAYERS, VARIANTS, random_head, serving

from jspec.config import Experts
from jspec.config.heads import EagleConfig
from jspec.models import Decoder, causal_logits
from jspec.models.kv_cache import CausalView
from jspec.models.layers import Linear, Norm
from jspec.models.params import flat_params, init
from jspec.pallas.matmul.small_batch import small_batch_tiling

INT8 = dataclasses.replace(TARGET, quantization="int8")
# Its MLPs are wide enough for split-K.
WIDE = dataclasses.replace(INT8, hidden_size=64, intermediate_size=2048)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Programs are lowered as for the GPUs on which products are split."""
    monkeypatch.setattr("jspec.pallas.matmul.table.on_hopper", lambda: True)


def quantizing(module) -> set[str]:
    """The paths of the maps that quantise their inputs, and of the norms that quantise their outputs."""
    parts = {".".join(map(str, path)): part for path, part in nnx.iter_graph(module) if isinstance(part, Linear | Norm)}
    return {
        path
        for path, part in parts.items()
        if (part.quantize_inputs if isinstance(part, Linear) else part.quantize_outputs)
    }


def distance(actual, wanted) -> float:
    """The root of the mean square of what differs, as a part of that of what is wanted."""
    actual, wanted = (np.asarray(x, np.float64) for x in (actual, wanted))
    return float(np.sqrt(np.mean((actual - wanted) ** 2) / np.mean(wanted**2)))


def tokens_of(config) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(config.vocab_size, size=(2, 12)), jnp.int32)


def layer(i: int, *names: str) -> set[str]:
    return {f"layers.{i}.{name}" for name in names}


MAPS = "attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"
NORMS = "attention_norm", "mlp_norm"
WHICH = {
    "eagle3-int8": layer(0, *MAPS, "mlp_norm") | {"head"},  # its attention reads two norms side by side
    "eagle-small": layer(0, *MAPS[1:], "mlp_norm") | {"head"},  # its attention reads the residual stream
    "mtp-int8": layer(0, *MAPS, *NORMS),  # the output head is the target's
    "dspark-int8": layer(0, *MAPS, "mlp_norm") | layer(1, *MAPS, "mlp_norm") | {"head"},  # normed, beside the context
    "dflash2-int8": layer(0, *MAPS) | layer(1, *MAPS),  # convolutions read what the norms return
    "domino-int8": layer(0, *MAPS, "mlp_norm") | layer(1, *MAPS, "mlp_norm"),
    "lilicorr-int8": layer(0, *MAPS, "mlp_norm") | layer(1, *MAPS, "mlp_norm"),  # whose own layers have floats
    "eagle": set(),
    "p-eagle-fp8": set(),
    "eagle-int4": set(),
    "mlp-small": set(),
    "medusa-rows": set(),
}


@pytest.mark.parametrize("name", WHICH)
def test_which_maps_of_a_draft_head_quantise_their_inputs(name):
    config = VARIANTS[name]
    assert quantizing(random_head(config)) == set()
    assert quantizing(serving(config, random_head(config))) == WHICH[name]


def test_which_maps_of_a_draft_model_quantise_their_inputs():
    model = Decoder(INT8, rngs=nnx.Rngs(0))
    assert quantizing(model) == set()
    assert not model.quantize_head_inputs
    expected = set().union(*(layer(i, *MAPS, *NORMS) for i in range(3)))
    drafter = model.prepare()
    assert quantizing(drafter) == expected
    assert drafter.quantize_head_inputs
    parts = {path for path, part in nnx.iter_graph(drafter) if isinstance(part, Linear) and part.allow_partial_sums}
    assert {path[-1] for path in parts} == {"out", "down"}


def test_betas_and_decays_are_computed_from_floats():
    """Of a gated delta net, whose first map quantises what its norm returns."""
    actual = quantizing(Decoder(dataclasses.replace(HYBRID_DRAFT, quantization="int8"), rngs=nnx.Rngs(0)).prepare())
    of_delta_net = layer(0, "delta_net.qkvz", "delta_net.out", *MAPS[2:], "mlp_norm")
    assert actual == of_delta_net | layer(1, *MAPS, *NORMS)


@pytest.mark.parametrize("config", [INT8, *(VARIANTS[name] for name in ("eagle3-int8", "p-eagle-fp8", "medusa-rows"))])
def test_preparing_changes_nothing_and_copies_no_array(config):
    model = init(config, nnx.Rngs(0))
    before, graph = dict(flat_params(model)), nnx.graphdef(model)
    after = flat_params(model.prepare())
    assert nnx.graphdef(model) == graph
    assert all(flat_params(model)[name] is array for name, array in before.items())
    assert all(after[name] is before[name] for name in after.keys() & before.keys())
    assert after.keys() ^ before.keys() <= {"mask_hidden", "mask_feature", "draft_tokens"}


def test_a_residual_stream_without_norms_is_not_quantised():
    after = dataclasses.replace(INT8, norm_placement="after")
    actual = quantizing(Decoder(after, rngs=nnx.Rngs(0)).prepare())
    assert actual == set().union(*(layer(i, "attention.out", "mlp.down") for i in range(3)))


def test_inputs_of_experts_are_not_quantised():
    mixed = dataclasses.replace(INT8, experts=Experts(4, 2, 24))
    actual = quantizing(Decoder(mixed, rngs=nnx.Rngs(0)).prepare())
    assert actual == set().union(*(layer(i, *MAPS[:2], "attention_norm") for i in range(3)))


@pytest.mark.parametrize(
    "config",
    [
        INT8,
        WIDE,
        dataclasses.replace(INT8, gated_mlp=False),
        dataclasses.replace(INT8, activation="gelu", tie_embeddings=True),
        dataclasses.replace(INT8, norm_placement="around", mlp_bias=True, output_bias=True),
        dataclasses.replace(INT8, norm_placement="after_sum"),
        dataclasses.replace(LATENTS, quantization="int8"),
        dataclasses.replace(HYBRID_DRAFT, quantization="int8"),
    ],
    ids=["plain", "wide", "no gate", "gelu, tied", "around, biases", "after sum", "latents", "delta nets"],
)
def test_logits_of_a_draft_model_are_close(config):
    model, tokens = Decoder(config, rngs=nnx.Rngs(0)), tokens_of(config)
    wanted = np.asarray(causal(model)(tokens))
    error = distance(causal(model.prepare())(tokens), wanted)
    assert 1e-4 < error < 0.04  # quantisation shows, but little


def test_partial_sums_reach_the_residual_stream():
    model, tokens = Decoder(WIDE, rngs=nnx.Rngs(0)).prepare(), tokens_of(WIDE)
    tiling = small_batch_tiling(tokens.size, WIDE.hidden_size, WIDE.intermediate_size, allow_partial_sums=True)
    assert tiling.num_splits == 2
    with_partial_sums = np.asarray(jax.jit(functools.partial(causal_logits, model))(tokens))
    for module in model.layers:
        module.attention.out.allow_partial_sums = module.mlp.down.allow_partial_sums = False
    assert (
        0 < distance(with_partial_sums, causal(model)(tokens)) < 0.01
    )  # sums in another order, rounded once more or less


@pytest.mark.parametrize("norms", [False, True])
def test_hidden_states_of_a_draft_head_are_close(norms):
    config = EagleConfig(LAYERS, norms=norms).with_quantization("int8")
    head, rng = random_head(config), np.random.default_rng(0)
    embedded, features = (jnp.asarray(rng.standard_normal((2, 9, 16)), jnp.float32) for _ in range(2))
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32)[None], (2, 9))

    def hidden(head):
        return head(embedded, features, positions, (None,) * 2, CausalView(positions))[0]

    assert 1e-4 < distance(hidden(serving(config, head)), hidden(head)) < 0.04


def test_a_sharded_draft_model_quantises_its_own_part_of_inputs():
    model, tokens = Decoder(INT8, rngs=nnx.Rngs(0)), tokens_of(INT8)
    wanted = np.asarray(causal(model)(tokens))
    spread = in_shards(model, 2).prepare()
    assert 1e-4 < distance(spread_logits(spread, tokens), wanted) < 0.04
