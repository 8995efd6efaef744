"""Tensor parallelism over one mesh axis, as in Megatron-LM (Shoeybi et al., 2019): the shard of each parameter on a device.

Attention heads, the columns of MLPs and of experts, and the vocabulary are sharded. The linear maps after attention and MLP
have a part of their inputs in each shard, so their outputs are summed over the shards. Everything else is replicated."""

import dataclasses
import math
from typing import NamedTuple

from jspec._validation import is_int, require
from jspec.config.decoder_params import DOWNS, GATE_UPS
from jspec.config.model import ModelConfig
from jspec.config.moe import Experts
from jspec.config.param_specs import ONCE, Parameter, bytes_of, expanded

AXIS = "tp"  # of the mesh
VOCABULARY_GROUP = 1024  # tokens; every shard has whole groups of the vocabulary, the last of them padded
SHARDED = ("heads", "kv", "mlp", "expert_mlp", "vocab")  # the logical axes that are sharded
# The axis of each array of a quantised weight that is sharded where an axis of the weight is. Scales have one for inputs
# only where groups of inputs have scales.
_AXES = {"scale": {0: 0, 1: 1}, "channel_scale": {0: 0}, "order": {1: 0}, "input_scale": {1: 0}}


class ParameterSharding(NamedTuple):
    """How one array is sharded.

    Attributes:
      parameter: its declaration.
      axis: the axis of the array that is sharded; None if the array is replicated.
      by_tensor: whether each of the tensors that fill axis 0 is sharded by itself, as queries, keys and values are. If
        not, the axis is sharded as a whole.
    """

    parameter: Parameter
    axis: int | None
    by_tensor: bool


