"""Which keys a ``quantization_config`` may have, for each method; all others are refused by name.

A key that nothing looks at may change what the stored weights stand for. AutoRound's ``rotation_config``, for example, says
that they are rotated, which no tensor does: they would load without a word, and every logit would be wrong. So a reader
that begins to look at a key adds it to its table in ``KEYS``, and so does everyone who finds out that a key that tools write
is harmless. A key whose value is null or empty says nothing, and no tool tells it from an absent one: it is not refused.
False, on the other hand, is a value like any other."""

from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.quantization.formats import INSTEAD

# The keys that an object may have -> None for one that its reader checks, or that changes no weight whatever its value is;
# a tuple of the values with which it changes nothing, where others are refused; a string that says why all are; or the keys
# of the object under it, or of each object in the list under it. ``*`` stands for any key.
Keys = Mapping[str, Any]


def require_known(fields: Fields, keys: Keys):
    """Raise a ``Refusal`` if an object has a key that is not among ``keys``, or a value that is not taken there."""
    for key, value in fields.raw.items():
        known = keys.get(key, keys.get("*", False))
        if value is None or value in ({}, [], ""):
            continue
        if isinstance(known, Mapping):
            listed = enumerate(value) if isinstance(value, list) else ()
            objects = {key: value, **{f"{key}[{i}]": each for i, each in listed}}
            for name, each in objects.items():
                if isinstance(each, dict):
                    require_known(Fields(each, fields.where, f"{fields.prefix}{name}."), known)
        elif isinstance(known, tuple):
            require_one_of(fields, key, *known)
        elif isinstance(known, str):
            raise fields.refuse(key, f"none, because {known}; {INSTEAD}")
        elif known is not None:
            raise fields.refuse(
                key,
                "no such key, because jspec does not know it, and what the weights stand for may depend on it; remove it if "
                "they do not",
            )


# How the rounded numbers were found. What was found is in the tensors.
_CALIBRATION = """
    act_group_aware amp batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
    enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input fallback foem gptaq gradient_accumulate_steps hessian
    hyb_act iters low_cpu_mem_usage low_gpu_mem_usage lr max_input_length minmax_lr model_free model_seqlen
    module_name_preceding_first_block mse nsamples observer observer_kwargs pad_token_id quant_block_list seqlen smooth
    smoother static_groups supported_types to_quant_block_names tokenizer true_sequential
"""
# Who wrote the files, and with which kernels other libraries multiply, and what they fuse for them.
_ABOUT_THE_FILE = """
    autoround_version backend dequantize disable_exllama do_fuse exllama_config fuse_max_seq_len global_compression_ratio
    meta model_file_base_name model_name_or_path modules_to_fuse packed_modules_mapping producer provider quant_method
    run_compressed use_cuda_fp16 use_exllama use_optimized_inference version
"""
# Which modules are quantised, and in which dtype scales and zeros are. Tensors say it by their names, dtypes and shapes.
_IN_TENSORS = """
    ignore in_blocks lm_head modules_in_block_to_quantize modules_to_convert modules_to_not_convert quantization_status
    scale_dtype scale_fmt zp_dtype
"""
# How activations are rounded, which is the user's choice here (``activation_dtype``).
_ACTIVATIONS = """
    act_data_type act_dynamic act_group_size act_sym activation activation_scheme attention_input_activations
    static_attention_granularity static_kv_granularity
"""
_ROTATED, _CACHED = "rotated weights are not read", "a rounded cache is read of kv_cache_scheme alone"
_HARMLESS: Keys = {
    **dict.fromkeys(f"{_CALIBRATION} {_ABOUT_THE_FILE} {_IN_TENSORS} {_ACTIVATIONS}".split()),
    **dict.fromkeys(("rotation", "rotation_config", "rotation_configs", "spinquant_config"), _ROTATED),
    **dict.fromkeys(("super_bits", "super_group_size"), "scales that are quantised themselves are not read"),
    **dict.fromkeys(("static_kv_dtype", "static_attention_dtype"), _CACHED),
    "adapter": "adapters are not applied",
    "lora_rank": "low-rank parts of weights are not read",
    "moe_sparsity_config": "all layers have as many experts as config.json says",
    "regex_config": "single modules have settings in extra_config or dynamic alone",
}


