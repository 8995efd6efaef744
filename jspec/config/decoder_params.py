"""The parameters of decoder layers and of language models, declared as in ``jspec.config.param_specs``."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jspec.config.layer import LayerConfig
from jspec.config.model_fields import ModelFields
from jspec.config.moe import Experts
from jspec.config.param_specs import (
    DRAFT_IDS,
    DRAFT_VOCAB,
    EMBED,
    VOCAB,
    Axis,
    Parameter,
    indices,
    linear,
    matrix,
    norm,
    of_experts,
    vector,
)
from jspec.config.tensor_names import LLAMA, TensorNames, names_of

Copies = Sequence[tuple[int, ...]]  # as in ``Parameter``

MLP = Axis("F", "mlp")
WORD_EMBED, POSITIONS = Axis("We", "word_embed"), Axis("Pe", "position")
# Of per-layer inputs: the numbers of one layer, those of all layers, the tokens of their table.
LAYER_INPUTS, ALL_LAYER_INPUTS, LAYER_VOCAB = Axis("Wl", "layer_in"), Axis("LWl", "layer_in"), Axis("Vl", "layer_vocab")
ONE = Axis("1", "one")
EXPERTS, EXPERT_MLP = Axis("X", "experts"), Axis("Fe", "expert_mlp")
GATE_UPS, DOWNS = Axis("2XFe", "experts"), Axis("XD", "experts")  # of all experts, one after another
HEADS, KV, HEAD_DIM = Axis("NH", "heads"), Axis("GH", "kv"), Axis("H", "head_dim")
HEAD_COUNT = Axis("N", "heads")
# Of latent attention: all queries, the unrotated parts of all keys, all values, and the ranks.
QUERY_RANK, LATENT, CACHED = Axis("Cq", "query_rank"), Axis("Ck", "latent"), Axis("Cc", "latent")
UNROTATED, VALUES = Axis("NHn", "heads"), Axis("NHv", "heads")
# Of gated delta nets: all numbers of queries or keys, all of values, the value heads, the taps of the convolution.
DELTA_KEYS, DELTA_VALUES = Axis("NkDk", "heads"), Axis("NvDv", "heads")
DELTA_HEADS, DELTA_VALUE, TAPS = Axis("Nv", "heads"), Axis("Dv", "head_dim"), Axis("Wc", "taps")
PAIR = Axis("32", "pair")  # the bytes of a pair of groups of MXFP4 codes


def decoder_layers(
    config: ModelFields,
    copies: Copies,
    *,
    names: TensorNames = LLAMA,
    prefix: str = "",
    attention_inputs: Axis = EMBED,
    attention_norms: Mapping[str, str] | None = None,
) -> tuple[Parameter, ...]:
    """The parameters of decoder layers.

    Args:
      config: determines sizes, norms, biases and quantisation.
      copies: the indices of the layers, as in ``Parameter``.
      names: their names in the checkpoint.
      prefix: the part of these names before ``layers.{}.``.
      attention_inputs: the axis that the attention reads. In a language model that is the width D.
      attention_norms: the norms before the attention of a draft head's first layer, name in the params -> name in the
        checkpoint. None means that of a language model.

    Returns:
      those of all layers that have the same sizes, then those of others.
    """
    alike: dict[tuple, list[tuple[int, ...]]] = {}
    for copy in copies:
        layer = config.layer(copy[0])
        kind = (*layer.dimensions.values(), layer.projections, config.has_delta_net(copy[0]))
        alike.setdefault(kind, []).append(copy)  # layers of one kind have the same parameters
    parameters: list[Parameter] = []
    for group in alike.values():
        layer = config.layer(group[0][0])
        declared = _layers_alike(
            config,
            layer,
            tuple(group),
            names=names,
            prefix=prefix,
            attention_inputs=attention_inputs,
            attention_norms=attention_norms,
        )
        own_sizes = layer.dimensions if config.layers else {}
        parameters += [dataclasses.replace(parameter, sizes=own_sizes) for parameter in declared]
    return tuple(parameters)


def halves_of_queries(names: TensorNames) -> tuple[str, str]:
    """The two parts of the tensor of queries where that has the gates of attention, too: queries, and gates."""
    return f"{names.qkv[0]}.queries", f"{names.qkv[0]}.gates"


def _layers_alike(
    config: ModelFields,
    layer: LayerConfig,
    copies: Copies,
    *,
    names: TensorNames,
    prefix: str,
    attention_inputs: Axis,
    attention_norms: Mapping[str, str] | None,
) -> list[Parameter]:
    """The parameters of decoder layers with the sizes of ``layer``; the other arguments as for ``decoder_layers``."""
    ours, theirs = "layers.{}.", prefix + "layers.{}."
    norms = {name: names.norms[name] for name in config.layer_norms}
    if attention_norms is not None:
        norms = {**attention_norms, **{name: tensor for name, tensor in norms.items() if name != "attention_norm"}}
    parameters: list[Parameter] = []
    for name, tensor in norms.items():
        parameters += norm(ours + name, theirs + tensor, EMBED, copies, kind=config.norm)
    sparse, dense = (tuple(copy for copy in copies if config.has_experts(copy[0]) is has) for has in (True, False))
    beside = config.experts is not None and config.experts.beside_mlp
    dense = tuple(copies) if beside else dense
    recurrent = config.has_delta_net(copies[0][0])
    if recurrent:
        parameters += _delta_net(config, names, theirs, copies)
    else:
        parameters += _attention(config, layer, names, theirs, copies, attention_inputs)
    bias = config.mlp_bias
    if config.gated_mlp:
        parameters += _linear_map(config, "mlp.gate_up", names.gate_up, (MLP, MLP), EMBED, bias, dense, theirs)
    else:
        parameters += _linear_map(config, "mlp.up", names.up, (MLP,), EMBED, bias, dense, theirs)
    parameters += _linear_map(config, "mlp.down", names.down, (EMBED,), MLP, bias, dense, theirs)
    if config.experts is not None:
        parameters += _experts(config, config.experts, names, theirs, sparse)
    if beside:
        for name, tensor in names.beside_norms.items():
            parameters += norm(f"{ours}beside.{name}", theirs + tensor, EMBED, copies, kind=config.norm)
        parameters.append(vector(f"{ours}beside.router_norm.weight", theirs + names.router_scale, EMBED, copies))
        parameters.append(vector(f"{ours}beside.expert_scale", theirs + names.expert_scale, EXPERTS, copies))
    if not recurrent:
        parameters += _attention_norms(config, layer, names, theirs, copies)
    if config.per_layer_inputs is not None:
        parameters += linear(f"{ours}inputs.gate", {theirs + names.layer_gate: LAYER_INPUTS}, EMBED, copies)
        parameters += linear(f"{ours}inputs.out", {theirs + names.layer_out: EMBED}, LAYER_INPUTS, copies)
        parameters += norm(f"{ours}inputs.norm", theirs + names.layer_out_norm, EMBED, copies, kind=config.norm)
    if config.layer_scalars:
        parameters.append(vector(f"{ours}scalar", theirs + names.scalar, ONE, copies))
    return parameters


def _linear_map(
    config: ModelFields,
    name: str,
    tensors: Sequence[str] | str,
    axes: tuple[Axis, ...],
    inputs: Axis,
    bias: bool,
    copies: Copies,
    prefix: str,
) -> Iterator[Parameter]:
    """The parameters of a linear map of a layer, which may be quantised.

    Args:
      config: the config of the model.
      name: of the map, behind ``layers.{}.``.
      tensors: their names in the checkpoint, behind ``prefix``; a single name for several ``axes`` means that the checkpoint
        holds them joined.
      axes: the output features of each of them.
      inputs, bias: as for ``linear``.
      copies: the indices of the layers.
      prefix: the names of a layer's tensors before theirs.
    """
    joined = prefix + tensors if isinstance(tensors, str) and len(axes) > 1 else None
    parts = [tensors] if isinstance(tensors, str) else tensors
    parts = parts if joined is None else [f"{tensors}.{i}" for i in range(len(axes))]
    prefixed = {prefix + part: axis for part, axis in zip(parts, axes, strict=True)}
    ours = f"layers.{{}}.{name}"
    for stored, group in by_quantization(config, ours, copies):
        yield from linear(ours, prefixed, inputs, group, bias=bias, quantization=stored, joined=joined)


def _attention(
    config: ModelFields, layer: LayerConfig, names: TensorNames, prefix: str, copies: Copies, inputs: Axis
) -> Iterator[Parameter]:
    """The parameters of the attention of layers, but for the norms of its heads and its sinks."""
    ours, latent = "layers.{}.attention.", config.latent

    def linear_map(name: str, tensors: Sequence[str] | str, axes: tuple[Axis, ...], inputs: Axis, bias: bool):
        return _linear_map(config, f"attention.{name}", tensors, axes, inputs, bias, copies, prefix)

    if latent is None:
        parts = 1 + layer.projections
        tensors, axes = names.qkv if isinstance(names.qkv, str) else names.qkv[:parts], (HEADS, KV, KV)[:parts]
        if config.attention_gate and not isinstance(tensors, str):
            queries, gates = halves_of_queries(names)
            tensors, axes = (queries, *tensors[1:], gates), (*axes, HEADS)
        yield from linear_map("qkv", tensors, axes, inputs, config.qkv_bias)
    else:
        query, axis = (names.query, HEADS) if latent.query_rank is None else (names.query_down, QUERY_RANK)
        yield from linear_map("compress", [query, names.latent_down], (axis, CACHED), inputs, config.qkv_bias)
        if latent.query_rank is not None:
            yield from norm(f"{ours}query_norm", prefix + names.query_norm, QUERY_RANK, copies)
            yield from linear_map("queries", names.query_up, (HEADS,), QUERY_RANK, False)
        yield from norm(f"{ours}latent_norm", prefix + names.latent_norm, LATENT, copies)
        yield from linear_map("keys", f"{names.latent_up}.keys", (UNROTATED,), LATENT, False)
        yield from linear_map("values", f"{names.latent_up}.values", (VALUES,), LATENT, False)
    yield from linear_map("out", names.out, (EMBED,), HEADS if latent is None else VALUES, config.output_bias)


def _attention_norms(
    config: ModelFields, layer: LayerConfig, names: TensorNames, prefix: str, copies: Copies
) -> Iterator[Parameter]:
    """The norms of queries and keys, and the sinks."""
    ours = "layers.{}.attention."
    normed = (("q_norm", names.q_norm, HEADS), ("k_norm", names.k_norm, KV))[: 2 if layer.projections else 1]
    for name, tensor, axis in normed if config.qk_norm else ():
        size = axis if config.qk_norm_over == "projection" else HEAD_DIM
        yield from norm(f"{ours}{name}", prefix + tensor, size, copies, kind=config.norm)
    if config.attention_sinks:
        yield vector(f"{ours}sinks", prefix + names.sinks, HEAD_COUNT, copies)


def _delta_net(config: ModelFields, names: TensorNames, prefix: str, copies: Copies) -> Iterator[Parameter]:
    """The parameters of a gated delta net. Betas and decays are never quantised: errors in decays add up over a text."""
    assert names.delta_inputs is not None
    ours, (wide, narrow) = "layers.{}.delta_net.", names.delta_inputs
    axes = DELTA_KEYS, DELTA_KEYS, DELTA_VALUES
    yield from _linear_map(config, "delta_net.qkvz", wide, (*axes, DELTA_VALUES), EMBED, False, copies, prefix)
    yield from linear(f"{ours}ba", {prefix + name: DELTA_HEADS for name in narrow}, EMBED, copies)
    convolved = {f"{prefix}{names.delta_convolution}.{i}.weight": axis for i, axis in enumerate(axes)}
    yield Parameter(f"{ours}convolution", convolved, (ONE, TAPS), copies)
    for name, tensor in (("decay", names.delta_decay), ("bias", names.delta_bias)):
        yield dataclasses.replace(vector(f"{ours}{name}", prefix + tensor, DELTA_HEADS, copies), dtype="float32")
    yield from norm(f"{ours}norm", prefix + names.delta_norm, DELTA_VALUE, copies)
    yield from _linear_map(config, "delta_net.out", names.delta_out, (EMBED,), DELTA_VALUES, False, copies, prefix)


def by_quantization(config: ModelFields, name: str, copies: Copies) -> Iterator[tuple[str | None, Copies]]:
    """The quantisations of the linear maps ``name``, with a ``{}`` for the layer, and the copies that have each."""
    if not config.plain_maps:
        yield config.quantization, copies
        return
    groups: dict[str | None, list[tuple[int, ...]]] = {}
    for copy in copies:
        groups.setdefault(config.quantization_of(name.format(*copy)), []).append(copy)
    yield from ((quantization, tuple(group)) for quantization, group in groups.items())


def _experts(
    config: ModelFields, experts: Experts, names: TensorNames, prefix: str, copies: Copies
) -> Iterator[Parameter]:
    """The parameters of a mixture of experts, whose maps are stacked along the output channels: one expert after another,
    and of each expert gate before up."""
    ours = "layers.{}.beside.mixture." if experts.beside_mlp else "layers.{}.mlp."
    yield from linear(f"{ours}router", {prefix + names.router: EXPERTS}, EMBED, copies, bias=experts.biases)
    if experts.corrected:
        correction = vector(f"{ours}correction", prefix + names.correction, EXPERTS, copies)
        yield dataclasses.replace(correction, dtype="float32")
    if experts.shared_gate:
        yield from linear(f"{ours}shared_gate", {prefix + names.shared_gate: ONE}, EMBED, copies)
    if names.stacked_maps is not None:
        stacked = [prefix + name for name in names.stacked_maps]
        yield from _stacked_maps(experts, stacked, copies, of_experts(config.quantization))
        return
    gate, up, down = names.expert_maps
    every = [f"{names.experts}.{expert}.{{}}" for expert in range(experts.count)]
    # A single shared expert has the names of an MLP. Of several, each is a part of the tensors of all of them.
    shared = [""] if experts.shared == 1 else [f".{i}" for i in range(experts.shared)]
    every += [f"{names.shared_experts}.{{}}{i}" for i in shared]
    gate_up = {prefix + expert.format(tensor): EXPERT_MLP for expert in every for tensor in (gate, up)}
    downs = {prefix + expert.format(down): EMBED for expert in every}
    for name, tensors, inputs in ((f"{ours}gate_up", gate_up, EMBED), (f"{ours}down", downs, EXPERT_MLP)):
        for stored, group in by_quantization(config, name, copies):
            yield from linear(name, tensors, inputs, group, bias=experts.biases, quantization=of_experts(stored))


def _stacked_maps(
    experts: Experts, tensors: Sequence[str], copies: Copies, quantization: str | None
) -> Iterator[Parameter]:
    """The maps of all experts from two stacked ``tensors`` of the checkpoint: gate and up, and down."""
    maps = ("gate_up", GATE_UPS, EMBED, "Dp"), ("down", DOWNS, EXPERT_MLP, "Fp")
    for (name, outputs, inputs, pairs), tensor in zip(maps, tensors, strict=True):
        ours = f"layers.{{}}.mlp.{name}"
        if experts.stored is None:
            yield dataclasses.replace(
                matrix(f"{ours}.weight", tensor, outputs, inputs, copies), quantization=quantization
            )
        else:
            in_pairs = Axis(pairs, inputs.name)
            weight = matrix(f"{ours}.weight", f"{tensor}_blocks", in_pairs, outputs, copies)
            yield dataclasses.replace(weight, other_axes=(outputs, PAIR), dtype="uint8", weights_each=2)
            scale = matrix(f"{ours}.scale", f"{tensor}_scales", in_pairs, outputs, copies)
            yield dataclasses.replace(scale, dtype="uint32", weights_each=0)
        if experts.biases:
            yield vector(f"{ours}.bias", f"{tensor}_bias", outputs, copies)


def language_model(config: ModelFields) -> tuple[Parameter, ...]:
    """The parameters of a causal language model.

    A tied embedding is also the output head and is quantised if that is. An embedding that is not tied is never quantised.
    """
    tied, names = config.tie_embeddings, names_of(config.architecture)
    start, full_width = names.prefix, config.embedding_size is None
    width = EMBED if full_width else WORD_EMBED
    embedding = matrix("embedding", f"{start}{names.embedding}.weight", VOCAB, width)
    parameters = [dataclasses.replace(embedding, quantization=config.head_quantization if tied else None)]
    if config.position_offset is not None:
        parameters.append(matrix("positions", f"{start}{names.positions}.weight", POSITIONS, EMBED))
    if not full_width:
        kind = config.quantization_of("project_in")
        parameters += linear("project_in", {start + names.project_in: EMBED}, WORD_EMBED, quantization=kind)
    if config.per_layer_inputs is not None:
        ours = "layer_inputs."
        parameters.append(matrix(f"{ours}table", f"{start}{names.layer_inputs}.weight", LAYER_VOCAB, ALL_LAYER_INPUTS))
        projection = {start + names.layer_inputs_projection: ALL_LAYER_INPUTS}
        parameters += linear(f"{ours}projection", projection, EMBED)
        parameters += norm(f"{ours}norm", start + names.layer_inputs_norm, LAYER_INPUTS, kind=config.norm)
    parameters += decoder_layers(config, indices(0, config.num_layers), names=names, prefix=start)
    if config.final_norm:
        parameters += norm("norm", start + names.norm, EMBED, kind=config.norm)
    if not full_width:
        kind = config.quantization_of("project_out")
        parameters += linear("project_out", {start + names.project_out: WORD_EMBED}, EMBED, quantization=kind)
    if not tied:
        outputs = DRAFT_VOCAB if config.reduced else VOCAB
        parameters += linear("head", {names.head: outputs}, width, quantization=config.head_quantization)
    return (*parameters, DRAFT_IDS) if config.reduced else tuple(parameters)
