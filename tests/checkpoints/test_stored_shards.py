"""What a process reads of a checkpoint for its shard: the numbers of the whole, and about as many bytes as it keeps."""

import os
import tracemalloc
import warnings

import jax
import numpy as np
import pytest
from block_checkpoints import KEPT, KEPT_CODES, KINDS, block_checkpoint
from fp8_checkpoints import fp8_checkpoint
from tiny import tiny_checkpoint

from convert import chunks, convert
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files import ranges
from jspec.config import Shards
from jspec.config.sharding import AXIS
from jspec.models import sharding
from jspec.models.params import abstract_params
from jspec.models.sharding import abstract_shards, build_shards, indices_of, mesh_of

HEADS = {"num_key_value_heads": 4}  # one for each of four shards
EXPERTS = {"num_local_experts": 4, "num_key_value_heads": 4}
LATENTS = {"qk_nope_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
WHOLE_GROUPS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 128,
}  # four shards have groups of 128 inputs each
WHOLE_BLOCKS = {**WHOLE_GROUPS, "hidden_size": 64, "num_hidden_layers": 1}
EXPERTS_OF_BLOCKS = {"moe_intermediate_size": 512, "hidden_size": 64, "num_experts": 4, "num_hidden_layers": 2}
LATENTS_OF_BLOCKS = {"kv_lora_rank": 256, "v_head_dim": 128, "intermediate_size": 512, "moe_intermediate_size": 512}
FOUR_BITS = {"hidden_size": 96, "intermediate_size": 64, "quantization_config": MXFP4, "dtype": "bfloat16"}


def converted(path, quantize=None, **options):
    convert(tiny_checkpoint(path.with_name("src"), **options), path, quantize=quantize)
    return path


def reconverted(src):
    out = src.with_name("converted")
    convert(src, out)
    return out


CHECKPOINTS = {
    "safetensors": lambda path: tiny_checkpoint(path, **HEADS),
    "latents": lambda path: tiny_checkpoint(path, "DeepseekV3ForCausalLM", **LATENTS),
    "stacked experts": lambda path: tiny_checkpoint(path, "GptOssForCausalLM", **EXPERTS),
    "mxfp4": lambda path: tiny_checkpoint(path, "GptOssForCausalLM", **FOUR_BITS, **EXPERTS),
    "fp8 channels": lambda path: fp8_checkpoint(path, **HEADS),
    **{name: lambda path, kind=kind: block_checkpoint(path, kind, **HEADS) for name, kind in KINDS.items()},
    "fp8 blocks": lambda path: block_checkpoint(path, KEPT["qwen"], **HEADS, **WHOLE_GROUPS),
    "converted fp8 blocks": lambda path: reconverted(block_checkpoint(path, KEPT["qwen"], **HEADS, **WHOLE_GROUPS)),
    **{
        f"kept {name}": lambda path, kind=KEPT_CODES[name]: block_checkpoint(path, kind, **HEADS, **WHOLE_BLOCKS)
        for name in ("gptq", "gptq in another order", "packed channel", "mxfp4", "mxfp8")
    },
    "kept awq modelopt": lambda path: block_checkpoint(
        path, KEPT_CODES["awq modelopt"], **HEADS, **{**WHOLE_BLOCKS, "hidden_size": 128}
    ),
    "kept nvfp4": lambda path: block_checkpoint(path, KEPT_CODES["nvfp4"], **HEADS, **WHOLE_BLOCKS, head=True),
    "kept nvfp4 experts": lambda path: block_checkpoint(
        path, KEPT_CODES["nvfp4"], "Qwen3MoeForCausalLM", **HEADS, **{**WHOLE_GROUPS, **EXPERTS_OF_BLOCKS}
    ),
    "converted nvfp4": lambda path: reconverted(block_checkpoint(path, KEPT_CODES["nvfp4"], **HEADS, **WHOLE_BLOCKS)),
    "kept fp8 latents": lambda path: block_checkpoint(
        path, KEPT["qwen"], "DeepseekV3ForCausalLM", **LATENTS | LATENTS_OF_BLOCKS
    ),
    "kept gptq latents": lambda path: block_checkpoint(
        path,
        KEPT_CODES["gptq"],
        "DeepseekV3ForCausalLM",
        **LATENTS
        | LATENTS_OF_BLOCKS
        | {"q_lora_rank": 32, "hidden_size": 32, "first_k_dense_replace": 0, "num_hidden_layers": 1},
    ),
    "fp8 latents": lambda path: block_checkpoint(path, KINDS["fp8"], "DeepseekV3ForCausalLM", **LATENTS),
    "gptq latents": lambda path: block_checkpoint(path, KINDS["gptq order"], "DeepseekV3ForCausalLM", **LATENTS),
    "converted": lambda path: converted(path, **HEADS),
    "converted int8": lambda path: converted(path, "int8", **HEADS),
    "converted fp8": lambda path: converted(path, "fp8", **HEADS),
    "converted mxfp4": lambda path: converted(path, architecture="GptOssForCausalLM", **FOUR_BITS, **EXPERTS),
}
# How many times its share of the bytes a shard may read: with tiny sizes, scales and the groups of input features are many.
# A part of the input features may be of any groups if these are scattered ("order").
SLACK = {
    "gptq": 1.25,
    "gptq v2": 1.25,
    "gptq order": 1.6,
    "gptq 8 bits": 1.6,
    "gptq 8 bits symmetric": 1.25,
    "gptq latents": 1.85,
    "kept gptq in another order": 2.2,
}


