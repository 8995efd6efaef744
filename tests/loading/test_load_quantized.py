"""Quantised targets and drafts behind the front door: drafts change nothing of what the quantised target says."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_heads
from block_checkpoints import KEPT_CODES, block_checkpoint
from fp8_checkpoints import changed, compressed_tensors, fp8_checkpoint, raw_tensor
from tiers import in_tiers
from tiny import SMALL, tiny_checkpoint

import convert
import jspec
from jspec.quantization.formats import known_format
from jspec.train.loop import TrainingPlan
from jspec.train.methods import Sizes
from jspec.train.run import TrainingRun, train

K3 = jspec.Speculation(num_draft_tokens=3)
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = [[3, 4, 5], [7], list(range(20, 45))]
MODELS = [("int8", True), ("fp8", False)]  # whether the output head is the embedding


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Targets as they came and quantised, with an output head of their own or a tied one; a PARD model likewise."""
    root = tmp_path_factory.mktemp("checkpoints")
    for tied in (False, True):
        tiny_checkpoint(root / f"plain-{tied}", tie_word_embeddings=tied)
    for kind, tied in MODELS:
        convert.convert(root / f"plain-{tied}", root / f"{kind}-{tied}", quantize=kind)
    convert.convert(tiny_heads.pard(root / "pard"), root / "pard-int8", quantize="int8")
    return root


def generated(llm) -> list[list[int]]:
    return [result.token_ids for result in jspec.generate(llm, PROMPTS, **GREEDY)]


@pytest.fixture(scope="module")
def plain(folders):
    """Greedy text of every quantised target."""
    return {model: generated(jspec.load(folders / "{}-{}".format(*model), **SMALL)) for model in MODELS}


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_logits_are_those_of_the_quantised_model(folders, plain, kind, tied):
    """Close to the original and not equal to it, and consistent with its own logits."""
    original, llm = (jspec.load(folders / f"{name}-{tied}", **SMALL) for name in ("plain", kind))
    assert llm.target.config.quantization == kind
    assert llm.target.output_weight.numbers.dtype == known_format(kind).numbers
    tokens = [*PROMPTS[0], *plain[kind, tied][0]]
    ours, theirs = llm.logits(tokens), original.logits(tokens)
    assert 0 < np.abs(ours - theirs).max() < 0.3 * np.abs(theirs).max()
    assert np.argmax(ours, axis=-1).tolist()[2:-1] == tokens[3:]


@pytest.mark.parametrize(("kind", "tied", "draft"), [("int8", True, "plain-True"), ("fp8", False, "fp8-False")])
def test_a_draft_model_changes_nothing(folders, plain, kind, tied, draft):
    """The draft is the target's original, or the target itself."""
    llm = jspec.load(folders / f"{kind}-{tied}", folders / draft, speculation=K3, **SMALL)
    results = jspec.generate(llm, PROMPTS, **GREEDY)
    assert [result.token_ids for result in results] == plain[kind, tied]
    assert sum(result.stats.num_accepted_draft_tokens for result in results) > 0
    assert llm.engine.num_compilations == 3


def test_a_quantised_draft_serves_a_plain_target(folders):
    llm = jspec.load(folders / "plain-True", folders / "pard-int8", speculation=K3, **SMALL)
    assert llm.method == "parallel"
    assert generated(llm) == generated(jspec.load(folders / "plain-True", **SMALL))


@pytest.mark.parametrize("make", [tiny_heads.eagle, tiny_heads.medusa], ids=lambda make: make.__name__)
def test_heads_for_a_quantised_target(folders, plain, tmp_path, make):
    llm = jspec.load(folders / "int8-True", make(tmp_path / "head"), speculation=K3, **SMALL)
    assert generated(llm) == plain["int8", True]


def test_quantised_models_run_in_bfloat16(folders):
    """At one width the text is the same with drafts and without; the weights stay as they are stored."""
    folder = folders / "int8-True"
    alone, drafted = (jspec.load(folder, draft, dtype="bfloat16", width=5, **SMALL) for draft in (None, folder))
    assert drafted.target.layers[0].mlp.down.weight[...].dtype == jnp.int8
    assert drafted.target.layers[0].mlp.down.scale[...].dtype == jnp.float32
    assert drafted.target.embed(jnp.zeros((1, 1), jnp.int32)).dtype == jnp.bfloat16
    assert generated(drafted) == generated(alone)


STORED_KINDS = {
    "channel": compressed_tensors(),
    "tensor": compressed_tensors("tensor"),
    "int8": compressed_tensors(format="int-quantized", weights__type="int"),
}


