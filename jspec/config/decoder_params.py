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
EXPERTS, EXPERT_MLP, SHARED_MLP = Axis("X", "experts"), Axis("Fe", "expert_mlp"), Axis("Fs", "mlp")
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
        apart = values_apart(config, copy[0])
        kind = (*layer.dimensions.values(), layer.projections, config.has_delta_net(copy[0]), apart)
        alike.setdefault(kind, []).append(copy)  # layers of one kind have the same parameters
    parameters: list[Parameter] = []
    for group in alike.values():
        layer = config.layer(group[0][0])
        layers = _LayersAlike(config, layer, names, f"{prefix}layers.{{}}.", tuple(group))
        declared = layers.parameters(attention_inputs, attention_norms)
        own_sizes = layer.dimensions if config.layers else {}
        parameters += [dataclasses.replace(parameter, sizes=own_sizes) for parameter in declared]
    return tuple(parameters)


def parts_values(config: ModelFields, layer: int) -> bool:
    """Whether the values of a layer can be a linear map apart from its queries and keys."""
    grouped = config.latent is None and not config.has_delta_net(layer) and config.layer(layer).projections == 2
    return grouped and not isinstance(names_of(config.architecture).qkv, str)


def values_apart(config: ModelFields, layer: int) -> bool:
    """Whether they are one, ``attention.values``, because ``other_formats`` has a format for it."""
    return parts_values(config, layer) and config.has_own_format(f"layers.{layer}.attention.values")


def halves_of_queries(names: TensorNames) -> tuple[str, str]:
    """The two parts of the tensor of queries where that has the gates of attention, too: queries, and gates."""
    return f"{names.qkv[0]}.queries", f"{names.qkv[0]}.gates"


