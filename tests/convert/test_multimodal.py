"""The text models of multimodal checkpoints: read in every spelling of config.json and names, with transformers' logits."""

import json

import jax
import numpy as np
import pytest
from wrapper_checkpoints import WRAPPED, copied, logits_of, renamed, rewrite, same

import jspec
from convert import Refusal, convert, load_folder
from convert.verify import jspec_logits, transformers_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.huggingface.multimodal import WRAPPERS
from jspec.models import build

pytest.importorskip("torch")
pytest.importorskip("transformers")

TEXT = [3, 14, 15, 92, 65, 35, 89, 79] * 5  # longer than every window and original length
SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}
FLAT = ("text_config", "vision_config", "architectures", "model_type")


@pytest.mark.parametrize("name", WRAPPED)
def test_logits_equal_transformers(saved, name):
    folder, model = saved(name)
    source = Checkpoint.open(folder).hugging_face
    assert source.unused == source.missing == []
    assert source.ignored
    [note] = source.layout.notes
    assert note == f"{len(source.ignored)} tensors of other parts than the text model were left out"
    config, params = load_folder(folder, "float32")
    assert config.architecture == WRAPPED[name][-1]
    model_of_ours = build(config.for_length(len(TEXT)), jax.device_put(params))
    [found] = jspec_logits(model_of_ours, [np.asarray(TEXT)])
    expected = logits_of(model, TEXT)
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2e-5


def test_the_converter_finds_the_class_of_transformers(saved):
    folder, model = saved("qwen3-vl")
    [found] = transformers_logits(folder, [np.asarray(TEXT)])
    np.testing.assert_allclose(found, logits_of(model, TEXT), atol=1e-4)


@pytest.mark.parametrize("name", WRAPPED)
def test_a_converted_folder_equals_the_source(saved, tmp_path, name):
    folder, _ = saved(name)
    report = convert(folder, tmp_path / "out")
    assert any("of other parts than the text model" in note for note in report.notes)
    same(folder, tmp_path / "out")


@pytest.mark.parametrize("draft", [None, "ngram", "itself"])
@pytest.mark.parametrize("name", WRAPPED)
def test_greedy_texts_are_those_of_transformers(saved, name, draft):
    folder, model = saved(name)
    small = {**SMALL, "prefill_chunk": 64 if name.startswith("qwen3.5") else 16}  # whole chunks of gated delta nets
    llm = jspec.load(folder, folder if draft == "itself" else draft, dtype="float32", num_draft_tokens=3, **small)
    [result] = jspec.generate(llm, [TEXT[:20]], temperature=0, max_tokens=16, ignore_eos=True)
    text = [*TEXT[:20], *result.token_ids]
    assert np.argmax(logits_of(model, text), axis=-1).tolist()[19:-1] == result.token_ids


NAMES = {
    "gemma3": {"language_model.model.": "model.language_model."},
    "mistral3": {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."},
    "qwen3-vl": {"model.language_model.": "language_model.model.", "model.visual.": "visual."},
    "qwen2.5-vl": {"model.": "model.language_model.", "visual.": "model.visual."},
}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_begin_in_one_of_several_ways(saved, tmp_path, name):
    folder, _ = saved(name)
    other = copied(folder, tmp_path / "other")
    rewrite(other, tensors=renamed(NAMES[name]))
    same(folder, other)


def flat(raw, **rope):
    """config.json of Qwen2.5-VL as it was published, with the keys of the text model beside those of the wrapper."""
    text = {
        key: value for key, value in raw["text_config"].items() if key not in (*FLAT, "rope_parameters", "layer_types")
    }
    scaling = {"type": "mrope", "mrope_section": [3, 3, 2], **rope}
    return {
        **text,
        **{key: raw[key] for key in raw if key != "text_config"},
        "rope_theta": 1e6,
        "rope_scaling": scaling,
    }


def test_a_flat_config_is_that_of_the_text_model(saved, tmp_path):
    folder, _ = saved("qwen2.5-vl")
    for i, rope in enumerate(({}, {"rope_type": "default"})):
        other = copied(folder, tmp_path / str(i))
        rewrite(other, config=lambda raw, rope=rope: flat(raw, **rope))
        assert "text_config" not in json.loads((other / "config.json").read_text())
        same(folder, other)
    rewrite(other, config=lambda raw: {**raw, "new_scale": 2.0})
    with pytest.warns(UserWarning, match="jspec does not know new_scale;"):
        _ = Checkpoint.open(other).config


def test_a_model_type_alone_names_the_class(saved, tmp_path):
    for name in WRAPPED:
        other = copied(saved(name)[0], tmp_path / name)
        rewrite(other, config=lambda raw: {**raw, "architectures": None})
        same(saved(name)[0], other)


@pytest.mark.parametrize("name", WRAPPED)
def test_end_tokens_of_the_generation_config_count(saved, tmp_path, name):
    other = copied(saved(name)[0], tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7, 9]}))
    assert Checkpoint.open(other).target_config.eos_token_ids == (2, 3, 7, 9)