@pytest.mark.parametrize("kind", STORED_KINDS)
def test_a_checkpoint_in_eight_bits_loads_without_conversion(tmp_path, kind):
    """Loaded as it came or converted, it is the model of its wide weights; as a draft it changes nothing."""
    src = fp8_checkpoint(tmp_path / "src", quantization=STORED_KINDS[kind])
    convert.convert(src, tmp_path / "out")
    wide, stored, converted = (jspec.load(tmp_path / name, **SMALL) for name in ("src-wide", "src", "out"))
    assert (
        stored.target.layers[1].mlp.down.weight[...].dtype == known_format("int8" if kind == "int8" else "fp8").numbers
    )
    assert stored.target.output_weight.scale is None
    expected, texts = wide.logits(PROMPTS[2]), generated(stored)
    np.testing.assert_allclose(stored.logits(PROMPTS[2]), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(stored.logits(PROMPTS[2]), converted.logits(PROMPTS[2]))
    for target, draft in ((src, src), (src, tmp_path / "src-wide"), (tmp_path / "src-wide", tmp_path / "out")):
        llm = jspec.load(target, draft, speculation=K3, **SMALL)
        results = jspec.generate(llm, PROMPTS, **GREEDY)
        assert [result.token_ids for result in results] == (texts if target == src else generated(wide))
        assert sum(result.stats.num_accepted_draft_tokens for result in results) > 0


@pytest.mark.parametrize("name", in_tiers(["awq", "nvfp4", "mxfp4", "packed channel"], test=["awq"]))
def test_a_checkpoint_in_codes_loads_without_conversion(tmp_path, name):
    """It is the model of its wide weights; as a target it says the same with drafts and without."""
    src = block_checkpoint(tmp_path / "src", KEPT_CODES[name])
    wide, stored = (jspec.load(path, dtype="float32", **SMALL) for path in (tmp_path / "src-wide", src))
    assert stored.target.layers[1].mlp.down.weight[...].dtype == np.uint8
    np.testing.assert_allclose(stored.logits(PROMPTS[2]), wide.logits(PROMPTS[2]), rtol=1e-4, atol=1e-5)
    for draft in (src, tmp_path / "src-wide"):
        results = jspec.generate(jspec.load(src, draft, dtype="float32", speculation=K3, **SMALL), PROMPTS, **GREEDY)
        assert [result.token_ids for result in results] == generated(stored)
        assert sum(result.stats.num_accepted_draft_tokens for result in results) > 0


LATENTS = {"kv_lora_rank": 96, "q_lora_rank": 64, "v_head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.mark.parametrize("name", in_tiers(["gptq", "gptq in another order", "nvfp4", "mxfp4"], test=["gptq"]))
def test_latents_in_codes(tmp_path, name):
    """A target with maps from latents in codes says what its wide weights say, on one device and on two; with other scales
    of one such map it says something else."""
    src = block_checkpoint(tmp_path / "src", KEPT_CODES[name], "DeepseekV3ForCausalLM", **LATENTS)
    wide, stored, shards = (
        jspec.load(path, dtype="float32", **how, **SMALL)
        for path, how in ((tmp_path / "src-wide", {}), (src, {}), (src, {"tensor_parallel": 2}))
    )
    for of in (stored.target.layers[0].attention.keys, stored.target.layers[0].attention.values):
        assert of.weight[...].dtype == np.uint8
    texts = generated(wide)
    assert generated(stored) == generated(shards) == texts
    module = "model.layers.0.self_attn.kv_b_proj"
    scales = f"{module}.{'scales' if 'gptq' in name else 'weight_scale'}"
    changed(src, **{scales: np.ascontiguousarray(raw_tensor(src, scales)[:, ::-1])})
    assert generated(jspec.load(src, dtype="float32", **SMALL)) != texts


def test_a_head_borrows_an_output_head_that_is_not_quantised(tmp_path):
    src = fp8_checkpoint(tmp_path / "src")
    llm = jspec.load(src, tiny_heads.eagle(tmp_path / "head"), speculation=K3, **SMALL)
    assert generated(llm) == generated(jspec.load(src, **SMALL))


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    src = fp8_checkpoint(tmp_path / "src", quantization=compressed_tensors(format="mixed-precision"))
    plain = tiny_checkpoint(tmp_path / "plain")
    for target, draft in ((src, None), (plain, src)):
        with pytest.raises(ValueError, match=r"config_groups\.group_0\.format=None: expected 'float-quantized'"):
            jspec.load(target, draft, speculation=K3, **SMALL)


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("eagle", Sizes()),
        ("eagle3", Sizes(num_draft_tokens=2, draft_vocab_size=40)),
        ("medusa", Sizes(num_draft_tokens=2, borrow_head=True)),
    ],
)
def test_a_head_learns_from_a_quantised_target(folders, tmp_path, method, sizes):
    pytest.importorskip("matplotlib")
    tokens = np.random.default_rng(0).integers(3, 20, 2000)
    np.savez(tmp_path / "tokens.npz", train=tokens[:1600], held_out=tokens[1600:])
    plan = TrainingPlan(6, 1e-2, 0.0, tokens_per_step=64, length=16, evaluate_every=3)
    target, out = folders / "int8-True", tmp_path / "out"
    figures = train(TrainingRun(method, target, tmp_path / "tokens.npz", out, plan, sizes, prompts=1, dtype="float32"))
    assert np.isfinite(figures["held_out_loss"])
    assert jspec.load(target, out / "head", speculation=jspec.Speculation(2), **SMALL).method == method
