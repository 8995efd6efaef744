"""Assistants of Gemma 4 equal transformers', draft through the engine, and are refused where they do not fit."""

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assistant_checkpoints import CLUSTERED, V, assistant_of, target_of
from resaved import set_keys
from safetensors.numpy import load_file, save_file
from tiers import in_tiers

import jspec
from convert import load_folder
from convert.cli import main as convert
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config import Shards
from jspec.engine.runner import shard_map
from jspec.loading.compatibility import require_shards
from jspec.models import build, build_head
from jspec.models.cache_pools import init_pool
from jspec.models.kv_cache import PagedView

torch = pytest.importorskip("torch")

P, K = 8, 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a small target and its assistant with clusters, made once. Tests must not change them."""
    folder = tmp_path_factory.mktemp("saved")
    target_of(folder / "target", "small")
    assistant_of(folder / "assistant", "small", **CLUSTERED)
    return folder


def copied(saved, name: str, folder):
    """A copy that a test may change."""
    return shutil.copytree(saved / name, folder / name)


def by_transformers(target, assistant, tokens) -> np.ndarray:
    """The logits of K drafts behind a text, ``[K, V]``, by the steps of transformers' candidate generator."""
    with torch.no_grad():
        read = target(tokens[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
        hidden, token, logits = read.hidden_states[-1][:, -1:], tokens[:, -1:], []
        position = torch.tensor([[tokens.shape[1] - 1]])
        for _ in range(K):
            inputs = torch.cat([target.get_input_embeddings()(token), hidden], dim=-1)
            out = assistant(
                inputs_embeds=inputs, position_ids=position, shared_kv_states=read.shared_kv_states, use_cache=False
            )
            token, hidden = out.logits.argmax(dim=-1), out.last_hidden_state
            logits.append(out.logits[0, -1].numpy())
    return np.array(logits)


def by_jspec(target_folder, folder, tokens) -> np.ndarray:
    config, params = load_folder(target_folder)
    target = build(config, params)
    checkpoint: Any = Checkpoint.open(folder)
    head_config, params = checkpoint.config, checkpoint.params()
    head, L = build_head(head_config, params), tokens.shape[1]
    table = 1 + jnp.arange(-(-L // P), dtype=jnp.int32)[None]
    positions = jnp.arange(L - 1, dtype=jnp.int32)[None]
    pool = init_pool(target.cache_shape(), 1 + table.size, P, jnp.float32)

    @jax.jit
    def drafts(tokens, pool):
        view = PagedView(table, positions, positions >= 0)
        hidden, pool = target(tokens[:, :-1], positions, pool, view)
        hidden, token, logits = hidden[:, -1:], tokens[:, -1:], []
        newest = jnp.full((1, 1), L - 1, jnp.int32)
        caches = [pool[source] for source in head_config.sources(config)]
        for _ in range(K):
            view = PagedView(table, newest - 1, newest > 0)
            normed, hidden = head(target.embed(token), hidden, newest, caches, view)
            logits.append(head.logits(normed)[0, 0])
            token = jnp.argmax(logits[-1])[None, None]
        return jnp.stack(logits)

    return np.asarray(drafts(jnp.asarray(tokens), pool))


@pytest.mark.parametrize(("kind", "more"), [("large", {}), ("small", CLUSTERED)], ids=["large", "small"])
@pytest.mark.parametrize("length", in_tiers([5, 9, 30], test=(9,)))
def test_drafts_equal_transformers(tmp_path, kind, more, length):
    """For texts shorter than a window, just longer, and much longer; transformers' window holds one key more here."""
    target, assistant = target_of(tmp_path / "target", kind), assistant_of(tmp_path / "assistant", kind, **more)
    tokens = np.random.default_rng(length).integers(3, V, size=(1, length)).astype(np.int32)
    wanted = by_transformers(target, assistant, torch.tensor(tokens, dtype=torch.long))
    got = by_jspec(tmp_path / "target", tmp_path / "assistant", tokens)
    scored = np.isfinite(got)
    assert scored.sum(axis=1).tolist() == [3 * V // 12 if more else V] * K
    np.testing.assert_allclose(got[scored], wanted[scored], rtol=2e-4, atol=2e-4)
    if more:  # transformers gives the other tokens a logit below all of these, jspec none
        lowest = np.where(scored, wanted, np.inf).min(axis=1, keepdims=True)
        assert (np.where(scored, -np.inf, wanted) < lowest).all()


def test_an_assistant_drafts_and_the_text_is_the_targets(tmp_path, capsys):
    target = target_of(tmp_path / "target", "small")
    assistant_of(tmp_path / "assistant", "small", **CLUSTERED)
    assert convert([str(tmp_path / "assistant"), str(tmp_path / "converted")]) == 0
    assert "assistant of Gemma 4" in capsys.readouterr().out
    prompts, texts = [[5], [7, 8, 9] * 3, list(range(3, 27))], []
    for draft in ("assistant", "converted"):
        llm = jspec.load(
            tmp_path / "target", tmp_path / draft, num_draft_tokens=3, max_batch=2, max_len=48, page_size=16
        )
        assert llm.method == "assistant"
        results = jspec.generate(llm, prompts, temperature=0, max_tokens=20, ignore_eos=True)
        assert sum(result.stats.num_draft_tokens for result in results) > 20
        texts.append([result.token_ids for result in results])
    for prompt, text in zip(prompts, texts[0], strict=True):
        whole = torch.tensor([[*prompt, *text]])
        with torch.no_grad():
            likeliest = target(whole).logits[0].argmax(dim=-1).tolist()
        assert likeliest[len(prompt) - 1 : -1] == text
    assert texts[0] == texts[1]


def changed(folder, key: str, value, text: bool = True):
    set_keys(folder, within="text_config" if text else None, **{key: value})


@pytest.mark.parametrize(
    ("key", "value", "text", "message"),
    [
        ("num_kv_shared_layers", 2, True, "num_kv_shared_layers=2: expected 3, all layers"),
        ("enable_moe_block", True, True, "enable_moe_block=True: expected 0 or false"),
        ("text_config", None, False, "text_config is missing"),
        ("tie_word_embeddings", False, False, "tie_word_embeddings=False: expected true"),
        ("num_centroids", 13, False, "clusters=13: expected a divisor of the vocabulary, 96"),
        ("centroid_intermediate_top_k", 13, False, "best_clusters=13: expected at most the 12 clusters"),
        ("backbone_hidden_size", 72, False, "has shape .*, but config.json asks for"),
        ("sliding_window", 9, True, "a window of 9 tokens, and this target has none"),
        ("head_dim", 8, True, "has shape .*, but config.json asks for"),
    ],
)
def test_assistants_that_do_not_fit_are_refused(saved, tmp_path, key, value, text, message):
    assistant = copied(saved, "assistant", tmp_path)
    changed(assistant, key, value, text)
    with pytest.raises(ValueError, match=message):
        jspec.load(saved / "target", assistant)


def test_an_ordering_that_repeats_a_token_is_refused(saved, tmp_path):
    assistant = copied(saved, "assistant", tmp_path)
    file = assistant / "model.safetensors"
    tensors = load_file(file)
    order = tensors["masked_embedding.token_ordering"].copy()
    order[3] = order[4]
    save_file({**tensors, "masked_embedding.token_ordering": order}, file)
    with pytest.raises(ValueError, match="token_ordering' does not hold each of the 96 tokens once"):
        Checkpoint.open(assistant).config  # noqa: B018


@pytest.mark.parametrize("packets", [False, True])
def test_texts_and_drafts_are_those_of_a_target_in_shards(saved, packets, monkeypatch):
    if packets:
        monkeypatch.setattr(shard_map, "reason_against_packets", lambda mesh: None)
    how = {"max_len": 96, "max_batch": 2, "page_size": 16, "dtype": "float32", "num_draft_tokens": 3}
    prompts = [list(range(3, 9)), list(range(20, 61))]
    found, wanted = (
        jspec.generate(
            jspec.load(saved / "target", saved / "assistant", tensor_parallel=count, **how),
            [{"prompt_token_ids": prompt} for prompt in prompts],
            temperature=1.0,
            seed=5,
            max_tokens=30,
            ignore_eos=True,
        )
        for count in (2, 1)
    )
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert [one.sources for one in found] == [one.sources for one in wanted]


def test_more_shards_than_divide_the_heads_of_an_assistant_are_refused(saved):
    heads = Checkpoint.open(saved / "assistant").config
    shards = Shards(3), None
    with pytest.raises(ValueError, match="tensor_parallel=3: expected a divisor of"):
        require_shards(shards, Checkpoint.open(saved / "target").config, heads)


def test_keys_of_layers_that_read_another_cache_are_left_out(saved, tmp_path):
    """Published files carry them, and nothing reads them."""
    target = copied(saved, "target", tmp_path)
    tensors, at = load_file(target / "model.safetensors"), "model.layers.5.self_attn."
    more = {f"{at}k_proj.weight": np.ones((64, 64), np.float32), f"{at}k_norm.weight": np.ones(32, np.float32)}
    save_file({**tensors, **more}, target / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint.open(target).hugging_face.unused == []
    (config, params), (again, others) = load_folder(saved / "target"), load_folder(target)
    assert config == again
    assert all(np.array_equal(params[name], others[name]) for name in params)


def test_a_target_without_keys_is_refused(saved, tmp_path):
    """The layers of an assistant alone are no language model."""
    target = copied(saved, "target", tmp_path)
    set_keys(target, num_kv_shared_layers=6)
    with pytest.raises(ValueError, match="num_kv_shared_layers=6: expected fewer than the 6 layers"):
        jspec.load(target)
