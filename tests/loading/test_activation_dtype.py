"""Targets that round the inputs of their maps to eight bits: which do, that the model is the one that transformers computes
when its linear maps round, that shards change nothing about it, and what is refused."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from block_checkpoints import KEPT, block_checkpoint
from engines import HYBRID, LATENTS, TARGET, causal, in_eight_bits, in_shards, spread_logits, target
from flax import nnx
from fp8_checkpoints import compressed_tensors, fp8_checkpoint
from greedy_texts import assert_likeliest
from tiny import tiny_checkpoint

import convert
import jspec
from jspec.config import EngineConfig, Experts
from jspec.loading.activation_dtype import check_activation_dtype
from jspec.models import Decoder
from jspec.models.layers import Linear, Norm
from jspec.models.w8a8 import with_quantized_activations

INT8 = dataclasses.replace(TARGET, quantization="int8")
TOKENS = np.random.default_rng(0).integers(97, size=(1, 24))
STORED = {"int8": compressed_tensors(format="int-quantized", weights__type="int"), "fp8": compressed_tensors()}
LARGEST = {"int8": 127, "fp8": 448}


def rounding(config, kind="int8") -> set[str]:
    """The paths in layer 1 of the maps that round their inputs, and of the norms that round their outputs."""
    model = with_quantized_activations(Decoder(config, rngs=nnx.Rngs(0)), kind)
    parts = {".".join(map(str, path)): part for path, part in nnx.iter_graph(model) if isinstance(part, Linear | Norm)}
    kinds = {
        path: part.quantize_inputs if isinstance(part, Linear) else part.quantize_outputs
        for path, part in parts.items()
    }
    assert {path for path, kind in kinds.items() if kind and not path.startswith("layers.")} == set()
    return {path.removeprefix("layers.1.") for path, kind in kinds.items() if kind and path.startswith("layers.1.")}


MAPS, NORMS = {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}, {"attention_norm", "mlp_norm"}


@pytest.mark.parametrize(
    ("changes", "maps"),
    [
        ({}, MAPS | NORMS),
        ({"norm_placement": "after"}, MAPS),  # of the residual stream itself, as in vLLM
        ({"gated_mlp": False}, MAPS - {"mlp.gate_up"} | {"mlp.up"} | NORMS),
        ({"other_formats": (("layers.1.mlp.down", None),)}, MAPS - {"mlp.down"} | NORMS),
        ({"experts": Experts(4, 2, 24)}, {"attention.qkv", "attention.out", "attention_norm"}),
    ],
    ids=["plain", "no norms", "no gate", "a map in floats", "experts"],
)
def test_every_map_of_a_layer_that_is_stored_so_rounds(changes, maps):
    assert rounding(dataclasses.replace(INT8, **changes)) == maps
    assert rounding(dataclasses.replace(INT8, **changes), "fp8") == set()


def test_maps_of_latents_and_of_decays_do_not_round():
    of_latents = {"attention.compress", "attention.queries", "attention.out", "mlp.gate_up", "mlp.down"} | NORMS
    assert rounding(dataclasses.replace(LATENTS, quantization="fp8"), "fp8") == of_latents
    nets = dataclasses.replace(HYBRID.delta_nets, layers=(True, True, False))
    of_nets = {"delta_net.qkvz", "delta_net.out", "mlp.gate_up", "mlp.down", "mlp_norm"}
    assert rounding(dataclasses.replace(HYBRID, delta_nets=nets, quantization="int8")) == of_nets


# The model is the one that transformers computes.


def reference_logits(folder, kind: str | None, tokens) -> np.ndarray:
    """The logits of transformers, whose linear maps in layers round what they read, as vLLM's W8A8 does."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))

    def rounded(_, inputs):
        [x] = inputs
        scale = x.abs().amax(dim=-1, keepdim=True) / LARGEST[kind]
        numbers = (x / scale).round() if kind == "int8" else (x / scale).to(torch.float8_e4m3fn).to(x.dtype)
        return (numbers * scale,)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    for layer in model.model.layers if kind is not None else ():
        for part in layer.modules():
            if isinstance(part, torch.nn.Linear):
                part.register_forward_pre_hook(rounded)
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_logits_are_those_of_maps_that_round(tmp_path, kind):
    folder = fp8_checkpoint(tmp_path / "model", quantization=STORED[kind])
    wide = tmp_path / "model-wide"  # the same weights, dequantised, which transformers reads by itself
    plain, wanted = (reference_logits(wide, rounds, TOKENS) for rounds in (None, kind))
    how = {"max_batch": 1, "max_len": 64, "prefill_chunk": 4}
    llm = jspec.load(folder, activation_dtype=kind, **how)
    assert f"activation_dtype='{kind}'" in repr(llm)
    assert np.abs(plain - wanted).max() > 1e-3
    np.testing.assert_allclose(llm.logits(TOKENS[0].tolist()), wanted[0], atol=2e-5)
    np.testing.assert_allclose(jspec.load(folder, **how).logits(TOKENS[0].tolist()), plain[0], atol=2e-5)
    prompt = TOKENS[0, :9].tolist()
    text = jspec.generate(llm, prompt, temperature=0, max_tokens=6, ignore_eos=True).token_ids
    assert_likeliest(llm, prompt, text)


