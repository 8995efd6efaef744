"""The experts of multimodal checkpoints, all of a layer in one tensor: in either orientation, in FP8, in parts."""

import jax
import numpy as np
import pytest
from packed_weights import fp8, fp8_config
from wrapper_checkpoints import copied, logits_of, rewrite, same

import jspec
from convert import Refusal, convert, load_folder
from convert.verify import jspec_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.models import build

pytest.importorskip("torch")
pytest.importorskip("transformers")

TEXT = [3, 14, 15, 92, 65, 35, 89, 79] * 3
SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}


def transposed(tensors):
    return {name: array.swapaxes(1, 2) if "experts" in name else array for name, array in tensors.items()}


@pytest.mark.parametrize("width", [24, 32, 64])  # gate and up are square at half of D, and down at D
def test_experts_are_stacked_in_either_orientation(saved, tmp_path, width):
    folder, _ = saved("qwen3-vl-moe", moe_intermediate_size=width)
    other = copied(folder, tmp_path / "published")
    rewrite(other, tensors=transposed)
    same(folder, other)
    params = load_folder(folder)[1]
    name = "layers.0.mlp.gate_up.weight"
    assert len({params[name][i * width : (i + 1) * width].tobytes() for i in range(14)}) == 14


BLOCK = (12, 24)  # output features of which gate and up have two blocks each; the last block of 64 inputs is ragged


def in_fp8(tensors, orient=lambda array: array):
    """The stacked experts in FP8 with a scale for each block, and what that stands for in float32; two times tensors."""
    stored, wide = dict(tensors), dict(tensors)
    for name, array in tensors.items():
        if ".experts." in name:
            made = [fp8(expert, BLOCK) for expert in array]
            numbers, scales = (np.stack([parts[end] for parts, _ in made]) for end in (".weight", ".weight_scale_inv"))
            stored |= {name: orient(numbers), f"{name}_scale_inv": orient(scales)}
            wide[name] = np.stack([weight for _, weight in made])
    return stored, wide


def with_fp8(raw):
    return {**raw, "quantization_config": fp8_config(weight_block_size=list(BLOCK))}


@pytest.mark.parametrize(
    "orient", [lambda array: array, lambda array: array.swapaxes(1, 2)], ids=["plain", "transposed"]
)
def test_stacked_experts_in_fp8_are_dequantised(saved, tmp_path, orient):
    folder, _ = saved("qwen3-vl-moe", moe_intermediate_size=24)
    small, large = (copied(folder, tmp_path / name) for name in ("fp8", "float32"))
    rewrite(small, with_fp8, lambda tensors: in_fp8(tensors, orient)[0])
    rewrite(large, tensors=lambda tensors: in_fp8(tensors)[1])
    with pytest.warns(UserWarning, match="FP8 with a scale for each block of 12 x 24"):
        (config, params), (again, others) = load_folder(small, "float32"), load_folder(large, "float32")
    assert config == again
    assert all(np.array_equal(params[name], others[name]) for name in params)
    unscaled = load_folder(folder, "float32")[1]["layers.0.mlp.gate_up.weight"]
    assert not np.array_equal(params["layers.0.mlp.gate_up.weight"], unscaled)


BAD_SCALES = {
    "none": (
        lambda t: {k: v for k, v in t.items() if not k.endswith("gate_up_proj_scale_inv")},
        "weight_scale_inv' is missing",
    ),
    "fewer": (
        lambda t: {k: v[:, :-1] if k.endswith("gate_up_proj_scale_inv") else v for k, v in t.items()},
        r"gate_up_proj_scale_inv' has shape \[7, 3, 3\]: expected \[7, 4, 3\]",
    ),
    "nan": (
        lambda t: {k: v * np.float32("nan") if k.endswith("down_proj_scale_inv") else v for k, v in t.items()},
        "down_proj_scale_inv' holds nan",
    ),
}


@pytest.mark.filterwarnings("ignore:.*dequantised:UserWarning")
@pytest.mark.parametrize("what", BAD_SCALES)
def test_bad_scales_of_stacked_experts_are_refused(saved, tmp_path, what):
    change, message = BAD_SCALES[what]
    folder = copied(saved("qwen3-vl-moe", moe_intermediate_size=24)[0], tmp_path / "fp8")
    rewrite(folder, with_fp8, lambda tensors: change(in_fp8(tensors)[0]))
    with pytest.raises(Refusal, match=message):
        load_folder(folder, "float32")


