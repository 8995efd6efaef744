"""Keys and values that are cached in eight bits: which scales count, and that the model is the one that transformers
computes with a cache that rounds what it is given."""

import dataclasses
import json
import re

import ml_dtypes
import numpy as np
import pytest
from rounded_caches import (
    OF_CACHE_ALONE,
    SCHEME,
    TOKENS,
    K,
    V,
    assert_rounds,
    checkpoint,
    chosen,
    logits_and_text,
    rounding_of,
)
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights

import jspec
from convert import convert
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config import EngineConfig
from jspec.loading.memory_budget import ModelMemory
from jspec.models.cache_pools import KVRounding


def heads(scale, layer: int) -> tuple[float, ...]:
    return tuple(
        np.broadcast_to(np.asarray(scale, np.float32).reshape(-1), 2).tolist()[i] * (1 + layer) for i in (0, 1)
    )


@pytest.mark.parametrize(
    ("k", "v", "scales"),
    [
        ("self_attn.k_scale", "self_attn.v_scale", (K, V)),  # compressed-tensors, attn_head
        ("self_attn.k_scale", "self_attn.v_scale", (np.float32([0.02]), np.float32([0.5]))),  # and tensor
        (
            "self_attn.k_proj.k_scale",
            "self_attn.v_proj.v_scale",
            (np.float32(0.02), np.float32(0.5)),
        ),  # Model Optimizer
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale", (np.float32([0.02]), np.float32([0.5]))),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale", (K.astype(ml_dtypes.bfloat16), V)),
        ("self_attn.kv_scale", "self_attn.kv_scale", (V, V)),
        ("self_attn.attn.kv_scale", "self_attn.attn.kv_scale", (V, V)),
        # What else vLLM's loader renames, and its own modules' names.
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale", (K, V)),
        ("self_attn.qkqkv_proj.k_scale", "self_attn.qkqkv_proj.v_scale", (K, V)),
        ("self_attn.attn.impl.k_scale", "self_attn.attn.impl.v_scale", (K, V)),
    ],
)
def test_scales_are_found_under_their_names(tmp_path, k, v, scales):
    folder = checkpoint(tmp_path / "model", k, v, scales)
    expected = [KVRounding(*(heads(scale, layer) for scale in scales)) for layer in range(2)]
    for got, wanted in zip(rounding_of(folder), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert not any("scale" in name for name in Checkpoint.open(folder).params())  # but nothing of them is in the way


@pytest.mark.parametrize("name", ["self_attn.{}_cache_scale", "self_attn.rotary.{}_scale", "self_attn.attn._{}_scale"])
@pytest.mark.parametrize("letter", ["k", "v"])
def test_scales_under_names_that_are_not_known_are_refused(tmp_path, name, letter):
    other = {"k": "self_attn.k_scale", "v": "self_attn.v_scale"} | {letter: name.format(letter)}
    folder = checkpoint(tmp_path / "model", **other)
    with pytest.raises(
        ValueError, match=re.escape(f"tensor 'model.layers.0.{name.format(letter)}' seems to be the scale")
    ):
        jspec.load(folder, kv_cache_dtype="fp8")


def with_zeros(folder, number: float):
    """The checkpoint with zeros as compressed-tensors writes them, and a scale of queries."""
    tensors = load_file(folder / "model.safetensors")
    for name in ("q_zero_point", "k_zero_point", "v_zero_point", "q_scale"):
        value = 1.0 if name == "q_scale" else number
        tensors[f"model.layers.1.self_attn.{name}"] = np.full((1, 1, 1), value, ml_dtypes.float8_e4m3fn)
    write_weights(folder, tensors)
    return folder


def test_zeros_beside_scales_are_zero_or_refused_by_their_name(tmp_path):
    folder = with_zeros(checkpoint(tmp_path / "model"), 0)
    assert rounding_of(folder) == rounding_of(checkpoint(tmp_path / "plain"))
    convert(folder, tmp_path / "out")
    assert rounding_of(tmp_path / "out") == rounding_of(folder)
    other = with_zeros(checkpoint(tmp_path / "other"), 0.5)
    said = r"other/model.safetensors: tensor 'model.layers.1.self_attn.k_zero_point' holds 0.5: expected 0, because"
    for load in (lambda: jspec.load(other, kv_cache_dtype="fp8"), lambda: convert(other, tmp_path / "none")):
        with pytest.raises(ValueError, match=said):
            load()
    assert not (tmp_path / "none").exists()
    assert rounding_of(other, "float32") is None


def test_a_checkpoint_that_is_made_for_it_turns_it_on_and_says_so(tmp_path):
    folder = checkpoint(tmp_path / "model")
    with pytest.warns(UserWarning, match=r"kv_cache_scheme=.*: keys and values are cached in FP8.*'bfloat16' leaves"):
        assert chosen(folder, dtype="bfloat16") == "fp8"
    assert chosen(folder, "float32") == "float32"
    assert chosen(folder, "fp8_per_token_head") == "fp8_per_token_head"
    assert rounding_of(folder, "fp8_per_token_head") == (KVRounding(),) * 2
    assert rounding_of(folder, "float32") is None


@pytest.mark.parametrize("in_config", [True, False])
def test_a_checkpoint_of_model_optimizer_turns_it_on(tmp_path, in_config):
    said = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    folder = checkpoint(tmp_path / "model", said=said if in_config else None)
    if not in_config:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    with pytest.warns(UserWarning, match="kv_cache_quant_algo='FP8': keys and values are cached in FP8"):
        assert chosen(folder) == "fp8"


@pytest.mark.parametrize(
    "change", [{"num_bits": 4}, {"type": "int"}, {"dynamic": True}, {"strategy": "channel"}, {"group_size": 16}]
)
def test_other_schemes_are_named_and_left_out(tmp_path, change):
    said = {**OF_CACHE_ALONE, "kv_cache_scheme": {**SCHEME, **change}}
    with pytest.warns(UserWarning, match="jspec does not read that, so the cache has the dtype of the model, float32"):
        assert chosen(checkpoint(tmp_path / "model", said=said)) == "float32"


def test_scales_that_are_missing_are_ones_and_named(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    assert chosen(folder) == "float32"
    with pytest.warns(UserWarning, match=r"holds no 'model.layers.0.self_attn.k_scale', nor 3 other scales"):
        assert rounding_of(folder) == (KVRounding((1.0, 1.0), (1.0, 1.0)),) * 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -0.5])
