"""Every family of language models through the paged cache and the engine, against one causal pass without a cache."""

import dataclasses
import functools
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_checkpoints import KEPT, block_checkpoint
from delta_nets import advanced
from disturbances import preempting, serve
from engines import TARGET, causal
from flax import nnx
from greedy_texts import assert_likeliest, drafted
from requests_and_engines import chunks_of_states
from tiers import in_tiers
from tiny import ARCHITECTURES, tiny_checkpoint
from tiny_heads import NO_EMBEDDING, eagle, speculators

import jspec
from convert.folders import load_folder
from jspec.checkpoints.huggingface.families import FAMILIES
from jspec.engine.runner.compile import one_order_options
from jspec.models import Decoder, build
from jspec.models.cache_pools import init_cache
from jspec.models.kv_cache import CausalView, PagedView
from jspec.models.one_order import one_order, without_one_order
from jspec.pallas.delta_net.state import PrefillRows, VerifyRows

S, P = 40, 8  # past every window, and past the original length of the longrope
SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}
# Gated delta nets read prompts in whole chunks of 64 tokens.
OF_DELTA_NETS = {"prefill_chunk": 64}
HYBRIDS = tuple(name for name, family in FAMILIES.items() if family.has_delta_nets)
PROMPTS = [[5], [7, 8, 9] * 3, list(range(3, 27))]  # the last is read in two pieces
DRAFTS = ("draft_model", "ngram", "eagle", "eagle3", "p_eagle")
# Scores of heads that are normed and not scaled, and a router: rounding to bfloat16 alone changes these logits by 0.24.
COARSE = {"Gemma4ForCausalLM": 0.2}
BLOCKS = "latents in FP8 blocks"
LATENTS_IN_BLOCKS = functools.partial(block_checkpoint, kind=KEPT["deepseek"], architecture="DeepseekV3ForCausalLM")
# Families whose layers have nothing that another family's do not: their engines are made at night.
ALIKE = (
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GraniteForCausalLM",
    "Olmo2ForCausalLM",
    "Gemma2ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "Olmo3ForCausalLM",
    "SeedOssForCausalLM",
    "Exaone4ForCausalLM",
)
BITS_IN_MAKE_TEST = (
    ("LlamaForCausalLM", "float32"),
    ("Qwen2MoeForCausalLM", "bfloat16"),
    ("DeepseekV3ForCausalLM", "float32"),
    ("Gemma4ForCausalLM", "float32"),
)


def marks(j: int, i: int) -> list:
    if i != j % len(DRAFTS):
        return [pytest.mark.long]
    return [pytest.mark.nightly] if ARCHITECTURES[j] in ALIKE else []


