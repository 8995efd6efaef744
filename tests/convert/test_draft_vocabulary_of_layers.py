"""Reduced draft vocabularies of multi-token prediction layers that are stored beside their target."""

import numpy as np
import pytest
from heads import VARIANTS, random_head
from mtp_checkpoints import with_layers
from tiny import SMALL, tiny_tokenizer
from tiny_heads import IDS, V

import jspec
from convert import Refusal, check, convert, load_draft, load_folder
from convert.cli import main
from jspec.checkpoints.export import export_draft
from jspec.models import flat_params
from jspec.models.quantization import quantize


@pytest.mark.parametrize("architecture", ["Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize(("layers", "kind"), [(1, None), (2, None), (1, "int8"), (1, "fp8")])
def test_layers_beside_their_target(tmp_path, architecture, layers, kind):
    """The target stays whole. The layers, which have experts and latent attention, get rows of its output head."""
    src, out = with_layers(tmp_path / "src", architecture, layers), tmp_path / "out"
    report = convert(src, out, mtp=True, draft_vocabulary=IDS, quantize=kind, verify="shapes")
    assert f"mtp/: draft vocabulary of 6 of {V} tokens" in [note.split(",")[0] for note in report.notes]
    assert check(out) == []
    convert(src, tmp_path / "whole", quantize=kind)
    same_params(load_folder(out), load_folder(tmp_path / "whole"))
    (config, params), (_, whole) = load_draft(out / "mtp"), load_draft(tmp_path / "whole" / "mtp")
    assert (config.reduced, config.dimensions["Vd"], config.quantization) == (True, len(IDS), kind)
    rows = load_folder(src)[1]["head.weight"][IDS]
    wanted = (rows,) if kind is None else quantize(rows, kind)
    for name, array in zip(("head.weight", "head.scale"), wanted, strict=False):
        np.testing.assert_array_equal(params[name], array)
    assert np.flatnonzero(params["draft_ids"] >= 0).tolist() == IDS
    same_params((None, {name: params[name] for name in whole}), (None, whole))
    convert(src, out, mtp=True, quantize=kind, overwrite=True)  # again, without a draft vocabulary
    same_params(load_draft(out / "mtp"), load_draft(tmp_path / "whole" / "mtp"))


def same_params(found, wanted):
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert all(np.array_equal(array, wanted[1][name]) for name, array in found[1].items())


@pytest.mark.parametrize("given", [{}, {"tensor_parallel": 2}], ids=["one device", "shards"])
def test_layers_with_some_rows_draft_for_their_target(tmp_path, given):
    """The greedy texts are those of the target alone."""
    src, ids = with_layers(tmp_path / "src", layers=2), list(range(0, V, 2))
    convert(src, tmp_path / "out", mtp=True, draft_vocabulary=ids, quantize="int8")
    llm, plain = jspec.load(tmp_path / "out", "mtp", **SMALL, **given), jspec.load(tmp_path / "out", **SMALL)
    prompts, how = [[5], [7, 8, 9] * 3, list(range(3, 27))], {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    found, wanted = (jspec.generate(one, prompts, **how) for one in (llm, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert sum(one.stats.num_draft_tokens for one in found) > 0


def test_the_tokenizer_beside_the_layers_counts(tmp_path, capsys):
    src, corpus = with_layers(tmp_path / "src", vocab_size=300), tmp_path / "corpus.txt"
    tiny_tokenizer(src)
    corpus.write_text("aaaabbbccd", "utf-8")
    arguments = [str(src), str(tmp_path / "out"), "--mtp", "--draft-vocabulary", "7", "--corpus", str(corpus)]
    assert main([*arguments, "--dry-run"]) == main(arguments) == 0
    assert capsys.readouterr().out.count("note: mtp/: draft vocabulary of 7 of 300 tokens, ") == 2
    convert(src, tmp_path / "model", draft_vocabulary=7, corpus=corpus)
    ours, theirs = (load_draft(tmp_path / name)[1]["draft_ids"] for name in ("out/mtp", "model"))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_vocabulary": V, "corpus": "corpus.txt"}, f"draft_vocabulary={V}: expected 1..{V - 1}"),
        ({"draft_vocabulary": 20}, "draft_vocabulary=20: corpus is missing"),
        ({"draft_vocabulary": 20, "corpus": "corpus.txt"}, "the corpus needs a tokenizer, and it has none"),
        ({"draft_vocabulary": [1, V]}, rf"holds token {V}: expected ids in 0\.\.{V - 1}"),
        ({"corpus": "corpus.txt"}, "counts the tokens of a draft vocabulary; give draft_vocabulary"),
    ],
)
def test_invalid_draft_vocabularies_of_layers_are_refused(tmp_path, options, words):
    src = with_layers(tmp_path / "src")
    with pytest.raises(Refusal, match=words):
        convert(src, tmp_path / "out", mtp=True, **options)
    assert not (tmp_path / "out").exists()


def test_layers_are_not_kept_beside_a_draft_model(tmp_path):
    report = convert(with_layers(tmp_path / "src"), tmp_path / "out", draft_vocabulary=IDS)
    [note] = [
        note for note in report.notes if note.startswith("multi-token prediction layers are left out; with mtp=True")
    ]
    assert "they get the draft vocabulary, and their model stays whole" in note
    assert not (tmp_path / "out" / "mtp").exists()


@pytest.mark.parametrize("name", ["eagle-small", "mlp-small", "medusa-small", "mtp-plain-output-small"])
def test_layouts_that_cannot_state_it(tmp_path, name):
    config = VARIANTS[name].with_quantization(None)
    with pytest.raises(ValueError, match="draft_vocab_size=20: expected None, as this layout has all tokens"):
        export_draft(tmp_path / "head", config, flat_params(random_head(config)), target_name="target")
