"""The keys of config.json that only some families have, read as choices of ``ModelConfig`` (``Family.more``)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.rope import yarn_score_factor
from jspec.config import Experts, Latent

# More than any published model has. They bound the work that a hostile config can cause.
MAX_EXPERTS, MAX_MTP_LAYERS = 1024, 64

Choices = Mapping[str, Any]  # fields of ``ModelConfig``


def nothing_more(fields: Fields) -> Choices:
    """For families without keys of their own."""
    del fields
    return {}


def multipliers(fields: Fields) -> Choices:
    """Granite: numbers by which embeddings, scores, residuals and logits are scaled."""
    return {
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "residual_multiplier": fields.number("residual_multiplier", 1.0),
        "logit_divisor": fields.number("logits_scaling", 1.0),
    }


def opt(fields: Fields) -> Choices:
    """OPT: where its norms stand, and how wide its embeddings are."""
    fields.only("layer_norm_elementwise_affine", True, "because norms without weights are not supported")
    before, biases = fields.flag("do_layer_norm_before", True), fields.flag("enable_bias", True)
    hidden = fields.integer("hidden_size")
    width = fields.integer("word_embed_proj_dim", hidden)
    return {
        "norm_placement": "before" if before else "after_sum",
        "final_norm": before and not fields.flag("_remove_final_layer_norm"),
        "qkv_bias": biases,
        "output_bias": biases,
        "mlp_bias": biases,
        "embedding_size": None if width == hidden else width,
    }


def gemma2(fields: Fields) -> Choices:
    """Gemma 2: scales that follow from sizes, and soft caps; null switches a soft cap off."""
    if fields.raw.get("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "false, because text is generated from left to right")
    return {
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        "embedding_multiplier": fields.integer("hidden_size") ** 0.5,
        "attention_softcap": fields.number("attn_logit_softcapping", None),
        "logit_softcap": fields.number("final_logit_softcapping", None),
    }


def gemma3(fields: Fields) -> Choices:
    """Gemma 3, whose attention has no soft cap."""
    choices = gemma2(fields)
    if choices["attention_softcap"] is not None:
        raise fields.refuse("attn_logit_softcapping", "null, because the attention of Gemma 3 has no soft cap")
    return choices


def seed_oss(fields: Fields) -> Choices:
    """Seed-OSS: queries, keys and values have biases or not, and so has the output of attention."""
    return {"qkv_bias": fields.flag("attention_bias"), "output_bias": fields.flag("attention_out_bias")}


def hunyuan(fields: Fields) -> Choices:
    """Hunyuan: what its checkpoints say beside the keys of the class, which computes one thing only."""
    fields.only("use_qk_norm", True, "because this architecture norms queries and keys")
    fields.only("use_cla", False, "because layers that share keys and values are not supported")
    fields.only("use_rotary_pos_emb", True, "because this architecture rotates queries and keys")
    fields.only("norm_type", "rms", "as this architecture has it")
    fields.only("num_experts", 1, "because this architecture has no mixture of experts")
    size = fields.integer("head_dim", None)
    if fields.integer("attention_head_dim", size) != size:
        raise fields.refuse("attention_head_dim", f"head_dim, {size}, which decides")
    return {}


def mixtral(fields: Fields) -> Choices:
    """Mixtral: every layer has experts, as wide as an MLP would be."""
    count, chosen = expert_counts(fields, "num_local_experts")
    return {"experts": Experts(count, chosen, fields.integer("intermediate_size"))}


def qwen3_moe(fields: Fields) -> Choices:
    """Qwen3-MoE: experts in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not name."""
    layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step")
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.refuse("mlp_only_layers", "a list of layers")
    # transformers 5 writes what checkpoints before it call num_experts.
    count, chosen = expert_counts(fields, "num_experts" if "num_experts" in fields.raw else "num_local_experts")
    width, renormalise = fields.integer("moe_intermediate_size"), fields.flag("norm_topk_prob")
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    return {"experts": Experts(count, chosen, width, renormalise, sparse) if any(sparse) else None}


def qwen2_moe(fields: Fields) -> Choices:
    """Qwen2-MoE: as Qwen3-MoE, with a shared expert that has a width of its own, and a gate."""
    choices = qwen3_moe(fields)
    experts = with_shared_experts(fields, choices["experts"])
    return {"qkv_bias": fields.flag("qkv_bias"), "experts": experts}


def with_shared_experts(fields: Fields, experts: Experts | None) -> Experts | None:
    """The experts of a family of Qwen, with the shared expert that config.json describes: it has a gate. One that is as
    wide as several routed experts is so many shared experts here, and any other an MLP. None stays None."""
    width = fields.integer("shared_expert_intermediate_size")
    if experts is None:
        return None
    several = width % experts.width == 0 and width // experts.width <= MAX_EXPERTS
    shared = {"shared": width // experts.width} if several else {"shared_width": width}
    return dataclasses.replace(experts, **shared, shared_gate=True)


def gpt_oss(fields: Fields) -> Choices:
    """gpt-oss: experts with biases and a clamped SwiGLU, stored in MXFP4 if ``quantization_config`` says so."""
    fields.only("swiglu_alpha", 1.702, "as every published model has it")
    count, chosen = expert_counts(fields, "num_local_experts")
    width, clamp = fields.integer("intermediate_size"), float(fields.number("swiglu_limit"))
    quantization = fields.nested("quantization_config")
    stored = "mxfp4" if quantization is not None and quantization.raw.get("quant_method") == "mxfp4" else None
    return {"experts": Experts(count, chosen, width, biases=True, clamp=clamp, stored=stored)}


def deepseek(fields: Fields) -> Choices:
    """DeepSeek-V3 and models like it: latents, experts that are chosen by sigmoids in groups, and shared experts."""
    heads, rotated = fields.integer("num_attention_heads"), fields.integer("qk_rope_head_dim")
    size = rotated + fields.integer("qk_nope_head_dim")
    latent = Latent(
        fields.integer("kv_lora_rank"),
        rotated,
        fields.integer("v_head_dim"),
        fields.integer("q_lora_rank", None),
        interleaved=fields.flag("rope_interleave"),
    )
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.refuse("num_key_value_heads", f"num_attention_heads, {heads}, because each head has its own key")
    return {
        "latent": latent,
        "head_dim": size,
        "num_kv_heads": heads,
        "attention_scale": None if (factor := yarn_score_factor(fields)) == 1 else factor * size**-0.5,
        "experts": _deepseek_experts(fields),
        "mtp_layers": _mtp_layers(fields),
    }


def glm4_moe(fields: Fields) -> Choices:
    """GLM-4.5 to 4.7: the experts of DeepSeek-V3 behind attention with heads."""
    return {
        "qkv_bias": fields.flag("attention_bias"),
        "qk_norm": fields.flag("use_qk_norm"),
        "experts": _deepseek_experts(fields),
        "mtp_layers": _mtp_layers(fields),
    }


def minimax_m2(fields: Fields) -> Choices:
    """MiniMax-M2: experts that are chosen by corrected sigmoids, and keys that older models of MiniMax gave a meaning."""
    fixed = {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid", "qk_norm_type": "per_layer"}
    for key, value in fixed.items():
        fields.only(key, value, "as this architecture has it")
    fields.only("shared_intermediate_size", 0, "because this architecture has no shared expert")
    for part in ("full_attention", "linear_attention", "mlp"):
        fields.only(f"layernorm_{part}_beta", 1.0, "because residuals are not scaled")
    kinds = fields.raw.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise fields.refuse("attn_type_list", "a list of ones, because linear attention is not supported")
    count, chosen = expert_counts(fields, "num_local_experts")
    return {"experts": Experts(count, chosen, fields.integer("intermediate_size"), scores="sigmoid", corrected=True)}


def _mtp_layers(fields: Fields) -> int:
    """How many layers for multi-token prediction the checkpoint may have; transformers 5 also takes the second name."""
    key = "num_nextn_predict_layers" if "num_nextn_predict_layers" in fields.raw else "num_mtp_layers"
    return fields.integer(key, 0, low=0, high=MAX_MTP_LAYERS)


def _deepseek_experts(fields: Fields) -> Experts | None:
    """The experts of DeepSeek-V3; the first layers have none, as ``mlp_layer_types`` or ``first_k_dense_replace`` says."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        fields.only(key, only, "by which this architecture chooses experts")
    fields.only("moe_layer_freq", 1, "because all layers behind the first dense ones have experts")
    layers, kinds = fields.integer("num_hidden_layers"), fields.raw.get("mlp_layer_types")
    if kinds is None:
        dense = fields.integer("first_k_dense_replace", low=0)
        sparse = tuple(layer >= dense for layer in range(layers))
    elif isinstance(kinds, list) and len(kinds) == layers and all(kind in ("dense", "sparse") for kind in kinds):
        sparse = tuple(kind == "sparse" for kind in kinds)
    else:
        raise fields.refuse("mlp_layer_types", f"a list of 'dense' or 'sparse' for each of {layers} layers")
    key = "n_routed_experts" if "n_routed_experts" in fields.raw else "num_local_experts"
    count, chosen = expert_counts(fields, key)
    experts = Experts(
        count,
        chosen,
        fields.integer("moe_intermediate_size"),
        fields.flag("norm_topk_prob"),
        sparse,
        scores="sigmoid",
        groups=fields.integer("n_group"),
        chosen_groups=fields.integer("topk_group"),
        scale=float(fields.number("routed_scaling_factor")),
        corrected=True,
        shared=fields.integer("n_shared_experts", 0, low=0, high=MAX_EXPERTS),
    )
    return experts if any(sparse) else None


def expert_counts(fields: Fields, key: str, chosen: str = "num_experts_per_tok") -> tuple[int, int]:
    """How many experts there are, and how many of them a token goes through, by the keys that say so."""
    count = fields.integer(key, high=MAX_EXPERTS)
    return count, fields.integer(chosen, high=count)