def test_scales_that_are_none_are_refused_by_their_name(tmp_path, bad):
    folder = checkpoint(tmp_path / "model", scales=(K, np.float32([bad])))
    with pytest.raises(
        ValueError, match=r"tensor 'model.layers.0.self_attn.v_scale' holds .*: expected positive numbers"
    ):
        jspec.load(folder, kv_cache_dtype="fp8")


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 2)])
def test_scales_of_another_shape_are_refused_by_their_name(tmp_path, shape):
    folder = checkpoint(tmp_path / "model", scales=(np.ones(shape, np.float32), V))
    wanted = f"tensor 'model.layers.0.self_attn.k_scale' has shape {list(shape)}: expected one number, or [2, 1, 1]"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        jspec.load(folder, kv_cache_dtype="fp8")


@pytest.mark.parametrize("kind", ["fp8_e5m2", "int8", "bfloat16", None, 8])
def test_other_types_are_refused(kind):
    with pytest.raises(ValueError, match=r"kv_cache_dtype=.*: expected one of 'auto', 'float32', 'fp8', 'fp8_per_tok"):
        EngineConfig(kv_cache_dtype=kind)


@pytest.mark.parametrize(("kind", "bits"), [("bfloat16", 16), ("fp8", 8), ("fp8_per_token_head", 8 + 32 / 16)])
def test_the_budget_counts_what_is_cached(tmp_path, kind, bits):
    target = Checkpoint.open(tiny_checkpoint(tmp_path / "model")).target_config
    config = EngineConfig(max_batch=3, max_len=64, dtype="bfloat16", kv_cache_dtype=kind, page_size=16)
    assert ModelMemory(target, None, 1).budget(config).cache == 2 * 2 * 2 * 16 * bits / 8 * config.pool_pages * 16
    with_draft = ModelMemory(target, target, 1).budget(config).cache
    assert with_draft == 2 * 2 * 2 * 16 * (bits / 8 + 2) * config.pool_pages * 16  # whose cache is not rounded


# The model is the one that transformers computes.


def rounding_cache(rounding: list[KVRounding]):
    """A cache of transformers that rounds keys and values when it gets them, which is before any query sees them."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))

    def round_with(x, scale):
        codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.to(torch.float32) * scale

    class RoundingCache(transformers.DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            states = []
            for x, scales in zip((key_states, value_states), rounding[layer_idx], strict=True):
                if scales is None:
                    peak = x.abs().amax(dim=-1, keepdim=True)
                    scale = 2 ** torch.ceil(torch.log2(peak / 448))
                else:
                    scale = torch.tensor(scales)[None, :, None, None]
                states.append(round_with(x, scale))
            return super().update(*states, layer_idx, *args, **kwargs)

    return RoundingCache()


def reference_of(folder, rounding):
    """``logits_and_text`` of transformers; with ``rounding`` None its cache is its own."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    return logits_and_text(model, lambda: transformers.DynamicCache() if rounding is None else rounding_cache(rounding))


@pytest.mark.parametrize("kind", ["fp8", "fp8_per_token_head"])
def test_logits_and_text_are_those_of_a_cache_that_rounds(tmp_path, kind):
    folder = checkpoint(tmp_path / "model", said=None)  # which transformers would want a library for
    rounding = rounding_of(folder, kind)
    plain, _ = reference_of(folder, None)(TOKENS)
    wanted, _ = reference_of(folder, rounding)(TOKENS)
    _, text = reference_of(folder, rounding)(TOKENS[:, :9], 20)
    assert_rounds(folder, kind, rounding, plain, wanted, text)


def test_load_gives_the_target_its_rounding(tmp_path):
    folder = checkpoint(tmp_path / "model")
    with pytest.warns(UserWarning, match="cached in FP8"):
        llm = jspec.load(folder, "ngram", max_len=32, max_batch=1)
    assert llm.engine.config.kv_cache_dtype == "fp8"
    scales = llm.engine.runner.batch.state.cache[1].scales
    np.testing.assert_array_equal(scales.k, 2 * K.reshape(-1))
    llm = jspec.load(
        folder, engine=dataclasses.replace(EngineConfig(max_len=32, max_batch=1), kv_cache_dtype="float32")
    )
    assert llm.engine.runner.batch.state.cache[1].scales is None