@dataclasses.dataclass(frozen=True)
class Shards:
    """Tensor parallelism over two or more shards.

    Attributes:
      count: number of shards.
      axis: of the mesh.
      by_expert: whether a shard has some of the experts instead of a part of each (expert parallelism). Experts with
        biases or in MXFP4 are sharded so in any case.
      batch_sharded_from: bytes of a round's logits from which on each shard verifies some of the rows
        (``jspec.engine.multihost.batch_sharded_verify``). The default is an estimate: with fewer bytes, exchanging the
        results, some 12 us, takes as long as it saves.
    """

    count: int
    axis: str = AXIS
    by_expert: bool = False
    batch_sharded_from: int = 8 << 20

    def local(self, config: ModelConfig) -> ModelConfig:
        """The sizes of one shard's layers, as the config of a model. Its ``vocab_size`` is that of the whole model.

        Raises:
          ValueError: the model cannot be sharded so.
        """
        self._require_fit(config)
        n, experts = self.count, config.experts
        if experts is not None:
            width = experts.width if self.splits_experts(experts) else experts.width // n
            experts = dataclasses.replace(experts, width=width, shared_width=experts.shared_width // n)
        local_heads = config.num_heads // n if config.latent is not None else max(config.num_kv_heads // n, 1)
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // n,
            num_kv_heads=local_heads,
            intermediate_size=config.intermediate_size // n,
            experts=experts,
            delta_nets=config.delta_nets and config.delta_nets.local(n),
            layers=tuple(
                dataclasses.replace(
                    layer,
                    num_kv_heads=max(layer.num_kv_heads // n, 1),
                    intermediate_size=layer.intermediate_size // n,
                )
                for layer in config.layers
            ),
        )

    def splits_experts(self, experts: Experts) -> bool:
        """Whether a shard has some of the experts instead of a part of each."""
        return self.by_expert or experts.stored is not None or experts.biases

    def vocabulary(self, vocab_size: int) -> int:
        """Tokens of the vocabulary in a shard of embedding and output head; those after the last token are padding."""
        groups = -(-vocab_size // VOCABULARY_GROUP)
        return -(-groups // self.count) * VOCABULARY_GROUP

    def weight_bytes(self, config: ModelConfig, itemsize: int) -> int:
        """Bytes of one shard's weights, where a number that is not quantised takes ``itemsize`` bytes."""
        total, dimensions = 0, config.dimensions
        for parameter in config.parameters:
            each = bytes_of(dataclasses.replace(parameter, copies=ONCE), dimensions, itemsize)
            if self._split(parameter, config).axis is not None:
                rows = parameter.tensor_lengths(dimensions)[0]
                of_vocabulary = any(axis.name == "vocab" for axis in parameter.tensors.values())
                each *= self.vocabulary(rows) / rows if of_vocabulary else 1 / self.count
            total += len(parameter.copies) * math.ceil(each)
        return total

    def splits(self, config: ModelConfig) -> dict[str, ParameterSharding]:
        """How each array of a model is sharded, by its name in the params."""
        shardings = {}
        for parameter, copy in expanded(config.parameters):
            sharding = self._split(parameter, config)
            shardings[parameter.name.format(*copy)] = sharding
            if (form := parameter.form) is None:
                continue
            for part in form.arrays(parameter.shape(config.dimensions)).keys() - {"weight"}:
                axes = {0: 0} if part == "scale" and form.group is None else _AXES[part]
                split = sharding._replace(axis=None if sharding.axis is None else axes.get(sharding.axis))
                shardings[parameter.array_name(part).format(*copy)] = split
        return shardings

    def _split(self, parameter: Parameter, config: ModelConfig) -> ParameterSharding:
        axes = [*parameter.tensors.values(), *parameter.other_axes]
        of_experts = any(axis.name == "expert_mlp" or axis in (GATE_UPS, DOWNS) for axis in axes)
        if of_experts and config.experts is not None and self.splits_experts(config.experts):
            axis = 0 if parameter.dtype is None else 1  # in MXFP4, pairs of groups come first
            return ParameterSharding(parameter, axis, False)
        if any(axis.name in SHARDED or axis == GATE_UPS for axis in parameter.tensors.values()):
            return ParameterSharding(parameter, 0, True)
        axis = next((i for i, axis in enumerate(parameter.other_axes, 1) if axis.name in SHARDED), None)
        return ParameterSharding(parameter, axis, False)

    def _require_fit(self, config: ModelConfig):
        n, name = self.count, "tensor_parallel"
        require(config.num_heads % n == 0, name, n, f"a divisor of num_heads, {config.num_heads}")
        for layer in dict.fromkeys(config.layer(number) for number in range(config.num_layers)):
            heads, width = layer.num_kv_heads, layer.intermediate_size
            grouped = config.latent is not None or heads % n == 0 or n % heads == 0
            require(grouped, name, n, f"a divisor or a multiple of num_kv_heads, {heads}")
            require(width % n == 0, name, n, f"a divisor of intermediate_size, {width}")
        if (nets := config.delta_nets) is not None:
            require(nets.key_heads % n == 0, name, n, f"a divisor of delta_nets.key_heads, {nets.key_heads}")
        self._require_whole_groups(config)
        experts = config.experts
        if experts is None:
            return
        together = experts.shared_width
        require(together % n == 0, name, n, f"a divisor of the width of shared experts, {together}")
        if self.splits_experts(experts):
            shared = f", {experts.shared} of them shared" if experts.shared else ""
            require(experts.all % n == 0, name, n, f"a divisor of the number of experts, {experts.all}{shared}")
        else:
            require(experts.width % n == 0, name, n, f"a divisor of the width of an expert, {experts.width}")

    def _require_whole_groups(self, config: ModelConfig):
        """Raise a ValueError if a shard would have a part of a group of inputs that share a scale."""
        for parameter in config.parameters:
            together = parameter.form.indivisible if parameter.form else 1
            if together > 1 and self._split(parameter, config).axis == 1:
                inputs, name = parameter.shape(config.dimensions)[1], parameter.name.format("i")
                what = f"a divisor of the groups of {together} inputs that {name} stores together, which has {inputs} inputs"
                ok = inputs % (together * self.count) == 0
                require(ok, "tensor_parallel", self.count, f"{what}; int8 and fp8 weights have no groups")


def axis_of(shards: Shards | None) -> str | None:
    """The mesh axis of ``shards``; None without shards."""
    return None if shards is None else shards.axis


def shards_of(
    tensor_parallel: int, draft_tensor_parallel: int, draft_is_model: bool, expert_parallel: bool = False
) -> tuple[Shards | None, Shards | None]:
    """The shards of a target and of its draft; None for a model that is replicated.

    Args:
      tensor_parallel: number of devices over which the target is sharded.
      draft_tensor_parallel: number of devices over which the draft is sharded.
      draft_is_model: whether the draft is a language model, or there is none. Draft heads are never sharded.
      expert_parallel: whether a device has some of the experts instead of a part of each.

    Raises:
      ValueError: the numbers do not fit together.
    """
    n, of_draft = tensor_parallel, draft_tensor_parallel
    require(is_int(n) and n >= 1, "tensor_parallel", n, "an integer of at least 1")
    require(is_int(of_draft) and of_draft in (1, n), "draft_tensor_parallel", of_draft, f"1 or tensor_parallel, {n}")
    ok = of_draft == 1 or draft_is_model
    require(ok, "draft_tensor_parallel", of_draft, "1 for a draft that is no language model")
    require(isinstance(expert_parallel, bool), "expert_parallel", expert_parallel, "True or False")
    shards = Shards(n, by_expert=expert_parallel)
    return (None if n == 1 else shards), (None if of_draft == 1 else shards)
