"""``jspec doctor --reference``: a target beside transformers is called equal, and of one with a fault it is said where."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from resaved import set_keys
from safetensors.numpy import load_file, save_file
from tiny import ARCHITECTURES, tiny_checkpoint, tiny_tokenizer

from convert.cli import main as convert_main
from jspec.checkpoints.huggingface.families import MODEL_TYPES
from jspec.cli import main
from jspec.doctor import Comparison, compare_with_reference
from jspec.doctor.comparison import TOLERANCES
from jspec.doctor.figures import Texts, logit_figures, text_difference
from jspec.doctor.reference import Reference

pytest.importorskip("torch", reason="transformers computes with torch")

LAYERS = 3
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [20, 21]]
# Of the families whose class in transformers wants to know more than jspec.
SETTINGS_OF = {
    "SmolLM3ForCausalLM": {"pad_token_id": 0, "num_hidden_layers": 2},
    "Phi3ForCausalLM": {"pad_token_id": 0},
    "OPTForCausalLM": {"num_key_value_heads": 4},
    "Olmo3ForCausalLM": {  # transformers has a theta of its own for windows, and no pattern of layers
        "rope_theta": 500_000.0,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "Gemma4ForCausalLM": {  # experts are stacked there
        "num_hidden_layers": 5,
        "enable_moe_block": False,
        "vocab_size_per_layer_input": 258,
    },
    "Gemma4UnifiedForCausalLM": {"num_hidden_layers": 2},
    **{
        name: {"num_hidden_layers": 2}
        for name in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
    },
}
TYPES = {architecture: model_type for model_type, architecture in MODEL_TYPES.items()}
SETTINGS = {"prompts": PROMPTS, "max_tokens": 6}


def checkpoint(folder: Path, architecture: str = "LlamaForCausalLM", **settings) -> Path:
    sizes = {"vocab_size": 258, "num_hidden_layers": LAYERS, "bos_token_id": 0, "eos_token_id": 1}
    tiny_checkpoint(folder, architecture, **{**sizes, **settings})
    tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("reference") / "original")


def compared(target: Path, reference: Path, **settings) -> Comparison:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers'
        return compare_with_reference(target, reference, **{**SETTINGS, **settings})


def changed(original: Path, folder: Path, tensor: str | None = None, **keys) -> Path:
    """A copy of a checkpoint with one number of a tensor moved, or with other keys in config.json."""
    shutil.copytree(original, folder)
    if tensor is not None:
        tensors = load_file(folder / "model.safetensors")
        tensors[tensor] = tensors[tensor].copy()
        tensors[tensor].flat[7] += 4.0
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return set_keys(folder, **keys)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_checkpoint_is_equal(tmp_path, architecture):
    settings = {"model_type": TYPES[architecture], **SETTINGS_OF.get(architecture, {})}
    folder = checkpoint(tmp_path / "checkpoint", architecture, **settings)
    found = compared(folder, folder)
    assert found.equal, found.explanation
    assert found.first_layer is None
    assert not any(text.difference for text in found.texts)
    assert max(text.max_absolute for text in found.texts) < 1e-4
    assert "within the tolerance of float32: logits within 0.001" in found.explanation


def test_the_command_compares_a_converted_folder_and_a_draft(original, tmp_path, capsys):
    assert convert_main([str(original), str(tmp_path / "converted")]) == 0
    (tmp_path / "prompts.txt").write_text("import os\nclass Queue:\nprint(\n")
    command = ["doctor", "--target", str(tmp_path / "converted"), "--reference", str(original), "--max-tokens", "8"]
    command += ["--draft", str(original), "--prompts", str(tmp_path / "prompts.txt"), "--num-draft-tokens", "2"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*command, "--output", str(tmp_path / "report.txt")]) == 0
    out, report = capsys.readouterr().out, (tmp_path / "report.txt").read_text()
    assert "equal: logits differ by at most" in out
    assert report in out
    for words in (
        "jspec doctor --reference: equal\nversions: jspec ",
        "torch ",
        "target: LlamaForCausalLM, config.json ",
        "draft: LlamaForCausalLM, config.json ",
        "computed in float32",
        "0 of 17",
        "the same 8 tokens",
        "acceptance: healthy: An acceptance length of ",
        "served: acceptance length ",
    ):
        assert words in report
    assert str(tmp_path) not in report
    assert "import os" not in report


@pytest.mark.parametrize(("layer", "tensor"), [(1, "mlp.down_proj"), (2, "self_attn.o_proj")])
def test_a_perturbed_weight_is_found_in_its_layer(original, tmp_path, layer, tensor):
    found = compared(changed(original, tmp_path / "other", f"model.layers.{layer}.{tensor}.weight"), original)
    assert not found.equal
    assert found.first_layer is not None
    assert found.first_layer.index == layer + 1
    assert f"begin to differ after layer {layer} of 0 to 2" in found.explanation
    assert found.configs == ()


def test_a_perturbed_output_head_is_found_behind_the_layers(original, tmp_path):
    found = compared(changed(original, tmp_path / "other", "lm_head.weight"), original)
    assert not found.equal
    assert found.first_layer is None
    assert "agree up to the output head, which is where to look" in found.explanation


def test_a_wrong_key_is_named_with_where_it_begins(original, tmp_path, capsys):
    other = changed(original, tmp_path / "other", rope_theta=500.0)
    (tmp_path / "prompts.txt").write_text("import os\n")
    command = ["doctor", "--target", str(other), "--reference", str(original), "--max-tokens", "6"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*command, "--prompts", str(tmp_path / "prompts.txt")]) == 1
    out = capsys.readouterr().out
    assert "jspec doctor --reference: DIFFERENT" in out
    for words in (
        "config.json differs: rope_theta 500.0 here and 10000.0 in the reference",
        "begin to differ after layer 0 of 0 to 2",
        "from position 1 on",  # at 0 nothing is rotated
        "; margin ",
    ):
        assert words in out.rpartition("A report")[2]


def test_bfloat16_has_a_tolerance_of_its_own(original):
    found = compared(original, original, dtype="bfloat16")
    assert found.equal, found.explanation
    assert "bfloat16: KL within 0.02 nats" in found.explanation
    assert max(text.max_absolute for text in found.texts) > 1e-3  # which float32 would not pass


def test_where_texts_differ_and_by_what_margin():
    rng = np.random.default_rng(0)
    reference, own = rng.standard_normal((2, 5, 9)).astype(np.float32)
    assert text_difference([1, 2], [1, 2], 3, reference, own) is None
    found = text_difference([1, 2, 3], [1, 4, 3], 3, reference, own)
    assert found is not None
    assert (found.index, found.expected, found.ours) == (1, 2, 4)
    assert found.margin == pytest.approx(float(reference[3, 2] - reference[3, 4]))
    assert found.own_margin == pytest.approx(float(own[3, 2] - own[3, 4]))
    ended = text_difference([1], [1, 4], 3, reference, own)
    assert ended is not None
    assert (ended.index, ended.expected, ended.ours, ended.margin) == (1, None, 4, None)


def test_figures_of_logits():
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], np.float32))
    ours = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]], np.float32))
    figures = logit_figures(reference, ours)
    assert figures["max_absolute"] == pytest.approx(np.log(2), rel=1e-5)
    assert (figures["at"], figures["top1_differs"]) == (0, (0,))
    assert figures["max_kl"] == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2), rel=1e-5)
    assert figures["mean_kl"] == pytest.approx(figures["max_kl"] / 2)
    with pytest.raises(ValueError, match="the reference has logits for 3 tokens, and the target for 2"):
        logit_figures(reference, ours[:, :2])


@pytest.mark.parametrize(
    ("changes", "dtype", "equal"),
    [
        ({}, "float32", True),
        ({"max_absolute": 2e-3}, "float32", False),
        ({"max_absolute": float("nan")}, "float32", False),
        ({"mean_kl": 2e-5}, "float32", False),
        ({"max_absolute": 0.5, "mean_kl": 0.01}, "bfloat16", True),
        ({"mean_kl": 0.03}, "bfloat16", False),
        ({"mean_kl": float("nan")}, "bfloat16", False),
        ({"margin": 0.4}, "bfloat16", True),
        ({"margin": 0.6}, "bfloat16", False),
        ({"margin": 1e-6}, "float32", False),
        ({"margin": None}, "bfloat16", False),
    ],
)
def test_logits_within_rounding_count_as_equal(changes, dtype, equal):
    fields = {"max_absolute": 1e-4, "max_relative": 1e-5, "at": 0, "mean_kl": 1e-7, "max_kl": 1e-6, "top1_differs": ()}
    difference = None
    if "margin" in changes:
        logits = np.zeros((4, 3), np.float32)
        logits[1, 1] = changes["margin"] or 0.0
        difference = text_difference([1, 1], [2] if changes["margin"] is not None else [], 2, logits, logits)
    fields |= {key: value for key, value in changes.items() if key != "margin"}
    text = Texts(prompt_length=2, length=2, difference=difference, **fields)
    assert TOLERANCES[dtype].holds_for(text) == equal


def test_a_class_that_transformers_lacks_is_named(original, tmp_path):
    unknown = changed(original, tmp_path / "unknown", model_type="not_yet", architectures=["NotYetForCausalLM"])
    with pytest.raises(ValueError, match=r"transformers [\d.]+ cannot load it .*not_yet"):
        compared(original, unknown)
    no_text = changed(original, tmp_path / "clip", model_type="clip_vision_model", architectures=["NotYetModel"])
    with pytest.raises(ValueError, match=r"has no class for NotYetModel \(model_type 'clip_vision_model'\)"):
        compared(original, no_text)
    (tmp_path / "gone").mkdir()
    with pytest.raises(ValueError, match="cannot load it"):
        compared(original, tmp_path / "gone")
    partial = changed(original, tmp_path / "partial")
    tensors = load_file(partial / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no tensor of the right shape for model.layers.1.mlp.up_proj.weight"):
        compared(original, partial)


def test_code_of_the_reference_is_never_run(original, tmp_path):
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    hostile = changed(original, tmp_path / "hostile", auto_map=names)
    (hostile / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(Reference(hostile, "float32").write([3, 4], 2, ())) == 2
    shutil.rmtree(hostile)
    hostile = changed(original, tmp_path / "hostile", auto_map=names, model_type="mine")
    (hostile / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match="cannot load it"):
        compared(original, hostile)
    assert not (tmp_path / "ran").exists()


def test_mistakes_of_the_command(original, tmp_path, capsys, monkeypatch):
    assert convert_main([str(original), str(tmp_path / "converted")]) == 0
    command = ["doctor", "--target", str(original)]
    for options, words in (
        ([], "draft=None: expected --draft, whose acceptance is measured, or --reference"),
        (["--draft", str(original), "--output", "file"], "output='file': expected --reference beside it"),
        (["--reference", str(tmp_path / "converted")], "was written by jspec-convert, which transformers cannot read"),
        (["--reference", "nowhere"], "'nowhere' is no folder"),
        (["--reference", str(original), "--max-tokens", "0"], "max_tokens=0: expected an integer of at least 1"),
    ):
        assert main([*command, *options]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*command, "--reference", str(original)]) == 2
    assert "torch and transformers is not installed: pip install 'jspec[parity]'" in capsys.readouterr().err
