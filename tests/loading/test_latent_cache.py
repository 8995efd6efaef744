"""Latents that are cached in eight bits: which scale counts, and that the model is the one that transformers computes if its
latents and rotated keys are rounded before anything reads them."""

import dataclasses
import re

import numpy as np
import pytest
from rounded_caches import OF_CACHE_ALONE, TOKENS, assert_rounds, chosen, logits_and_text, rounding_of
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights

import jspec
from convert import Refusal, convert
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config import EngineConfig
from jspec.loading.memory_budget import ModelMemory
from jspec.models.cache_pools import KVRounding

OF_MODEL_OPTIMIZER = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
NAMES = ["k_proj.k_scale", "kv_a_proj_with_mqa.k_scale", "mla_attn.mla_attn.k_scale"]
SCALE = np.float32(0.013)


def checkpoint(path, name=NAMES[0], scale=SCALE, said: dict | None = OF_MODEL_OPTIMIZER, **config):
    """A DeepSeek-V3 of two layers, with a scale of latents under this name; that of layer 1 is twice as large."""
    folder = tiny_checkpoint(path, "DeepseekV3ForCausalLM", quantization_config=said, **config)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.{name}"] = np.asarray(scale * (1 + layer), np.float32)
        tensors[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = np.float32([7.0])  # of nothing that is cached
    write_weights(folder, tensors)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_scale_is_found_under_its_names(tmp_path, name):
    folder = checkpoint(tmp_path / "model", name)
    assert rounding_of(folder) == (KVRounding((float(SCALE),)), KVRounding((float(2 * SCALE),)))
    assert rounding_of(folder, "fp8_per_token_head") == (KVRounding(),) * 2
    assert rounding_of(folder, "float32") is None


@pytest.mark.parametrize(
    "said",
    [
        OF_MODEL_OPTIMIZER,
        {
            "quant_method": "modelopt",
            "quant_algo": None,
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
    ],
)
def test_a_scheme_of_model_optimizer_turns_it_on(tmp_path, said):
    folder = checkpoint(tmp_path / "model", said=said)
    with pytest.warns(UserWarning, match="latents are cached in FP8, with the scales in the files.*'bfloat16' leaves"):
        assert chosen(folder, dtype="bfloat16") == "fp8"
    assert chosen(folder, "float32") == "float32"
    with pytest.warns(UserWarning, match="latents are cached in FP8"):
        llm = jspec.load(folder, "ngram", max_len=32, max_batch=1)
    layer = llm.engine.runner.batch.state.cache[1]
    assert (layer.k.dtype, layer.v, layer.scales.v) == ("uint8", None, None)
    np.testing.assert_array_equal(layer.scales.k, [2 * SCALE])


def test_a_scheme_of_keys_and_values_of_heads_is_named_and_left_out(tmp_path):
    folder = checkpoint(tmp_path / "model", "k_scale", said=OF_CACHE_ALONE)
    with pytest.warns(
        UserWarning, match="that is of keys and values of heads, and latents are cached, so the cache has"
    ):
        assert chosen(folder) == "float32"
    with pytest.warns(
        UserWarning, match=r"holds no 'model.layers.0.self_attn.k_proj.k_scale', nor 1 other scales of lat"
    ):
        assert rounding_of(folder) == (KVRounding((1.0,)),) * 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -0.5])
def test_a_scale_that_is_none_is_refused_by_its_name(tmp_path, bad):
    folder, name = checkpoint(tmp_path / "model", scale=np.float32(bad)), "model.layers.0.self_attn.k_proj.k_scale"
    for load in (lambda: jspec.load(folder, kv_cache_dtype="fp8"), lambda: convert(folder, tmp_path / "out")):
        with pytest.raises((ValueError, Refusal), match=f"tensor '{name}' holds .*: expected positive numbers"):
            load()


def test_scales_of_heads_are_refused_by_their_name(tmp_path):
    folder = checkpoint(tmp_path / "model", scale=np.ones((4, 1, 1), np.float32))
    wanted = "tensor 'model.layers.0.self_attn.k_proj.k_scale' has shape [4, 1, 1]: expected one number"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        jspec.load(folder, kv_cache_dtype="fp8")


