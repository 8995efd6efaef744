"""Tiny checkpoints with multi-token prediction layers behind their last layer, or under names of their own."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from greedy_texts import drafted
from parity_cases import SIZES
from resaved import resave, set_keys
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights

import jspec
from convert import convert, load_folder
from convert.manifest import check
from jspec.checkpoints.layouts.mtp import place_of
from jspec.checkpoints.tensors.names import renamed, tensor_table
from jspec.checkpoints.tensors.parts import rearranged_tensors
from jspec.config.heads import MTPConfig, mtp_layers
from jspec.config.tensor_names import names_of
from jspec.models.kv_cache import CausalView


def with_layers(path, architecture="Glm4MoeLiteForCausalLM", layers=1, **overrides):
    """A random checkpoint with multi-token prediction layers, as its family has them."""
    folder, has_names = tiny_checkpoint(path, architecture, **overrides), names_of(architecture).mtp is not None
    set_keys(folder, **{"mtp_num_hidden_layers" if has_names else "num_nextn_predict_layers": layers})
    target, _ = load_folder(folder)
    own, place, rng = mtp_layers(target, layers), place_of(target), np.random.default_rng(7)
    apart = rearranged_tensors(own, place.layers, place.start)
    parts = {part.name for whole in apart.values() for part in whole.parts}
    source = placements(target, layers)
    shapes = {name: at.shape for name, at in source.items() if name not in parts}
    shapes |= {name: whole.shape for name, whole in apart.items()}
    tensors = load_file(folder / "model.safetensors")
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        tensors[name] = (1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5).astype(np.float32)
    for k in () if has_names else place.layers:  # copies of the target's
        tensors[f"model.layers.{k}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"model.layers.{k}.shared_head.head.weight"] = tensors["lm_head.weight"]
    write_weights(folder, tensors)
    return folder


def by_transformers(folder, family: str, settings: dict, count: int):
    """A checkpoint that transformers wrote with ``count`` layers of its own class behind it, and the two models."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(0)
    settings = copy.deepcopy({**SIZES, **settings, "attn_implementation": "eager"})
    config = getattr(transformers, f"{family}Config")(**settings)
    config.num_mtp_layers, config.mtp_mlp_layer_types = count, ["sparse"] * count
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    mtp = MtpModel(model, count).eval()
    with torch.no_grad():
        for one in (model, mtp):
            for name, parameter in (*one.named_parameters(), *one.named_buffers()):
                if "norm" in name:
                    parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
                elif name.endswith("e_score_correction_bias"):
                    parameter.copy_(0.1 * torch.randn_like(parameter))
                elif parameter.ndim > 1:
                    parameter.copy_(parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tensors, first = {}, config.num_hidden_layers
    for name, array in mtp.state_dict().items():
        tensors |= published(name, array.numpy(), first)
    resave(folder, add=tensors, num_nextn_predict_layers=count)
    return torch, model, mtp


def published(name: str, array: np.ndarray, first: int) -> dict[str, np.ndarray]:
    """A tensor of ``MtpModel`` under the names that it has in a checkpoint, where such layers begin at number ``first``."""
    if not name.startswith("layers."):
        return {}  # embedding and output head are the target's
    _, k, rest = name.split(".", 2)
    at = f"model.layers.{first + int(k)}."
    rest = "shared_head.norm.weight" if rest == "post_norm.weight" else rest.removeprefix("mtp_block.")
    if rest.endswith("experts.gate_up_proj"):
        halves = (np.split(one, 2) for one in array)
        return {
            f"{at}mlp.experts.{e}.{part}_proj.weight": np.ascontiguousarray(half)
            for e, pair in enumerate(halves)
            for part, half in zip(("gate", "up"), pair, strict=True)
        }
    if rest.endswith("experts.down_proj"):
        return {f"{at}mlp.experts.{e}.down_proj.weight": np.ascontiguousarray(one) for e, one in enumerate(array)}
    return {at + rest: np.array(array)}


def placements(target, layers):
    """Tensor name -> placement, of the layers that are yet to be written."""
    return renamed(tensor_table(MTPConfig(mtp_layers(target, layers))), place_of(target).renames)


def assert_drafts(folder, out, **loading):
    """That its layers draft for a target, from its Hugging Face folder and the converted one, with the same texts."""
    convert(folder, out, verify="shapes")
    assert check(out) == []
    texts = []
    for path in (folder, out):
        llm = jspec.load(path, "mtp", num_draft_tokens=3, **loading)
        assert llm.method == "mtp"
        results = drafted(llm, [[5], [7, 8, 9] * 3, range(3, 27)], most=20, each=False)
        texts.append([result.token_ids for result in results])
    assert texts[0] == texts[1]


def slots(target, head, tokens):
    """The logits of the head after each slot of a text, from true features."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]

    @jax.jit
    def computed(tokens):
        hidden, _ = target(tokens[None], positions, (None,) * target.config.num_layers, CausalView(positions))
        embedded, where = head.embed(tokens[None, 1:], target), positions[:, :-1]
        none = (None,) * head.config.layers.num_layers
        out, _ = head(embedded, hidden[:, :-1], where, none, CausalView(where))
        return head.logits(out, target)[0], hidden

    return computed(tokens)


def chained(target, head, tokens, features, layers: tuple[int, ...]):
    """The logits after the last of several drafts of each slot, and the state behind it, of which a layer of the head makes
    each from the state before it, first from ``features``."""
    count = features.shape[1]
    where = jnp.arange(count, dtype=jnp.int32)[None]

    @jax.jit
    def computed(tokens, hidden):
        embedded, cache = head.embed(tokens[None], target), (None,) * head.config.layers.num_layers
        for k, layer in enumerate(layers):
            hidden, cache = head.read(
                layer, embedded[:, k + 1 : k + 1 + count], hidden, where, cache, CausalView(where)
            )
            hidden = head.recycle(hidden)
        return head.logits(hidden, target)[0], hidden

    return computed(jnp.asarray(tokens, jnp.int32), features)
