"""What a ``ModelConfig`` has to satisfy: checks of its fields, each with an error that names the field and its value."""

from typing import Any

from jspec._validation import FieldChecks, is_int, is_number, require
from jspec.config.delta_net import DeltaNets
from jspec.config.layer import LAYER_NORMS, LayerConfig
from jspec.config.mla import Latent
from jspec.config.model_fields import EMBEDDING, HEAD, ModelFields
from jspec.config.moe import Experts
from jspec.config.rope import Rope
from jspec.config.tensor_names import names_of
from jspec.quantization.formats import form_of_maps, format_of

QUANTIZATIONS = ("int8", "fp8", "int4")  # that weights can be converted to
# The last one comes from checkpoints alone, and so do formats of four bits besides int4 (``jspec.quantization``).
STORED_QUANTIZATIONS = (*QUANTIZATIONS, "fp8_block")
NORMS = ("rms", "rms_wide", "rms_offset", "layer")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def require_quantization(quantization: object):
    """Raise a ValueError unless weights can be stored so; None is for weights that are not quantised."""
    known = quantization is None or _is_format(quantization)
    expected = f"one of {', '.join(map(str, (None, *STORED_QUANTIZATIONS)))}"
    require(known, "quantization", quantization, expected)


def _is_format(name: object) -> bool:
    """Whether linear maps may be stored in a format of this name."""
    return isinstance(name, str) and form_of_maps(name) is not None


def require_part(name: str, size: Any, vocab_size: int | None):
    """Raise a ValueError unless ``size`` is None or the size of a part of a vocabulary."""
    inside = size is None or (is_int(size) and size >= 1 and (vocab_size is None or size < vocab_size))
    expected = "None or an integer of at least 1, and a known vocab_size"
    if vocab_size is not None:
        expected = f"None or an integer in 1..{vocab_size - 1}, fewer than the vocabulary's {vocab_size} tokens"
    require(inside and (size is None or vocab_size is not None), name, size, expected)


def require_valid(config: ModelFields):
    """Raise a ValueError that names the first field of ``config`` that is wrong, its value, and what is expected."""
    check, heads = FieldChecks(config), config.num_heads
    widths = ("vocab_size", "hidden_size", "intermediate_size")
    counts = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position")
    check.sizes(*widths, *counts, expected="an integer of at least 1 and below 2^31")
    check.require("num_kv_heads", heads % config.num_kv_heads == 0, f"a divisor of num_heads, {heads}")
    # With latents, only a part of a head is rotated.
    even = config.latent is not None or config.head_dim % 2 == 0
    check.require("head_dim", even, "an even number (rotary pairs)")
    check.positive("rms_norm_eps")
    listed = len(config.windows) == config.num_layers
    check.require("windows", listed, f"{config.num_layers} entries, one a layer")
    for window in config.windows:
        require(window is None or (is_int(window) and window >= 1), "windows", window, "None or at least 1")
    for token in config.eos_token_ids:
        inside = is_int(token) and 0 <= token < config.vocab_size
        require(inside, "eos_token_ids", token, f"in 0..{config.vocab_size - 1}")
    require_quantization(config.quantization)
    _require_other_formats(config, check)
    further = config.mtp_layers
    check.require("mtp_layers", is_int(further) and further >= 0, "an integer of at least 0")
    require_part("draft_vocab_size", config.draft_vocab_size, config.vocab_size)
    untied = config.draft_vocab_size is None or not config.tie_embeddings
    require(untied, "tie_embeddings", True, "False with a draft_vocab_size, as the embedding has all tokens")
    _require_choices(config, check)
    _require_layers(config, check)
    _require_latent(config, check)
    _require_delta_nets(config, check)
    _require_positions(config, check)


def _require_other_formats(config: ModelFields, check: FieldChecks):
    others, name = config.other_formats, "other_formats"
    pairs = isinstance(others, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in others)
    known = pairs and all(isinstance(of_map, str) and (form is None or _is_format(form)) for of_map, form in others)
    check.require(name, known, f"pairs: a linear map, and None or one of {', '.join(STORED_QUANTIZATIONS)}")
    quantized = config.quantization is not None or all(form is None for _, form in others)
    check.require(name, quantized, "no format without quantization, which is that of most maps")
    formats = {
        HEAD: (config.head_quantization, config.tie_embeddings),
        EMBEDDING: (config.embedding_quantization, True),
    }
    for part, (quantization, looked_up) in formats.items():
        form = format_of(quantization)
        fits = form is None or form.serves_head(looked_up)
        require(fits, f"the format of {part!r}", quantization, "another one, or None in other_formats")


