"""How a model is split over the devices of one mesh axis: which part of each parameter every device has.

It is tensor parallelism as in Megatron-LM (Shoeybi et al., 2019). Attention heads, the columns of MLPs and of experts, and
the vocabulary are dealt to the *shards*, one shard for each device. The linear maps behind attention and MLP have a part of
their inputs in each shard, so what they give is added up over the shards. Everything else is the same in every shard."""

import dataclasses
import math
from typing import NamedTuple

from jspec._arguments import is_int, require
from jspec.config.model import ModelConfig
from jspec.parameters import GATE_UPS, ONCE, Parameter, bytes_of, expanded

AXIS = "tp"  # of the mesh
VOCABULARY_GROUP = 1024  # tokens; every shard has whole groups of the vocabulary, the last of them padded
SPLIT = ("heads", "kv", "mlp", "expert_mlp", "vocab")  # the logical axes that are dealt to the shards


class Split(NamedTuple):
    """How one array is split.

    Attributes:
      parameter: its declaration.
      axis: the axis of the array that is dealt to the shards, None if every shard has all of it.
      is_scale: whether the array holds the scales of the parameter, ``[out]``.
    """

    parameter: Parameter
    axis: int | None
    is_scale: bool


@dataclasses.dataclass(frozen=True)
class Shards:
    """A number of shards, two or more, along the mesh axis ``axis``."""

    count: int
    axis: str = AXIS

    def local(self, config: ModelConfig) -> ModelConfig:
        """The sizes of one shard's layers, as the config of a model. Its ``vocab_size`` is that of the whole model.

        Raises:
          ValueError: the model cannot be split into so many shards.
        """
        self._require_fit(config)
        n, experts = self.count, config.experts
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // n,
            num_kv_heads=config.num_heads // n if config.latent is not None else max(config.num_kv_heads // n, 1),
            intermediate_size=config.intermediate_size // n,
            experts=None if experts is None else dataclasses.replace(experts, width=experts.width // n),
        )

    def vocabulary(self, vocab_size: int) -> int:
        """How many rows of embedding and output head a shard has. Those behind the last token are padding."""
        groups = -(-vocab_size // VOCABULARY_GROUP)
        return -(-groups // self.count) * VOCABULARY_GROUP

    def weight_bytes(self, config: ModelConfig, itemsize: int) -> int:
        """Bytes of the weights that one shard has, where a number that is not quantised takes ``itemsize`` bytes."""
        total, dimensions = 0, config.dimensions
        for parameter in config.parameters:
            one = dataclasses.replace(parameter, copies=ONCE)
            split, rows = _split_axis(parameter) is not None, parameter.tensor_lengths(dimensions)
            share = self.vocabulary(rows[0]) / rows[0] if split and _of_vocabulary(parameter) else 1 / self.count
            bytes_each = bytes_of(one, dimensions, itemsize)
            total += len(parameter.copies) * math.ceil(bytes_each * (share if split else 1))
        return total

    def splits(self, config: ModelConfig) -> dict[str, Split]:
        """How each array of a model is split, by its name in the params."""
        found = {}
        for parameter, copy in expanded(config.parameters):
            axis = _split_axis(parameter)
            found[parameter.name.format(*copy)] = Split(parameter, axis, False)
            if parameter.quantization is not None:
                found[parameter.scale.format(*copy)] = Split(parameter, 0 if axis == 0 else None, True)
        return found

    def _require_fit(self, config: ModelConfig):
        n, heads = self.count, config.num_kv_heads
        name = "tensor_parallel"
        require(config.num_heads % n == 0, name, n, f"a divisor of num_heads, {config.num_heads}")
        grouped = config.latent is not None or heads % n == 0 or n % heads == 0
        require(grouped, name, n, f"a divisor or a multiple of num_kv_heads, {heads}")
        width = config.intermediate_size
        require(width % n == 0, name, n, f"a divisor of intermediate_size, {width}")
        experts = config.experts
        require(experts is None or experts.width % n == 0, name, n, f"a divisor of the width of an expert, {experts}")
        stored = experts is not None and (experts.stored is not None or experts.biases)
        require(not stored, name, n, f"1 for experts with biases or in MXFP4, as {config.architecture} has them")
        require(
            not (config.qk_norm and config.qk_norm_over == "projection"),
            name,
            n,
            f"1 for {config.architecture}, whose norms of queries and keys take all heads together",
        )


def shards_of(
    tensor_parallel: int, draft_tensor_parallel: int, draft_is_model: bool
) -> tuple[Shards | None, Shards | None]:
    """The shards of a target and of its draft; None for what is whole on every device.

    Args:
      tensor_parallel: over how many devices the target is split.
      draft_tensor_parallel: over how many the draft is.
      draft_is_model: whether the draft is a language model, or there is none. Draft heads are never split.

    Raises:
      ValueError: the numbers do not fit together.
    """
    n, of_draft = tensor_parallel, draft_tensor_parallel
    require(is_int(n) and n >= 1, "tensor_parallel", n, "an integer of at least 1")
    require(is_int(of_draft) and of_draft in (1, n), "draft_tensor_parallel", of_draft, f"1 or tensor_parallel, {n}")
    whole = of_draft == 1 or draft_is_model
    require(whole, "draft_tensor_parallel", of_draft, "1 for a draft that is no language model")
    return (None if n == 1 else Shards(n)), (None if of_draft == 1 else Shards(n))


def _of_vocabulary(parameter: Parameter) -> bool:
    return any(axis.name == "vocab" for axis in parameter.tensors.values())


def _split_axis(parameter: Parameter) -> int | None:
    if any(axis.name in SPLIT or axis == GATE_UPS for axis in parameter.tensors.values()):
        return 0
    return next((i for i, axis in enumerate(parameter.other_axes, 1) if axis.name in SPLIT), None)
