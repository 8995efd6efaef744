"""Which keys a ``quantization_config`` may have, for each method; all others are refused by name.

A key that nothing looks at may change what the stored weights stand for. AutoRound's ``rotation_config``, for example, says
that they are rotated, which no tensor does: they would load without a word, and every logit would be wrong. So a reader
that begins to look at a key adds it to its table in ``KEYS``, and so does everyone who finds out that a key that tools write
is harmless. A key whose value is null or empty says nothing, and no tool tells it from an absent one: it is not refused.
False, on the other hand, is a value like any other."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.quantization.formats import INSTEAD


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that an object may have.

    Attributes:
      known: those that the method's reader checks, and those that change no weight whatever their values are, with blanks
        between them. Nothing is looked for inside their values.
      only: key -> the values with which it changes nothing; others are refused.
      never: key -> why all its values are refused.
      inside: key -> the keys of the object under it, or of each object in the list under it; ``*`` stands for any key.
    """

    known: str = ""
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    never: Mapping[str, str] = dataclasses.field(default_factory=dict)
    inside: Mapping[str, "Keys"] = dataclasses.field(default_factory=dict)

    def with_more(self, known: str = "", **others: Mapping[str, Any]) -> "Keys":
        """These keys, and others besides; arguments are those of the class."""
        merged = {name: {**getattr(self, name), **more} for name, more in others.items()}
        return dataclasses.replace(self, known=f"{self.known} {known}", **merged)

    @property
    def names(self) -> frozenset[str]:
        """All keys that are not refused for being unknown."""
        return frozenset((*self.known.split(), *self.only, *self.never, *self.inside))


def require_known(fields: Fields, keys: Keys):
    """Raise a ``Refusal`` if an object has a key that is not among ``keys``, or a value that is not taken there."""
    names = keys.names
    for key, value in fields.raw.items():
        inside = keys.inside.get(key, keys.inside.get("*"))
        if value is None or value in ({}, [], ""):
            continue
        if inside is not None:
            for name, each in [(key, value)] if isinstance(value, dict) else _numbered(key, value):
                require_known(Fields(each, fields.where, f"{fields.prefix}{name}.", fields.asked), inside)
        elif key in keys.only:
            require_one_of(fields, key, *keys.only[key])
        elif key in keys.never:
            raise fields.refuse(key, f"none, because {keys.never[key]}; {INSTEAD}")
        elif key not in names:
            raise fields.refuse(
                key,
                "no such key, because jspec does not know it, and what the weights stand for may depend on it; remove it if "
                "they do not",
            )