def test_blocks_of_gate_and_up_together_are_refused(saved, tmp_path):
    folder = copied(saved("qwen3-vl-moe", moe_intermediate_size=24)[0], tmp_path / "fp8")
    rewrite(folder, lambda raw: {**raw, "quantization_config": fp8_config(weight_block_size=[16, 24])})
    rewrite(folder, tensors=lambda tensors: in_fp8(tensors)[0])
    with pytest.raises(Refusal, match="blocks in which gate and up meet are not read"):
        load_folder(folder, "float32")


def test_the_square_experts_of_transformers_are_read_as_it_writes_them(saved):
    for width in (32, 64):
        folder, model = saved("qwen3-vl-moe", moe_intermediate_size=width)
        config, params = load_folder(folder, "float32")
        ours = build(config, jax.device_put(params))
        [found] = jspec_logits(ours, [np.asarray(TEXT)])
        expected = logits_of(model, TEXT)
        assert np.abs(found - expected).max() / np.abs(expected).max() < 2e-5


GATE_UP, DOWN = (f"model.language_model.layers.0.mlp.experts.{part}_proj" for part in ("gate_up", "down"))
BROKEN_EXPERTS = {
    "fewer experts": (
        lambda t: {**t, GATE_UP: t[GATE_UP][:-1]},
        r"experts.gate_up_proj' is float32 \[6, 48, 64\], but config.json asks for one of .*\[7, 64, 48\] or \[7, 48, 64\]",
    ),
    "narrower ones": (lambda t: {**t, DOWN: t[DOWN][:, :, :-1]}, r"experts.down_proj' is float32 \[7, 64, 23\]"),
    "a matrix": (lambda t: {**t, DOWN: t[DOWN][0]}, r"experts.down_proj' is float32 \[64, 24\]"),
    "integers": (lambda t: {**t, DOWN: t[DOWN].astype(np.int32)}, r"experts.down_proj' is int32 \[7, 64, 24\]"),
    "one of them transposed": (
        lambda t: {**t, DOWN: t[DOWN].swapaxes(1, 2)},
        r"gate_up_proj' \[7, 48, 64\]|down_proj' \[7, 24, 64\]",
    ),
    "an expert stored twice": (
        lambda t: {**t, GATE_UP.replace("gate_up_proj", "3.up_proj.weight"): t[GATE_UP][3, 24:]},
        r"gate_up_proj' besides 'model.layers.0.mlp.experts.3.up_proj.weight', which is a part of it",
    ),
    "none of one kind": (
        lambda t: {name: array for name, array in t.items() if name != DOWN},
        r"tensor 'model.layers.0.mlp.experts.0.down_proj.weight' is missing",
    ),
    "experts in a layer that has none": (
        lambda t: {**t, DOWN.replace("layers.0", "layers.1"): t[DOWN]},
        r"tensor 'model.layers.1.mlp.experts.down_proj' has no place",
    ),
}


@pytest.mark.parametrize("what", BROKEN_EXPERTS)
def test_bad_experts_are_refused(saved, tmp_path, what):
    change, message = BROKEN_EXPERTS[what]
    other = copied(saved("qwen3-vl-moe")[0], tmp_path / "src")
    rewrite(other, tensors=change)
    with pytest.raises(Refusal, match=message):
        load_folder(other)
    with pytest.raises(Refusal, match=message):
        convert(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "index", [(), (slice(0, 5),), (slice(3, 20), slice(2, 9)), (slice(4, 4),), (slice(None), slice(1, 2))]
)
def test_parts_of_an_expert_are_those_of_the_whole(saved, tmp_path, index):
    """Of both orientations, whatever the part: those are what several devices read."""
    folder, _ = saved("qwen3-vl-moe")
    other = copied(folder, tmp_path / "published")
    rewrite(other, tensors=transposed)
    for path in (folder, other):
        tensors = Checkpoint.open(path).hugging_face.tensors
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensor = tensors[f"model.layers.0.mlp.experts.5.{part}.weight"]
            np.testing.assert_array_equal(tensor.read_part(index), tensor.read()[index])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen3-vl-moe", "ministral3"])
def test_two_devices_write_the_texts_of_transformers(saved, tmp_path, name):
    """Each reads its parts of the experts from the tensors that hold all of them, as they are published."""
    folder, model = saved(name)
    other = copied(folder, tmp_path / "published")
    rewrite(other, tensors=transposed)
    llm = jspec.load(other, "ngram", dtype="float32", num_draft_tokens=3, tensor_parallel=2, **SMALL)
    [result] = jspec.generate(llm, [TEXT[:20]], temperature=0, max_tokens=16, ignore_eos=True)
    text = [*TEXT[:20], *result.token_ids]
    assert np.argmax(logits_of(model, text), axis=-1).tolist()[19:-1] == result.token_ids
