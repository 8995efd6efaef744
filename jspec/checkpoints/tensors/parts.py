"""Tensors of a checkpoint whose rows or columns are in another order in the parameters, or go into several of them.

| tensor | in the files | in the params |
|---|---|---|
| queries (``q_b_proj``, ``q_proj``) | the rotated numbers of a head in pairs: 0, 1, 2, 3, ... | 0, 2, ..., 1, 3, ... |
| ``kv_a_proj_with_mqa`` | the numbers of the rotated key likewise | likewise |
| ``kv_b_proj`` | for each head the rows of its key and of its value | all keys; all values |
| ``shared_experts.*`` | several shared experts as one wide MLP | one expert after another |
| ``in_proj_qkv`` of delta nets | queries, keys, values | each by itself |
| ``in_proj_qkvz`` of delta nets | for each key head its query, key, values and gates | all queries; all keys; ... |
| ``in_proj_ba`` | for each key head the rows of its betas and of its decays | all betas; all decays |
| ``conv1d`` | the channels of queries, of keys, of values | each by itself |
| queries with gates (``q_proj``) | for each head the rows of its query and of its gate | all queries; all gates |

The first two are rearranged where rotary pairs are *interleaved* (``Latent.interleaved``). A rotation of interleaved pairs
and one of the first half with the second are then the same up to this order, which queries and keys share."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor, joined
from jspec.config import DeltaNets, Experts, Latent, ModelConfig
from jspec.config.decoder_params import halves_of_queries
from jspec.config.tensor_names import TensorNames, names_of


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows or columns of a tensor that go into one parameter.

    Attributes:
      name: the name of that tensor in the table of the layout.
      axis: 0 for rows, 1 for columns.
      size: how many of them.
      index: which of them, in this order, int ``[size]``. It is called when the tensor is read, whose size is known to be
        right by then: the sizes in a config.json alone may be anything.
    """

    name: str
    axis: int
    size: int
    index: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class RearrangedTensor:
    """A tensor in the files whose parts go into parameters: its shape, and these parts."""

    shape: tuple[int, ...]
    parts: Sequence[Part]