@dataclasses.dataclass(frozen=True)
class _LayersAlike:
    """Declares the parameters of decoder layers that have the same sizes.

    Names of parameters are those behind ``layers.{}.``, and names of tensors those behind ``prefix``.

    Attributes:
      config: the config of the model.
      layer: the sizes of these layers.
      names: their names in the checkpoint.
      prefix: the part of these names up to ``layers.{}.``.
      copies: the indices of these layers, or of those of them that have what is declared.
    """

    config: ModelFields
    layer: LayerConfig
    names: TensorNames
    prefix: str
    copies: Copies

    def parameters(self, attention_inputs: Axis, attention_norms: Mapping[str, str] | None) -> list[Parameter]:
        """All of them; the arguments are those of ``decoder_layers``."""
        config, names, experts = self.config, self.names, self.config.experts
        norms = {name: names.norms[name] for name in config.layer_norms}
        if attention_norms is not None:
            norms = {**attention_norms, **{name: tensor for name, tensor in norms.items() if name != "attention_norm"}}
        parameters: list[Parameter] = []
        for name, tensor in norms.items():
            parameters += self._norm(name, tensor, EMBED)
        recurrent = config.has_delta_net(self.copies[0][0])
        parameters += self._delta_net() if recurrent else self._attention(attention_inputs)
        beside = experts is not None and experts.beside_mlp
        dense = self if beside else self._of_layers(has_experts=False)
        bias = config.mlp_bias
        if config.gated_mlp:
            parameters += dense._linear_map("mlp.gate_up", names.gate_up, (MLP, MLP), EMBED, bias)
        else:
            parameters += dense._linear_map("mlp.up", names.up, (MLP,), EMBED, bias)
        parameters += dense._linear_map("mlp.down", names.down, (EMBED,), MLP, bias)
        if experts is not None:
            parameters += self._of_layers(has_experts=True)._experts(experts)
        if beside:
            for name, tensor in names.beside_norms.items():
                parameters += self._norm(f"beside.{name}", tensor, EMBED)
            parameters.append(self._vector("beside.router_norm.weight", names.router_scale, EMBED))
            parameters.append(self._vector("beside.expert_scale", names.expert_scale, EXPERTS))
        if not recurrent:
            parameters += self._attention_norms()
        if config.per_layer_inputs is not None:
            parameters += self._plain_map("inputs.gate", {names.layer_gate: LAYER_INPUTS}, EMBED)
            parameters += self._plain_map("inputs.out", {names.layer_out: EMBED}, LAYER_INPUTS)
            parameters += self._norm("inputs.norm", names.layer_out_norm, EMBED)
        if config.layer_scalars:
            parameters.append(self._vector("scalar", names.scalar, ONE))
        return parameters

    def _of_layers(self, *, has_experts: bool) -> "_LayersAlike":
        """Those of the layers that have experts, or that have none."""
        copies = tuple(copy for copy in self.copies if self.config.has_experts(copy[0]) is has_experts)
        return dataclasses.replace(self, copies=copies)

    def _vector(self, name: str, tensor: str, axis: Axis) -> Parameter:
        return vector(f"layers.{{}}.{name}", self.prefix + tensor, axis, self.copies)

    def _norm(self, name: str, tensor: str, axis: Axis, kind: str | None = None) -> tuple[Parameter, ...]:
        """A norm of the ``kind`` of all norms of the model, or of its own."""
        return norm(f"layers.{{}}.{name}", self.prefix + tensor, axis, self.copies, kind=kind or self.config.norm)

    def _plain_map(
        self, name: str, tensors: Mapping[str, Axis], inputs: Axis, bias: bool = False
    ) -> tuple[Parameter, ...]:
        """A linear map that is never quantised."""
        prefixed = {self.prefix + tensor: axis for tensor, axis in tensors.items()}
        return linear(f"layers.{{}}.{name}", prefixed, inputs, self.copies, bias=bias)

    def _linear_map(
        self, name: str, tensors: Sequence[str] | str, axes: tuple[Axis, ...], inputs: Axis, bias: bool = False
    ) -> Iterator[Parameter]:
        """A linear map, which may be quantised.

        Args:
          name: its name.
          tensors: their names; a single name for several ``axes`` means that the checkpoint holds them joined.
          axes: the output features of each of them.
          inputs, bias: as for ``linear``.
        """
        joined = self.prefix + tensors if isinstance(tensors, str) and len(axes) > 1 else None
        parts = [tensors] if isinstance(tensors, str) else tensors
        parts = parts if joined is None else [f"{tensors}.{i}" for i in range(len(axes))]
        prefixed = {self.prefix + part: axis for part, axis in zip(parts, axes, strict=True)}
        ours = f"layers.{{}}.{name}"
        for stored, group in by_quantization(self.config, ours, self.copies):
            yield from linear(ours, prefixed, inputs, group, bias=bias, quantization=stored, joined=joined)

    def _attention(self, inputs: Axis) -> Iterator[Parameter]:
        """The attention, but for the norms of its heads and its sinks."""
        config, names, latent = self.config, self.names, self.config.latent
        if latent is None:
            parts = 1 + self.layer.projections
            tensors, axes = names.qkv if isinstance(names.qkv, str) else names.qkv[:parts], (HEADS, KV, KV)[:parts]
            if config.attention_gate and not isinstance(tensors, str):
                queries, gates = halves_of_queries(names)
                tensors, axes = (queries, *tensors[1:], gates), (*axes, HEADS)
            if values_apart(config, self.copies[0][0]):
                yield from self._linear_map("attention.values", tensors[2:3], axes[2:3], inputs, config.qkv_bias)
                tensors, axes = (*tensors[:2], *tensors[3:]), (*axes[:2], *axes[3:])
            yield from self._linear_map("attention.qkv", tensors, axes, inputs, config.qkv_bias)
        else:
            query, axis = (names.query, HEADS) if latent.query_rank is None else (names.query_down, QUERY_RANK)
            compressed = [query, names.latent_down], (axis, CACHED)
            yield from self._linear_map("attention.compress", *compressed, inputs, config.qkv_bias)
            if latent.query_rank is not None:
                yield from self._norm("attention.query_norm", names.query_norm, QUERY_RANK, "rms")
                yield from self._linear_map("attention.queries", names.query_up, (HEADS,), QUERY_RANK)
            yield from self._norm("attention.latent_norm", names.latent_norm, LATENT, "rms")
            yield from self._linear_map("attention.keys", f"{names.latent_up}.keys", (UNROTATED,), LATENT)
            yield from self._linear_map("attention.values", f"{names.latent_up}.values", (VALUES,), LATENT)
        outputs = HEADS if latent is None else VALUES
        yield from self._linear_map("attention.out", names.out, (EMBED,), outputs, config.output_bias)

    def _attention_norms(self) -> Iterator[Parameter]:
        """The norms of queries and keys, and the sinks."""
        config, names = self.config, self.names
        normed = (("q_norm", names.q_norm, HEADS), ("k_norm", names.k_norm, KV))[: 2 if self.layer.projections else 1]
        for name, tensor, axis in normed if config.qk_norm else ():
            size = axis if config.qk_norm_over == "projection" else HEAD_DIM
            yield from self._norm(f"attention.{name}", tensor, size)
        if config.attention_sinks:
            yield self._vector("attention.sinks", names.sinks, HEAD_COUNT)

    def _delta_net(self) -> Iterator[Parameter]:
        """A gated delta net. Betas and decays are never quantised: errors in decays add up over a text."""
        names = self.names
        assert names.delta_inputs is not None
        (wide, narrow), axes = names.delta_inputs, (DELTA_KEYS, DELTA_KEYS, DELTA_VALUES)
        yield from self._linear_map("delta_net.qkvz", wide, (*axes, DELTA_VALUES), EMBED)
        yield from self._plain_map("delta_net.ba", dict.fromkeys(narrow, DELTA_HEADS), EMBED)
        convolved = {f"{self.prefix}{names.delta_convolution}.{i}.weight": axis for i, axis in enumerate(axes)}
        yield Parameter("layers.{}.delta_net.convolution", convolved, (ONE, TAPS), self.copies)
        for name, tensor in (("decay", names.delta_decay), ("bias", names.delta_bias)):
            yield dataclasses.replace(self._vector(f"delta_net.{name}", tensor, DELTA_HEADS), dtype="float32")
        yield from self._norm("delta_net.norm", names.delta_norm, DELTA_VALUE, "rms")
        yield from self._linear_map("delta_net.out", names.delta_out, (EMBED,), DELTA_VALUES)

    def _experts(self, experts: Experts) -> Iterator[Parameter]:
        """A mixture of experts, whose maps are stacked along the output channels: one expert after another, and of each
        expert gate before up."""
        names, prefix = self.names, self.prefix
        ours = "beside.mixture." if experts.beside_mlp else "mlp."
        yield from self._plain_map(f"{ours}router", {names.router: EXPERTS}, EMBED, experts.biases)
        if experts.corrected:
            yield dataclasses.replace(self._vector(f"{ours}correction", names.correction, EXPERTS), dtype="float32")
        if experts.shared_gate:
            yield from self._plain_map(f"{ours}shared_gate", {names.shared_gate: ONE}, EMBED)
        if names.stacked_maps is not None:
            stacked = [prefix + name for name in names.stacked_maps]
            yield from _stacked_maps(self.config, experts, stacked, self.copies)
            return
        gate, up, down = names.expert_maps
        if experts.shared_width:
            own = [f"{names.shared_experts}.{tensor}" for tensor in (gate, up, down)]
            yield from self._linear_map(f"{ours}shared.gate_up", own[:2], (SHARED_MLP, SHARED_MLP), EMBED)
            yield from self._linear_map(f"{ours}shared.down", own[2:], (EMBED,), SHARED_MLP)
        every = [f"{names.experts}.{expert}.{{}}" for expert in range(experts.count)]
        # A single shared expert has the names of an MLP. Of several, each is a part of the tensors of all of them.
        shared = [""] if experts.shared == 1 else [f".{i}" for i in range(experts.shared)]
        every += [f"{names.shared_experts}.{{}}{i}" for i in shared]
        gate_up = {prefix + expert.format(tensor): EXPERT_MLP for expert in every for tensor in (gate, up)}
        downs = {prefix + expert.format(down): EMBED for expert in every}
        for name, tensors, inputs in (("gate_up", gate_up, EMBED), ("down", downs, EXPERT_MLP)):
            name = f"layers.{{}}.{ours}{name}"
            for stored, group in by_quantization(self.config, name, self.copies):
                yield from linear(name, tensors, inputs, group, bias=experts.biases, quantization=of_experts(stored))


