"""The keys that tools write into a ``quantization_config``, from the tools' own sources, which are read and not imported."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

# file:class or function -> where in the tables of ``jspec.checkpoints.quantized.known_keys`` its keys stand. Keys that a
# function writes may stand anywhere in the table.
_ARGS = ("weights", "input_activations", "output_activations")
_CT, _TRANSFORM = "compressed-tensors", "transform_config/config_groups/*"
_TRANSFORMERS = "transformers/utils/quantization_config.py"
SOURCES: dict[str, list[str]] = {
    "compressed_tensors/quantization/quant_config.py:QuantizationConfig": [_CT],
    "compressed_tensors/quantization/quant_scheme.py:QuantizationScheme": [f"{_CT}/config_groups/*"],
    "compressed_tensors/quantization/quant_args.py:QuantizationArgs": [
        f"{_CT}/kv_cache_scheme",
        *(f"{method}/config_groups/*/{args}" for method in (_CT, "modelopt") for args in _ARGS),
    ],
    "compressed_tensors/config/base.py:SparsityCompressionConfig": [f"{_CT}/sparsity_config"],
    "compressed_tensors/transform/transform_config.py:TransformConfig": [f"{_CT}/transform_config"],
    "compressed_tensors/transform/transform_scheme.py:TransformScheme": [f"{_CT}/{_TRANSFORM}"],
    "compressed_tensors/transform/transform_args.py:TransformArgs": [f"{_CT}/{_TRANSFORM}/apply"],
    f"{_TRANSFORMERS}:CompressedTensorsConfig": [_CT],
    f"{_TRANSFORMERS}:AutoRoundConfig": ["auto-round"],
    f"{_TRANSFORMERS}:AwqConfig": ["awq"],
    f"{_TRANSFORMERS}:BitsAndBytesConfig": ["bitsandbytes"],
    f"{_TRANSFORMERS}:FineGrainedFP8Config": ["fp8"],
    f"{_TRANSFORMERS}:GPTQConfig": ["gptq", "awq"],
    f"{_TRANSFORMERS}:Mxfp4Config": ["mxfp4"],
    f"{_TRANSFORMERS}:TorchAoConfig": ["torchao"],
    "modelopt/torch/export/convert_hf_config.py:convert_hf_quant_config_format": ["modelopt"],
    "modelopt/torch/export/convert_hf_config.py:_quant_algo_to_group_config": ["modelopt"],
    "modelopt/torch/export/quant_utils.py:process_layer_quant_config": ["modelopt"],
    "auto_round/compressors/base.py:SerializedCompressorConfig": ["auto-round", "gptq", "awq", "fp8"],
    "auto_round/schemes.py:QuantizationScheme": ["auto-round/extra_config/*"],
    "auto_round/export/export_to_autoround/export.py:save_quantized_as_autoround": ["auto-round"],
    "auto_round/export/export_to_autoround/export_to_fp8.py:save_quantized_as_autoround": ["fp8"],
    "auto_round/export/export_to_autogptq/export.py:save_quantized_as_autogptq": ["gptq"],
    "auto_round/export/export_to_awq/export.py:save_quantized_as_autoawq": ["awq"],
    "gptqmodel/quantization/config.py:BaseQuantizeConfig.to_dict": ["gptq", "awq"],
    "gptqmodel/quantization/config.py:GPTQConfig._update_output_payload": ["gptq"],
    "gptqmodel/quantization/config.py:AWQConfig._update_output_payload": ["awq"],
}
# What the sources of tools give that are no part of the extra ``parity``: AutoRound 0.16.1 and GPTQModel 7.6.0.
RECORDED = {
    "auto_round/compressors/base.py:SerializedCompressorConfig": """
        act_bits act_data_type act_dynamic act_group_size act_sym amp batch_size bits data_type
        enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps group_size
        iters low_gpu_mem_usage lr minmax_lr nsamples quant_block_list regex_config rotation_configs scale_dtype
        seqlen static_attention_dtype static_attention_granularity static_kv_dtype static_kv_granularity
        super_bits super_group_size supported_types sym to_quant_block_names
    """,
    "auto_round/schemes.py:QuantizationScheme": """
        act_bits act_data_type act_dynamic act_group_size act_sym bits data_type group_size rotation_config
        super_bits super_group_size sym
    """,
    "auto_round/export/export_to_autoround/export.py:save_quantized_as_autoround": """
        block_name_to_quantize extra_config packing_format quant_method
    """,
    "auto_round/export/export_to_autoround/export_to_fp8.py:save_quantized_as_autoround": """
        activation_scheme block_name_to_quantize extra_config fmt packing_format quant_method
    """,
    "auto_round/export/export_to_autogptq/export.py:save_quantized_as_autogptq": """
        block_name_to_quantize damp_percent desc_act dynamic lm_head modules_in_block_to_quantize provider
        quant_method true_sequential
    """,
    "auto_round/export/export_to_awq/export.py:save_quantized_as_autoawq": """
        modules_to_not_convert provider quant_method version zero_point
    """,
    "gptqmodel/quantization/config.py:BaseQuantizeConfig.to_dict": """
        activation bits checkpoint_format desc_act dynamic format group_size lm_head meta method pack_dtype
        quant_method rotation
    """,
    "gptqmodel/quantization/config.py:GPTQConfig._update_output_payload": "format sym",
    "gptqmodel/quantization/config.py:AWQConfig._update_output_payload": "format version zero_point",
}
_NO_KEYS = ("kwargs", "self", "group_0")


def keys_of(source: str, root: Path | None = None) -> set[str] | None:
    """The keys of one of ``SOURCES``; None if the tool is neither installed nor recorded.

    Args:
      source: file and class or function.
      root: the folder where packages are installed; None for those of this environment.
    """
    path, _, name = source.partition(":")
    package, _, rest = path.partition("/")
    found = importlib.util.find_spec(package) if root is None else None
    folders = [root / package] if root is not None else [] if found is None else found.submodule_search_locations or []
    for folder in map(Path, folders):
        if (folder / rest).exists():
            return set(_read(ast.parse((folder / rest).read_text()), name)) - set(_NO_KEYS)
    return set(RECORDED[source].split()) if root is None and source in RECORDED else None


def _read(module: ast.Module, name: str) -> Iterator[str]:
    constants = {
        target.id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    nodes: list[ast.stmt] = module.body
    for part in name.split("."):
        node = next(each for each in nodes if getattr(each, "name", None) == part)
        nodes = getattr(node, "body", [])
    if isinstance(node, ast.ClassDef):
        yield from _fields(node)
    else:
        yield from _written(node, constants)


def _fields(cls: ast.ClassDef) -> Iterator[str]:
    """The fields of a dataclass or a pydantic model, or the arguments of ``__init__``, which transformers writes."""
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from (arg.arg for arg in (*node.args.args, *node.args.kwonlyargs))


def _written(node: ast.AST, constants: dict[str, str]) -> Iterator[str]:
    """What a function writes into objects: keys of dicts that it spells out, and of those that it assigns to; without what
    GPTQModel notes under ``meta``."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    places = [target for target in targets if isinstance(target, ast.Subscript)]
    if any(isinstance(place.value, ast.Name) and place.value.id == "meta_payload" for place in places):
        return
    for key in (*(node.keys if isinstance(node, ast.Dict) else []), *(place.slice for place in places)):
        value = constants.get(key.id) if isinstance(key, ast.Name) else getattr(key, "value", None)
        if isinstance(value, str):
            yield value
    for child in ast.iter_child_nodes(node):
        yield from _written(child, constants)