@dataclasses.dataclass(frozen=True)
class TensorPart(Tensor):
    """A part of a tensor in the files, in the form of its parameter.

    Attributes:
      origin: the tensor in the files.
      part: which rows or columns.
    """

    origin: Tensor
    part: Part

    @property
    def dequantizes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.origin.dequantizes

    def check(self):
        self.origin.check()

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. Of the tensor in the files it reads those rows or columns alone, neighbours together."""
        axis, bounds = self.part.axis, bounds_of(index, self.shape)
        places = self.part.index()[slice(*bounds[axis])]
        wanted, within, runs = np.unique(places), [slice(*bound) for bound in bounds], []
        for neighbours in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
            within[axis] = slice(neighbours[0], neighbours[-1] + 1) if neighbours.size else slice(0)
            runs.append(self.origin.read_part(tuple(within)))
        found = joined(runs, axis)
        return found if np.array_equal(wanted, places) else found.take(np.searchsorted(wanted, places), axis)


def rearrange(
    config: ModelConfig, tensors: Mapping[str, Tensor], layers: Sequence[int] | None = None, prefix: str | None = None
) -> dict[str, Tensor]:
    """``tensors``, with parts in place of the tensors of ``rearranged_tensors``.

    Args:
      config: the config of the decoder layers.
      tensors: those in the files, by name.
      layers, prefix: as for ``rearranged_tensors``.

    Raises:
      Refusal: one of them has another shape than ``config`` asks for.
    """
    replaced = dict(tensors)
    for name, rearranged in rearranged_tensors(config, layers, prefix).items():
        if name not in tensors:
            continue
        tensor = replaced.pop(name)
        if tensor.shape != rearranged.shape:
            expected = f"but config.json asks for {list(rearranged.shape)}"
            raise Refusal(f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, {expected}")
        scale = replaced.pop(f"{name}_scale", None)
        for part in rearranged.parts:
            replaced[part.name] = part_of(tensor, part)
            if scale is not None:  # for each row, or one for all: then, and of columns, it is that of each part
                by_row = part.axis == 0 and scale.shape[:1] == rearranged.shape[:1]
                replaced[f"{part.name}_scale"] = part_of(scale, part) if by_row else scale
    return replaced


def part_of(tensor: Tensor, part: Part) -> TensorPart:
    """The ``part`` of a tensor."""
    shape = tuple(part.size if axis == part.axis else size for axis, size in enumerate(tensor.shape))
    return TensorPart(part.name, tensor.file, tensor.path, shape, tensor.dtype, tensor, part)


def wholes_of_parts(
    config: ModelConfig, layers: Sequence[int] | None = None, prefix: str | None = None
) -> dict[str, str]:
    """Name of a part -> the name of the tensor that it is a part of; the arguments are those of ``rearranged_tensors``."""
    rearranged = rearranged_tensors(config, layers, prefix)
    return {part.name: name for name, tensor in rearranged.items() for part in tensor.parts}


def modules_of_parts(config: ModelConfig) -> dict[str, str]:
    """Name of a part -> the name of the module whose tensor it is a part of, both without ``.weight``."""
    suffix = ".weight"
    return {part.removesuffix(suffix): name.removesuffix(suffix) for part, name in wholes_of_parts(config).items()}


def rearranged_tensors(
    config: ModelConfig, layers: Sequence[int] | None = None, prefix: str | None = None
) -> dict[str, RearrangedTensor]:
    """Tensor name -> its parts, for each tensor in the files that is reordered or goes into several parameters.

    Args:
      config: the config of the decoder layers.
      layers: the numbers that the layers have in the checkpoint; by default those of a language model.
      prefix: what stands before ``layers.``; by default what the architecture has there.
    """
    names, tensors = names_of(config.architecture), {}
    start = names.prefix if prefix is None else prefix
    for i, layer in enumerate(range(config.num_layers) if layers is None else layers):
        at = f"{start}layers.{layer}."
        if config.latent is not None:
            tensors |= dict(_of_latents(config, config.latent, names, at))
        if config.delta_nets is not None and config.has_delta_net(i):
            tensors |= dict(_of_delta_net(config.hidden_size, config.delta_nets, names, at))
        elif config.attention_gate:
            tensors |= dict(_of_gated_queries(config, config.layer(i).head_dim, names, at))
        if config.experts is not None and config.has_experts(i) and config.experts.shared > 1:
            tensors |= dict(_of_shared_experts(config, config.experts, names, at))
    return tensors


def _of_latents(
    config: ModelConfig, latent: Latent, names: TensorNames, at: str
) -> Iterator[tuple[str, RearrangedTensor]]:
    N, H, Hr, D, Hv = config.num_heads, config.head_dim, latent.rotated, config.hidden_size, latent.value_dim
    if latent.interleaved:
        query, inputs = (names.query, D) if latent.query_rank is None else (names.query_up, latent.query_rank)
        yield _pairs_apart(f"{at}{query}.weight", N, H, Hr, inputs)
        compressed = f"{at}{names.latent_down}."
        yield _pairs_apart(f"{compressed}weight", 1, latent.cached, Hr, D)
        if config.qkv_bias:
            yield _pairs_apart(f"{compressed}bias", 1, latent.cached, Hr)
    Hn, up = H - Hr, f"{at}{names.latent_up}"
    of_each_head = functools.partial(_of_each_head, N, Hn + Hv)
    keys = Part(f"{up}.keys.weight", 0, N * Hn, functools.partial(of_each_head, 0, Hn))
    values = Part(f"{up}.values.weight", 0, N * Hv, functools.partial(of_each_head, Hn, Hn + Hv))
    yield f"{up}.weight", RearrangedTensor((N * (Hn + Hv), latent.rank), [keys, values])


def _of_gated_queries(
    config: ModelConfig, H: int, names: TensorNames, at: str
) -> Iterator[tuple[str, RearrangedTensor]]:
    N, D, query = config.num_heads, config.hidden_size, f"{at}{names.qkv[0]}"
    queries, gates = (f"{at}{name}" for name in halves_of_queries(names))
    of_each_head = functools.partial(_of_each_head, N, 2 * H)
    for suffix, inputs in (("weight", (D,)), *((("bias", ()),) if config.qkv_bias else ())):
        first = Part(f"{queries}.{suffix}", 0, N * H, functools.partial(of_each_head, 0, H))
        second = Part(f"{gates}.{suffix}", 0, N * H, functools.partial(of_each_head, H, 2 * H))
        yield f"{query}.{suffix}", RearrangedTensor((2 * N * H, *inputs), [first, second])


def _of_delta_net(D: int, nets: DeltaNets, names: TensorNames, at: str) -> Iterator[tuple[str, RearrangedTensor]]:
    assert names.delta_inputs is not None
    Nk, shared, (wide, narrow) = nets.key_heads, nets.value_heads // nets.key_heads, names.delta_inputs
    keys, values = Nk * nets.key_size, nets.value_heads * nets.value_size
    yield _in_groups(f"{at}{names.delta_convolution}", "012", 1, (keys, keys, values), 1, nets.taps)
    held, own = wide[0].removesuffix(".queries"), [name.rpartition(".")[2] for name in wide]
    if narrow[0].endswith(".betas"):
        sizes = nets.key_size, nets.key_size, shared * nets.value_size, shared * nets.value_size
        yield _in_groups(f"{at}{held}", own, Nk, sizes, D)
        yield _in_groups(f"{at}{narrow[0].removesuffix('.betas')}", ("betas", "decays"), Nk, (shared, shared), D)
    else:
        yield _in_groups(f"{at}{held}", own[:3], 1, (keys, keys, values), D)


def _in_groups(
    module: str, parts: Sequence[str], groups: int, sizes: Sequence[int], *others: int
) -> tuple[str, RearrangedTensor]:
    """A weight whose rows are ``groups`` of the same form, each with ``sizes`` rows for one part after another."""
    size, starts = sum(sizes), itertools.accumulate(sizes, initial=0)
    every = [
        Part(
            f"{module}.{name}.weight",
            0,
            groups * rows,
            functools.partial(_of_each_head, groups, size, start, start + rows),
        )
        for name, rows, start in zip(parts, sizes, starts, strict=False)
    ]
    return f"{module}.weight", RearrangedTensor((groups * size, *others), every)


def _of_each_head(heads: int, size: int, start: int, stop: int) -> np.ndarray:
    """Rows ``start .. stop - 1`` of each of ``heads`` heads of ``size`` rows."""
    return np.arange(heads * size).reshape(heads, size)[:, start:stop].reshape(-1)


def _pairs_apart(name: str, heads: int, size: int, rotated: int, *inputs: int) -> tuple[str, RearrangedTensor]:
    """A tensor with ``heads`` heads of ``size`` rows, the last ``rotated`` of which are pairs; in the parameter, the first
    numbers of all pairs come before the second ones."""

    def index():
        plain, turned = np.split(np.arange(heads * size).reshape(heads, size), [size - rotated], axis=1)
        return np.concatenate([plain, turned[:, 0::2], turned[:, 1::2]], axis=1).reshape(-1)

    return name, RearrangedTensor((heads * size, *inputs), [Part(name, 0, heads * size, index)])


def _of_shared_experts(
    config: ModelConfig, experts: Experts, names: TensorNames, at: str
) -> Iterator[tuple[str, RearrangedTensor]]:
    D, width, count = config.hidden_size, experts.width, experts.shared
    for name, axis in zip(names.expert_maps, (0, 0, 1), strict=True):
        module = f"{at}{names.shared_experts}.{name}"
        parts = [
            Part(f"{module}.{i}.weight", axis, width, functools.partial(np.arange, i * width, (i + 1) * width))
            for i in range(count)
        ]
        yield f"{module}.weight", RearrangedTensor((count * width, D) if axis == 0 else (D, count * width), parts)
