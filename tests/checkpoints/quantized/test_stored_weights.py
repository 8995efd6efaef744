"""Checkpoints in every format that is loaded as it is stored: what is read, what it computes, and conversion."""

import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KEPT, KEPT_CODES, sizes_of, stored_as
from fp8_checkpoints import DOWN, FP8, names_in, raw_tensor
from fp8_checkpoints import KINDS as CHANNELS
from mtp_checkpoints import with_layers
from stored_params import (
    assert_same,
    assert_stands_for,
    form_of,
    logits,
    refuses,
    rewrite,
    stored_checkpoint,
    with_plain,
)
from tiers import in_tiers
from tiny import ARCHITECTURES, SMALL

import jspec
from convert import convert, load_draft, load_folder
from convert.folders import read_draft_config
from convert.verify import compare
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config.model_fields import PLAIN_HEAD
from jspec.models.params import abstract_params

LLAMA, MIXTURE, DEEPSEEK = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"
FAMILIES = [LLAMA, MIXTURE, "Phi3ForCausalLM", "OPTForCausalLM", "MiniMaxM2ForCausalLM", "Gemma3ForCausalLM", DEEPSEEK]
OF_EXPERTS = ["bitsandbytes nf4", "gptq", "awq channel", "packed", "nvfp4", "mxfp4", "packed 8 bits, groups"]
OF_LATENTS = ["gptq", "gptq symmetric", "gptq v2 in order", "awq", "packed", "packed channel", "packed 8 bits, groups"]
OF_LATENTS += ["nvfp4", "nvfp4 modelopt", "mxfp4", "bitsandbytes nf4"]
CASES = [
    *((architecture, name) for architecture in FAMILIES for name in KEPT),
    *((LLAMA, name) for name in KEPT_CODES),
    *((MIXTURE, name) for name in OF_EXPERTS),
    *((DEEPSEEK, name) for name in OF_LATENTS),
    *(
        (architecture, name)
        for architecture in ARCHITECTURES
        if architecture != "GptOssForCausalLM"
        for name in CHANNELS
    ),
]
COMPUTED = [
    *((LLAMA, name) for name in ("deepseek", "gptq", "nvfp4", "tensor", "int8")),
    *((MIXTURE, name) for name in ("compressed", "gptq", "nvfp4", "fp8")),
    *((DEEPSEEK, name) for name in ("qwen instruct", "gptq", "nvfp4 modelopt", "channel")),
    ("OPTForCausalLM", "int8 of a tensor"),
]
READ = [
    *COMPUTED,
    *((LLAMA, name) for name in list(KEPT_CODES)[::2]),
    (LLAMA, "awq channel"),
    (MIXTURE, "mxfp4"),
    (MIXTURE, "mxfp8"),
]


@pytest.mark.parametrize("case", in_tiers(CASES, test=READ), ids=" in ".join)
def test_params_stand_for_the_numbers_in_the_files(tmp_path, case):
    """Number by number, without a warning; they stay in their bits, and so they do in a converted folder."""
    architecture, name = case
    src, out, form = stored_checkpoint(tmp_path / "src", name, architecture, shards=2), tmp_path / "out", form_of(name)
    config, params = load_folder(src)
    assert (config.quantization, config.other_formats) == (form, PLAIN_HEAD)
    assert config == Checkpoint.open(src).target_config == read_draft_config(src)
    assert {n: (a.shape, a.dtype) for n, a in params.items()} == {
        n: (leaf.shape, leaf.dtype) for n, leaf in abstract_params(config, "bfloat16").items()
    }
    assert sum(array.nbytes for array in params.values()) == config.weight_bytes(2)
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    report = convert(src, out, verify="shapes")
    assert (report.dtype, report.quantization, report.parameters) == ("bfloat16", form, config.num_parameters)
    assert any("params are the source's, as they are stored" in note for note in report.notes)
    assert_same((config, params), load_folder(out))