@pytest.mark.parametrize(("kind", "token"), [("bfloat16", 2 * 48), ("fp8", 48), ("fp8_per_token_head", 48 + 4)])
def test_the_budget_counts_what_is_cached(tmp_path, kind, token):
    folder = tiny_checkpoint(tmp_path / "model", "DeepseekV3ForCausalLM")
    target = Checkpoint.open(folder).target_config
    plain = EngineConfig(max_batch=3, max_len=64, dtype="bfloat16", page_size=16).for_target(target)
    budget, whole = (
        ModelMemory(target, None, 1).budget(dataclasses.replace(plain, kv_cache_dtype=of)) for of in (kind, "bfloat16")
    )
    assert budget.cache == 2 * token * plain.pool_pages * 16
    assert (
        budget.work == whole.work
    )  # prefill computes keys and values of all heads in any case, and nothing beside them


def test_a_converted_folder_has_the_scale_of_its_original(tmp_path):
    src = checkpoint(tmp_path / "src")
    report = convert(src, tmp_path / "out")
    assert "kept in manifest.json: 2 scales of latents; the folder turns on a cache in FP8" in str(report.notes)
    assert rounding_of(report.out) == rounding_of(src)
    with pytest.warns(UserWarning, match="latents are cached in FP8"):
        assert chosen(report.out) == "fp8"
    other = convert(checkpoint(tmp_path / "other", said=OF_CACHE_ALONE), tmp_path / "out2")
    assert "2 scales of latents" in str(other.notes)
    assert "turns on" not in str(other.notes)
    with pytest.warns(UserWarning, match="that is of keys and values of heads"):
        assert chosen(other.out) == "float32"


# The model is the one that transformers computes.


def reference_of(folder, rounding: tuple[KVRounding, ...] | None, monkeypatch):
    """``logits_and_text`` of transformers, with latents and rotated keys rounded before keys and values are made of them."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    scale = None  # of the tokens that the layer reads, [B, T, 1]

    def rounded(x, by):
        return (x / by).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * by

    def rotation(original):
        def rotated(q, k, *args, **how):
            q, k = original(q, k, *args, **how)
            return q, k if scale is None else rounded(k, scale[:, None])

        return rotated

    originals = {name: getattr(modeling, name) for name in dir(modeling) if name.startswith("apply_rotary_pos_emb")}

    def find_scale(attention, args, how):
        nonlocal scale
        scale = None
        compressed = attention.kv_a_proj_with_mqa(how["hidden_states"] if "hidden_states" in how else args[0])
        latent, key = compressed.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
        own = rounding[attention.layer_idx].k  # pyright: ignore[reportOptionalSubscript]
        if own is not None:
            scale = torch.full((*latent.shape[:2], 1), own[0])
            return
        name = "apply_rotary_pos_emb" + ("_interleave" if attention.config.rope_interleave else "")
        rotated = originals[name](key[:, None], key[:, None], *how["position_embeddings"])[1][:, 0]
        together = torch.cat([attention.kv_a_layernorm(latent), rotated], dim=-1)
        scale = 2 ** torch.ceil(torch.log2(together.abs().amax(dim=-1, keepdim=True) / 448))

    if rounding is not None:
        for name, original in originals.items():
            monkeypatch.setattr(modeling, name, rotation(original))
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(find_scale, with_kwargs=True)
            layer.self_attn.kv_b_proj.register_forward_pre_hook(lambda _, args: (rounded(args[0], scale),))
    return logits_and_text(model, transformers.DynamicCache)


@pytest.mark.parametrize("kind", ["fp8", "fp8_per_token_head"])
def test_logits_and_text_are_those_of_rounded_latents(tmp_path, kind, monkeypatch):
    folder = checkpoint(tmp_path / "model", said=None, model_type="deepseek_v3")  # what is said would want a library
    rounding = rounding_of(folder, kind)
    plain, _ = reference_of(folder, None, monkeypatch)(TOKENS)
    run = reference_of(folder, rounding, monkeypatch)
    (wanted, _), (_, text) = run(TOKENS), run(TOKENS[:, :9], 20)
    assert_rounds(folder, kind, rounding, plain, wanted, text)
