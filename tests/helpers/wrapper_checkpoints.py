"""Tiny multimodal checkpoints that transformers' own classes wrote, with every choice of their text models on."""

import copy
import json
from pathlib import Path

import numpy as np
from parity_cases import (
    DELTA_EXPERTS,
    DELTA_NETS,
    GEMMA3,
    GEMMA3_ROPES,
    GEMMA4_EXPERTS,
    GEMMA4_LARGE,
    GEMMA4_SMALL,
    GROWING,
    QWEN3_MOE,
    SECTIONS,
    SIZES,
    YARN,
)
from safetensors.numpy import load_file, save_file

from convert import load_folder

VISION = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
QWEN3_VISION = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
PIXTRAL = {**VISION, "model_type": "pixtral", "num_hidden_layers": 1, "head_dim": 8, "image_size": 28, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
GEMMA4_TOKENS = {"image_token_id": 190, "video_token_id": 191, "audio_token_id": 192, "tie_word_embeddings": True}
# name -> (prefix of transformers' classes, the text model's settings, those of the vision part, further ones, the class of
# the text model alone). The settings of a text model are those besides ``SIZES``.
WRAPPED = {
    "gemma3": (
        "Gemma3",
        {**GEMMA3, "rope_parameters": GEMMA3_ROPES, "sliding_window_pattern": 2},
        {**VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4, "image_token_index": 96},
        "Gemma3ForCausalLM",
    ),
    "gemma4": (
        "Gemma4",
        {**GEMMA4_SMALL, "pad_token_id": 0},
        {**VISION, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64},
        GEMMA4_TOKENS,
        "Gemma4ForCausalLM",
    ),
    "gemma4-experts": (
        "Gemma4",
        {**GEMMA4_LARGE, **GEMMA4_EXPERTS, "pad_token_id": 0},
        {**VISION, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64},
        GEMMA4_TOKENS,
        "Gemma4ForCausalLM",
    ),
    "gemma4-unified": (
        "Gemma4Unified",
        {**{k: v for k, v in GEMMA4_LARGE.items() if k != "hidden_size_per_layer_input"}, "pad_token_id": 0},
        {"mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 64, "patch_size": 2},
        GEMMA4_TOKENS,
        "Gemma4UnifiedForCausalLM",
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_parameters": MROPE, "attention_bias": True},
        QWEN3_VISION,
        {"tie_word_embeddings": True},
        "Qwen3ForCausalLM",
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {**QWEN3_MOE, "rope_parameters": MROPE, "mlp_only_layers": [1]},
        QWEN3_VISION,
        {},
        "Qwen3MoeForCausalLM",
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 3, 2]},
            **{"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        },
        QWEN_VISION,
        {},
        "Qwen2ForCausalLM",
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            **DELTA_NETS,
            "rope_parameters": {**YARN, **SECTIONS, "partial_rotary_factor": 0.5},
            "mtp_num_hidden_layers": 0,
        },
        {**QWEN_VISION, "num_position_embeddings": 16},
        {"tie_word_embeddings": True},
        "Qwen3_5ForCausalLM",
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {**DELTA_EXPERTS, "rope_parameters": {**MROPE, **SECTIONS, "partial_rotary_factor": 0.25}},
        {**QWEN_VISION, "num_position_embeddings": 16},
        {},
        "Qwen3_5MoeForCausalLM",
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 32, "rope_parameters": YARN, "sliding_window": None},
        PIXTRAL,
        {"tie_word_embeddings": False},
        "MistralForCausalLM",
    ),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "rope_parameters": GROWING},
        PIXTRAL,
        {"tie_word_embeddings": True},
        "Ministral3ForCausalLM",
    ),
}
TOKENS = {"image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193}


def save_wrapper(folder, name: str, **changes):
    """A multimodal model with random weights, saved as transformers saves it.

    Args:
      folder: where to.
      name: of ``WRAPPED``.
      changes: further settings of the text model.

    Returns:
      the model of transformers.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    prefix, text, vision, more, _ = WRAPPED[name]
    settings = copy.deepcopy({**SIZES, **text, **changes})
    if prefix == "Qwen2_5_VL":
        del settings["head_dim"]
    tokens = {"eos_token_id": [2, 3]} | (TOKENS if prefix.startswith("Qwen") else {})
    config = getattr(transformers, f"{prefix}Config")(
        text_config=settings, vision_config=copy.deepcopy(vision), **{**tokens, **more}
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for tensor, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if tensor.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "norm" in tensor:
                zero_centred = prefix == "Gemma3" or (prefix.startswith("Qwen3_5") and "linear_attn" not in tensor)
                parameter.copy_((not zero_centred) + 0.1 * noise)
            elif tensor.endswith("A_log"):
                parameter.copy_(1.5 * noise - 3)
            else:
                parameter.copy_(parameter.shape[-1] ** -0.5 * noise)
    model.save_pretrained(folder)
    return model


def logits_of(model, tokens) -> np.ndarray:
    """The logits ``[length, V]`` of a text, by transformers."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(np.asarray(tokens))[None], use_cache=False).logits[0].numpy()


def rewrite(folder, config=None, tensors=None):
    """Change config.json, the tensors, or both.

    Args:
      folder: a checkpoint with one file of weights.
      config: function of config.json that gives another.
      tensors: likewise of name -> array.
    """
    path, file = Path(folder, "config.json"), Path(folder, "model.safetensors")
    if config is not None:
        path.write_text(json.dumps(config(json.loads(path.read_text()))))
    if tensors is not None:
        changed = {name: np.ascontiguousarray(array) for name, array in tensors(load_file(file)).items()}
        save_file(changed, file, metadata={"format": "pt"})


def renamed(prefixes: dict[str, str]):
    """A function for ``rewrite`` that gives names another beginning."""

    def rename(tensors):
        def new(name):
            old = next((old for old in prefixes if name.startswith(old)), "")
            return prefixes.get(old, "") + name.removeprefix(old)

        return {new(name): array for name, array in tensors.items()}

    return rename


def copied(folder, to):
    """A copy that a test may change."""
    to.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def same(folder, other):
    """Assert that two folders have one config and the same params."""
    (config, params), (again, others) = load_folder(folder), load_folder(other)
    assert config == again
    assert params.keys() == others.keys()
    assert all(np.array_equal(params[name], others[name]) for name in params)
