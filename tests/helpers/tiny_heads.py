"""Tiny random draft heads in the public layout of each kind, for a target with V=97 and D=64 (tests/helpers/tiny.py).

Every function writes config.json and the weights into a folder, and returns the folder. Its further keyword arguments are
keys of config.json, where a value of None removes the key. ``leave_out`` names tensors that are not written. They are drawn
nevertheless, so that the other tensors stay the same. ``file`` is the file of the weights. If it ends in .pt or .bin, torch
writes it as a pickle.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import tiny_checkpoint

V, D, Vd = 97, 64, 40
IDS = [2, 3, 5, 7, 11, 90]  # of a draft vocabulary
MASK = 5  # the token that mask slots read
Shapes = dict[str, tuple[int, ...]]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def eagle(path: str | os.PathLike, *, seed: int = 0, leave_out=(), file="model.safetensors", **keys) -> Path:
    """EAGLE or EAGLE-2 as SafeAILab publishes them.

    There is an fc.bias unless ``bias=False``. With ``num_key_value_heads=None`` the attention is multi-head attention.
    """
    config = _merge(LLAMA, keys)
    shapes: Shapes = {"embed_tokens.weight": (V, D), "fc.weight": (D, 2 * D)}
    if config.get("bias", True):
        shapes["fc.bias"] = (D,)
    for layer in range(config["num_hidden_layers"]):
        norms = ("input_layernorm", "post_attention_layernorm")[layer == 0 :]
        shapes |= _layer(f"layers.{layer}.", config, D, norms, qkv_bias=config.get("qkv_bias", False))
    return _write(path, config, _draw(seed, shapes), leave_out, file)


def eagle3(path: str | os.PathLike, *, seed: int = 0, leave_out=(), file="model.safetensors", **keys) -> Path:
    """EAGLE-3 in its native layout, with the first layer under ``midlayer.``."""
    config = _merge(LLAMA, {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": Vd}, keys)
    tensors = _eagle3_tensors(seed, config, {**config, **config.get("eagle_config", {})}, "midlayer.")
    return _write(path, config, tensors, leave_out, file)


def deepspec_eagle3(path: str | os.PathLike, ids=(0, 1, 2, 4, 5), *, seed: int = 0, leave_out=(), **keys) -> Path:
    """EAGLE-3 as DeepSpec trains it for a target of 8 layers: a copy of the target's config, and of embedding and head."""
    own = {"num_target_layers": 8, "target_layer_ids": list(ids), "ttt_length": 7, "step_loss_decay": 1.0}
    layers = {"layer_types": ["full_attention"], "sliding_window": None, "max_window_layers": 8, "head_dim": 16}
    config = _merge(LLAMA, {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", **layers}, own, keys)
    tensors = _eagle3_tensors(seed, config, {**config, "draft_vocab_size": V}, "layers.0.")
    return _write(path, config, tensors, leave_out)


def p_eagle(path: str | os.PathLike, *, seed: int = 0, leave_out=(), file="model.safetensors", **keys) -> Path:
    """P-EAGLE in a native layout: two layers, ``mask_hidden`` and a mask token."""
    parallel = {"architectures": ["PeagleLlamaForCausalLM"], "parallel_drafting": True, "ptd_token_id": MASK}
    config = _merge(LLAMA, parallel, {"draft_vocab_size": Vd, "num_hidden_layers": 2}, keys)
    tensors = _eagle3_tensors(seed, config, {**config, **config.get("eagle_config", {})}, "layers.0.", mask=True)
    return _write(path, config, tensors, leave_out, file)


def speculators(
    path: str | os.PathLike,
    kind: str = "eagle3",
    *,
    seed: int = 0,
    leave_out=(),
    verifier: str = "target",
    layers: dict | None = None,
    **keys,
) -> Path:
    """EAGLE-3 (``kind="eagle3"``) or P-EAGLE (``"peagle"``) as the speculators package saves them.

    Args:
      verifier: name or path of the target, which config.json states.
      layers: keys of ``transformer_layer_config``. As in the published files, a key that is left out means the default of
        the class, for example an rms_norm_eps of 1e-6.
    """
    parallel = kind == "peagle"
    sizes = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    layer_config = {key: LLAMA[key] for key in (*sizes, "num_key_value_heads", "max_position_embeddings")}
    layer_config = _merge(layer_config, {"head_dim": 16, "num_hidden_layers": 1 + parallel}, layers or {})
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "draft_vocab_size": Vd,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": parallel,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config,
        **({"mask_token_id": MASK} if parallel else {}),
        **keys,
    }
    tensors = _eagle3_tensors(seed, layer_config, config, "layers.0.", mask=parallel)
    return _write(path, config, tensors, leave_out)


def pard(path: str | os.PathLike, *, seed: int = 0, **keys) -> Path:
    """PARD: an ordinary language model whose config.json has a ``pard_token``."""
    return tiny_checkpoint(path, seed=seed, **{"pard_token": MASK, **keys})


def mlp_speculator(path: str | os.PathLike, *, seed: int = 0, leave_out=(), repeat: bool = False, **keys) -> Path:
    """MLP speculator as ibm-fms publishes it. With ``repeat``, the weights that tied stages share are written for each."""
    sizes = {"vocab_size": V, "emb_dim": D, "inner_dim": 32, "n_predict": 3, "top_k_tokens_per_head": [4, 3, 2]}
    flags = {"n_candidates": 5, "tie_weights": False, "scale_input": False, "torch_dtype": "float32"}
    kind = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}
    config = _merge(kind, sizes, flags, keys)
    n, tied, W = config["n_predict"], config["tie_weights"], config["inner_dim"] or config["emb_dim"]
    own: Shapes = {"emb.{}.weight": (V, W), "head.{}.weight": (V, W), "ln.{}.weight": (W,), "ln.{}.bias": (W,)}
    shapes = {name.format(i): shape for i in range(1 if tied else n) for name, shape in own.items()}
    shapes |= {f"proj.{i}.weight": (W, W if i else config["emb_dim"]) for i in range(min(n, 2) if tied else n)}
    tensors = _draw(seed, shapes)
    if tied and repeat:
        tensors |= {name.format(i): tensors[name.format(0)] for i in range(1, n) for name in own}
        tensors |= {f"proj.{i}.weight": tensors["proj.1.weight"] for i in range(2, n)}
    return _write(path, config, {f"speculator.{name}": array for name, array in tensors.items()}, leave_out)


