"""Weights that a checkpoint stores quantised: kept as they are stored where there is a kernel for them, else dequantised.

``jspec.checkpoints.quantized.stored_weights`` keeps those of language models for which there is a kernel. Each format has
one file here, which says which tensors ``<name>.*`` stand for the weight ``[out, in]`` of the linear map ``<name>``; it
ends with the function that reads its ``quantization_config``.

A number of the weight is the FP8 number times the scale of its block, or ``(code - zero) * scale`` of its group of input
features; in NVFP4 and MXFP4 it is the number that a code stands for times the scale of its group. GPTQ may say which group
each is in (``g_idx``, ``[in]``). Codes and zeros of four bits are int32, eight in one, and in those two uint8, two in one.
The weight is computed in float32, one tensor at a time. With four bits and scales in float16 or bfloat16 that is exact, as
it is in MXFP4, and otherwise each number is rounded once. Draft heads whose weights are dequantised may also have FP8 with
a scale for each output channel, or with one for all (``scaled``).

config.py                how stored weights are quantised, by config.json
known_keys.py            which keys a ``quantization_config`` may have, for each method
config_fields.py         checks and lists of modules that readers of a ``quantization_config`` share
mixed.py                 several formats in one checkpoint
model_optimizer.py       config.json of NVIDIA Model Optimizer
cache_scheme.py          what a checkpoint says of a cache in eight bits, and its scales
stored_weights.py        weights that are kept as they are stored, where the tensors say which
stored_codes.py          codes of four and eight bits as jspec stores them, read from a checkpoint
scales.py                weights of eight bits with a scale for each output channel
format.py                ``BlockFormat`` and ``QuantizedTensor``, the base classes of formats and of their weights
scaled.py                FP8 and int8 with scales of blocks, channels or weights, and MXFP8
gptq.py                  GPTQ
awq.py                   AWQ
bitsandbytes.py          NF4, FP4 and int8 of bitsandbytes
torchao.py               FP8 and integers of torchao
auto_round.py            AutoRound, whose tensors are those of GPTQ, AWQ or compressed-tensors
gguf.py                  quantised tensors of GGUF files
gguf_blocks.py           the types of these, and the formats that hold the same numbers
packed.py                ``pack-quantized`` of compressed-tensors, and codes with a byte each
scaled_inputs.py         AWQ of NVIDIA Model Optimizer
e2m1.py                  NVFP4 of compressed-tensors and of NVIDIA Model Optimizer, and MXFP4 of compressed-tensors
packed_codes.py          unpacks codes of four and eight bits
dequantized_layout.py    replaces stored tensors by dequantised weights
"""