CASES = [
    pytest.param(architecture, draft, marks=marks(j, i))
    for (j, architecture), (i, draft) in itertools.product(enumerate(ARCHITECTURES), enumerate(DRAFTS))
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, BLOCKS])
def test_pages_give_the_logits_of_one_causal_pass(tmp_path, architecture, dtype):
    """A text that is read in two pieces of different lengths, and then by one token and by several."""
    make = (
        LATENTS_IN_BLOCKS if architecture == BLOCKS else functools.partial(tiny_checkpoint, architecture=architecture)
    )
    config, params = load_folder(make(tmp_path / "model"), dtype)
    model = build(config.for_length(S), params, dtype)
    tokens = jnp.asarray(np.random.default_rng(0).integers(config.vocab_size, size=(2, S)), jnp.int32)
    wanted = np.asarray(causal(model)(tokens), np.float32)
    table = jnp.asarray(1 + np.random.default_rng(1).permutation(2 * S // P).reshape(2, S // P), jnp.int32)
    pool = init_cache(model.cache_shape(), 1 + table.size, P, 2, 13, dtype)

    @jax.jit
    def read(tokens, positions, pool, recurrent):
        view = PagedView(table, positions, jnp.ones(positions.shape, bool), recurrent=recurrent)
        hidden, pool = model(tokens, positions, pool, view)
        return model.logits(hidden), pool

    both = lambda value: jnp.full(2, value)  # noqa: E731
    rows, recurrent = jnp.arange(2, dtype=jnp.int32), None
    for start, end in ((0, 16), (16, 29), (29, 30), (30, 35), (35, S)):
        positions, count = (
            jnp.broadcast_to(jnp.arange(start, end, dtype=jnp.int32)[None], (2, end - start)),
            both(end - start),
        )
        if start == 0:
            recurrent = PrefillRows(rows, count, both(True), both(False))
        else:
            accepted, half = (
                advanced(recurrent, recurrent.tokens) if isinstance(recurrent, VerifyRows) else (both(0), both(0))
            )
            recurrent = VerifyRows(rows, count, accepted, half, both(False))
        logits, pool = read(tokens[:, start:end], positions, pool, recurrent)
        error = np.abs(np.asarray(logits, np.float32) - wanted[:, start:end]).max() / np.abs(wanted).max()
        assert error < (2e-5 if dtype == "float32" else COARSE.get(architecture, 0.05)), (start, end)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(*case, marks=() if case in BITS_IN_MAKE_TEST else pytest.mark.nightly)
        for case in itertools.product(ARCHITECTURES, ("float32", "bfloat16"))
    ],
)
def test_a_token_has_the_same_bits_in_passes_of_any_shape(tmp_path, architecture, dtype):
    """With recurrent states, a prompt is read by prefill, in chunks of 8 tokens, and what follows by rounds. With jax 0.12,
    engines do not promise them in bfloat16."""
    config, params = load_folder(tiny_checkpoint(tmp_path / "model", architecture=architecture), dtype)
    model = build(config.for_length(S), params, dtype)
    assert (without_one_order(dtype, model) is None) == (dtype == "float32" or jax.__version_info__ < (0, 12))
    graph, state = nnx.split(model)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(6, S)).astype(np.int32)
    prompt = 16 if architecture in HYBRIDS else 0

    # With weights as arguments, as engines have them: XLA computes with constants ahead, in other orders.
    @functools.partial(jax.jit, compiler_options=one_order_options(True))
    @one_order()
    def read(state, tokens, positions, pool, table, recurrent):
        model = nnx.merge(graph, state)
        view = PagedView(table, positions, jnp.ones(positions.shape, bool), recurrent=recurrent)
        hidden, pool = model(tokens, positions, pool, view)
        return model.logits(hidden), pool

    def first_row(B: int, *cuts: int) -> np.ndarray:
        table = jnp.arange(1, 1 + B * S // P, dtype=jnp.int32).reshape(B, S // P)
        pool, found = init_cache(model.cache_shape(), 1 + table.size, P, B, S, dtype), []
        rows, half, accepted = jnp.arange(B, dtype=jnp.int32), jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.int32)
        for start, end in itertools.pairwise((0, *cuts, S)):
            positions = jnp.broadcast_to(jnp.arange(start, end, dtype=jnp.int32)[None], (B, end - start))
            count, recurrent = jnp.full(B, end - start, jnp.int32), None
            if start < prompt:
                recurrent = PrefillRows(rows, count, jnp.full(B, start == 0), jnp.full(B, False))
            elif prompt:
                recurrent = VerifyRows(rows, count, accepted, half, jnp.full(B, False))
                accepted, half = count, 1 - half
            logits, pool = read(state, tokens[:B, start:end], positions, pool, table, recurrent)
            found.append(np.asarray(logits[0]))
        return np.concatenate(found)

    ways = [(1,), (1, *range(1, S)), (3, *range(3, S, 5)), (6, 16, 32)]
    if prompt:
        ways = [(1, prompt), (1, 8, *range(prompt, S)), (3, prompt, *range(prompt + 3, S, 5)), (6, 8, prompt, 32)]
    with chunks_of_states():
        first, *others = (first_row(*way) for way in ways)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(("architecture", "draft"), CASES)
