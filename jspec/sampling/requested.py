"""The sampling settings that a caller asks for: ``SamplingParams``, or its fields by name."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jspec._validation import require, resolve_names
from jspec.config import EngineConfig, Speculation
from jspec.sampling.params import SamplingParams

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
SPECULATION_FIELDS = tuple(field.name for field in dataclasses.fields(Speculation))
ENGINE_FIELDS = tuple(field.name for field in dataclasses.fields(EngineConfig))
# The arguments of ``jspec.load`` that are fields of neither; tests/test_api.py compares them with its signature.
LOAD_ARGUMENTS = (
    "draft",
    "speculation",
    "engine",
    "ngram_corpus",
    "aux_convention",
    "norm_output",
    "mask_token_id",
    "mask_first",
    "costs",
    "tensor_parallel",
    "draft_tensor_parallel",
    "expert_parallel",
    "devices",
    "mesh",
    "gpu_memory_utilization",
    "compilation_cache",
    "generation_config",
    "check_files",
    "download",
)
_VLLM_NAMES = {"tensor_parallel_size": "tensor_parallel", "draft_tensor_parallel_size": "draft_tensor_parallel"}
LOAD_ALIASES = Speculation.aliases | _VLLM_NAMES

_LOADING = dict.fromkeys(
    [*LOAD_ARGUMENTS, *SPECULATION_FIELDS, *ENGINE_FIELDS, *LOAD_ALIASES],
    "it is chosen when a model is loaded: give it to jspec.load()",
)


def requested(where: str, params: Any, options: Mapping[str, Any], default: SamplingParams) -> Any:
    """What a call asks for: its params, or the default ones with the fields that it gives by name.

    Args:
      where: the function that was called, for messages.
      params: its argument ``params``, which is also called ``sampling_params`` among the options, as in vLLM.
      options: its other keyword arguments.
      default: what fields come from that it leaves open.

    Raises:
      TypeError: an option is unknown, or the same thing is given twice. The message says what may have been meant.
      ValueError: a field is out of range.
    """
    options = dict(options)
    if "sampling_params" in options:
        if params is not None:
            raise TypeError(f"{where}: 'sampling_params' and 'params' are the same argument; give one of them")
        params = options.pop("sampling_params")
    fields = resolve_names(where, options, SAMPLING_FIELDS, SamplingParams.aliases, _LOADING)
    if params is not None and fields:
        raise TypeError(f"{', '.join(fields)}: give either params or its fields, not both")
    return dataclasses.replace(default, **fields) if params is None else params


def require_params(params: Any, expected: str):
    """Raise a ValueError unless ``params`` is a SamplingParams."""
    hint = f": SamplingParams(**{params!r})" if isinstance(params, Mapping) else ""
    require(isinstance(params, SamplingParams), "params", params, f"{expected}{hint}")


def params_of_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """A list with one SamplingParams for each of ``count`` prompts.

    Raises:
      ValueError: ``params`` is neither one SamplingParams nor one for each prompt.
    """
    if isinstance(params, SamplingParams):
        return [params] * count
    several = isinstance(params, Iterable) and not isinstance(params, Mapping | str | bytes | set | frozenset)
    listed: list = list(params) if several else [params]
    for given in listed:
        require_params(given, "SamplingParams, one or one per prompt")
    if len(listed) != count:
        raise ValueError(f"params has {len(listed)} entries: expected one, or one per prompt, {count}")
    return listed
