"""Shared experts that have another format than those that are chosen: each of the two is kept as it is stored.

``test_malformed_maps`` breaks their tensors. That shared experts may have another width, the parity of families shows."""

import jax
import numpy as np
import pytest
from engines import in_shards, spread_logits
from greedy_texts import drafted
from mixed_checkpoints import SHARED, mixed_checkpoint, write_mixed
from mtp_checkpoints import with_layers
from safetensors.numpy import load_file
from stored_params import assert_same, assert_stands_for, logits
from tiers import in_tiers
from tiny import SMALL

import jspec
from convert import convert, load_draft, load_folder
from convert.verify import compare, transformers_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.models import build, causal_logits


def with_mtp(folder, name: str):
    """A mixture whose layer for multi-token prediction is stored as its others are."""
    mix = SHARED[name]
    wide = with_layers(folder / "src-wide", mix.architecture, **mix.sizes)
    return write_mixed(folder / "src", wide, mix, load_file(wide / "model.safetensors"))


@pytest.mark.parametrize("name", SHARED)
def test_each_is_kept_as_it_is_stored(tmp_path, name):
    """Without a warning, of the model and of its layer for multi-token prediction, and in a converted folder, too."""
    mix, src = SHARED[name], with_mtp(tmp_path, name)
    config, params = load_folder(src)
    assert (config.experts.shared, config.experts.shared_width) == (0, 256)
    assert {of_map: config.quantization_of(of_map) for of_map in mix.kept} == mix.kept
    assert config == Checkpoint.open(src).target_config
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    layer, drafts = load_draft(src, mtp=True)
    kept = {of_map: form for of_map, form in mix.kept.items() if of_map.startswith("layers.0.")}
    assert {of_map: layer.layers.quantization_of(of_map) for of_map in kept} == kept
    assert_stands_for(drafts, layer, load_draft(tmp_path / "src-wide", "float32", mtp=True)[1])
    convert(src, tmp_path / "out", verify="shapes")
    assert_same(load_folder(tmp_path / "out"), (config, params))
    assert_same(load_draft(tmp_path / "out" / "mtp"), (layer, drafts))


@pytest.mark.parametrize("name", in_tiers(SHARED, test=["plain shared experts"]))
def test_logits_are_those_of_the_numbers_in_the_files(tmp_path, name):
    """As transformers computes them, and two devices, which have half of the experts each and half of the shared one."""
    pytest.importorskip("transformers")
    src = mixed_checkpoint(tmp_path / "src", SHARED[name])
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact
    [wanted] = transformers_logits(tmp_path / "src-wide", [text := np.arange(3, 43)])
    config, params = load_folder(src, "float32")
    model = build(config, params)
    [found], [spread] = (
        np.asarray(one)
        for one in (
            jax.jit(lambda tokens: causal_logits(model, tokens))(text[None]),
            spread_logits(in_shards(model, 2, by_expert=True), text[None]),
        )
    )
    for one in (found, spread):
        assert np.abs(one - wanted).max() / np.abs(wanted).max() < 1e-5


def test_greedy_texts_are_those_of_the_plain_model(tmp_path):
    """With drafts of its own layer for multi-token prediction, and of a model of the same kind."""
    src = with_mtp(tmp_path, "plain shared experts")
    prompts, how = [[5], [7, 8, 9] * 3], {"num_draft_tokens": 3, "dtype": "float32", **SMALL, "prefill_chunk": 64}
    texts = [
        [result.token_ids for result in drafted(jspec.load(target, draft, **how), prompts, most=20, each=False)]
        for target, draft in ((src, "mtp"), (src, src), (tmp_path / "src-wide", src))
    ]
    assert texts[0] == texts[1] == texts[2]
