"""``jspec-convert --draft-vocabulary``: which tokens are chosen, what is stored of them, and what is refused."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_heads
from fp8_checkpoints import compressed_tensors, fp8_checkpoint
from heads import random_head
from safetensors.numpy import load_file
from tiny import SMALL, tiny_checkpoint, tiny_tokenizer, write_weights
from tiny_heads import IDS
from tokenizers import pre_tokenizers

import jspec
from convert import Refusal, check, convert, load_draft, load_folder, read_draft_config
from convert.cli import main
from jspec.checkpoints.export import export_draft
from jspec.config import ModelConfig
from jspec.config.heads import BlockConfig, MTPConfig
from jspec.models import build, build_head, flat_params
from jspec.models.params import abstract_params
from jspec.models.quantization import quantize
from jspec.quantization.formats import known_format
from jspec.quantization.weight import Weight

V, Vd = 97, len(IDS)


BLOCK = ModelConfig("Qwen3ForCausalLM", V, 64, 96, 1, 4, 2, 16, 128, qk_norm=True)


def block(folder, config):
    export_draft(folder, config, flat_params(random_head(config)), target_name="target", dtype="float32")
    return folder


def dflash(folder):
    """A head that borrows the target's output head."""
    return block(folder, BlockConfig(BLOCK, V, 64, (1, 2), 4, 5, False, (False,)))


def dspark(folder):
    """A head with a Markov head and an output head of its own."""
    return block(folder, BlockConfig(BLOCK, V, 64, (1, 2), 4, 5, True, (False,), "vanilla", 6, own_head=True))


def mtp(folder):
    """Multi-token prediction layers without their target, whose output head they borrow."""
    config = MTPConfig(ModelConfig("LlamaForCausalLM", V, 64, 96, 2, 4, 2, 16, 128))
    export_draft(folder, config, flat_params(random_head(config)), target_name="target", dtype="float32")
    return folder


def full_eagle3(folder):
    return tiny_heads.eagle3(folder, draft_vocab_size=V)


def tied(folder):
    return tiny_checkpoint(folder, seed=3, tie_word_embeddings=True)


def borrowed_medusa(folder):
    return tiny_heads.medusa(folder, version="2")


OWN = [tiny_checkpoint, tied, tiny_heads.pard, tiny_heads.mlp_speculator, tiny_heads.medusa, full_eagle3, dspark]
BORROWED = [tiny_heads.eagle, borrowed_medusa, dflash, mtp]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target") / "target")


def written(model, text="bbbbbaaaacccddé\n", **keys):
    """A model with a tokenizer, and a corpus beside it."""
    folder = tiny_checkpoint(model, vocab_size=300, **keys)
    tiny_tokenizer(folder)
    corpus = folder.parent / "corpus.txt"
    corpus.write_text(text, "utf-8")
    return folder, corpus


@pytest.mark.parametrize("make", [*OWN, *BORROWED], ids=lambda make: make.__name__)
def test_the_rows_of_the_tokens_are_stored(tmp_path, target, make):
    src, out = make(tmp_path / "src"), tmp_path / "out"
    report = convert(src, out, draft_vocabulary=IDS[::-1], target=target if make in BORROWED else None, verify="shapes")
    assert sum(note.startswith("draft vocabulary of 6 of 97 tokens") for note in report.notes) == 1
    (plain, original), (config, params) = load_draft(src), load_draft(out)
    assert config == read_draft_config(out)
    assert check(out) == []
    assert (config.reduced, plain.reduced) == (True, False)
    assert (config.dimensions["V"], config.dimensions["Vd"]) == (V, Vd)
    expected = np.full(V, -1, np.int32)
    expected[IDS] = np.arange(Vd)
    np.testing.assert_array_equal(params["draft_ids"], expected)
    assert {n: (a.shape, a.dtype) for n, a in params.items()} == {
        n: (leaf.shape, leaf.dtype) for n, leaf in abstract_params(config).items()
    }
    heads = [name for name, array in params.items() if array.shape[0] == Vd]
    assert heads
    borrowed = load_folder(target)[1]["head.weight"] if make in BORROWED else original.get("embedding")
    for name, array in params.items():
        if name in heads:
            np.testing.assert_array_equal(array, original.get(name, borrowed)[IDS])
        elif name != "draft_ids":
            np.testing.assert_array_equal(array, original[name])
    assert report.parameters == config.num_parameters == sum(array.size for array in params.values())


