"""Models in shards on 2 to 8 devices against the same on one, for every family; what each device has; refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import HYBRID, LATENTS, OF_HYBRIDS, TARGET, error_in_shards, in_shards, spread_logits
from flax import nnx
from tiers import in_tiers
from tiny import ARCHITECTURES, tiny_checkpoint, wide

import jspec
from convert.folders import load_folder
from jspec.config import Experts, Latent, ModelConfig, Shards, shards_of
from jspec.config.sharding import AXIS, VOCABULARY_GROUP
from jspec.models import Decoder, build, causal_logits, flat_params
from jspec.models.flatten import flatten
from jspec.models.sharding import build_shards, indices_of, mesh_of
from jspec.pallas.matmul import partial_sums

MIXTURES = (
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
)
CASES = [
    *((architecture, Shards(count)) for architecture in ARCHITECTURES for count in (2, 4)),
    *((architecture, Shards(2, by_expert=True)) for architecture in MIXTURES),
]
AMONG_MORE = (
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen3NextForCausalLM",
)
MORE = [(architecture, Shards(count)) for architecture in AMONG_MORE for count in (6, 8)]
MORE += [("Qwen3MoeForCausalLM", Shards(count, by_expert=True)) for count in (6, 8)]
EXPERTS = {"num_local_experts": 4, "num_experts": 4}  # which 2 and 4 divide


def some_tokens(config: ModelConfig) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(config.vocab_size, size=(2, 12)), jnp.int32)


def relative_error(actual, wanted) -> float:
    return float(np.abs(np.asarray(actual) - np.asarray(wanted)).max() / np.abs(np.asarray(wanted)).max())


@pytest.mark.parametrize(("architecture", "shards"), CASES, ids=str)
def test_logits_are_those_of_one_device(tmp_path, architecture, shards):
    """Among 4 devices there are more shards than KV heads."""
    assert_logits_are_those_of_one(tmp_path, architecture, shards, EXPERTS if architecture in MIXTURES else {})


@pytest.mark.parametrize("case", in_tiers(MORE, MORE[1:2]), ids=str)
def test_logits_of_six_and_eight_devices(tmp_path, case, monkeypatch):
    """Of 13 groups of the vocabulary, the last of 6 and of 8 devices have none."""
    monkeypatch.setattr("jspec.config.sharding.VOCABULARY_GROUP", 8)
    architecture, shards = case
    assert_logits_are_those_of_one(tmp_path, architecture, shards, wide(architecture))


def assert_logits_are_those_of_one(tmp_path, architecture, shards, overrides):
    config, params = load_folder(tiny_checkpoint(tmp_path, architecture, **overrides), "float32")
    model = build_shards(config, params, "float32", shards, mesh_of(shards.count, AXIS))
    tokens = some_tokens(config)
    wanted = jax.jit(functools.partial(causal_logits, build(config, params)))(tokens)
    assert relative_error(spread_logits(model, tokens), wanted) < 1e-5


MXFP4 = Experts(4, 2, 32, biases=True, clamp=7.0, stored="mxfp4")


@pytest.mark.parametrize(
    "changes",
    [
        *({"quantization": kind, "tie_embeddings": tied} for kind in ("int8", "fp8") for tied in (False, True)),
        {"quantization": "int8", "draft_vocab_size": 9},  # which every shard has in full
        {"architecture": "GptOssForCausalLM", "hidden_size": 32, "experts": MXFP4},  # sharded by expert
    ],
    ids=str,
)
def test_quantised_weights_are_split_with_their_scales(changes):
    config = dataclasses.replace(TARGET, **changes)
    assert error_in_shards(Decoder(config, rngs=nnx.Rngs(1))) < 1e-5


# As llama.cpp has other maps than most in a GGUF file, whose embedding is quantised too.
Q4_K_M = (("layers.0.mlp.down", "int6_16_levels"), ("head", "int5_32_float16"), ("embedding", "int4_32_levels_offsets"))
IN_BLOCKS = dataclasses.replace(TARGET, num_layers=1, windows=(), head_dim=64, quantization="fp8_block")


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 512},
        {"experts": Experts(4, 2, 256), "other_formats": (("layers.0.attention.qkv", None),)},
        {"intermediate_size": 512, "num_kv_heads": 4, "latent": Latent(160, 16, 64, 24)},
        {"intermediate_size": 512, "quantization": "mxfp8"},
        {"intermediate_size": 512, "quantization": "int4_128_float16_scaled", "other_formats": (("head", None),)},
        {"intermediate_size": 512, "head_dim": 256, "quantization": "int4_32_levels_offsets", "other_formats": Q4_K_M},
    ],
    ids=["dense", "experts", "latents", "mxfp8", "scaled inputs", "levels"],
)
def test_blocks_are_split_with_their_scales(changes):
    config = dataclasses.replace(IN_BLOCKS, **changes)
    params = {name: np.asarray(array) for name, array in flat_params(Decoder(config, rngs=nnx.Rngs(1))).items()}
    for stored in config.stored_params().values():
        for name in (stored.names[part] for part in ("scale", "input_scale") if part in stored.names):
            varied = params[name] * np.random.default_rng(len(name)).uniform(0.5, 2, params[name].shape)
            if params[name].dtype == np.uint32:  # of levels, of which integers differ
                params[name] = params[name].copy()
                integers = params[name][..., 1:]
                integers += np.random.default_rng(len(name)).integers(0, 2, integers.shape, np.uint32)
                continue
            shifted = params[name] + np.arange(params[name].shape[-1], dtype=np.uint8) % 3
            params[name] = shifted if params[name].dtype == np.uint8 else varied.astype(params[name].dtype)
    tokens = some_tokens(config)
    wanted = jax.jit(functools.partial(causal_logits, build(config, params)))(tokens)
    for shards in (Shards(2), Shards(2, by_expert=config.experts is not None)):
        spread = build_shards(config, params, "float32", shards, mesh_of(2, AXIS))
        assert relative_error(spread_logits(spread, tokens), wanted) < 1e-5
        held = [shard.data.nbytes for leaf in flatten(spread).leaves for shard in leaf.addressable_shards[:1]]
        assert shards.weight_bytes(config, 4) == pytest.approx(sum(held), rel=0.02)


def test_a_missing_all_reduce_is_detected(monkeypatch):
    monkeypatch.setattr(partial_sums, "all_reduce", lambda x, reduce_axis: x)
    jax.clear_caches()  # of layers that add up
    assert error_in_shards(Decoder(TARGET, rngs=nnx.Rngs(1))) > 0.01
    jax.clear_caches()


@pytest.mark.parametrize("config", [TARGET, LATENTS], ids=["heads", "latents"])
@pytest.mark.parametrize("count", [2, 4])
def test_shards_have_every_number_once(config, count):
    """Put side by side again, parts are the array: but for KV heads that several shards have."""
    shards = Shards(count)
    for name, split_ in shards.splits(config).items():
        shape = flat_params(Decoder(config, rngs=nnx.Rngs(0)))[name].shape
        array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 1
        indices = [indices_of(shape, split_, config.dimensions, shards, i) for i in range(count)]
        parts = [np.concatenate([array[index] for index in each]) for each in indices]
        if split_.axis is None:
            assert all(np.array_equal(part, array) for part in parts)
            continue
        numbers, times = np.unique(np.concatenate([part.reshape(-1) for part in parts]), return_counts=True)
        assert np.array_equal(numbers, array.reshape(-1))
        copies = count // config.num_kv_heads if "qkv" in name and count > config.num_kv_heads else 1
        assert times.max() == copies


def test_a_device_has_its_own_bytes_alone():
    """And ``weight_bytes``, from which the size of the cache follows, counts them."""
    for config, count in (
        (TARGET, 2),
        (TARGET, 4),
        (LATENTS, 2),
        (dataclasses.replace(TARGET, quantization="int8"), 2),
    ):
        shards, model = Shards(count), in_shards(Decoder(config, rngs=nnx.Rngs(0)), count)
        for device in mesh_of(count, AXIS).devices.flat:
            held = [
                s.data.nbytes for leaf in flatten(model).leaves for s in leaf.addressable_shards if s.device == device
            ]
            assert shards.weight_bytes(config, 4) == pytest.approx(sum(held), rel=0.02)  # KV heads count as if dealt


def test_the_vocabulary_is_sharded_in_entire_groups():
    assert Shards(2).vocabulary(128_256) == 63 * VOCABULARY_GROUP
    assert Shards(4).vocabulary(29) == VOCABULARY_GROUP


@pytest.mark.parametrize(
    ("changes", "count", "error"),
    [
        ({}, 3, "tensor_parallel=3: expected a divisor of num_heads, 4"),
        (
            {"num_heads": 12, "num_kv_heads": 3},
            4,
            "tensor_parallel=4: expected a divisor or a multiple of num_kv_heads, 3",
        ),
        (
            {"num_heads": 12, "num_kv_heads": 4},
            6,
            "tensor_parallel=6: expected a divisor or a multiple of num_kv_heads, 4",
        ),
        (
            {**OF_HYBRIDS, "delta_nets": HYBRID.delta_nets, "num_heads": 6},
            6,
            "tensor_parallel=6: expected a divisor of delta_nets.key_heads, 2",
        ),
        (
            {"quantization": "fp8_block", "head_dim": 64, "intermediate_size": 640},
            2,
            "tensor_parallel=2: expected a divisor of the groups of 128 inputs that layers.i.mlp.down.weight .* 640 inputs",
        ),
        ({"intermediate_size": 25}, 2, "tensor_parallel=2: expected a divisor of intermediate_size, 25"),
        ({"experts": Experts(3, 2, 9)}, 2, "tensor_parallel=2: expected a divisor of the width of an expert, 9"),
        ({"experts": Experts(3, 2, 8, shared_width=9)}, 2, "expected a divisor of the width of shared experts, 9"),
        (
            {"experts": Experts(3, 2, 8, biases=True)},
            2,
            "tensor_parallel=2: expected a divisor of the number of experts, 3",
        ),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(changes, count, error):
    with pytest.raises(ValueError, match=error):
        Shards(count).local(dataclasses.replace(TARGET, **changes))


def test_shared_experts_count_among_those_that_are_dealt_out():
    with pytest.raises(
        ValueError, match="tensor_parallel=2: expected a divisor of the number of experts, 5, 1 of them shared"
    ):
        Shards(2, by_expert=True).local(dataclasses.replace(TARGET, experts=Experts(4, 2, 8, shared=1)))


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((0, 1, True), "tensor_parallel=0: expected an integer of at least 1"),
        ((2, 3, True), "draft_tensor_parallel=3: expected 1 or tensor_parallel, 2"),
        ((2, 2, False), "draft_tensor_parallel=2: expected 1 for a draft that is no language model"),
        ((2, 1, True, "yes"), "expert_parallel='yes': expected True or False"),
    ],
)
def test_numbers_of_shards_that_do_not_fit_are_refused(args, error):
    with pytest.raises(ValueError, match=error):
        shards_of(*args)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"tensor_parallel": 2}, marks=pytest.mark.nightly),
        {"tensor_parallel_size": 2, "draft_tensor_parallel_size": 2},
    ],
    ids=["target", "target and draft"],
)
def test_a_checkpoint_is_loaded_into_shards(tmp_path, given):
    """The greedy texts, logits and log-probabilities are those of one device; the names are also vLLM's."""
    target, draft = (tiny_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("target", "draft")))
    small = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16, "num_draft_tokens": 2}
    prompts, how = [[5], [7, 8, 9] * 3], {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    expected = jspec.load(target, draft, **small)
    llm = jspec.load(target, draft, **small, **given)
    assert relative_error(llm.logits([1, 2, 3]), expected.logits([1, 2, 3])) < 1e-5
    for actual, wanted in zip(*(jspec.generate(model, prompts, **how) for model in (llm, expected)), strict=True):
        assert actual.token_ids == wanted.token_ids
        assert actual.logprobs[0].keys() == wanted.logprobs[0].keys()
    heads = llm.engine.runner.batch.state.cache[0].k.sharding.spec
    assert heads == jax.sharding.PartitionSpec(AXIS)


def test_unsuitable_checkpoints_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    target = tiny_checkpoint(tmp_path)
    monkeypatch.setattr("jspec.checkpoints.checkpoint.Checkpoint.params", lambda *_: pytest.fail("weights were read"))
    for given, error in (
        ({"tensor_parallel": 16}, "tensor_parallel=16: expected at most 8, the number of devices that JAX sees"),
        ({"tensor_parallel": 6}, "tensor_parallel=6: expected a divisor of num_heads, 4"),
        ({"tensor_parallel": 3}, "tensor_parallel=3: expected a divisor of num_heads"),
    ):
        with pytest.raises(ValueError, match=error):
            jspec.load(target, **given)