def test_drafts_leave_the_greedy_text_of_the_target(tmp_path, architecture, draft):
    """By a draft model that is the target rounded to bfloat16, by lookup, and by draft heads with random weights."""
    target = tiny_checkpoint(tmp_path / "target", architecture)
    head = tmp_path / "draft"
    if draft == "draft_model":
        shutil.copytree(tiny_checkpoint(tmp_path / "rounded", architecture, dtype="bfloat16"), head)
    elif draft == "eagle":
        eagle(head, **NO_EMBEDDING)
    elif draft == "eagle3":
        speculators(head, eagle_aux_hidden_state_layer_ids=[0, 1, 2])  # the embeddings, and the layers' outputs
    elif draft == "p_eagle":
        speculators(head, "peagle", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    how = {**SMALL, **(OF_DELTA_NETS if architecture in HYBRIDS else {})}
    llm = jspec.load(target, "ngram" if draft == "ngram" else head, num_draft_tokens=3, **how)
    stats = [result.stats for result in drafted(llm, PROMPTS, most=24, each=False)]
    if draft == "draft_model":
        accepted = sum(each.num_accepted_draft_tokens for each in stats)
        assert accepted > sum(each.num_draft_tokens for each in stats) // 2


@pytest.mark.parametrize("architecture", in_tiers(ARCHITECTURES, test=("DeepseekV3ForCausalLM", "Gemma4ForCausalLM")))
def test_disturbances_leave_the_greedy_text_of_the_target(tmp_path, architecture):
    """Requests that share a prefix, with a budget of tokens to verify, and are swapped out of the device and back."""
    how = {"num_draft_tokens": 3, "verify_budget": 2.5, "max_len": 64, "page_size": 8, "prefill_chunk": 16}
    hybrid = architecture in HYBRIDS
    how |= OF_DELTA_NETS | {"max_len": 128} if hybrid else {}
    llm = jspec.load(tiny_checkpoint(tmp_path, architecture), "ngram", max_batch=3, **how)
    prefix = [5, 6, 7, 8] * (17 if hybrid else 6)
    prompts = [[*prefix, *rest] for rest in ([9], [10, 11], [12, 13, 14], [5, 6], [15])]
    params = jspec.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [llm.engine.request(prompt, params) for prompt in prompts]
    with preempting(llm.engine):
        actives = serve(llm.engine, requests, at_a_time=2)
    metrics = llm.engine.metrics()
    assert metrics.num_preemptions > 0
    assert metrics.num_cached_tokens > 0
    for prompt, active in zip(prompts, actives, strict=True):
        assert_likeliest(llm, prompt, active.tokens)


@pytest.mark.parametrize(("dtype", "multiplier"), [(jnp.float32, 3584**0.5), (jnp.bfloat16, 59.75)])
def test_the_multiplier_of_embeddings_is_rounded_as_the_model_is(dtype, multiplier):
    """Gemma 2 9B has 59.866 in fp32 and 59.75 in bfloat16; the embeddings that draft heads read have neither."""
    config = dataclasses.replace(TARGET, embedding_multiplier=3584**0.5)
    model, tokens = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)), jnp.arange(6, dtype=jnp.int32)[None]
    embedded = model.embed(tokens)
    np.testing.assert_array_equal(embedded[0], model.embedding[...][:6])
    _, first, _ = model.with_auxiliary(tokens, tokens, (None,) * config.num_layers, CausalView(tokens), (0,))
    np.testing.assert_array_equal(first, (embedded.astype(jnp.float32) * np.float32(multiplier)).astype(dtype))


def test_every_family_is_tested():
    assert set(ARCHITECTURES) == set(FAMILIES)


def test_an_engine_chooses_the_factors_of_its_longest_text(tmp_path):
    """``longrope`` takes the long factors for all texts of an engine whose texts may pass the original length, 32."""
    folder = tiny_checkpoint(tmp_path, "Phi3ForCausalLM")
    long, short = (jspec.load(folder, **SMALL | {"max_len": n}) for n in (33, 32))
    assert (long.target.config.rope.long_texts, short.target.config.rope.long_texts) == (True, False)
    assert np.abs(np.asarray(long.logits([5, 6, 7])) - np.asarray(short.logits([5, 6, 7]))).max() > 1e-3