@pytest.mark.parametrize("case", in_tiers(CASES, test=COMPUTED), ids=" in ".join)
def test_logits_are_those_of_the_numbers_in_the_files(tmp_path, case):
    architecture, name = case
    src = stored_checkpoint(tmp_path / "src", name, architecture)
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 1}
LATENTS = {
    "kv_lora_rank": 256,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 0,
}
EXPERTS = {"moe_intermediate_size": 128, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [(LLAMA, name) for name in ("gptq", "awq channel", "packed", "nvfp4", "mxfp4", "qwen")]
    + [(DEEPSEEK, name) for name in ("gptq", "qwen")],
)
def test_live_bytes_are_those_of_the_files(tmp_path, architecture, name):
    """Of inputs that fill whole blocks, quantised maps take at most a tenth more than in the files."""
    sizes = WHOLE_BLOCKS | (LATENTS | EXPERTS if architecture == DEEPSEEK else {})
    src = stored_checkpoint(tmp_path / "src", name, architecture, **sizes)
    config, params = load_folder(src)
    maps = {param for stored in config.stored_params().values() for param in stored.names.values()}
    floats = sum(array.nbytes for name, array in params.items() if name not in maps)
    files = sum(raw_tensor(src, name).nbytes for name in names_in(src))
    assert sum(params[name].nbytes for name in maps) <= 1.1 * (files - floats)


QUANTIZED = [(name, kind) for name in ("awq", "deepseek", "mxfp4") for kind in ("int8", "fp8", "int4")]


@pytest.mark.parametrize(
    "case", in_tiers(QUANTIZED, test=[("awq", "int4"), ("deepseek", "int8"), ("mxfp4", "int8")]), ids=" in ".join
)
def test_weights_may_be_quantised_otherwise(tmp_path, case):
    name, kind = case
    src, out = stored_checkpoint(tmp_path / "src", name), tmp_path / "out"
    report = convert(src, out, quantize=kind, dtype="bfloat16", verify="shapes")
    assert report.quantization == load_folder(out)[0].formats
    convert(tmp_path / "src-wide", tmp_path / "wide", quantize=kind, dtype="bfloat16")
    assert_same(load_folder(out), load_folder(tmp_path / "wide"))


LAYER = ("layers.0.attention.qkv", "layers.0.attention.out", "layers.0.mlp.gate_up", "layers.0.mlp.down")


@pytest.mark.parametrize(
    ("architecture", "name", "modules", "plain"),
    [
        *((LLAMA, name, DOWN, ("layers.1.mlp.down",)) for name in ("gptq", "packed channel", "mxfp4", "deepseek")),
        (LLAMA, "deepseek", r"model\.layers\.0\..*_proj", LAYER),
        (MIXTURE, "deepseek", r".*experts\..*\.down_proj", ("layers.1.mlp.down",)),
    ],
)
def test_single_maps_may_be_plain(tmp_path, architecture, name, modules, plain):
    """What the tensors say decides, whether or not a list of modules says so."""
    src = with_plain(stored_checkpoint(tmp_path / "src", name, architecture), modules)
    config, params = load_folder(src)
    assert (config.quantization, dict(config.other_formats)) == (form_of(name), dict.fromkeys((*plain, "head")))
    assert params[f"{plain[0]}.weight"].dtype == ml_dtypes.bfloat16
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    convert(src, tmp_path / "out", verify="shapes")
    assert_same(load_folder(src), load_folder(tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "words"), [("awq", "stored in AWQ.* half a one"), ("deepseek", r"stored in FP8 .*128, are deq")]
)
def test_a_part_that_is_plain_has_its_neighbours_dequantised(tmp_path, name, words):
    """But for values, which are a map of their own where they are stored otherwise than queries and keys."""
    parts = r"model\.layers\.0\.(mlp\.gate|self_attn\.v)_proj"
    src = with_plain(stored_checkpoint(tmp_path / "src", name), parts)
    with pytest.warns(UserWarning, match=r"src: model\.layers\.0\.mlp\.up_proj, " + words):
        config, params = load_folder(src)
    others = {"layers.0.attention.values": None, "layers.0.mlp.gate_up": None, "head": None}
    assert dict(config.other_formats) == others
    for layer in range(2):
        assert params[f"layers.{layer}.attention.qkv.weight"].dtype == (FP8 if name == "deepseek" else np.uint8)
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