def by_quantization(config: ModelFields, name: str, copies: Copies) -> Iterator[tuple[str | None, Copies]]:
    """The quantisations of the linear maps ``name``, with a ``{}`` for the layer, and the copies that have each."""
    if not config.other_formats:
        yield config.quantization, copies
        return
    groups: dict[str | None, list[tuple[int, ...]]] = {}
    for copy in copies:
        groups.setdefault(config.quantization_of(name.format(*copy)), []).append(copy)
    yield from ((quantization, tuple(group)) for quantization, group in groups.items())


def _stacked_maps(config: ModelFields, experts: Experts, tensors: Sequence[str], copies: Copies) -> Iterator[Parameter]:
    """The maps of all experts from two stacked ``tensors`` of the checkpoint: gate and up, and down."""
    maps = ("gate_up", GATE_UPS, EMBED, "Dp"), ("down", DOWNS, EXPERT_MLP, "Fp")
    for (name, outputs, inputs, pairs), tensor in zip(maps, tensors, strict=True):
        ours = f"layers.{{}}.mlp.{name}"
        if experts.stored is None:
            for stored, group in by_quantization(config, ours, copies):
                weight = matrix(f"{ours}.weight", tensor, outputs, inputs, group)
                yield dataclasses.replace(weight, quantization=of_experts(stored))
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

    A tied embedding is also the output head and is quantised if that is.
    """
    tied, names = config.tie_embeddings, names_of(config.architecture)
    start, full_width = names.prefix, config.embedding_size is None
    width = EMBED if full_width else WORD_EMBED
    embedding = matrix("embedding", f"{start}{names.embedding}.weight", VOCAB, width)
    parameters = [dataclasses.replace(embedding, quantization=config.embedding_quantization)]
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