# What is wrong -> what the error says. Each is tried on every class.
BROKEN_CONFIGS = {
    "no text_config": (
        lambda raw: {key: value for key, value in raw.items() if key != "text_config"},
        "text_config is missing: expected the config of the text model",
    ),
    "an empty text_config": (lambda raw: {**raw, "text_config": {}}, "text_config is missing"),
    "a text_config that is a list": (lambda raw: {**raw, "text_config": [1]}, "text_config=[1]: expected an object"),
    "a text model of another class": (
        lambda raw: {**raw, "text_config": {**raw["text_config"], "model_type": "mamba"}},
        "text_config.model_type='mamba': expected one of ",
    ),
    "a class of another text model": (
        lambda raw: {**raw, "text_config": {**raw["text_config"], "architectures": other_text(raw)}},
        "text_config.architectures=",
    ),
    "a model_type that is no text": (
        lambda raw: {**raw, "text_config": {**raw["text_config"], "model_type": {"a": 1}}},
        "text_config.model_type={'a': 1}: expected one of ",
    ),
    "a rotary embedding that is a list": (
        lambda raw: {**raw, "text_config": {**raw["text_config"], "rope_scaling": [1]}},
        "text_config.rope_scaling=[1]: expected an object or null",
    ),
    "a model_type of another wrapper": (
        lambda raw: {**raw, "model_type": "gemma3" if raw["model_type"] != "gemma3" else "qwen3_vl"},
        "contradict each other; correct the one that is wrong",
    ),
    "two sizes": (
        lambda raw: {**raw, "hidden_size": 128},
        "hidden_size=128 and text_config.hidden_size=64 contradict each other",
    ),
    "two vocabularies": (
        lambda raw: {**raw, "vocab_size": 98},
        "vocab_size=98 and text_config.vocab_size=97 contradict each other",
    ),
    "a size of another type": (
        lambda raw: {**raw, "text_config": {**raw["text_config"], "hidden_size": "64"}},
        "text_config.hidden_size='64': expected an integer",
    ),
}


def other_text(raw):
    of_gemma = raw["architectures"][0].startswith("Gemma3")
    return ["Qwen3ForCausalLM" if of_gemma else "Gemma3ForCausalLM"]


@pytest.mark.parametrize("name", WRAPPED)
def test_bad_configs_are_refused(saved, tmp_path, name):
    for what, (change, message) in BROKEN_CONFIGS.items():
        other = copied(saved(name)[0], tmp_path / "src")
        rewrite(other, config=change)
        with pytest.raises(Refusal) as refusal:
            load_folder(other)
        assert message in str(refusal.value), what
        assert f"{other}/config.json: " in str(refusal.value), what
        with pytest.raises(Refusal):
            convert(other, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_all_wrappers_are_tested():
    assert {f"{prefix}ForConditionalGeneration" for prefix, *_ in WRAPPED.values()} == set(WRAPPERS)


def text_names(tensors):
    return [name for name in tensors if "layers.0.input_layernorm" in name and "vision" not in name]


def under_both(tensors):
    """One of the text model's tensors under another prefix as well."""
    [name] = text_names(tensors)
    new = "model.language_model." if name.startswith("language_model.") else "language_model.model."
    return {**tensors, new + name[name.index("layers.") :]: tensors[name]}


def partly(tensors):
    """One of them under another prefix only."""
    [name] = text_names(tensors)
    return {key: array for key, array in under_both(tensors).items() if key != name}


def without(tensors):
    [name] = text_names(tensors)
    return {key: array for key, array in tensors.items() if key != name}


def misshapen(tensors):
    [name] = text_names(tensors)
    return {**tensors, name: tensors[name][:-1]}


def of_an_unknown_part(tensors):
    return {**tensors, "model.audio_encoder.layers.0.weight": np.ones(3, np.float32)}


BROKEN_TENSORS = {
    under_both: "layers.0.input_layernorm.weight' besides ",
    partly: "whose names begin in two ways, so they belong to two models; delete those of one",
    without: "tensor 'model.layers.0.",
    misshapen: "has shape [63], but config.json asks for [64]",
    of_an_unknown_part: "tensor 'model.audio_encoder.layers.0.weight' has no place",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_bad_tensors_are_refused(saved, tmp_path, name):
    for change, message in BROKEN_TENSORS.items():
        other = copied(saved(name)[0], tmp_path / "src")
        rewrite(other, tensors=change)
        with pytest.raises(Refusal) as refusal:
            load_folder(other)
        assert message in str(refusal.value)
        with pytest.raises(Refusal):
            convert(other, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_fixed_choice_is_refused_otherwise(saved, tmp_path):
    other = copied(saved("qwen3-vl-moe")[0], tmp_path / "src")
    rewrite(other, config=lambda raw: {**raw, "text_config": {**raw["text_config"], "norm_topk_prob": False}})
    with pytest.raises(Refusal, match=r"text_config\.norm_topk_prob=False: expected true, which is what Qwen3VLMoeFor"):
        load_folder(other)