@pytest.mark.parametrize("quantize", in_tiers([None, "int8"], test=[None]))
@pytest.mark.parametrize("name", ["packed channel", "nvfp4", "mxfp4", "deepseek", "channel"])
def test_an_output_head_may_be_stored_as_the_maps_are(tmp_path, name, quantize):
    """And some of its rows, for a draft vocabulary."""
    src = stored_checkpoint(tmp_path / "src", name, head=True)
    config, params = load_folder(src)
    assert config.head_quantization == config.quantization
    assert params["head.weight"].dtype == (FP8 if name in ("deepseek", "channel") else np.uint8)
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact
    if quantize and name == "channel":  # which is not quantised again
        return
    convert(src, tmp_path / "out", draft_vocabulary=[3, 5], quantize=quantize, dtype="bfloat16", verify="shapes")
    draft, some = load_draft(tmp_path / "out")
    assert (draft.quantization, len(some["head.weight"])) == (quantize or config.quantization, 2)
    for part in [part for part in params if part.startswith("head.") and quantize is None]:
        np.testing.assert_array_equal(some[part].view(np.uint8), params[part][[3, 5]].view(np.uint8))


def test_a_tied_output_head_is_not_stored_as_the_maps_are(tmp_path):
    src = stored_checkpoint(tmp_path / "src", "deepseek", tie_word_embeddings=True)
    config, params = load_folder(src)
    assert config.head_quantization is None
    assert params["embedding"].dtype == ml_dtypes.bfloat16
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


LAYERS = [("Glm4MoeForCausalLM", "deepseek"), (DEEPSEEK, "deepseek"), ("Glm4MoeForCausalLM", "awq channel")]


@pytest.mark.parametrize("case", in_tiers(LAYERS, test=LAYERS[::2]), ids=" in ".join)
def test_multi_token_prediction_layers_stay_as_they_are_stored(tmp_path, case):
    """But for the map of embedding and feature, which checkpoints do not quantise."""
    architecture, name = case
    src, wide = with_stored_layers(tmp_path, architecture, name)
    config, params = load_draft(src, mtp=True)
    assert config.layers.quantization == form_of(name)
    assert ("fuse_in.0", None) in config.layers.other_formats
    for part in ("attention.out", "mlp.gate_up"):
        assert params[f"layers.0.{part}.weight"].dtype == (FP8 if name == "deepseek" else np.uint8)
    assert_stands_for(params, config, load_draft(wide, "float32", mtp=True)[1])
    convert(src, tmp_path / "out", verify="shapes")
    assert_same(load_folder(tmp_path / "out"), load_folder(src))
    assert_same(load_draft(tmp_path / "out" / "mtp"), (config, params))


def with_stored_layers(folder, architecture: str, name: str):
    kind = (KEPT | KEPT_CODES)[name]
    sizes = {**sizes_of(kind, architecture), **({} if name == "deepseek" else {"intermediate_size": 128})}
    wide = with_layers(folder / "wide", architecture, **sizes)
    return stored_as(folder / "src", wide, kind), wide


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", [DEEPSEEK, "Glm4MoeForCausalLM"])
def test_multi_token_prediction_layers_in_blocks_draft(tmp_path, architecture):
    src, _ = with_stored_layers(tmp_path, architecture, "deepseek")
    llm = jspec.load(src, draft="mtp", num_draft_tokens=2, **SMALL)
    [result] = jspec.generate(llm, [[7, 8, 9] * 3], temperature=0, max_tokens=6, ignore_eos=True)
    assert result.stats.num_draft_tokens > 0


def test_a_model_in_blocks_is_served(tmp_path):
    src = stored_checkpoint(tmp_path / "src", "qwen", MIXTURE)
    found, wanted = (
        jspec.load(path, dtype="float32", **SMALL).logits([3, 4, 5, 6]) for path in (src, tmp_path / "src-wide")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "key"), [("awq", "modules_to_not_convert"), ("deepseek", "modules_to_not_convert"), ("mxfp4", "ignore")]
)
def test_a_list_that_contradicts_the_files_is_refused(tmp_path, name, key):
    src = stored_checkpoint(tmp_path / "src", name)
    rewrite(src, quantization_config={**(KEPT | KEPT_CODES)[name].config, key: ["lm_head", DOWN]})
    refuses(src, f"{key} says that '{DOWN}' is not quantised, but")
