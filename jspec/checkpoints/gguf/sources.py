"""Of which tensors of a GGUF file each tensor of a checkpoint is made, for every one that a model needs."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.header import TensorInfo
from jspec.checkpoints.layouts.mtp import place_of
from jspec.checkpoints.tensors.names import renamed, tensor_table
from jspec.checkpoints.tensors.parts import rearranged_tensors
from jspec.checkpoints.tensors.stacked_experts import file_shapes
from jspec.config import ModelConfig
from jspec.config.heads import MTPConfig, mtp_layers

PLAIN_TYPES, MXFP4 = (0, 1, 30), 39  # numbers of types in ggml: F32, F16 and BF16
ROPE_FACTORS = "rope_freqs.weight"  # a setting of the rotary embedding, which config.json has
Order = Callable[[], np.ndarray]

# Name in the checkpoint and in the file, in turn, both without ``.weight`` or ``.bias`` if they share it. Those in a layer
# stand behind ``model.layers.N.`` and ``blk.N.``, and those of ``mtp.`` in the file as if in a layer behind the last.
_NAMES = """
    model.embed_tokens token_embd                       model.norm output_norm             lm_head output
    model.embed_tokens_per_layer per_layer_token_embd   model.per_layer_model_projection per_layer_model_proj
    model.per_layer_projection_norm per_layer_proj_norm
    input_layernorm attn_norm                           post_attention_layernorm post_attention_norm
    pre_feedforward_layernorm ffn_norm                  post_feedforward_layernorm post_ffw_norm
    self_attn.q_proj attn_q    self_attn.k_proj attn_k  self_attn.v_proj attn_v            self_attn.o_proj attn_output
    self_attn.q_norm attn_q_norm                        self_attn.k_norm attn_k_norm       self_attn.sinks attn_sinks.weight
    mlp.gate_proj ffn_gate     mlp.up_proj ffn_up       mlp.down_proj ffn_down
    mlp.gate ffn_gate_inp      mlp.router ffn_gate_inp  router.proj ffn_gate_inp           router.scale ffn_gate_inp.scale
    router.per_expert_scale ffn_down_exps.scale         mlp.shared_expert_gate ffn_gate_inp_shexp
    mlp.shared_expert.gate_proj ffn_gate_shexp          mlp.shared_expert.up_proj ffn_up_shexp
    mlp.shared_expert.down_proj ffn_down_shexp          post_feedforward_layernorm_1 post_ffw_norm_1
    pre_feedforward_layernorm_2 pre_ffw_norm_2          post_feedforward_layernorm_2 post_ffw_norm_2
    per_layer_input_gate inp_gate                       per_layer_projection proj
    post_per_layer_input_norm post_norm                 layer_scalar layer_output_scale.weight
    linear_attn.in_proj_qkv attn_qkv                    linear_attn.in_proj_z attn_gate
    linear_attn.in_proj_a ssm_alpha                     linear_attn.in_proj_b ssm_beta
    linear_attn.conv1d ssm_conv1d                       linear_attn.dt_bias ssm_dt.bias    linear_attn.A_log ssm_a
    linear_attn.norm ssm_norm                           linear_attn.out_proj ssm_out
    mtp.fc nextn.eh_proj                                mtp.pre_fc_norm_embedding nextn.enorm
    mtp.pre_fc_norm_hidden nextn.hnorm                  mtp.norm nextn.shared_head_norm
