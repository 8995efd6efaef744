"""Weights of eight and of four bits that are kept as they are stored, each parameter by the tensors that fill it.

These are FP8 weights with a scale for each block (``jspec.quantization.fp8_block``), whose blocks have whole groups of 128
inputs and any number of output channels; weights in FP8 or int8 with a scale for each output channel or for each weight, in
checkpoints of which some maps are not quantised; and codes in groups (``packed_codes.py`` beside this file). Each parameter
is kept in the format of the tensors that fill it, which have to be stored alike: gate and up projections for example. Of
integers, those of four bits may be kept in eight, as other parts have them. Values that are stored otherwise than queries
and keys are a parameter of their own. Other parameters, and those for which there is no kernel, are dequantised, and a note
names their tensors."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.format import BlockFormat, QuantizedTensor, StoredParts
from jspec.checkpoints.quantized.scaled_inputs import INPUTS
from jspec.checkpoints.quantized.stored_codes import RepackedCodes, in_eight_bits
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.names import VALUES, Placement, with_values_apart
from jspec.checkpoints.tensors.parts import Part, TensorPart, part_of
from jspec.config import ModelConfig
from jspec.config.decoder_params import parts_values
from jspec.config.model_fields import EMBEDDING, HEAD
from jspec.config.param_specs import of_experts
from jspec.config.tensor_names import names_of
from jspec.quantization.formats import OF_INPUTS, Format, format_of, num_groups

WEIGHT = ".weight"
_OF_LATENTS = (f"attention.keys{WEIGHT}", f"attention.values{WEIGHT}")
_HEAD = HEAD + WEIGHT
_NAMED = 3  # tensors that a note names


def stored_parts(tensor: Tensor) -> StoredParts | None:
    """A quantised weight, or some rows or columns of one, as it is stored; None if it cannot be kept."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.stored()
    whole = stored_parts(tensor.origin) if isinstance(tensor, TensorPart) else None
    if not isinstance(tensor, TensorPart) or whole is None:
        return None
    part = tensor.part
    return whole.rows(lambda of: part_of(of, part)) if part.axis == 0 else _columns_of(whole, part)


def with_shared_apart(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    layers: Sequence[int] | None = None,
    prefix: str | None = None,
) -> ModelConfig:
    """``config``, whose shared experts are an MLP of their own if those of a layer are stored otherwise than its first
    expert, or if one of several begins within a group of inputs.

    Args:
      config: the config of the decoder layers.
      tensors: those in the files, by name.
      layers, prefix: as for ``rearranged_tensors``.
    """
    experts, names = config.experts, names_of(config.architecture)
    if experts is None or not experts.shared:
        return config
    start, apart = names.prefix if prefix is None else prefix, experts.with_shared_apart()
    for i, layer in enumerate(range(config.num_layers) if layers is None else layers):
        for name in names.expert_maps if config.has_experts(i) else ():
            modules = f"{names.experts}.0", names.shared_experts
            first, shared = (_kept_as(tensors.get(f"{start}layers.{layer}.{of}.{name}{WEIGHT}")) for of in modules)
            within = shared is not None and shared.group is not None and experts.width % shared.group > 0
            if (within and experts.shared > 1) or shared != (first and format_of(of_experts(first.name))):
                return dataclasses.replace(config, experts=apart)
    return config


def _kept_as(tensor: Tensor | None) -> Format | None:
    """The format in which a weight can be kept as it is stored; None if it is plain, missing, or has to be dequantised."""
    stored = None if tensor is None else stored_parts(tensor)
    return None if stored is None else stored.form


def _columns_of(whole: StoredParts, part: Part) -> StoredParts | None:
    """The columns ``part`` of a weight; None if they are not side by side from the start of a group on."""
    numbers, scales, size, columns = whole.arrays["weight"], whole.arrays["scale"], whole.form.group, part.index()
    first, count = int(columns[0]), len(columns)
    if not whole.arrays.keys().isdisjoint(OF_INPUTS) or not np.array_equal(columns, np.arange(first, first + count)):
        return None
    if size is not None:
        if first % size:
            return None
        groups = np.arange(num_groups(count, size)) + first // size
        scales = part_of(scales, dataclasses.replace(part, size=len(groups), index=lambda: groups))
    if isinstance(numbers, RepackedCodes):  # whose blocks are those of this part
        numbers = RepackedCodes.of(numbers.stored, first, count)
    else:
        numbers = part_of(numbers, part)
    return whole.having(weight=numbers, scale=scales)


