"""``load`` with draft heads: the method follows from the checkpoint, and a head of another target is refused."""

import json
import warnings

import pytest
import tiny_heads
from safetensors.numpy import load_file, save_file
from tiny import SMALL, tiny_checkpoint

import convert
import jspec
from jspec.checkpoints.files.refusal import Refusal
from jspec.loading.modules import build_draft_module
from jspec.models import build

K3 = jspec.Speculation(num_draft_tokens=3)
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = [[3, 4, 5], [7], list(range(20, 45))]
METHODS = {
    tiny_heads.eagle: "eagle",
    tiny_heads.eagle3: "eagle3",
    tiny_heads.p_eagle: "parallel",
    tiny_heads.pard: "parallel",
    tiny_heads.mlp_speculator: "mlp",
    tiny_heads.medusa: "medusa",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "target", num_hidden_layers=8)


@pytest.fixture(scope="module")
def plain(target):
    return [result.token_ids for result in jspec.generate(jspec.load(target, **SMALL), PROMPTS, **GREEDY)]


@pytest.mark.parametrize("make", METHODS, ids=lambda make: make.__name__)
def test_the_method_follows_from_the_checkpoint(target, plain, tmp_path, make):
    """And the text is the target's. Straight from the published layout, and converted."""
    head, converted = make(tmp_path / "head"), tmp_path / "converted"
    convert.convert(head, converted)
    for folder in (head, converted):
        llm = jspec.load(target, folder, speculation=K3, **SMALL)
        assert llm.method == METHODS[make]
    results = jspec.generate(llm, PROMPTS, **GREEDY)
    assert [result.token_ids for result in results] == plain
    assert sum(result.stats.num_draft_tokens for result in results) > 0
    assert llm.engine.num_compilations == 3


@pytest.mark.parametrize("make", [*METHODS, tiny_checkpoint], ids=lambda make: make.__name__)
def test_a_draft_in_eight_bits_with_few_tokens_changes_nothing(target, plain, tmp_path, make):
    """Greedy text is the target's own, whatever a draft rounds and whichever tokens it knows; nothing compiles again."""
    what: dict = {"quantize": "int8" if make is not tiny_heads.mlp_speculator else "fp8"}
    if make not in (tiny_heads.eagle3, tiny_heads.p_eagle):  # which have a draft vocabulary
        what |= {"draft_vocabulary": sorted({*plain[0][::2], 2, 3, 90})}
    if make is tiny_heads.eagle:
        what["target"] = target
    src = target if make is tiny_checkpoint else make(tmp_path / "head")
    llm = jspec.load(target, convert.convert(src, tmp_path / "out", **what).out, speculation=K3, **SMALL)
    results = jspec.generate(llm, PROMPTS, **GREEDY)
    assert [result.token_ids for result in results] == plain
    assert sum(result.stats.num_draft_tokens for result in results) > 0
    assert llm.engine.num_compilations == 3
    if make is tiny_checkpoint:  # the target itself, which agrees where it knows the token
        rounds = sum(result.stats.num_steps for result in results)
        accepted = sum(result.stats.num_accepted_draft_tokens for result in results)
        assert 0 < accepted < 3 * rounds


def test_a_speculators_head_brings_its_target(target, tmp_path):
    head = tiny_heads.speculators(tmp_path / "head", verifier=str(target))
    llm = jspec.load(head, speculation=K3, **SMALL)
    assert llm.method == "eagle3"
    assert llm.target.config.num_layers == 8
    beside = tiny_heads.speculators(tmp_path / "beside", "peagle", verifier="../target")
    with pytest.raises(ValueError, match=r"is a draft head for '../target', which is no folder here; download"):
        jspec.load(beside, **SMALL)
    tiny_checkpoint(tmp_path / "target", num_hidden_layers=8)
    assert jspec.load(beside, speculation=jspec.Speculation(num_draft_tokens=2), **SMALL).method == "parallel"


@pytest.mark.parametrize(
    "make", [make for make in METHODS if make is not tiny_heads.pard], ids=lambda make: make.__name__
)
@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"hidden_size": 32}, "hidden size of 64, and this target's is 32"),
        ({"vocab_size": 101}, "vocabulary of 97, and this target's is 101"),
    ],
)
def test_a_head_of_another_target_is_refused_with_both_numbers(tmp_path, make, size, message):
    other = tiny_checkpoint(tmp_path / "other", num_hidden_layers=8, **size)
    with pytest.raises(ValueError, match=message):
        jspec.load(other, make(tmp_path / "head"), speculation=K3, **SMALL)


def test_layer_ids_beyond_the_target_are_refused(target, tmp_path):
    head = tiny_heads.eagle3(tmp_path / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 8]})
    with pytest.raises(Refusal, match="aux_convention"):
        jspec.load(target, head, **SMALL)
    with pytest.raises(ValueError, match=r"layers \(3, 5, 9\), and the target has 8 layers"):
        jspec.load(target, head, aux_convention="output_of", **SMALL)
    assert jspec.load(target, head, aux_convention="input_of", **SMALL).method == "eagle3"