def _numbered(key: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """The objects in a list under ``key``, and what they are called in messages; nothing for other values."""
    listed = value if isinstance(value, list) else []
    return [(f"{key}[{i}]", each) for i, each in enumerate(listed) if isinstance(each, dict)]


# How the rounded numbers were found. What was found is in the tensors.
_CALIBRATION = """
    act_group_aware amp batch_size block_name_to_quantize buffered_fwd cache_block_outputs damp_auto_increment
    damp_percent dataset enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input fail_safe fallback foem gptaq
    gradient_accumulate_steps hessian hyb_act iters low_cpu_mem_usage low_gpu_mem_usage lr max_input_length minmax_lr
    mock_quantization model_free model_seqlen module_name_preceding_first_block mse nsamples offload_to_disk
    offload_to_disk_path pack_impl pad_token_id quant_block_list seqlen smooth smoother static_groups supported_types
    to_quant_block_names tokenizer train_bs true_sequential v2 v2_alpha v2_memory_device
"""
# Who wrote the files, and with which kernels other libraries multiply, and what they fuse for them.
_ABOUT_THE_FILE = """
    autoround_version backend dequantize disable_exllama do_fuse exllama_config fuse_max_seq_len
    global_compression_ratio meta model_file_base_name model_name_or_path modules_to_fuse packed_modules_mapping
    producer provider quant_method run_compressed use_cuda_fp16 use_exllama use_optimized_inference version
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
_HARMLESS = f"{_CALIBRATION} {_ABOUT_THE_FILE} {_IN_TENSORS} {_ACTIVATIONS}"
_NEVER = {
    **dict.fromkeys(
        ("rotation", "rotation_config", "rotation_configs", "spinquant_config"), "rotated weights are not read"
    ),
    **dict.fromkeys(("super_bits", "super_group_size"), "scales that are quantised themselves are not read"),
    **dict.fromkeys(("static_kv_dtype", "static_attention_dtype"), "a rounded cache is read of kv_cache_scheme alone"),
    "adapter": "adapters are not applied",
    "lora_rank": "low-rank parts of weights are not read",
    "moe_sparsity_config": "all layers have as many experts as config.json says",
    "regex_config": "single modules have settings in extra_config or dynamic alone",
}

# What GPTQ, AWQ and AutoRound share for all modules, and what they may say of some of them.
_OF_SOME = Keys(
    f"{_HARMLESS} bits data_type desc_act format group_size sym",
    only={"act_bits": (16, 32), "pack_dtype": ("int32",)},
    never=_NEVER,
)
_CODES = _OF_SOME.with_more(only={"act_bits": (16,), "data_type": ("int",)})
_DYNAMIC = {"dynamic": Keys(inside={"*": _OF_SOME})}
_EIGHT = {"act_bits": (8, 16), "bits": (8, 16)}  # as AutoRound writes them of FP8
# What compressed-tensors says of weights, activations or a cache, and of a group of modules.
_ARGS = Keys(
    f"block_structure dynamic group_size num_bits observer observer_kwargs strategy symmetric type {_IN_TENSORS}",
    only={"actorder": (False, "weight", "static")},
)
_GROUP = Keys("format targets", inside=dict.fromkeys(("weights", "input_activations", "output_activations"), _ARGS))
_TRANSFORM = Keys(
    "head_dim precision randomize requires_grad type", inside={"apply": Keys("ignore inverse location targets")}
)
_SPARSITY = Keys("format global_sparsity ignore registry_requires_subclass sparsity_structure targets")
# What Model Optimizer says of all modules, or of some.
_ALGORITHM = Keys("group_size quant_algo", only={"has_zero_point": (False,), "pre_quant_scale": (False,)}, never=_NEVER)

# quant_method -> its keys.
KEYS: dict[str, Keys] = {
    "awq": _CODES.with_more("checkpoint_format zero_point", only={"method": ("awq",)}, inside=_DYNAMIC),
    "compressed-tensors": Keys(
        f"{_HARMLESS} format",
        only={"fp8_dtype_flavor": ("float8_e4m3fn",)},  # on Gaudi 2, AutoRound writes numbers that mean others
        never=_NEVER,
        inside={
            "config_groups": Keys(inside={"*": _GROUP}),
            "kv_cache_scheme": _ARGS,
            "sparsity_config": _SPARSITY,
            "transform_config": Keys(inside={"config_groups": Keys(inside={"*": _TRANSFORM})}),
        },
    ),
    "fp8": _OF_SOME.with_more(
        "fmt ignored_layers kv_cache_scheme packing_format weight_block_size",
        only={**_EIGHT, "data_type": ("fp", "fp8"), "expert_dtype": ("fp8",)},
        inside={"extra_config": Keys(inside={"*": _OF_SOME.with_more(only=_EIGHT)})},
    ),
    "gptq": _CODES.with_more("checkpoint_format is_marlin_format", only={"method": ("gptq",)}, inside=_DYNAMIC),
    "modelopt": _ALGORITHM.with_more(
        "exclude_modules ignore kv_cache_quant_algo producer quant_method",
        inside={
            **_GROUP.inside,
            "config_groups": Keys(inside={"*": _ALGORITHM.with_more(_GROUP.known, inside=_GROUP.inside)}),
            "kv_cache_scheme": _ARGS,
            "quantized_layers": Keys(inside={"*": _ALGORITHM}),
        },
    ),
    "mxfp4": Keys(_HARMLESS),
}
_AUTO_ROUND = _CODES.with_more("packing_format", inside={"extra_config": Keys(inside={"*": _OF_SOME})})
KEYS |= dict.fromkeys(("auto-round", "auto_round", "intel/auto-round"), _AUTO_ROUND)
