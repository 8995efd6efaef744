"""EAGLE-3 heads of DeepSpec, whose ``target_layer_ids`` are outputs of layers: ``hidden_states[i + 1]`` of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from resaved import set_keys
from safetensors.numpy import load_file, save_file
from tiny import tiny_checkpoint
from tiny_heads import D, V, deepspec_eagle3, eagle3, speculators

from convert import convert, load_draft, load_folder
from convert.folders import read_draft_config
from jspec.checkpoints.files.refusal import Refusal
from jspec.models import build, build_head
from jspec.models.kv_cache import CausalView

LAYERS, T, EPS, THETA = 8, 9, 1e-5, 1e4
IDS, OUTPUT_IDS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
INPUTS = {"aux_convention": "input_of"}
OUTPUTS = {"aux_convention": "output_of"}


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotated(x):
    """``x`` ``[T, heads, H]`` after the rotary embedding, half by half."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * THETA ** (-np.arange(half) / half)
    cos, sin, (a, b) = np.cos(angles), np.sin(angles), (x[..., :half], x[..., half:])
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def reference(weights, hidden_states, ids, following):
    """Logits ``[T, V]`` of a DeepSpec head: one causal pass, written out from its ``Qwen3Eagle3Model``, in float64.

    Args:
      weights: tensor name -> array.
      hidden_states: those of transformers, a tuple of ``[T, D]``.
      ids: ``target_layer_ids``.
      following: int ``[T]``, the token behind each.
    """
    w = {name.removesuffix(".weight").removeprefix("layers.0."): array.astype(float) for name, array in weights.items()}
    fused = np.concatenate([hidden_states[i + 1] for i in ids], -1) @ w["fc"].T
    embedded = w["embed_tokens"][following]
    x = np.concatenate([norm(embedded, w["input_layernorm"]), norm(fused, w["hidden_norm"])], -1)
    q, k, v = ((x @ w[f"self_attn.{name}_proj"].T).reshape(len(x), -1, 16) for name in "qkv")
    q, k = rotated(norm(q, w["self_attn.q_norm"])), rotated(norm(k, w["self_attn.k_norm"]))
    k, v = (np.repeat(one, q.shape[1] // one.shape[1], axis=1) for one in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) / 4 + np.where(np.tri(len(x), dtype=bool), 0, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    hidden = fused + np.einsum("nts,snh->tnh", shares, v).reshape(len(x), -1) @ w["self_attn.o_proj"].T
    x = norm(hidden, w["post_attention_layernorm"])
    gate = x @ w["mlp.gate_proj"].T
    hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return norm(hidden, w["norm"]) @ w["lm_head"].T


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny Qwen3 model, tokens of a text, and the hidden states of transformers for all but the last of them."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tiny_checkpoint(tmp_path_factory.mktemp("target"), "Qwen3ForCausalLM", num_hidden_layers=LAYERS)
    tokens = np.array(jax.random.randint(jax.random.key(5), (T + 1,), 3, V))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor(tokens[None, :T]), output_hidden_states=True).hidden_states
    return build(*load_folder(folder, "float32")), tokens, [one[0].double().numpy() for one in states]


@pytest.mark.parametrize("ids", [(0, 1, 2, 4, 5), (1, 3, 4), (6,), (0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_the_head_reads_the_outputs_of_these_layers(tmp_path, target, ids):
    model, tokens, states = target
    folder = deepspec_eagle3(tmp_path / "head", ids)
    config, params = load_draft(folder)
    head, positions = build_head(config, params), jnp.arange(T, dtype=jnp.int32)[None]
    read = config.resolved_aux_layers(model.config)
    assert read == tuple(i + 1 for i in ids)
    _, features, _ = model.with_auxiliary(tokens[None, :T], positions, (None,) * LAYERS, CausalView(positions), read)
    expected = np.concatenate([states[i + 1] for i in ids], -1)
    np.testing.assert_allclose(features[0], expected, atol=1e-5 * np.abs(expected).max())
    embedded = head.embed(tokens[None, 1:], model)
    hidden, _ = head(embedded, head.fuse(features), positions, (None,), CausalView(positions))
    logits = reference(load_file(folder / "model.safetensors"), states, ids, tokens[1:])
    np.testing.assert_allclose(head.logits(hidden, model)[0], logits, atol=2e-5 * np.abs(logits).max())


def test_a_converted_folder_reads_the_same(tmp_path):
    convert(deepspec_eagle3(tmp_path / "head"), tmp_path / "out")
    assert read_draft_config(tmp_path / "out") == read_draft_config(tmp_path / "head", **OUTPUTS)
    with pytest.raises(Refusal, match="aux_convention='input_of', but the draft head was converted with 'output_of'"):
        load_draft(tmp_path / "out", **INPUTS)


def with_ids(folder, width=None, **keys):
    """The folder of a head, after ``keys`` of its config.json and the number of hidden states that it fuses were changed."""
    set_keys(folder, **keys)
    if width is not None:
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, "fc.weight": np.ones((D, width), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        *(
            ({OUTPUT_IDS: ids}, f"target_layer_ids={ids!r}: expected a list of layer ids of at least 0")
            for ids in ([-1, 0, 1, 2, 3], [], [0, 1.0], [True, 2], "0, 1", {"0": 1}, 3)
        ),
        ({OUTPUT_IDS: [0, 2, 1, 3, 4]}, "=[0, 2, 1, 3, 4]: expected different layer ids, ascending"),
        ({OUTPUT_IDS: [0, 1, 1, 3, 4]}, "=[0, 1, 1, 3, 4]: expected different layer ids, ascending"),
        (
            {OUTPUT_IDS: [0, 1, 2, 3, 8]},
            "=[0, 1, 2, 3, 8]: expected layer ids of at most 7, because num_target_layers=8",
        ),
        (
            {OUTPUT_IDS: [0, 1, 2]},
            "=[0, 1, 2]: expected 5 different layer ids, because 'fc.weight' fuses 5 hidden states",
        ),
        ({"width": 5 * D + 1}, "tensor 'fc.weight' reads 321 numbers, expected a multiple of the target's hidden size"),
        (
            {"layer_ids": [0, 1, 2, 4, 5]},
            f"layer_ids=[0, 1, 2, 4, 5]: expected none; rename it {IDS}, and say with aux_",
        ),
        ({"architectures": ["Gemma4Eagle3Model"]}, "draft heads of Gemma 4 are not supported"),
    ],
)
def test_bad_layer_ids_are_refused(tmp_path, keys, words):
    with pytest.raises(Refusal) as refusal:
        load_draft(with_ids(deepspec_eagle3(tmp_path / "head"), **keys))
    assert words in str(refusal.value)
    assert str(refusal.value).startswith(f"{tmp_path}/head/config.json: ")


def test_a_target_with_fewer_layers_is_refused(tmp_path, target):
    config, _ = load_draft(with_ids(deepspec_eagle3(tmp_path / "head", (0, 1, 2, 3, 8)), num_target_layers=None))
    with pytest.raises(ValueError, match=r"reads auxiliary layers \(1, 2, 3, 4, 9\), and the target has 8 layers"):
        config.require_fit(target[0].config)


def test_layers_that_read_the_embedding_again_are_refused(tmp_path):
    """DeepSpec's second layer would; those of others do not."""
    folder = deepspec_eagle3(tmp_path / "head", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "layers.1.hidden_norm.weight": np.ones(D, np.float32)}, folder / "model.safetensors")
    with pytest.raises(Refusal, match=r"'layers\.1\.hidden_norm\.weight' has no place"):
        load_draft(folder)


def test_an_option_that_contradicts_the_name_is_refused(tmp_path):
    folder = deepspec_eagle3(tmp_path / "head")
    assert read_draft_config(folder, **OUTPUTS) == read_draft_config(folder)
    with pytest.raises(Refusal, match=r"aux_convention='input_of': target_layer_ids=\[.*\] means the outputs of these"):
        read_draft_config(folder, **INPUTS)


# Lists of inputs and of outputs: which of the two readings of the former is that of the latter.
PAIRS = [([1, 3, 5], [0, 2, 4], {"input_of"}), ([0, 2, 4], [0, 2, 4], {"output_of"}), ([1, 2, 3], [0, 2, 4], set())]


@pytest.mark.parametrize("write", [eagle3, speculators])
@pytest.mark.parametrize(("ids", "outputs", "agree"), PAIRS)
def test_two_lists_agree_or_are_refused(tmp_path, write, ids, outputs, agree):
    """Whatever the user says of the first list; the speculators format says it."""
    folder = with_ids(write(tmp_path / "head"), **{IDS: ids, OUTPUT_IDS: outputs})
    for said in (None, "input_of", "output_of") if write is eagle3 else (None, "input_of"):
        known = {said} if said else {"input_of"} if write is speculators else {"input_of", "output_of"}
        if known & agree:
            assert read_draft_config(folder, aux_convention=said).aux_layers == (1, 3, 5)
            continue
        with pytest.raises(Refusal) as refusal:
            read_draft_config(folder, aux_convention=said)
        named = f"{OUTPUT_IDS}={outputs}, the outputs of these layers, and {IDS}={ids}, read as "
        assert named in str(refusal.value)
        assert str(refusal.value).endswith("name different hidden states; leave out the list that is wrong")


@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_layer_ids_are_read_from_either_place(tmp_path, place):
    keys = {OUTPUT_IDS: [1, 3, 6]}
    folder = with_ids(eagle3(tmp_path / "head"), **(keys if place == "top" else {"eagle_config": keys}))
    assert read_draft_config(folder).aux_layers == (2, 4, 7)