@pytest.mark.parametrize(
    "make", [tied, tiny_heads.mlp_speculator, tiny_heads.eagle, mtp], ids=lambda make: make.__name__
)
def test_quantised_as_well(tmp_path, target, make):
    src, out = make(tmp_path / "src"), tmp_path / "out"
    convert(src, out, quantize="int8", draft_vocabulary=IDS, target=None if make is tied else target, verify="shapes")
    plain, (config, params) = load_draft(src)[1], load_draft(out)
    assert config.quantization == "int8"
    name = "heads.0" if make is tiny_heads.mlp_speculator else "head"
    origin = plain["embedding"] if make is tied else plain.get("heads.0.weight", load_folder(target)[1]["head.weight"])
    for found, expected in zip(
        (params[f"{name}.weight"], params[f"{name}.scale"]), quantize(origin[IDS], "int8"), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    if make is tied:  # it is no output head any more
        np.testing.assert_array_equal(params["embedding"], plain["embedding"])


def test_rows_of_a_quantised_target(tmp_path, target):
    """They are those that its numbers stand for; they do not make a bfloat16 head a float32 one."""
    convert(target, tmp_path / "int8", quantize="int8")
    src = tiny_heads.eagle(tmp_path / "src")
    convert(src, tmp_path / "out", draft_vocabulary=IDS, target=tmp_path / "int8", dtype="float32")
    theirs, ours = load_folder(tmp_path / "int8")[1], load_draft(tmp_path / "out")[1]
    wide = Weight(theirs["head.weight"], theirs["head.scale"], form=known_format("int8")).dequantize()
    np.testing.assert_array_equal(ours["head.weight"], wide[IDS])
    narrow = tiny_heads.eagle(tmp_path / "narrow")
    write_weights(narrow, {n: a.astype(ml_dtypes.bfloat16) for n, a in load_file(narrow / "model.safetensors").items()})
    report = convert(narrow, tmp_path / "bfloat16", draft_vocabulary=IDS, target=tmp_path / "int8")
    assert report.dtype == "bfloat16"
    assert "the rows of the target's output head are dequantised" in report.notes


def test_a_draft_model_that_is_stored_quantised(tmp_path):
    """Its scales are those of the same rows."""
    src = fp8_checkpoint(tmp_path / "src", quantization=compressed_tensors(ignore=()), head=True)
    convert(src, tmp_path / "out", draft_vocabulary=IDS, verify="shapes")
    (_, original), (_, params) = load_folder(src), load_draft(tmp_path / "out")
    for name in ("head.weight", "head.scale"):
        np.testing.assert_array_equal(params[name].view(np.uint8), original[name][IDS].view(np.uint8))


def test_the_most_frequent_tokens(tmp_path, capsys):
    """Those of the corpus, and the stop tokens and special tokens, which are always there; ascending."""
    src, corpus = written(tmp_path / "src", eos_token_id=[2, 299])
    letters = {letter: 2 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in "abcd"}
    arguments = [str(src), str(tmp_path / "out"), "--corpus", str(corpus), "--draft-vocabulary", "7"]
    assert main([*arguments, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert "[7, 64]" in dry
    assert "d2t (draft vocabulary)" in dry
    assert main(arguments) == 0
    assert "note: draft vocabulary of 7 of 300 tokens, 70.6% of those of" in capsys.readouterr().out
    config, params = load_draft(tmp_path / "out")
    chosen = np.flatnonzero(params["draft_ids"] >= 0).tolist()
    assert chosen == sorted([0, 1, 2, 299, letters["a"], letters["b"], letters["c"]])
    assert params["draft_ids"][chosen].tolist() == list(range(7))
    assert config.draft_vocab_size == 7
    report = convert(src, tmp_path / "many", draft_vocabulary=100, corpus=corpus)
    assert any("it has only 7 different ones" in note for note in report.notes)
    ids = load_draft(tmp_path / "many")[1]["draft_ids"]
    assert (ids[:90] >= 0).all()  # with no text left, those of the lowest ids


def test_the_tokenizer_of_the_target_counts_for_a_head(tmp_path):
    target, corpus = written(tmp_path / "target")
    head = tiny_heads.eagle(tmp_path / "head", vocab_size=300)
    write_weights(head, load_file(head / "model.safetensors") | {"embed_tokens.weight": np.ones((300, 64), np.float32)})
    convert(head, tmp_path / "out", draft_vocabulary=20, corpus=corpus, target=target)
    convert(target, tmp_path / "model", draft_vocabulary=20, corpus=corpus)
    ours, theirs = (load_draft(tmp_path / name)[1]["draft_ids"] for name in ("out", "model"))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("form", ["json", "txt", "npy"])
def test_a_list_in_a_file(tmp_path, form):
    file = tmp_path / f"ids.{form}"
    if form == "npy":
        np.save(file, np.array(IDS))
    else:
        file.write_text(json.dumps(IDS) if form == "json" else "\n".join(map(str, IDS)))
    src = tiny_checkpoint(tmp_path / "src")
    assert main([str(src), str(tmp_path / "out"), "--draft-vocabulary", str(file)]) == 0
    assert np.flatnonzero(load_draft(tmp_path / "out")[1]["draft_ids"] >= 0).tolist() == IDS


def test_a_list_without_a_stop_token(tmp_path):
    report = convert(tiny_checkpoint(tmp_path / "src"), tmp_path / "out", draft_vocabulary=[3, 4])
    assert (
        "draft vocabulary of 2 of 97 tokens, without 2, at which texts stop: the target alone can end one"
        in report.notes
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (300, "draft_vocabulary=300: expected 1..299, fewer than the 300 tokens of the vocabulary"),
        (0, "draft_vocabulary=0: expected 1..299"),
        (2, "draft_vocabulary=2: expected at least 3, as many as there are stop tokens and special tokens"),
        ([1, 300], r"holds token 300: expected ids in 0\.\.299"),
        ([1, -1], "holds token -1: expected ids in"),
        ([1, 5, 5], "holds token 5 2 times: expected each once"),
        ([], r"expected a list of token ids, integers in 0\.\.299"),
        ([1.5], "expected a list of token ids"),
        (list(range(300)), "holds all 300 tokens of the vocabulary: expected fewer"),
        (
            "ids.csv",
            "'ids.csv': expected a number of tokens, or a file of their ids that ends in one of .json, .txt, .npy",
        ),
        ("missing.json", "'missing.json': expected a number of tokens, or a file"),
    ],
)
def test_invalid_draft_vocabularies_are_refused(tmp_path, value, words):
    src, corpus = written(tmp_path / "src")
    with pytest.raises(Refusal, match=words):
        convert(src, tmp_path / "out", draft_vocabulary=value, corpus=corpus if isinstance(value, int) else None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("ids.json", b"{", "cannot be read as a list of token ids"),
        ("ids.txt", b"1 two", "cannot be read as a list of token ids"),
        ("ids.npy", b"no", "cannot be read as a list of token ids"),
        ("ids.json", b'{"a": 1}', "expected a list of token ids"),
    ],
)
def test_a_file_without_a_list_is_refused(tmp_path, capsys, name, content, words):
    (tmp_path / name).write_bytes(content)
    src = tiny_checkpoint(tmp_path / "src")
    assert main([str(src), str(tmp_path / "out"), "--draft-vocabulary", str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is no file; give a text file"),
        (b"", "holds no text"),
        (b"\xff\xfe\xff", "expected a text file in UTF-8"),
    ],
)
def test_an_unusable_corpus_is_refused(tmp_path, content, words):
    src, corpus = written(tmp_path / "src")
    corpus.unlink()
    if content is not None:
        corpus.write_bytes(content)
    with pytest.raises(Refusal, match=words):
        convert(src, tmp_path / "out", draft_vocabulary=20, corpus=corpus)


def test_arguments_that_need_each_other(tmp_path, target):
    src, corpus = written(tmp_path / "src")
    for options, words in (
        ({"draft_vocabulary": 20}, "draft_vocabulary=20: corpus is missing"),
        ({"corpus": corpus}, "counts the tokens of a draft vocabulary; give draft_vocabulary"),
        ({"draft_vocabulary": [3], "corpus": corpus}, "counts tokens where draft_vocabulary is a number"),
    ):
        with pytest.raises(Refusal, match=words):
            convert(src, tmp_path / "out", **options)
    bare = tiny_checkpoint(tmp_path / "bare")
    with pytest.raises(
        Refusal, match=r"the corpus needs a tokenizer, and it has none; give a target that has tokenizer\.json"
    ):
        convert(bare, tmp_path / "out", draft_vocabulary=20, corpus=corpus)
    for make in BORROWED:
        head = make(tmp_path / make.__name__)
        with pytest.raises(Refusal, match=r"give (the target's folder as )?target"):
            convert(head, tmp_path / "out", draft_vocabulary=IDS)
    with pytest.raises(Refusal, match="--verify logits compares with transformers, which has logits for the whole"):
        convert(bare, tmp_path / "out", draft_vocabulary=IDS, verify="logits")


def test_a_second_draft_vocabulary_is_refused(tmp_path):
    with pytest.raises(Refusal, match="has a draft vocabulary of 40 of 97 tokens already; convert it without"):
        convert(tiny_heads.eagle3(tmp_path / "head"), tmp_path / "out", draft_vocabulary=IDS)


def test_a_head_whose_copy_would_not_cap_its_logits(tmp_path):
    target = tiny_checkpoint(tmp_path / "target", "Gemma2ForCausalLM")
    with pytest.raises(
        Refusal, match=r"are divided or capped, which a copy of its output head in this .* would not do"
    ):
        convert(dflash(tmp_path / "head"), tmp_path / "out", draft_vocabulary=IDS, target=target)


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("make", [tiny_heads.eagle, borrowed_medusa, mtp], ids=lambda make: make.__name__)
def test_a_copy_of_rows_gives_the_targets_logits(tmp_path, architecture, make):
    """Divided and capped as the target's are."""
    target = tiny_checkpoint(tmp_path / "target", architecture)
    convert(make(tmp_path / "head"), tmp_path / "out", draft_vocabulary=IDS, target=target)
    model, whole = build(*load_folder(target)), build_head(*load_draft(tmp_path / "head"))
    head, hidden = build_head(*load_draft(tmp_path / "out")), np.random.default_rng(0).standard_normal((1, 2, 64))
    more = (3,) if make is borrowed_medusa else ()
    found, expected = (np.asarray(one.logits(jnp.asarray(hidden, jnp.float32), model, *more)) for one in (head, whole))
    np.testing.assert_allclose(found, expected[..., IDS], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [tied, tiny_heads.pard], ids=lambda make: make.__name__)
def test_a_reduced_model_is_refused_as_target(tmp_path, target, make):
    out = convert(make(tmp_path / "src"), tmp_path / "out", draft_vocabulary=IDS).out
    words = (
        r"has logits for 6 of 97 tokens \(draft_vocab_size in manifest.json\), so it can only draft; give it as draft="
    )
    for refused in (
        lambda: jspec.load(out, **SMALL),
        lambda: jspec.load(out, target, **SMALL),
        lambda: load_folder(out),
    ):
        with pytest.raises(Refusal, match=words):
            refused()
    with pytest.raises(Refusal, match=words if make is tied else "is the target to be, but holds a draft head"):
        convert(tiny_heads.eagle(tmp_path / "head"), tmp_path / "again", target=out)


def test_layers_that_are_not_there_have_no_draft_vocabulary(tmp_path, target):
    with pytest.raises(Refusal, match="holds no multi-token prediction layers"):
        convert(target, tmp_path / "out", mtp=True, draft_vocabulary=IDS)
    with pytest.raises(
        Refusal, match=r"mtp=True: keeps multi-token prediction layers beside a language model, and this"
    ):
        convert(mtp(tmp_path / "alone"), tmp_path / "out", mtp=True, draft_vocabulary=IDS, target=target)