@pytest.mark.parametrize(("kind", "model"), [("int8", target), ("fp8", target)])
def test_shards_have_one_scale_for_each_token(kind, model):
    """Which is that of all inputs: with scales of their own, shards would be another model."""
    rounds, plain = (in_eight_bits(model(), kind, rounds) for rounds in (True, False))
    wanted, without = (np.asarray(causal(one)(TOKENS % 29)) for one in (rounds, plain))
    split = with_quantized_activations(in_shards(plain, 2), kind)
    close = {"rtol": 0, "atol": 1e-5 * np.abs(wanted).max()}
    np.testing.assert_allclose(spread_logits(split, jnp.asarray(TOKENS % 29)), wanted, **close)
    for part in (part for _, part in nnx.iter_graph(split) if isinstance(part, Linear)):
        part.scale_axis = None
    own = spread_logits(split, jnp.asarray(TOKENS % 29))
    assert np.abs(own - wanted).max() > 1e-3 * np.abs(wanted).max()
    assert np.abs(without - wanted).max() > 1e-3 * np.abs(wanted).max()


# What is refused, before any weight is read.


@pytest.mark.parametrize("kind", ["bfloat16", "fp8_block", "INT8", None, 8])
def test_other_types_are_refused(kind):
    with pytest.raises(ValueError, match=r"activation_dtype=.*: expected one of 'auto', 'int8', 'fp8'"):
        EngineConfig(activation_dtype=kind)


def test_weights_that_are_not_stored_so_are_refused(tmp_path):
    plain = tiny_checkpoint(tmp_path / "plain")
    wanted = "activation_dtype='int8': expected 'auto', or a checkpoint with maps of layers in int8"
    with pytest.raises(ValueError, match=re.escape(wanted) + ".*dtype of the model; .*jspec-convert --quantize int8"):
        jspec.load(plain, activation_dtype="int8")
    other = fp8_checkpoint(tmp_path / "fp8")
    (other / "model.safetensors").unlink()  # of which no weight is read
    with pytest.raises(ValueError, match=r"'int8': expected activation_dtype='fp8', 'auto', or .* stored as fp8"):
        jspec.load(other, activation_dtype="int8")
    blocks = block_checkpoint(tmp_path / "blocks", next(iter(KEPT.values())))
    with pytest.raises(ValueError, match=r"'fp8': expected 'auto', or a checkpoint .* stored as fp8_block"):
        jspec.load(blocks, activation_dtype="fp8")
    convert.convert(plain, tmp_path / "int4", quantize="int4")
    with pytest.raises(ValueError, match=r"'int8': expected 'auto', or a checkpoint .* stored as int8 and int4"):
        jspec.load(tmp_path / "int4", activation_dtype="int8")


def test_a_head_alone_is_no_map_of_a_layer():
    maps = tuple((f"layers.{i}.{name}", None) for i in range(3) for name in MAPS)
    with pytest.raises(ValueError, match="maps of layers in int8"):
        check_activation_dtype("int8", dataclasses.replace(INT8, other_formats=maps))


def test_maps_of_the_type_round_among_others():
    mixed = dataclasses.replace(
        INT8, quantization="nvfp4", other_formats=(("layers.0.mlp.down", "int8"), ("head", "fp8"))
    )
    check_activation_dtype("int8", mixed)
    with pytest.raises(
        ValueError, match=r"'fp8': expected activation_dtype='int8', .* stored as nvfp4 and int8 and fp8;"
    ):
        check_activation_dtype("fp8", mixed)


def test_experts_that_do_not_round_are_named():
    mixed = dataclasses.replace(INT8, experts=Experts(4, 2, 24))
    with pytest.warns(
        UserWarning, match="activation_dtype='int8': experts of 3 layers read inputs that are not rounded"
    ):
        check_activation_dtype("int8", mixed)
    in_floats = tuple((f"layers.{i}.attention.{name}", None) for i in range(3) for name in ("qkv", "out"))
    with pytest.raises(ValueError, match="maps of layers in int8"):
        check_activation_dtype("int8", dataclasses.replace(mixed, other_formats=in_floats))


def test_a_checkpoint_that_describes_rounded_activations_turns_nothing_on(tmp_path):
    folder = fp8_checkpoint(tmp_path / "model", quantization=STORED["int8"])
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["input_activations"]["dynamic"]
    llm = jspec.load(folder, max_batch=1, max_len=32)
    assert llm.engine.config.activation_dtype == "auto"
    assert llm.target.layers[0].mlp.down.quantize_inputs is None
