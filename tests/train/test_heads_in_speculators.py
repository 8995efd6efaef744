"""Heads that ``jspec train`` wrote load in the speculators package's own classes, which compute what jspec does with them.

The package is no dependency of the tests: it asks for an older transformers, and brings a trainer's packages. Where it is
not installed, ``JSPEC_SPECULATORS`` names the folders that have it and them, as PATH does; without it, the tests are
skipped."""

import importlib
import json
import os
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_heads import causal_drafts
from safetensors.numpy import load_file
from tiny import tiny_checkpoint

from convert import load_draft, load_folder
from jspec.checkpoints.export import export_draft
from jspec.cli import main
from jspec.models import build, build_head
from jspec.models.kv_cache import CausalView

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # those of a package that is not ours
K, LENGTH, NEAR = 3, 24, 1e-5
PLAN = "--steps 2 --evaluate-every 2 --tokens-per-step 64 --length 32 --prompts 1 --dtype float32 --peak-rate 1e-2"
SIZES = {
    "eagle3": ["--draft-vocab-size", "40"],
    "parallel": ["--draft-vocab-size", "40", "--layers", "2"],
    "dflash": ["--layers", "2"],
    "dspark": ["--layers", "2", "--draft-vocab-size", "40", "--markov", "rnn", "--markov-rank", "8"],
}