def test_ambiguous_settings_require_an_option(target, tmp_path):
    head = tiny_heads.eagle3(tmp_path / "head", norm_output=True)
    with pytest.raises(Refusal, match=r"norm_output=True can mean .*norm_output="):
        jspec.load(target, head, **SMALL)
    assert jspec.load(target, head, norm_output="before_head", **SMALL).method == "eagle3"
    masks = tiny_heads.p_eagle(tmp_path / "masks", ptd_token_id=None)
    with pytest.raises(Refusal, match="mask_token_id="):
        jspec.load(target, masks, **SMALL)
    assert jspec.load(target, masks, mask_token_id=tiny_heads.MASK, **SMALL).method == "parallel"


def test_a_head_is_no_target(target, tmp_path):
    head = tiny_heads.eagle(tmp_path / "head")
    with pytest.raises(ValueError, match="draft head"):
        jspec.load(head, **SMALL)


def test_more_drafts_than_weights_are_cut_with_a_warning(target, tmp_path):
    head = tiny_heads.medusa(tmp_path / "head")
    with pytest.warns(UserWarning, match="num_draft_tokens=8: the medusa checkpoint has weights for 3"):
        llm = jspec.load(target, head, speculation=jspec.Speculation(num_draft_tokens=8), **SMALL)
    assert llm.speculation.num_draft_tokens == llm.engine.runner.num_draft_tokens == 3


def test_auto_drafts_no_more_than_there_are_weights(target, tmp_path):
    """Without a word, unless more were asked for."""
    head = tiny_heads.medusa(tmp_path / "head")
    llm = jspec.load(target, head, speculation=jspec.Speculation("auto"), **SMALL)
    assert llm.speculation.draft_lengths == (0, 1, 2, 3)
    assert llm.engine.runner.num_draft_tokens == 3
    with pytest.warns(UserWarning, match="max_draft_tokens=8: the medusa checkpoint has weights for 3"):
        jspec.load(target, head, speculation=jspec.Speculation("auto", max_draft_tokens=8), **SMALL)


def test_more_drafts_than_were_trained_are_drafted_with_a_warning(target, tmp_path):
    head = tiny_heads.mlp_speculator(tmp_path / "head", tie_weights=True)
    with pytest.warns(UserWarning, match="num_draft_tokens=8: the mlp head was trained to draft 3"):
        llm = jspec.load(target, head, speculation=jspec.Speculation(num_draft_tokens=8), **SMALL)
    assert llm.engine.runner.num_draft_tokens == 8


def test_a_copy_of_the_targets_embedding_is_shared(target, tmp_path):
    """And one that differs is kept: the head was trained with it."""
    own, copied = (tiny_heads.eagle(tmp_path / name, seed=5) for name in ("own", "copied"))
    file = copied / "model.safetensors"
    tensors = load_file(file)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors | {"embed_tokens.weight": embedding}, file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes = [len(jspec.load(target, head, **SMALL).engine.runner.batch.leaves[1]) for head in (own, copied)]
    assert sizes[0] == sizes[1] + 1


def test_a_copy_of_a_quantised_output_head_is_shared(target, tmp_path):
    """With its scales, if both are quantised alike; a copy in another type is kept. That of a target in int4 is int8."""
    head = tiny_heads.eagle3(tmp_path / "head", draft_vocab_size=97)
    file, copied = head / "model.safetensors", load_file(target / "model.safetensors")["lm_head.weight"]
    save_file(load_file(file) | {"lm_head.weight": copied}, file)
    for kind in ("int8", "fp8", "int4"):
        convert.convert(target, tmp_path / f"target-{kind}", quantize=kind)
        convert.convert(head, tmp_path / f"head-{kind}", quantize=kind)

    def borrows(target, head):
        model = build(*convert.load_folder(target, "float32"))
        return not build_draft_module(*convert.load_draft(head, "float32"), "float32", model)[0].own_head

    assert borrows(target, head)
    assert borrows(tmp_path / "target-int8", tmp_path / "head-int8")
    assert borrows(tmp_path / "target-int4", tmp_path / "head-int8")
    for one, other in (
        (target, "head-int8"),
        (tmp_path / "target-fp8", "head-int8"),
        (tmp_path / "target-int8", "head-int4"),
        (tmp_path / "target-int4", "head-int4"),
        (tmp_path / "target-int8", "head"),
    ):
        assert not borrows(one, tmp_path / other)


def test_a_head_whose_target_is_missing_is_refused(tmp_path):
    head = tiny_heads.speculators(tmp_path / "head", verifier="Qwen/Qwen3-8B")
    config = json.loads((head / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "Qwen/Qwen3-8B"
    with pytest.raises(ValueError, match=r"Qwen/Qwen3-8B.*expected a checkpoint folder, or --download"):
        jspec.load(head, **SMALL)
