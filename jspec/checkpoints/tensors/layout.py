"""``Layout``: what a checkpoint was recognised as, and which tensor goes into which parameter."""

import dataclasses
import math
from collections.abc import Mapping

from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.tensors.finite import with_finite_decays
from jspec.checkpoints.tensors.names import OUTPUT_HEAD, Placement, is_buffer, renamed, tensor_table
from jspec.checkpoints.tensors.parts import rearrange, wholes_of_parts
from jspec.checkpoints.tensors.split_experts import split_experts
from jspec.checkpoints.tensors.stacked_experts import with_stacked_experts
from jspec.config import ModelConfig
from jspec.config.heads import DraftConfig, HeadConfig
from jspec.config.tensor_names import names_of

PREFIX = "model."
FOUR_BITS = "the experts stay in MXFP4, four bits a weight"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The result of reading a checkpoint's config.json and the headers of its weight files.

    Attributes:
      config: the config of the language model or the draft head.
      label: what it is, for messages: ``LlamaForCausalLM``, ``EAGLE-3 head``.
      table: tensor name -> where the tensor goes, for every tensor that the config needs.
      tensors: tensor name -> tensor, for every tensor in the files. A tensor that differs in form from its parameter is
        replaced by a converted one: ``d2t``, for example, holds ``draft_ids``.
      duplicates: tensor name -> name of the tensor that it repeats; for tied weights that the files hold twice.
      tied_by: the key of config.json that says that these weights are tied.
      left_out: names of tensors that the files may hold and that are not loaded: a copy of a tensor of the target, for
        example, or ``t2d``, which follows from ``d2t``.
      aux_convention: ``input_of`` or ``output_of``, what the layer ids in config.json mean; None if it lists none.
      norm_output: ``recycled`` or ``before_head``, what ``norm_output`` in config.json means; None if it lacks the key.
      holds_scales: whether the files hold the weights quantised, as the config says, and their scales. If not, weights
        that are to be quantised have yet to be.
      dequantized: the note of those below that says that weights are dequantised while they are read; empty if none are.
      notes: one sentence for the user on each thing to know about how the checkpoint was read.
      wholes: tensor name -> name of the tensor in the files that it is a part of, for tensors that are parts.
      dequantized_instead: the same layout with dequantised weights in place of those that are kept as they are stored; None
        if they cannot be dequantised, or none are kept.
    """

    config: ModelConfig | HeadConfig
    label: str
    table: dict[str, Placement]
    tensors: dict[str, Tensor]
    duplicates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied_by: str = ""
    left_out: frozenset[str] = frozenset()
    aux_convention: str | None = None
    norm_output: str | None = None
    holds_scales: bool = False
    dequantized: str = ""
    notes: tuple[str, ...] = ()
    wholes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dequantized_instead: "Layout | None" = None

    def ignores(self, name: str) -> bool:
        """Whether a tensor that has no place in the table may be in the files all the same."""
        return is_buffer(name) or name in self.duplicates or name in self.left_out


def reshaped(tensor: Tensor, *shape: int) -> Tensor:
    """``tensor`` with the stated shape instead of its own, for leading axes of length 1 that some files add.

    A tensor of another size is returned as it is; the check of shapes then refuses it."""
    return dataclasses.replace(tensor, shape=shape) if math.prod(tensor.shape) == math.prod(shape) else tensor


def decoder_layout(config: ModelConfig, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of a causal language model in Hugging Face's names.

    Embedding and output head of a tied model may be stored under the embedding's name, the output head's, or both. All
    names may lack their leading ``model.``, as those of some OPT checkpoints do."""
    table, tied = tensor_table(config), config.tie_embeddings and OUTPUT_HEAD in tensors
    prefixed = [name for name in table if name.startswith(PREFIX)]
    if tensors.keys().isdisjoint(prefixed) and any(name.removeprefix(PREFIX) in tensors for name in prefixed):
        table = renamed(table, {PREFIX: ""})
    embedding = next(name for name, at in table.items() if at.param == "embedding")
    unused = (*_of_mtp(config), *_of_shared_caches(config))
    stored_twice = tied and embedding in tensors
    if tied and not stored_twice:
        table[OUTPUT_HEAD] = table.pop(embedding)
    return Layout(
        config,
        config.architecture,
        table,
        rearrange(config, with_finite_decays(config, with_stacked_experts(config, split_experts(config, tensors)))),
        duplicates={OUTPUT_HEAD: embedding} if stored_twice else {},
        tied_by="tie_word_embeddings",
        left_out=frozenset(name for name in tensors if 0 in tensors[name].shape or name.startswith(unused)),
        notes=(FOUR_BITS,) if config.experts is not None and config.experts.stored else (),
        wholes=wholes_of_parts(config),
    )


def params_as_tensors(config: DraftConfig, tensors: dict[str, Tensor], as_stored: bool = False) -> Layout:
    """The ``Layout`` of tensors that have the names and the shapes of parameters.

    Args:
      config: that of the model.
      tensors: by name.
      as_stored: whether parameters that are quantised stand as their arrays, and not as one tensor that is not quantised.
    """
    stored = config.stored_params() if as_stored else {}
    shapes = config.param_shapes() | {n: array.shape for one in stored.values() for n, array in one.arrays.items()}
    table = {name: Placement(name, 0, shape) for name, shape in shapes.items()}
    return Layout(config, type(config).__name__, table, tensors, holds_scales=bool(stored))  # pyright: ignore[reportArgumentType]


def mtp_mark(architecture: str, layer: int) -> str:
    """The name of a tensor that is in the files if there are layers for multi-token prediction, and only then.

    Args:
      architecture: that of the target.
      layer: the number of the first of them, where they stand behind the target's last layer.
    """
    own = names_of(architecture).mtp
    return f"{PREFIX}layers.{layer}.eh_proj.weight" if own is None else f"{own}fc.weight"


def holds_mtp(layout: Layout) -> bool:
    """Whether multi-token prediction layers are beside a language model, or stand behind its last layer."""
    config = layout.config
    return isinstance(config, ModelConfig) and mtp_mark(config.architecture, config.num_layers) in layout.left_out


def _of_shared_caches(config: ModelConfig) -> tuple[str, ...]:
    """How the names of keys and values begin that files may have for layers that read the cache of another layer."""
    names = names_of(config.architecture)
    if isinstance(names.qkv, str):
        return ()
    layers = [number for number in range(config.num_layers) if config.layer(number).reads_cache_of is not None]
    unused = (*names.qkv[1:], names.k_norm, names.k_norm.replace("k_norm", "v_norm"))
    return tuple(f"{names.prefix}layers.{layer}.{name}." for layer in layers for name in unused)


def _of_mtp(config: ModelConfig) -> tuple[str, ...]:
    """How the names of tensors begin that belong to layers for multi-token prediction."""
    if (own := names_of(config.architecture).mtp) is not None:
        return (own,)
    layers = range(config.num_layers, config.num_layers + config.mtp_layers)
    return tuple(f"{names_of(config.architecture).prefix}layers.{layer}." for layer in layers)