"""
_IN_FILE: dict[str, str] = dict(zip(_NAMES.split()[::2], _NAMES.split()[1::2], strict=True))
_OF_MLP = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")  # call the second norm so
_PLUS_ONE = ("Gemma3ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
# What has a row for each head of a delta net's values; a row or column for each of their numbers, two behind other rows.
_OF_HEADS = tuple(f"linear_attn.{name}" for name in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"))
_OF_VALUES = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "conv1d", "in_proj_z", "out_proj"))
_PLACE = re.compile(r"(?:(?:model|mtp)\.layers\.(\d+)\.)?(.*?)(\.weight|\.bias)?")
_EXPERT = re.compile(r"(?:mlp\.)?experts\.(\d+)\.(gate|up|down)_proj")
_STACKED = re.compile(r"mlp\.experts\.(gate_up|down)_proj(?:_(bias|blocks|scales))?")


class Source(NamedTuple):
    """Of which tensor of a GGUF file a tensor of Hugging Face's names is made, and how.

    Its rows are those of ``[rows, in]``, with leading axes joined; those of vectors and biases are single numbers.

    Attributes:
      tensor: ``blk.0.attn_q.weight``.
      shape: of the result.
      rows: which rows, in this order, int ``[rows]``; None for all as they are. It is called when the tensor is read.
      columns: column j of the result is column ``columns()[j]`` of the tensor; None for all as they are.
      change: what becomes of the float32 values, ``[rows, in]``, which are then reshaped to ``shape``; None for nothing. No
        tensor has one whose type in the file is a quantised one.
      second: a tensor of the same shape, whose rows follow those of the first before ``rows`` chooses; None for none.
      part: of a tensor in MXFP4, its ``blocks`` or its ``scales``, which gpt-oss has in two tensors; None of all others.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: Order | None = None
    columns: Order | None = None
    change: Callable[[np.ndarray], np.ndarray] | None = None
    second: str | None = None
    part: str | None = None


