"""Matmuls of few tokens, which take as long as reading their weights.

reference.py              the product of two floating-point operands
small_batch.py            tiling, launch and accumulation of bf16.py and w8a8.py
bf16.py                   bfloat16 weights and activations
w8a8.py                   int8 weights and int8 activations
weight_only.py            weights of eight or four bits and bfloat16 activations
unpack.py                 weights of eight or four bits as bfloat16
mxfp4.py                  MXFP4 weights as bfloat16
quantize_activations.py   quantises activations to int8"""