def with_stored_weights(layout: Layout) -> Layout:
    """``layout`` with weights as they are stored, and their scales; unchanged if none can be kept.

    Args:
      layout: that of a language model or of a draft head with decoder layers, with dequantised weights.
    """
    found = {name: stored_parts(tensor) for name, tensor in layout.tensors.items() if name in layout.table}
    config, placed, keeps = _kept_params(layout, found)
    if not keeps:
        return layout
    params, summaries = config.stored_params(), []
    tensors, table = dict(layout.tensors), {}
    for name, at in placed.items():
        table[name] = at
        if at.param not in keeps or (form := _format_of(layout.tensors[name])) is None:
            continue
        summaries.append(form.summary)
        module = name.removesuffix(WEIGHT)
        called = {"weight": name, "scale": module + form.scale_end, "input_scale": module + INPUTS}
        for part, tensor in keeps[at.param][name].arrays.items():
            own = called.get(part, f"{module}.{part}")
            if part not in OF_INPUTS or at.start == 0:  # which its parts share
                table[own], tensors[own] = Placement(params[at.param].names[part], at.start, tensor.shape), tensor
    left = [name for name in layout.table if name in tensors and tensors[name].dequantizes]
    note = f"the weights stay in {' and '.join(dict.fromkeys(summaries))}, as they are stored"
    note += ", but for some" if left else ""
    dequantized = "; ".join(_notes({name: tensors[name] for name in left}))
    notes = (*(n for n in layout.notes if n != layout.dequantized), note, *([dequantized] if left else []))
    return dataclasses.replace(
        layout,
        config=config,
        table=table,
        tensors=tensors,
        holds_scales=True,
        dequantized=dequantized,
        notes=notes,
        dequantized_instead=layout,
    )


def _kept_params(
    layout: Layout, found: Mapping[str, StoredParts | None]
) -> tuple[Any, dict[str, Placement], dict[str, dict[str, StoredParts]]]:
    """Returns (config that says how each parameter is kept, its table, {parameter: {tensor name: its stored parts}}).

    Args:
      layout: as for ``with_stored_weights``.
      found: tensor name -> the tensor as it is stored, None if it cannot be kept.
    """
    config: Any = layout.config
    model: ModelConfig = config if isinstance(config, ModelConfig) else config.layers
    apart = tuple(
        (name, "int8") for name in (*_values_apart(model, layout, found), *_embedding_apart(model, layout, found))
    )
    model = dataclasses.replace(model, quantization="int8", other_formats=apart)  # any, for all of them
    table, every = with_values_apart(layout.table, model), _with_layers(config, model).stored_params()
    of_param: dict[str, dict[str, StoredParts | None]] = {}
    for name, at in table.items():
        if name in layout.tensors:
            of_param.setdefault(at.param, {})[name] = found[name]
    weights = {param: tensors for param, tensors in of_param.items() if param.endswith(WEIGHT) or param == EMBEDDING}
    alike = {param: _in_one_format(tensors, layout) for param, tensors in weights.items()}
    forms = {param: next(iter(tensors.values())).form for param, tensors in alike.items() if tensors}
    maps, named = [name.removesuffix(WEIGHT) for name in every if name.endswith(WEIGHT)], dict(apart)

    def config_with(params: Iterable[str]):
        """The config of a model with these parameters in their formats, and none of its others quantised."""
        common = collections.Counter(forms[param].name for param in params for _ in alike[param]).most_common(1)[0][0]
        of_map = {EMBEDDING: HEAD} if model.tie_embeddings else {}
        kept = {of_map.get(param, param.removesuffix(WEIGHT)): forms[param].name for param in params}
        others = [
            (name, kept.get(name))
            for name in dict.fromkeys((*maps, HEAD, *named))
            if name in named or kept.get(name) != common
        ]
        return _with_layers(config, dataclasses.replace(model, quantization=common, other_formats=tuple(others)))

    fitting = [param for param, form in forms.items() if param in every and _is_served(param, form, model)]
    if not fitting:
        return config, table, {}
    stored_as = config_with(fitting).stored_params()
    kept = [param for param in fitting if param in stored_as and stored_as[param].form == forms[param]]
    return (config_with(kept) if kept else config), table, {param: alike[param] for param in kept}