@pytest.fixture(scope="module")
def speculators() -> Any:
    folders = [folder for folder in os.environ.get("JSPEC_SPECULATORS", "").split(os.pathsep) if folder]
    sys.path += folders  # behind all that is installed
    try:
        return importlib.import_module("speculators")
    except ImportError as error:
        if folders:
            raise
        pytest.skip(f"speculators is not installed, and JSPEC_SPECULATORS names no folders that have it ({error})")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a target and token ids to train heads on."""
    root = tmp_path_factory.mktemp("speculators")
    tiny_checkpoint(root / "target", num_hidden_layers=8, max_position_embeddings=128)
    text = np.random.default_rng(1).integers(3, 97, size=800)
    np.savez(root / "tokens.npz", train=text[:600], held_out=text[600:])
    return root


def trained(folder, method: str):
    """The folder of a head that ``jspec train`` wrote."""
    paths = ["--target", str(folder / "target"), "--data", str(folder / "tokens.npz"), "--out", str(folder / method)]
    how = ["--method", method, *paths, *PLAN.split(), "--num-draft-tokens", str(K)]
    assert main(["train", *how, *SIZES[method]]) == 0
    return folder / method / "head"


def in_their_layout(folder, method: str, head):
    """The folder of the same head in the layout of the package, which ``jspec train`` writes for some methods alone."""
    config, params = load_draft(head, "float32")
    out = folder / f"{method}-of-speculators"
    names = {"target_name": str(folder / "target"), "target_architectures": ["LlamaForCausalLM"]}
    export_draft(out, config, params, **names, dtype="float32", layout="speculators")
    return out


def theirs(speculators, head, target):
    """The package's own model of a head; a layout that is not the package's is converted by it."""
    if "speculators_model_type" not in json.loads((head / "config.json").read_text()):
        model = speculators.SpeculatorModel.from_pretrained(str(head), verifier=str(target))
        head = head.with_name("converted-by-speculators")
        model.save_pretrained(head)
    config = speculators.SpeculatorModelConfig.from_pretrained(str(head))
    config.transformer_layer_config._attn_implementation = "sdpa"  # the default is compiled
    model = speculators.SpeculatorModel.from_pretrained(str(head), config=config).eval()
    if "embed_tokens.weight" not in load_file(head / "model.safetensors"):
        # The package takes the target's where it finds the NaN that it wrote before loading, which may be gone by now:
        # findings/speculators-absent-embedding.sh.
        torch.nn.init.constant_(model.embed_tokens.weight, torch.nan)
        model.load_verifier_weights()
    return model


def training_logits(model, **inputs) -> list[np.ndarray]:
    """The logits ``[slots, Vd]`` of which a training pass of the package computes its loss, of one draft or of all."""
    found: list[np.ndarray] = []

    def tell(logits, *_, **__):
        found.append(logits[0].numpy())
        return torch.zeros(()), {}

    with mock.patch.object(sys.modules[type(model).__module__], "compute_metrics", tell), torch.no_grad():
        model(**inputs)
    return found


def drafts_of_theirs(model, method: str, target, tokens: np.ndarray) -> dict[int, np.ndarray]:
    """The logits ``[K, Vd]`` of the drafts behind the first 2, 3, .. tokens of a text, by their number."""
    n, core = LENGTH, sys.modules[type(model).__module__]
    positions = jnp.arange(n, dtype=jnp.int32)[None]
    read = jax.jit(
        lambda text: target.with_auxiliary(
            text, positions, (None,) * target.config.num_layers, CausalView(positions), tuple(model.target_layer_ids)
        )[:2]
    )
    hidden, features = (torch.tensor(np.asarray(array)) for array in read(tokens[None, :n]))
    inputs = {"hidden_states": features, "verifier_last_hidden_states": hidden, "loss_mask": torch.ones(1, n)}
    inputs |= {"document_ids": torch.zeros(1, n, dtype=torch.long)}
    text, following = (torch.tensor(part, dtype=torch.long)[None] for part in (tokens[:n], tokens[1:]))
    if method == "eagle3":  # slot i reads token i + 1, and its draft k the true tokens before it
        steps = training_logits(model, **inputs, input_ids=following, ttt_steps=K)
        return {i + 2: np.stack([step[i] for step in steps]) for i in range(n - K)}
    if method == "parallel":  # every slot has all its mask slots; the package would draw some
        slots = [(i, depth) for depth in range(K) for i in range(n - depth)]
        chains = tuple(torch.tensor(column) for column in zip(*slots, strict=True))
        with mock.patch.object(core, "generate_cod_sample_indices", return_value=chains):
            [found] = training_logits(model, **inputs, input_ids=following, num_depths=K)
        logits = dict(zip(slots, found, strict=True))
        return {i + 2: np.stack([logits[i, depth] for depth in range(K)]) for i in range(n - K)}
    anchors = torch.arange(1, n - model.block_size)  # all, and not some that the package would draw
    of_blocks = importlib.import_module("speculators.models.dflash.core")
    chosen = anchors, torch.ones_like(anchors, dtype=torch.bool)
    with mock.patch.object(of_blocks, "select_anchors", return_value=chosen):
        [found] = training_logits(model, **inputs, input_ids=text, max_anchors=len(anchors))
    blocks = found.reshape(len(anchors), model.block_size, -1)[:, 0 if model.config.sample_from_anchor else 1 :]
    return {int(anchor) + 1: block for anchor, block in zip(anchors, blocks, strict=True)}


def drafts_of_jspec(head_folder, target, tokens: np.ndarray, lengths: list[int]) -> np.ndarray:
    """``[lengths, K, V]``, with -inf for tokens that the head does not know."""
    config, params = load_draft(head_folder, "float32")
    head, text = build_head(config, params), jnp.asarray(np.tile(tokens, (len(lengths), 1)), jnp.int32)
    drafts = jax.jit(lambda text, length: causal_drafts(config, head, target, text, length, K).logits)
    return np.asarray(drafts(text, jnp.asarray(lengths, jnp.int32)))


@pytest.mark.parametrize(
    ("method", "layout"),
    [("eagle3", "trained"), ("parallel", "trained"), ("dflash", "trained"), ("dflash", "own"), ("dspark", "own")],
)
def test_a_trained_head_computes_there_what_it_does_here(speculators, folder, method, layout):
    head = folder / method / "head"
    head = head if head.exists() else trained(folder, method)
    exported = head if layout == "trained" else in_their_layout(folder, method, head)
    target = build(*load_folder(folder / "target", "float32"))
    tokens = np.random.default_rng(2).integers(3, 97, size=LENGTH + 1)
    model = theirs(speculators, exported, folder / "target")
    wanted = drafts_of_theirs(model, method, target, tokens)
    found = drafts_of_jspec(head, target, tokens, [*wanted])
    known = np.arange(found.shape[-1]) if model.d2t is None else np.arange(len(model.d2t)) + model.d2t.numpy()
    assert (np.isfinite(found).all(axis=(0, 1)) == np.isin(np.arange(found.shape[-1]), known)).all()
    expected = np.stack([*wanted.values()])
    assert expected.shape == (len(wanted), K, len(known))
    assert np.abs(found[:, :, known] - expected).max() < NEAR * np.abs(expected).max()
