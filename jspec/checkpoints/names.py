"""Which rows of which parameter each Hugging Face tensor is.

Query, key and value stack into one parameter in this order, gate and up into another; all else is one to one.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from jspec.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Buffers that old versions of transformers saved; they follow from the config.
_BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")


class Placement(NamedTuple):
    """Where a tensor of ``shape`` goes: into ``param``, from index ``start`` of its first axis on."""

    param: str
    start: int
    shape: tuple[int, ...]


def tensor_table(config: ModelConfig, present: Iterable[str] = ()) -> dict[str, Placement]:
    """Tensor name -> its place, for every tensor that a checkpoint of ``config`` has to hold.

    Args:
      config: the architecture.
      present: names in the checkpoint. A tied pair may be stored under the head's name alone.
    """
    D, V = config.hidden_size, config.vocab_size
    table = {EMBEDDING: Placement("embedding", 0, (V, D))}
    for layer in range(config.num_layers):
        for suffix, rows in layer_table(config).items():
            table[f"model.layers.{layer}.{suffix}"] = rows._replace(param=f"layers.{layer}.{rows.param}")
    table["model.norm.weight"] = Placement("norm.weight", 0, (D,))
    if not config.tie_embeddings:
        table[HEAD] = Placement("head.weight", 0, (V, D))
    elif HEAD in (names := set(present)) and EMBEDDING not in names:
        table[HEAD] = table.pop(EMBEDDING)
    return table


def param_shapes(table: dict[str, Placement]) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape, from the tensors that stack into it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for param, start, shape in table.values():
        rows = max(start + shape[0], shapes.get(param, (0,))[0])
        shapes[param] = (rows, *shape[1:])
    return shapes


def is_buffer(name: str) -> bool:
    """Whether a tensor is a buffer, which follows from the config."""
    return bool(_BUFFERS.search(name))


def layer_table(config: ModelConfig) -> dict[str, Placement]:
    """The same for one decoder layer, both names without their prefix."""
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    N, G = config.num_heads, config.num_kv_heads
    table = {
        "input_layernorm.weight": Placement("attention_norm.weight", 0, (D,)),
        "post_attention_layernorm.weight": Placement("mlp_norm.weight", 0, (D,)),
    }
    linear = (
        ("self_attn.q_proj", "attention.qkv", 0, N * H, D, config.qkv_bias),
        ("self_attn.k_proj", "attention.qkv", N * H, G * H, D, config.qkv_bias),
        ("self_attn.v_proj", "attention.qkv", (N + G) * H, G * H, D, config.qkv_bias),
        ("self_attn.o_proj", "attention.out", 0, D, N * H, config.output_bias),
        ("mlp.gate_proj", "mlp.gate_up", 0, F, D, config.mlp_bias),
        ("mlp.up_proj", "mlp.gate_up", F, F, D, config.mlp_bias),
        ("mlp.down_proj", "mlp.down", 0, D, F, config.mlp_bias),
    )
    for tensor, param, start, rows, columns, bias in linear:
        table[f"{tensor}.weight"] = Placement(f"{param}.weight", start, (rows, columns))
        if bias:
            table[f"{tensor}.bias"] = Placement(f"{param}.bias", start, (rows,))
    if config.qk_norm:
        table["self_attn.q_norm.weight"] = Placement("attention.q_norm.weight", 0, (H,))
        table["self_attn.k_norm.weight"] = Placement("attention.k_norm.weight", 0, (H,))
    return table
