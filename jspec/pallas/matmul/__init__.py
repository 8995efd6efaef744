"""Matmuls of few tokens, whose weights stream from memory.

small_batch.py            what such kernels share: tiling, launch, accumulation
bf16.py                   weights of bfloat16
w8a8.py                   int8 weights and int8 activations
weight_only.py            weights of eight or four bits and bfloat16 activations
unpack.py                 weights of eight or four bits as numbers of bfloat16
mxfp4.py                  numbers in MXFP4
quantize_activations.py   activations quantised to int8
"""