def sources_of(where: str, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """Tensor name in the checkpoint -> what it is made of, for each that a checkpoint of ``config`` has to hold.

    Raises:
      Refusal: one of ``tensors``, those of the file ``where``, is missing, has another shape than ``config`` asks for, or
        has no place.
    """
    file = _File(where, config, tensors)
    found = {name: file.source(name, shape) for name, shape in _shapes(config).items()}
    used = {name for source in found.values() for name in (source.tensor, source.second)}
    for layer in range(config.num_layers):  # checkpoints may have keys and values that nothing reads, and so have files
        of_another = config.layer(layer).reads_cache_of is not None
        used |= {f"blk.{layer}.attn_{name}.weight" for name in ("k", "v", "k_norm") if of_another}
    used |= {ROPE_FACTORS} if config.architecture in ("LlamaForCausalLM", "Gemma4ForCausalLM") else set()
    unplaced = next((name for name in tensors if name not in used), None)
    if unplaced is not None:
        raise Refusal(f"{where}: holds the tensor {unplaced!r}, which has no place in {config.architecture}")
    return found


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a checkpoint, those of its layers for multi-token prediction among them."""
    tables, apart = tensor_table(config), rearranged_tensors(config)
    if config.mtp_layers:
        own, place = mtp_layers(config, config.mtp_layers), place_of(config)
        tables |= renamed(tensor_table(MTPConfig(own)), place.renames)
        apart |= rearranged_tensors(own, place.layers, place.start)
    parts = {part.name for whole in apart.values() for part in whole.parts}
    shapes = {name: at.shape for name, at in tables.items() if name not in parts}
    return shapes | file_shapes(config) | {name: whole.shape for name, whole in apart.items()}


class _File(NamedTuple):
    """A file: its name, for messages; the config of its model; and its tensors, by name."""

    where: str
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]

    def source(self, name: str, shape: tuple[int, ...]) -> Source:
        """What the tensor ``name`` of the checkpoint is made of."""
        layer, own, end = _PLACE.fullmatch(name).groups("")  # pyright: ignore[reportOptionalMemberAccess]
        layer = str(self.config.num_layers) if name.startswith("mtp.") else layer
        at = f"blk.{layer}." if layer else ""
        if (match := _STACKED.fullmatch(own)) is not None:
            return self._stacked(at, shape, *match.groups(""))
        if (match := _EXPERT.fullmatch(own)) is not None:
            return self._of_expert(at, shape, int(match[1]), match[2])
        is_ffn_norm = own == "post_attention_layernorm" and self.config.architecture in _OF_MLP
        called = "ffn_norm" if is_ffn_norm else _IN_FILE[own]
        tensor = self._checked(at + called + end, shape)
        order, is_norm = self._order(own), called.endswith("norm") and called != "ssm_norm"
        rows, columns = (None, order) if own == "linear_attn.out_proj" else (order, None)
        plus_one = is_norm and self.config.architecture in _PLUS_ONE
        return Source(
            tensor, shape, rows, columns, _logarithm if called == "ssm_a" else _minus_one if plus_one else None
        )

    def _of_expert(self, at: str, shape: tuple[int, ...], expert: int, which: str) -> Source:
        """One of the maps of an expert. Those of a layer are in one tensor; gates and up maps, too, or each in its own."""
        assert self.config.experts is not None
        (out, inputs), fused = shape, f"{at}ffn_gate_up_exps.weight" in self.tensors and which != "down"
        each = 2 * out if fused else out
        tensor = f"{at}ffn_{'gate_up' if fused else which}_exps.weight"
        first = expert * each + (out if fused and which == "up" else 0)
        rows = functools.partial(np.arange, first, first + out)
        return Source(self._checked(tensor, (self.config.experts.count, each, inputs)), shape, rows)

    def _stacked(self, at: str, shape: tuple[int, ...], which: str, end: str) -> Source:
        """The gates and up maps of all of gpt-oss's experts in a layer, row by row in turn, or their down maps."""
        assert self.config.experts is not None
        X, E, D = self.config.experts.count, self.config.experts.width, self.config.hidden_size
        out, inputs = (D, E) if which == "down" else (E, D)
        kind, held = ("bias", (X, out)) if end == "bias" else ("weight", (X, out, inputs))
        names = [self._checked(f"{at}ffn_{name}_exps.{kind}", held) for name in which.split("_")]
        known = PLAIN_TYPES if end in ("", "bias") else (MXFP4,)
        for name in names:
            if self.tensors[name].type not in known:
                raise Refusal(
                    f"{self.where}: tensor {name!r} has the type {self.tensors[name].type} of ggml: expected one of "
                    f"{list(known)}, as all experts of gpt-oss are in MXFP4, {MXFP4}, or none is quantised"
                )
        rows, second = (functools.partial(_in_turn, X * out), names[1]) if names[1:] else (None, None)
        change = functools.partial(_inputs_first, (X, shape[-1], inputs)) if not end else None
        return Source(names[0], shape, rows, None, change, second, end if end in ("blocks", "scales") else None)

    def _checked(self, name: str, shape: tuple[int, ...]) -> str:
        """``name``, of a tensor that has to be in the file with this shape, perhaps without axes of length 1."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise Refusal(f"{self.where}: lacks the tensor {name!r} of {self.config.architecture}; download it again")
        if [length for length in tensor.shape if length > 1] != [length for length in shape if length > 1]:
            raise Refusal(
                f"{self.where}: tensor {name!r} has shape {list(tensor.shape)}, but the sizes in the metadata ask for "
                f"{list(shape)}"
            )
        return name

    def _order(self, own: str) -> Order | None:
        """Where each row of a tensor of the checkpoint, or column, is in the file; None if they are in the same order."""
        config, nets = self.config, self.config.delta_nets
        if config.architecture == "LlamaForCausalLM" and own in ("self_attn.q_proj", "self_attn.k_proj"):
            # The two numbers that a rotation turns lie side by side in the file, and half a head apart in the checkpoint.
            heads = config.num_heads if own == "self_attn.q_proj" else config.num_kv_heads
            return functools.partial(_swapped, heads, config.head_dim // 2, 2)
        if nets is None or nets.key_heads == nets.value_heads or own not in _OF_HEADS + _OF_VALUES:
            return None
        # The file has the first of the heads that share a key head, for all key heads, then the second ones, and so on.
        size = 1 if own in _OF_HEADS else nets.value_size
        before = 2 * nets.key_heads * nets.key_size if own in _OF_VALUES[:2] else 0
        return functools.partial(_swapped, 1, nets.value_heads // nets.key_heads, nets.key_heads, size, before)


def _swapped(outer: int, first: int, second: int, size: int = 1, before: int = 0) -> np.ndarray:
    """Where the entries of ``[outer, second, first, size]`` are in ``[outer, first, second, size]``, ``before`` others."""
    places = np.arange(outer * first * second * size).reshape(outer, first, second, size).swapaxes(1, 2).reshape(-1)
    return np.concatenate([np.arange(before), before + places])


def _in_turn(count: int) -> np.ndarray:
    """The rows of two tensors of ``count`` rows each, one behind the other: one of each in turn."""
    return np.arange(2 * count).reshape(2, count).T.reshape(-1)


def _minus_one(values: np.ndarray) -> np.ndarray:
    return values - np.float32(1)


def _logarithm(values: np.ndarray) -> np.ndarray:
    return np.log(-values)


def _inputs_first(shape: tuple[int, ...], values: np.ndarray) -> np.ndarray:
    return values.reshape(shape).swapaxes(1, 2)