def medusa(path: str | os.PathLike, *, seed: int = 0, file="medusa_lm_head.safetensors", **keys) -> Path:
    """Medusa heads without their base model; ``version="2"`` has no output heads.

    The blocks of one head are equal, because the class that trains and writes them repeats one module.
    """
    config = _merge({"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "target"}, keys)
    blocks, tensors = config["medusa_num_layers"], {}
    for head in range(config["medusa_num_heads"]):
        drawn = _draw(seed + head, {"linear.weight": (D, D), "linear.bias": (D,), "weight": (V, D)})
        for block in range(blocks):
            tensors |= {f"{head}.{block}.linear.{kind}": drawn[f"linear.{kind}"] for kind in ("weight", "bias")}
        if config.get("version") != "2":
            tensors[f"{head}.{blocks}.weight"] = drawn["weight"]
    return _write(path, config, tensors, (), file)


def _eagle3_tensors(seed: int, config: dict, flags: dict, first: str, mask: bool = False) -> dict[str, np.ndarray]:
    """Tensors of an EAGLE-3 head. ``config`` describes its layers, ``flags`` has all other keys, and ``first`` is the prefix
    of the first layer's tensors."""
    V, D, Vd = config["vocab_size"], config["hidden_size"], flags["draft_vocab_size"]
    Dt = flags.get("target_hidden_size") or D
    ids = flags.get("eagle_aux_hidden_state_layer_ids") or flags.get("target_layer_ids") or range(3)
    aux_layers = len(ids) if flags.get("use_aux_hidden_state", True) else 0
    bias = config.get("attention_bias", False)
    rest = {"qkv_bias": bias, "out_bias": bias, "qk_norm": config["model_type"] == "qwen3"}
    shapes: Shapes = {"embed_tokens.weight": (V, D), "norm.weight": (D,), "lm_head.weight": (Vd, D)}
    shapes |= {"fc.weight": (D, aux_layers * Dt)} if aux_layers else {}
    shapes |= {"input_norm.weight": (aux_layers * Dt,)} if flags.get("norm_before_fc") else {}
    shapes |= {f"fc_norm.{i}.weight": (Dt,) for i in range(aux_layers if flags.get("fc_norm") else 0)}
    shapes |= {"mask_hidden": (1, 1, aux_layers * Dt)} if mask else {}
    norms = ("input_layernorm", "post_attention_layernorm")
    shapes |= _layer(first, config, 2 * D, ("hidden_norm", *norms), **rest)
    for layer in range(1, config["num_hidden_layers"]):
        shapes |= _layer(f"layers.{layer}.", config, D, norms, **rest)
    return _draw(seed, shapes) | (vocabulary(seed, V, Vd) if Vd < V else {})


def _layer(prefix: str, config: dict, inputs: int, norms, *, qkv_bias=False, out_bias=False, qk_norm=False) -> Shapes:
    """Tensors of one decoder layer whose attention reads ``inputs`` features."""
    D, F, N = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    G, H = config.get("num_key_value_heads", N), config.get("head_dim", D // N)
    shapes: Shapes = {f"{norm}.weight": (D,) for norm in norms}
    for name, out_features, in_features, bias in (
        ("self_attn.q_proj", N * H, inputs, qkv_bias),
        ("self_attn.k_proj", G * H, inputs, qkv_bias),
        ("self_attn.v_proj", G * H, inputs, qkv_bias),
        ("self_attn.o_proj", D, N * H, out_bias),
        ("mlp.gate_proj", F, D, False),
        ("mlp.up_proj", F, D, False),
        ("mlp.down_proj", D, F, False),
    ):
        shapes[f"{name}.weight"] = (out_features, in_features)
        shapes |= {f"{name}.bias": (out_features,)} if bias else {}
    shapes |= {f"self_attn.{name}_norm.weight": (H,) for name in ("q", "k")} if qk_norm else {}
    return {prefix + name: shape for name, shape in shapes.items()}


def vocabulary(seed: int, V: int, Vd: int) -> dict[str, np.ndarray]:
    """A draft vocabulary without token 0.

    ``d2t [Vd]`` holds offsets: token i of the draft vocabulary is token i + d2t[i] of the target. ``t2d [V]`` says of each
    token of the target whether it is in the draft vocabulary.
    """
    tokens = np.sort(1 + np.random.default_rng(seed).choice(V - 1, Vd, replace=False))
    return {"d2t": tokens - np.arange(Vd), "t2d": np.isin(np.arange(V), tokens)}


def _draw(seed: int, shapes: Shapes) -> dict[str, np.ndarray]:
    """Random float32 tensors: weights of norms near 1, biases near 0, and matrices that keep the scale of their input."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        if name.endswith("bias"):
            noise = 0.1 * noise
        elif len(shape) == 1:
            noise = 1 + 0.1 * noise
        elif len(shape) == 2:
            noise = noise * shape[1] ** -0.5
        tensors[name] = noise.astype(np.float32)
    return tensors


def _merge(*parts: dict) -> dict:
    merged = {key: value for part in parts for key, value in part.items()}
    return {key: value for key, value in merged.items() if value is not None}


def _write(path, config: dict, tensors: dict[str, np.ndarray], leave_out=(), file: str = "model.safetensors") -> Path:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    assert set(leave_out) <= tensors.keys(), leave_out
    tensors = {name: array for name, array in tensors.items() if name not in leave_out}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    else:
        torch = pytest.importorskip("torch")
        torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, folder / file)
    return folder


GQA = {"bias": False, "rope_theta": 500_000.0}
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24, "rope_theta": 1e6}
FULL = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "attention_bias": False}
NO_EMBEDDING = {"leave_out": ("embed_tokens.weight",)}

# The draft heads whose outputs golden/*.npz holds: by file and case, the function that writes one and its keywords.
CASES: dict[str, dict[str, tuple[Callable[..., Path], dict]]] = {
    "eagle": {
        "bias": (eagle, {"num_key_value_heads": None, **NO_EMBEDDING}),
        "own-embedding": (eagle, GQA),
        "qkv-bias": (eagle, {"qkv_bias": True, **NO_EMBEDDING}),
        "qkv-bias-only": (eagle, {**GQA, "qkv_bias": True, **NO_EMBEDDING}),
        "linear-rope": (eagle, {"bias": False, "rope_scaling": {"type": "linear", "factor": 2.0}, **NO_EMBEDDING}),
        "two-layers": (eagle, {"num_hidden_layers": 2, **NO_EMBEDDING}),
    },
    "eagle3": {
        "plain": (eagle3, {"architectures": ["LlamaForCausalLM"], **NO_EMBEDDING}),
        "own-embedding": (eagle3, {"rope_theta": 500_000.0}),
        "no-t2d": (eagle3, {"leave_out": ("embed_tokens.weight", "t2d")}),
        "full-vocabulary": (eagle3, {"draft_vocab_size": V, **NO_EMBEDDING}),
        "narrow": (eagle3, {"hidden_size": 48, "target_hidden_size": D}),
        "layer-ids": (eagle3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, **NO_EMBEDDING}),
        "final-hidden": (eagle3, {"eagle_config": {"use_aux_hidden_state": False}, **NO_EMBEDDING}),
        "attention-bias": (eagle3, {"attention_bias": True, **NO_EMBEDDING}),
        "wide-heads": (eagle3, {"head_dim": 24, **NO_EMBEDDING}),
        "qwen3": (eagle3, {**QWEN3, **NO_EMBEDDING}),
        "norm-before-fc": (eagle3, {"eagle_config": {"norm_before_fc": True}, **NO_EMBEDDING}),
        "fc-norm": (eagle3, {"fc_norm": True, **NO_EMBEDDING}),
        "norm-before-residual": (eagle3, {"norm_before_residual": True, **NO_EMBEDDING}),
        "norm-output": (eagle3, {"norm_output": True, **NO_EMBEDDING}),
        "two-layers": (eagle3, {"num_hidden_layers": 2, **NO_EMBEDDING}),
        "speculators": (speculators, {}),
        "speculators-residual": (speculators, {"norm_before_residual": True, "layers": FULL}),
        "speculators-norm-before-fc": (speculators, {"norm_before_fc": True}),
        "speculators-fc-norm-output": (speculators, {"fc_norm": True, "norm_output": True}),
        "speculators-full-vocabulary": (speculators, {"draft_vocab_size": V}),
        "speculators-qwen3": (speculators, {"layers": {"model_type": "qwen3", "head_dim": 24}}),
        "speculators-bias-two-layers": (speculators, {"layers": {"attention_bias": True, "num_hidden_layers": 2}}),
        "speculators-layer-ids": (speculators, {"eagle_aux_hidden_state_layer_ids": [1, 6]}),
    },
    "p_eagle": {
        "native": (p_eagle, {}),
        "native-norms": (p_eagle, {"norm_before_fc": True, "norm_before_residual": True, "draft_vocab_size": V}),
        "speculators": (speculators, {"kind": "peagle"}),
        "speculators-norms": (speculators, {"kind": "peagle", "norm_before_residual": True, "fc_norm": True}),
        "speculators-qwen3": (speculators, {"kind": "peagle", "layers": {"model_type": "qwen3"}}),
    },
    "pard": {"llama": (pard, {})},
    "mlp_speculator": {
        "plain": (mlp_speculator, {}),
        "scaled": (mlp_speculator, {"scale_input": True}),
        "tied": (mlp_speculator, {"tie_weights": True}),
        "tied-scaled": (mlp_speculator, {"tie_weights": True, "scale_input": True, "repeat": True}),
        "one-width": (mlp_speculator, {"inner_dim": 0, "n_predict": 4, "top_k_tokens_per_head": [4, 3, 2, 2]}),
    },
    "medusa": {
        "plain": (medusa, {}),
        "pickle": (medusa, {"file": "medusa_lm_head.pt"}),
        "two-blocks": (medusa, {"medusa_num_layers": 2}),
        "borrowed-head": (medusa, {"version": "2"}),
    },
}
IDS = [2, 3, 5, 7, 11, 90]