def _with(keys: Keys, read: str, **others: Any) -> Keys:
    """``keys``, those that are read besides, with blanks between them, and ``others`` that are more than that."""
    return {**keys, **dict.fromkeys(read.split()), **others}


# What GPTQ, AWQ and AutoRound say of some modules, and of all.
_OF_SOME = _with(_HARMLESS, "bits data_type desc_act format group_size sym", act_bits=(16, 32), pack_dtype=("int32",))
_CODES = _with(_OF_SOME, "", act_bits=(16,), data_type=("int",))
_EIGHT = {"act_bits": (8, 16), "bits": (8, 16)}  # as AutoRound writes them of FP8
_SOME_OF_AUTO_ROUND = {**_OF_SOME, "act_bits": (4, 8, 16)}  # its reader says which of integers
_AUTO_ROUND = _with(
    _SOME_OF_AUTO_ROUND, "fmt packing_format weight_block_size", extra_config={"*": _SOME_OF_AUTO_ROUND}
)
# What compressed-tensors says of weights, activations or a cache, and of a group of modules.
_ARGS = _with(
    dict.fromkeys(f"observer observer_kwargs {_IN_TENSORS}".split()),
    "actorder block_structure dynamic group_size num_bits strategy symmetric type",
)
_GROUP = _with(dict.fromkeys(("weights", "input_activations", "output_activations"), _ARGS), "format targets")
# Its rotations. Those of weights alone are in the stored weights, as R1 and R2 of SpinQuant (Liu et al., 2024), which cancel
# out. Those of inputs, outputs, queries or keys would be left to do for each token.
_ROTATION = _with({}, "ignore inverse targets", location=("weight_input", "weight_output"))
_ROTATIONS = _with({}, "head_dim precision randomize requires_grad type", apply=_ROTATION)
_SPARSITY = "global_sparsity ignore registry_requires_subclass sparsity_structure targets"
# What Model Optimizer says of all modules, or of some.
_ALGORITHM = _with(_HARMLESS, "group_size pre_quant_scale quant_algo", has_zero_point=(False,))

# quant_method -> its keys.
KEYS: dict[str, Keys] = {
    "bitsandbytes": _with(
        {},
        "_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type "
        "bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules "
        "llm_int8_threshold load_in_4bit load_in_8bit quant_method",
    ),
    "awq": _with(_CODES, "checkpoint_format zero_point", method=("awq",), dynamic={"*": _OF_SOME}),
    "compressed-tensors": _with(
        _HARMLESS,
        "format",
        config_groups={"*": _GROUP},
        fp8_dtype_flavor=("float8_e4m3fn",),  # on Gaudi 2, AutoRound writes numbers that mean others
        kv_cache_scheme=_ARGS,
        sparsity_config=_with({}, _SPARSITY, format=("dense",)),
        transform_config={"config_groups": {"*": _ROTATIONS}},
    ),
    "fp8": _with(
        {**_OF_SOME, **_EIGHT},
        "fmt ignored_layers kv_cache_scheme packing_format weight_block_size",
        data_type=("fp", "fp8"),
        expert_dtype=("fp8",),
        extra_config={"*": {**_OF_SOME, **_EIGHT}},
    ),
    "gptq": _with(_CODES, "checkpoint_format is_marlin_format", method=("gptq",), dynamic={"*": _OF_SOME}),
    "modelopt": _with(
        {**_ALGORITHM, **_GROUP},
        "exclude_modules kv_cache_quant_algo",
        config_groups={"*": {**_ALGORITHM, **_GROUP}},
        kv_cache_scheme=_ARGS,
        quantized_layers={"*": _ALGORITHM},
    ),
    "mxfp4": _HARMLESS,
    "torchao": _with(
        {},
        "include_input_output_embeddings modules_to_not_convert quant_method quant_type untie_embedding_weights",
    ),
    **dict.fromkeys(("auto-round", "auto_round", "intel/auto-round"), _AUTO_ROUND),
}
