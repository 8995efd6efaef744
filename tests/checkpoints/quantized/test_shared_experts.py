"""Shared experts that have another format than those that are chosen: each of the two is kept as it is stored.

``test_malformed_maps`` breaks their tensors. That shared experts may have another width, the parity of families shows."""

import numpy as np
import pytest
from engines import in_shards, spread_logits
from greedy_texts import drafted
from mixed_checkpoints import SHARED, mixed_checkpoint, write_mixed
from mtp_checkpoints import with_layers
from safetensors.numpy import load_file
from stored_params import assert_same, assert_stands_for
from tiny import SMALL

import jspec
from convert import convert, load_draft, load_folder
from convert.verify import jspec_logits, transformers_logits
from jspec.models import build

PLAIN = SHARED["plain shared experts"]


def with_mtp(folder, mix):
    """A mixture whose layer for multi-token prediction is stored as its others are."""
    wide = with_layers(folder / "src-wide", mix.architecture, **mix.sizes)
    return write_mixed(folder / "src", wide, mix, load_file(wide / "model.safetensors"))


@pytest.mark.parametrize("mix", SHARED.values(), ids=SHARED)
def test_each_is_kept_as_it_is_stored(tmp_path, mix):
    """Without a warning, of the model and of its layer for multi-token prediction, and in a converted folder, too."""
    src, wide, out = with_mtp(tmp_path, mix), tmp_path / "src-wide", tmp_path / "out"
    model, layer = load_folder(src), load_draft(src, mtp=True)
    assert {name: model[0].quantization_of(name) for name in mix.kept} == mix.kept
    assert layer[0].layers.quantization_of("layers.0.mlp.shared.down") == mix.kept["layers.1.mlp.shared.down"]
    for (config, params), floats in ((model, load_folder(wide)), (layer, load_draft(wide, "float32", mtp=True))):
        assert_stands_for(params, config, floats[1])
    convert(src, out, verify="shapes")
    assert_same(load_folder(out), model)
    assert_same(load_draft(out / "mtp"), layer)


def test_logits_are_those_of_the_numbers_in_the_files(tmp_path):
    """As transformers computes them. Of two devices each has some of the experts, and half of the shared one."""
    pytest.importorskip("transformers")
    src, text = mixed_checkpoint(tmp_path / "src", PLAIN), np.arange(3, 43)
    [wanted] = transformers_logits(tmp_path / "src-wide", [text])
    model = build(*load_folder(src, "float32"))
    spread = spread_logits(in_shards(model, 2, by_expert=True), text[None])
    for found in (*jspec_logits(model, [text]), *spread):
        assert np.abs(found - wanted).max() / np.abs(wanted).max() < 1e-5


def test_greedy_texts_are_those_of_the_plain_model(tmp_path):
    """With drafts of its own layer for multi-token prediction, and of a model of the same kind."""
    src, how = with_mtp(tmp_path, PLAIN), {"num_draft_tokens": 3, "dtype": "float32", **SMALL, "prefill_chunk": 64}
    texts = [
        [result.token_ids for result in drafted(jspec.load(target, draft, **how), [[5], [7, 8, 9] * 3], most=20)]
        for target, draft in ((src, "mtp"), (tmp_path / "src-wide", src))
    ]
    assert texts[0] == texts[1]