def _require_choices(config: ModelFields, check: FieldChecks):
    choices = {
        "norm": NORMS,
        "norm_placement": tuple(LAYER_NORMS),
        "qk_norm_over": ("head", "projection"),
        "activation": ACTIVATIONS,
    }
    for name, known in choices.items():
        value = getattr(config, name)
        check.require(name, isinstance(value, str) and value in known, f"one of {', '.join(known)}")
    check.flags("final_norm", "gated_mlp", "attention_sinks", "value_norm", "layer_scalars")
    check.flags("qk_norm_after_rope", "attention_gate")
    check.positive("embedding_multiplier", "residual_multiplier", "logit_divisor")
    for name in ("attention_scale", "attention_softcap", "logit_softcap"):
        value = getattr(config, name)
        check.require(name, value is None or (is_number(value) and value > 0), "None or a positive number")
    kinds = config.qk_norm and config.qk_norm_over == "head" and config.norm in ("rms", "rms_wide")
    normed = kinds or not config.value_norm
    check.require("value_norm", normed, "False without RMS norms of each head of queries and keys")
    apart = not isinstance(names_of(config.architecture).qkv, str)
    check.require("attention_gate", apart or not config.attention_gate, f"False for a {config.architecture}")
    _require_experts(config, check)
    for name in ("embedding_size", "per_layer_inputs", "per_layer_vocab_size"):
        width = getattr(config, name)
        check.require(name, width is None or (is_int(width) and 1 <= width < 2**31), "None or at least 1")
    tabled = config.per_layer_vocab_size is None or config.per_layer_inputs is not None
    check.require("per_layer_vocab_size", tabled, "None without per_layer_inputs")


def _require_layers(config: ModelFields, check: FieldChecks):
    listed = isinstance(config.layers, tuple) and all(isinstance(layer, LayerConfig) for layer in config.layers)
    each = listed and len(config.layers) in (0, config.num_layers)
    check.require("layers", each, f"() or {config.num_layers} entries, each a LayerConfig")
    for number, layer in enumerate(config.layers):
        own, heads = FieldChecks(layer, "layers."), config.num_heads
        own.require("num_kv_heads", heads % layer.num_kv_heads == 0, f"a divisor of num_heads, {heads}")
        even = config.latent is not None or layer.head_dim % 2 == 0
        own.require("head_dim", even, "an even number (rotary pairs)")
        layer.require_source(number, config.layers, config.windows)


def _require_latent(config: ModelFields, check: FieldChecks):
    latent, heads = config.latent, config.num_heads
    if latent is None:
        return
    check.require("latent", isinstance(latent, Latent), "Latent or None")
    latent.require_fit(config.head_dim)
    own_keys = config.num_kv_heads == heads
    check.require("num_kv_heads", own_keys, f"num_heads, {heads}, as every head has a key of its own")
    plain = not (config.qk_norm or config.attention_sinks or config.attention_softcap) and not any(config.windows)
    check.require("latent", plain, "None for attention with windows, soft caps, sinks or norms of queries and keys")
    uniform = not (config.layers or config.value_norm or config.attention_gate)
    check.require("latent", uniform, "None for layers that differ, norms of values, or gates of attention")
    rotated_alike = config.rope is not None and not config.layer_ropes
    check.require("rope", rotated_alike, "one Rope for all layers with latents")
    growth = 0 if config.rope is None else config.rope.query_growth
    require(growth == 0, "rope.query_growth", growth, "0 for attention with latents")
    biased = config.qkv_bias and latent.query_rank is None
    require(not biased, "latent.query_rank", None, "a rank, where attention has biases")


def _require_delta_nets(config: ModelFields, check: FieldChecks):
    nets = config.delta_nets
    if nets is None:
        return
    check.require("delta_nets", isinstance(nets, DeltaNets), "DeltaNets or None")
    nets.require_fit(config.num_layers)
    known = names_of(config.architecture).delta_inputs is not None
    check.require("delta_nets", known, f"None for a {config.architecture}")
    plain = config.latent is None and not (config.layers or any(config.windows) or config.attention_sinks)
    check.require("delta_nets", plain, "None beside latents, windows, sinks, or layers that differ in their sizes")


def _require_experts(config: ModelFields, check: FieldChecks):
    experts = config.experts
    if experts is None:
        return
    check.require("experts", isinstance(experts, Experts), "Experts or None")
    listed, own = len(experts.layers) in (0, config.num_layers), FieldChecks(experts, "experts.")
    own.require("layers", listed, f"() or {config.num_layers} entries, one a layer")
    if experts.stored is not None:
        experts.require_stored_in_groups(config.hidden_size)
        known = names_of(config.architecture).stacked_maps is not None
        own.require("stored", known, f"None for experts of {config.architecture}")
    activation = "gelu_tanh" if experts.beside_mlp else "silu"
    check.require(
        "activation", config.activation == activation, f"{activation!r} with experts (hidden_act of config.json)"
    )
    check.require("gated_mlp", config.gated_mlp, "True, as experts are gated")
    check.require("mlp_bias", not config.mlp_bias, "False, because experts have no such biases")
    placed = config.norm_placement == "around" or not experts.beside_mlp
    own.require("beside_mlp", placed, "False, unless norm_placement is 'around'")


def _require_positions(config: ModelFields, check: FieldChecks):
    offset, ropes = config.position_offset, config.layer_ropes
    check.require("position_offset", offset is None or (is_int(offset) and offset >= 0), "None or at least 0")
    check.require("rope", config.rope is None or isinstance(config.rope, Rope), "a Rope or None")
    listed = isinstance(ropes, tuple) and all(rope is None or isinstance(rope, Rope) for rope in ropes)
    each = listed and len(ropes) in (0, config.num_layers)
    check.require("layer_ropes", each, f"() or {config.num_layers} entries, each a Rope or None")
    for number in range(config.num_layers):
        if (rope := config.rope_of(number)) is not None:
            rope.require_fit(config.rotary_head(number))
