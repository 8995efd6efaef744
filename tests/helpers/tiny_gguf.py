"""A tiny Llama in a GGUF file, written by the package gguf, with a tokenizer of bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf_blocks import random_blocks
from tokenizers import pre_tokenizers

from jspec.checkpoints.quantized.gguf_blocks import TYPES

TOKENS = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "in"]
SIZES = {"hidden": 64, "width": 96, "heads": 4, "kv_heads": 2, "vocabulary": len(TOKENS)}


def shapes_of(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of one layer, and of the embedding, which is the output head, too."""
    D, E, V = sizes["hidden"], sizes["width"], sizes["vocabulary"]
    kv = D // sizes["heads"] * sizes["kv_heads"]
    maps = {"attn_q": (D, D), "attn_k": (kv, D), "attn_v": (kv, D), "attn_output": (D, D)}
    maps |= {"ffn_gate": (E, D), "ffn_up": (E, D), "ffn_down": (D, E), "attn_norm": (D,), "ffn_norm": (D,)}
    layer = {f"blk.0.{name}.weight": shape for name, shape in maps.items()}
    return {"token_embd.weight": (V, D), **layer, "output_norm.weight": (D,)}


def tiny_gguf(
    path: Path,
    kind: str | Mapping[str, str] = "Q8_0",
    *,
    seed: int = 0,
    files: int = 1,
    more: Mapping[str, Any] | None = None,
    tokens: Sequence[str] = tuple(TOKENS),
    **sizes: int,
) -> Path:
    """Write the file; returns the path that ``jspec.load`` takes.

    Args:
      path: of the file; of the first part, that name has ``-00001-of-0000N`` before its end.
      kind: the type of all matrices, ``Q4_0`` for example, or of each by its name, and ``F32`` for others.
      seed: of the weights.
      files: into how many parts.
      more: further keys of the metadata: numbers and strings.
      tokens: of the vocabulary, first those that begin and end a text; () for a file without a tokenizer.
      sizes: other ones than ``SIZES``.
    """
    import gguf

    path.parent.mkdir(exist_ok=True)
    sizes = {**SIZES, **sizes}
    shapes, rng = shapes_of(sizes), np.random.default_rng(seed)
    per_file = -(-len(shapes) // files)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=per_file if files > 1 else 0)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(sizes["hidden"])
    writer.add_feed_forward_length(sizes["width"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(sizes["hidden"] // sizes["heads"])
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
        writer.add_token_merges(["i n"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
    for key, value in (more or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        values = 1 + values / 10 if len(shape) == 1 else values * np.float32(shape[1] ** -0.5)
        wanted = kind if isinstance(kind, str) else kind.get(name.removeprefix("blk.0.").removesuffix(".weight"), "F32")
        wanted = wanted if len(shape) > 1 else "F32"
        of = getattr(gguf.GGMLQuantizationType, wanted)
        try:
            data = gguf.quants.quantize(values, of)
        except NotImplementedError:  # random codes, integers and numbers
            data = random_blocks(TYPES[of], *shape, seed).reshape(shape[0], -1)
        writer.add_tensor(name, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if files == 1 else path.with_name(f"{path.stem}-00001-of-{files:05d}.gguf")
