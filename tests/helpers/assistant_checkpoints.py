"""Tiny targets of Gemma 4 and their assistants, which transformers writes."""

import pytest
from parity_cases import GEMMA4_LARGE, GEMMA4_SMALL, SIZES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLUSTERED = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
TARGETS = {"large": GEMMA4_LARGE, "small": GEMMA4_SMALL}
V = 96  # a multiple of the clusters


def randomised(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("token_ordering"):
                parameter.copy_(torch.randperm(V))
            elif "norm" in name or name.endswith("layer_scalar"):
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif parameter.ndim > 1:
                parameter.copy_(parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    return model.eval()


def target_of(folder, kind: str):
    settings = {**SIZES, **TARGETS[kind], "vocab_size": V, "bos_token_id": 1, "eos_token_id": 2}
    model = randomised(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**settings)))
    model.save_pretrained(folder)
    return model


def assistant_of(folder, kind: str, **more):
    large = TARGETS[kind] is GEMMA4_LARGE
    text = transformers.Gemma4TextConfig(
        vocab_size=V,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        attention_k_eq_v=large,
        num_global_key_value_heads=1 if large else None,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=7,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=128,
        pad_token_id=None,
    )
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=64, **more)
    model = randomised(transformers.Gemma4AssistantForCausalLM(config))
    model.save_pretrained(folder)
    return model