@pytest.fixture(params=CHECKPOINTS)
def opened(request, tmp_path, monkeypatch):
    """Config and params of a checkpoint, whose arrays are small and are read and written as large ones are; the slack."""
    monkeypatch.setattr(ranges, "SHORTEST", 1)
    monkeypatch.setattr(chunks, "SMALLEST", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that weights are dequantised
        checkpoint = Checkpoint.open(CHECKPOINTS[request.param](tmp_path / "checkpoint"))
        yield *checkpoint.language_model(), SLACK.get(request.param, 1.1)


@pytest.fixture
def read(monkeypatch):
    """The list of how many bytes each call has read."""
    found, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: found.append(preadv(*args)) or found[-1])
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_a_shard_reads_its_own_bytes(opened, read, count):
    config, params, slack = opened
    shards = Shards(count)
    of_whole, of_shards = 0, np.zeros(count)
    for name, split in shards.splits(config).items():
        read.clear()
        whole = params[name]
        counts = [sum(read)]
        for shard in range(count):
            read.clear()
            indices = indices_of(whole.shape, split, config.dimensions, shards, shard)
            for index, part in zip(indices, params.parts(name, indices), strict=True):
                assert (part.shape, part.dtype) == (whole[index].shape, whole.dtype)
                assert part.tobytes() == whole[index].tobytes()
            counts.append(sum(read))
        if split.axis is not None and name not in (
            "embedding",
            "head.weight",
        ):  # a vocabulary of one group is dealt to one
            of_whole += counts[0]
            of_shards += counts[1:]
    assert of_whole > 30_000
    assert (of_shards < slack * of_whole / count).all()


@pytest.mark.parametrize("kind", ["safetensors", "converted"])
def test_host_memory_is_that_of_a_few_pieces(tmp_path, monkeypatch, kind):
    """Of a model of 30 MB in two shards, whose largest parts have 2 MB: those of gate and up, which are two tensors."""
    monkeypatch.setattr(chunks, "SMALLEST", 1)
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 1024}
    make = tiny_checkpoint if kind == "safetensors" else converted
    config, params = Checkpoint.open(make(tmp_path / "checkpoint", **sizes)).language_model()
    shards, mesh = Shards(2), mesh_of(2, AXIS)
    tree, whole = abstract_shards(config, shards, mesh, "float32"), abstract_params(config, "float32")
    monkeypatch.setattr(sharding, "abstract_shards", lambda *_: tree)
    monkeypatch.setattr(sharding, "require_params", lambda *_: whole)
    most = [0, 0]
    for i, together in enumerate((1 << 17, 1 << 30)):
        monkeypatch.setattr(ranges, "TOGETHER", together)
        build_shards(config, params, "float32", shards, mesh)  # everything is compiled
        tracemalloc.start()
        built = build_shards(config, params, "float32", shards, mesh)
        most[i] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(built)) > 30e6
    assert most[0] < 2 << 20 < most[1]
