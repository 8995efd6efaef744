"""Every bad value is refused by a message that names the field and the value."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from engines import TARGET

from benchmarks.shapes import GLM_47_FLASH, LLAMA_8B, QWEN3_30B_A3B
from jspec.config import EngineConfig, Experts, Latent, ModelConfig, Rope, Speculation

NO_INTEGERS = [1.5, 2.0, "3", None, True, math.nan, [1]]
NO_NUMBERS = ["1", None, True, math.nan, math.inf, -math.inf, [1.0], 1j]
# For fields that may be None.
WRONG_INTEGERS, WRONG_NUMBERS = ([bad for bad in every if bad is not None] for every in (NO_INTEGERS, NO_NUMBERS))
experts = lambda **fields: Experts(**{"count": 4, "chosen": 2, "width": 8, **fields})  # noqa: E731
latent = lambda **fields: Latent(**{"rank": 16, "rotated": 4, "value_dim": 8, **fields})  # noqa: E731
model = lambda **fields: dataclasses.replace(TARGET, **{"windows": (), **fields})  # noqa: E731


def refused(make, names: str, values, **others):
    """One case for each value of each field; a space is between their names."""
    of_each = itertools.product(names.split(), values)
    return [pytest.param(make, {name: value, **others}, name, id=f"{name}={value}") for name, value in of_each]


BAD = [
    *refused(
        model,
        "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim max_position",
        [*NO_INTEGERS, 0, -1, 2**31],
    ),
    *refused(model, "num_kv_heads", [3, 8]),
    *refused(model, "head_dim", [3]),
    *refused(model, "rms_norm_eps", [*NO_NUMBERS, 0, -1e-5]),
    *refused(model, "windows", [(4,), (4, 4, 4, 4), (0, None, None), (None, None, 2.5), (None, -1, None)]),
    *refused(model, "eos_token_ids", [(29,), (-1,), (1.0,), (0, True)]),
    *refused(model, "layer_ropes", [(None,), (None, None, None, None), (1, None, None)]),
    *refused(model, "rope", [1, "default"]),
    *refused(model, "experts", [4, "many"]),
    *refused(experts, "count chosen width", [*NO_INTEGERS, 0]),
    *refused(experts, "chosen", [5]),
    *refused(experts, "layers", [[True], (1, 0), None]),
    *refused(experts, "renormalise biases", [None, 1]),
    *refused(experts, "clamp", [0, -1.0, "7", True]),
    *refused(experts, "stored", ["fp8", True]),
    *refused(
        model,
        "other_formats",
        [None, [], ("head",), (("head",),), ((1, None),), (("head", "int2"),), (("head", "int8"),)],
    ),
    *refused(model, "position_offset", [*WRONG_INTEGERS, -1]),
    *refused(model, "embedding_size", [*WRONG_INTEGERS, 0]),
    *refused(model, "norm norm_placement qk_norm_over activation", ["", None, 1, "tanh"]),
    *refused(model, "final_norm gated_mlp attention_sinks", [None, 1, "yes"]),
    *refused(model, "embedding_multiplier residual_multiplier logit_divisor", [*NO_NUMBERS, 0, -1.0]),
    *refused(model, "attention_scale attention_softcap logit_softcap", [*WRONG_NUMBERS, 0, -1.0]),
    *refused(latent, "rank rotated value_dim", [*NO_INTEGERS, 0, -1]),
    *refused(latent, "query_rank", [1.5, "3", True, 0]),
    *refused(latent, "norm_eps", [*NO_NUMBERS, 0, -1.0]),
    *refused(latent, "interleaved", [None, 1]),
    *refused(experts, "scores", ["softplus", None, 1]),
    *refused(experts, "scale", [*NO_NUMBERS, 0, -1.0]),
    *refused(experts, "shared", [*NO_INTEGERS, -1]),
    *refused(experts, "shared_width", [*NO_INTEGERS, -1]),
    *refused(experts, "groups", [*NO_INTEGERS, 0, 3]),
    *refused(experts, "chosen_groups", [*NO_INTEGERS, 0, 2]),
    *refused(experts, "corrected", [None, 1]),
    *refused(model, "mtp_layers", [*NO_INTEGERS, -1]),
    *refused(Rope, "fraction", [*NO_NUMBERS, 0, 1.5]),
    *refused(Rope, "long_texts", [None, 1]),
    *refused(Rope, "short_factors", [(), (0.0,), [1.0], None, ("1",)], kind="longrope", long_factors=(1.0,)),
    *refused(Rope, "long_factors", [(1.0,)]),
    *refused(Rope, "kind", ["su", "", None, 1]),
    *refused(Rope, "theta factor attention_factor", [*NO_NUMBERS, 0, -1.0]),
    *refused(Speculation, "num_draft_tokens", [*NO_INTEGERS, -1, 256]),
    *refused(Speculation, "num_draft_tokens", ["Auto", "4", np.array([1, 2])]),
    *refused(Speculation, "max_draft_tokens", [*WRONG_INTEGERS, 0, 256], num_draft_tokens="auto"),
    *refused(Speculation, "verify", ["typical", "", None, "Match", 1]),
    *refused(Speculation, "draft_sampling", ["greedy", None, 0]),
    *refused(Speculation, "argmax_below", [*WRONG_NUMBERS, -0.1, 1e39]),
    *refused(Speculation, "draft_temperature", [-1, "1", math.nan, math.inf, True, 1e39]),
    *refused(Speculation, "ngram_min", [*WRONG_INTEGERS, 0, -1, 65]),
    *refused(Speculation, "ngram_max", [*WRONG_INTEGERS, 0, 2, 65], ngram_min=3),
    *refused(Speculation, "ngram_max", [3], lookup=True),
    *refused(Speculation, "lookup", [1, None, "ngram"]),
    *refused(Speculation, "lookup", [True], num_draft_tokens=0),
    *refused(Speculation, "synthetic_acceptance", [*WRONG_NUMBERS, -0.1, 1.01, [0.5]]),
    *refused(Speculation, "synthetic_acceptance", [(), (0.5, 1.01), (0.5, None), (0.5,) * 5]),
    *refused(EngineConfig, "max_batch page_size rounds", [*NO_INTEGERS, 0, -1, 2**31]),
    *refused(EngineConfig, "max_len", [*NO_INTEGERS, 0, 1, 2**22 + 1]),
    *refused(EngineConfig, "dtype", ["float16", "fp32", None, np.float32]),
    *refused(EngineConfig, "prefill_chunk num_pages width snapshot_every", [1.5, "3", True, 0, -1, 2**31]),
    *refused(EngineConfig, "expand_latents", [None, 1]),
    *refused(EngineConfig, "swap_space snapshot_space", [*NO_NUMBERS, -1, 1e39]),
]


@pytest.mark.parametrize(("make", "fields", "name"), BAD)
def test_bad_values_are_refused(make, fields, name):
    with pytest.raises(ValueError, match="expected") as error:
        make(**fields)
    message, value = str(error.value), fields[name]
    assert message.startswith((f"{name}=", f"rope.{name}=", f"experts.{name}=", f"latent.{name}="))
    shown = value if not isinstance(value, tuple) else next((v for v in value if repr(v) in message), value)
    assert repr(shown) in message


def test_experts_in_codes_fit_their_model():
    """Their inputs are whole groups, and the checkpoint of their architecture has them stacked."""
    four_bits = experts(width=32, stored="mxfp4")
    sizes = {"architecture": "GptOssForCausalLM", "hidden_size": 64}
    assert model(experts=four_bits, **sizes).dimensions["Dp"] == 1
    with pytest.raises(ValueError, match="hidden_size=48: expected a multiple of 32"):
        model(experts=four_bits, **sizes | {"hidden_size": 48})
    with pytest.raises(ValueError, match=r"experts\.width=40: expected a multiple of 32"):
        model(experts=experts(width=40, stored="mxfp4"), **sizes)
    with pytest.raises(ValueError, match=r"experts\.stored='mxfp4': expected None for experts of LlamaForCausalLM"):
        model(experts=four_bits, hidden_size=64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latent": "yes"}, "latent='yes': expected Latent or None"),
        ({"num_kv_heads": 2}, "num_kv_heads=2: expected num_heads, 4"),
        ({"head_dim": 4}, r"latent\.rotated=4: expected below head_dim, 4"),
        (
            {"qk_norm": True},
            r"^latent=Latent\(\.\.\.\): expected None for attention with windows, soft caps, sinks or norms",
        ),
        ({"windows": (None, 5, None)}, "expected None for attention with windows, soft caps, sinks or norms"),
        ({"rope": None}, "rope=None: expected one Rope for all layers with latents"),
        ({"qkv_bias": True}, r"latent\.query_rank=None: expected a rank, where attention has biases"),
    ],
)
def test_latents_go_with_some_choices_only(fields, message):
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 10, "latent": latent(), "qkv_bias": False, "qk_norm": False}
    assert model(**sizes).kv_bytes(1, 1) == 3 * 20
    with pytest.raises(ValueError, match=message):
        model(**sizes | fields)


def test_corrections_and_shared_experts_go_with_some_choices_only():
    assert experts(scores="sigmoid", corrected=True, shared=2).all == experts().count + 2
    with pytest.raises(ValueError, match=r"experts\.corrected=True: expected False, unless scores are sigmoid"):
        experts(corrected=True)
    with pytest.raises(ValueError, match=r"experts\.shared=1: expected 0 for experts with biases"):
        experts(shared=1, biases=True)
    with pytest.raises(ValueError, match=r"experts\.shared_width=8: expected 0 with shared experts among the others"):
        experts(shared=1, shared_width=8)
    for others in ({"biases": True}, {"beside_mlp": True}):
        with pytest.raises(ValueError, match="expected "):
            experts(shared_width=8, **others)
    assert experts(shared=2).with_shared_apart().shared_width == 2 * experts().width


def test_experts_of_another_number_of_layers_are_refused():
    with pytest.raises(ValueError, match=r"experts\.layers=\(True,\): expected \(\) or 3 entries"):
        model(experts=experts(layers=(True,)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "gelu"}, "activation='gelu': expected 'silu' with experts"),
        ({"gated_mlp": False}, "gated_mlp=False: expected True"),
        ({"mlp_bias": True}, "mlp_bias=True: expected False"),
    ],
)
def test_experts_go_with_some_mlps_only(fields, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        model(experts=experts(), **fields)


def test_of_long_values_messages_have_the_beginning():
    with pytest.raises(ValueError, match=r"^windows=\(0, 0, .*\.\.\.: expected") as error:
        model(windows=(0,) * 1000)
    assert len(str(error.value)) < 400


def test_biased_pairs_are_refused():
    for verify in ("rejection", "block"):
        with pytest.raises(ValueError, match=f"'coupled' with verify='{verify}' is biased.*use verify='match'"):
            Speculation(verify=verify, draft_sampling="coupled")
    with pytest.raises(ValueError, match=r"draft_temperature=0\.5 .*'coupled'"):
        Speculation(verify="match", draft_sampling="coupled", draft_temperature=0.5)


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("draft_sampling", ["sample", "argmax", "auto"])
def test_lossless_pairs_are_accepted(verify, draft_sampling):
    assert Speculation(verify=verify, draft_sampling=draft_sampling, draft_temperature=0.5).verify == verify


def test_boundary_values_are_accepted():
    assert Speculation(num_draft_tokens=0).draft_lengths == (0,)
    assert Speculation(num_draft_tokens=255, argmax_below=0, draft_temperature=0, ngram_min=2, ngram_max=2)
    assert Speculation(2, synthetic_acceptance=(0, 1)).synthetic_acceptance == (0, 1)
    assert EngineConfig(max_batch=np.int64(1), max_len=2, page_size=1, num_pages=1, prefill_chunk=1, rounds=1, width=1)
    assert EngineConfig(max_len=2**22).max_len == 2**22


def test_ngram_lengths_have_defaults():
    assert (Speculation().ngram_lengths, Speculation(lookup=True).ngram_lengths) == ((1, 4), (4, 8))
    assert Speculation(ngram_min=2, ngram_max=2).ngram_lengths == (2, 2)
    assert Speculation(ngram_min=6).ngram_lengths == (6, 6)
    assert Speculation(lookup=True, ngram_min=2).ngram_lengths == (2, 8)
    assert Speculation(lookup=True, ngram_max=64).fixed(2).ngram_lengths == (4, 64)
    with pytest.raises(
        ValueError, match=r"ngram_max=3: expected .* of at least the default of ngram_min, 4, and at most"
    ):
        Speculation(lookup=True, ngram_max=3)
    with pytest.raises(ValueError, match=r"lookup=True: expected .* or num_draft_tokens of at least 1"):
        Speculation(0, lookup=True)


def test_auto_chooses_from_draft_lengths():
    assert Speculation("auto").draft_lengths == (0, 1, 2, 3, 4, 6, 8)
    assert Speculation("auto", max_draft_tokens=5).draft_lengths == (0, 1, 2, 3, 4, 5)
    assert Speculation("auto", max_draft_tokens=1).draft_lengths == (0, 1)
    assert Speculation("auto", max_draft_tokens=255).draft_lengths[-2:] == (192, 255)
    assert (Speculation("auto").auto, Speculation("auto").most_draft_tokens) == (True, 8)
    assert (Speculation(3).auto, Speculation(3).most_draft_tokens, Speculation(3).draft_lengths) == (False, 3, (3,))
    assert Speculation("auto", "match", max_draft_tokens=4).fixed(2) == Speculation(2, "match")
    with pytest.raises(
        ValueError, match=r"max_draft_tokens=3 has no place with num_draft_tokens=4, .* leave it out or"
    ):
        Speculation(4, max_draft_tokens=3)


def test_vllm_names_are_aliases():
    theirs = Speculation(num_speculative_tokens=3, rejection_sample_method="block", draft_sample_method="argmax")
    assert theirs == Speculation(3, "block", "argmax")


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        ((), {"num_draft_tokens": 3, "num_speculative_tokens": 3}, "same argument; give one of them"),
        ((3,), {"num_speculative_tokens": 3}, "given twice, by position and by name"),
        ((), {"num_draft_token": 3}, "did you mean 'num_draft_tokens'"),
        ((), {"n_gram_max": 3}, "did you mean 'ngram_max'"),
        ((), {"zzz": 3}, "known are argmax_below, draft_sampling"),
    ],
)
def test_unknown_arguments_get_a_suggestion(arguments, keywords, words):
    with pytest.raises(TypeError, match=words):
        Speculation(*arguments, **keywords)


def test_pool_pages_include_the_null_page():
    config = EngineConfig(max_batch=3, max_len=40, page_size=7)
    assert (config.pages_per_row, config.pool_pages) == (6, 19)  # one of them is the null page
    assert EngineConfig(max_batch=3, max_len=40, page_size=7, num_pages=5).pool_pages == 6
    assert EngineConfig(max_len=64, page_size=64).pages_per_row == 1


def test_model_sizes_follow_from_the_config():
    config = ModelConfig("LlamaForCausalLM", 100, 8, 16, 2, 4, 2, 6, 64)
    layer = 8 * (4 + 2 + 2) * 6 + 4 * 6 * 8 + 3 * 8 * 16 + 2 * 8
    assert config.num_parameters == 2 * 100 * 8 + 8 + 2 * layer
    assert dataclasses.replace(config, tie_embeddings=True).num_parameters == config.num_parameters - 100 * 8
    assert config.kv_bytes(slots=10, itemsize=2) == 2 * 2 * 2 * 6 * 10 * 2
    # docs/guides/models.md has these.
    shapes = GLM_47_FLASH, QWEN3_30B_A3B, LLAMA_8B
    assert [shape.kv_bytes(slots=1, itemsize=2) for shape in shapes] == [54_144, 98_304, 131_072]
    assert config.windows == (None, None)


def test_mixture_has_larger_prefill_batches_unless_a_size_is_given():
    dense, mixture = model(), model(experts=experts())
    fast = EngineConfig(reproducible=False, max_len=8192)
    sizes = [fast.for_target(target).chunk_buckets[-1] * fast.chunk for target in (dense, mixture)]
    assert sizes == [4096, 8192]
    for asked in (EngineConfig(), dataclasses.replace(fast, prefill_tokens=1024)):
        assert asked.for_target(mixture) == asked


def test_latents_have_larger_chunks_unless_a_size_is_given():
    target = dataclasses.replace(GLM_47_FLASH, experts=None)
    for asked in (EngineConfig(), EngineConfig(reproducible=False)):
        config = asked.for_target(target)
        assert config.expand_latents
        assert config.chunk == 128
        assert config.chunk_buckets[-1] * config.chunk == asked.chunk_buckets[-1] * asked.chunk
        assert asked.chunk == 32
    assert EngineConfig(prefill_chunk=16).for_target(target).chunk == 16
    assert EngineConfig(prefill_tokens=64).for_target(target).chunk == 64
    assert not EngineConfig().for_target(model()).expand_latents
    glm = EngineConfig(reproducible=False, max_len=8192).for_target(GLM_47_FLASH)
    assert (glm.chunk, glm.chunk_buckets[-1]) == (128, 64)