def _values_apart(model: ModelConfig, layout: Layout, found: Mapping[str, StoredParts | None]) -> Iterator[str]:
    """The names of the maps to values that are stored otherwise than queries, keys and gates of their layers, which are
    stored alike."""
    filling: dict[str, list[tuple[int, str]]] = {}
    for name, at in layout.table.items():
        filling.setdefault(at.param, []).append((at.start, name))
    for layer in range(model.num_layers):
        joined = sorted(filling.get(f"layers.{layer}.attention.qkv{WEIGHT}", ()))
        forms = [one.form if (one := found.get(name)) is not None else None for _, name in joined]
        differs = len(forms) > VALUES and forms[VALUES] != forms[0]
        if parts_values(model, layer) and differs and len({*forms[:VALUES], *forms[VALUES + 1 :]}) == 1:
            yield f"layers.{layer}.attention.values"


def _embedding_apart(model: ModelConfig, layout: Layout, found: Mapping[str, StoredParts | None]) -> Iterator[str]:
    """The name of the embedding if it is no output head and can be kept as it is stored."""
    tensor = next((name for name, at in layout.table.items() if at.param == EMBEDDING), None)
    if not model.tie_embeddings and found.get(tensor or "") is not None:
        yield EMBEDDING


def _is_served(param: str, form: Format, model: ModelConfig) -> bool:
    """Whether the kernels that read a parameter know its format, which those of heads of latents and of the output head need
    not."""
    if model.latent is not None and param.endswith(_OF_LATENTS) and not form.serves_latents:
        return False
    return param not in (_HEAD, EMBEDDING) or form.serves_head(param == EMBEDDING)


def _in_one_format(tensors: Mapping[str, StoredParts | None], layout: Layout) -> dict[str, StoredParts]:
    """All tensors that fill a parameter, if they are stored alike, or can be in eight bits without a change of a number;
    empty if not."""
    found = {name: one for name, one in tensors.items() if one is not None}
    if len({one.form for one in found.values()}) > 1:
        found = {name: in_eight_bits(one, layout.table[name].shape[1]) for name, one in found.items()}
    alike = len(found) == len(tensors) and len({one.form for one in found.values()}) == 1
    shared = [[one.arrays[part].read() for one in found.values() if part in one.arrays] for part in OF_INPUTS]
    return found if alike and all(np.array_equal(one, arrays[0]) for arrays in shared for one in arrays) else {}


def _with_layers(config: Any, model: ModelConfig) -> Any:
    """``config`` with the config ``model`` of its decoder layers."""
    return model if isinstance(config, ModelConfig) else dataclasses.replace(config, layers=model)


def _format_of(tensor: Tensor) -> BlockFormat | None:
    """The format of the weight that ``tensor`` is, or is a part of; None if that is not quantised."""
    if isinstance(tensor, TensorPart):
        return _format_of(tensor.origin)
    return tensor.format if isinstance(tensor, QuantizedTensor) else None


def _notes(left: Mapping[str, Tensor]) -> Iterator[str]:
    """The sentences for the user on weights that are dequantised, by their names, one for each format."""
    by_format: dict[BlockFormat, list[str]] = {}
    for name, tensor in left.items():
        if (form := _format_of(tensor)) is not None:
            by_format.setdefault(form, []).append(name.removesuffix(WEIGHT))
    for form, listed in by_format.items():
        more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
        yield (
            f"{', '.join(listed[:_NAMED])}{more}, stored in {form.summary}, are dequantised as they are read, because no "
            "kernel multiplies by them, or they or maps that are read together with them are kept otherwise: in bfloat16 "
            f"they take two bytes each instead of {form.bytes_each}"
        )
