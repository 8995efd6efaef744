"""Matmuls of few tokens, which take as long as reading their weights. ``matmul`` is the entry to all of them.

table.py                  ``matmul``, and the table of which kernel serves which product
reference.py              the product of two floating-point operands
partial_sums.py           results in parts, which the norm that follows adds up
tiling.py                 the tile sizes of the kernels
small_batch.py            tilings, launch and accumulation of bf16.py and w8a8.py
bf16.py                   bfloat16 weights and activations
w8a8.py                   weights and activations of eight bits
weight_only.py            weights of eight or four bits and bfloat16 activations
few_tokens.py             weights of eight or four bits on Hopper GPUs: which products, and by what
few_tokens_sm90.py        the kernel for them, in Pallas' Mosaic GPU lowering
sm90_tiling.py            how that kernel divides a product
sm90_memory.py            its shared memory, and the scales of its tiles
sm90_sums.py              what one of its warpgroups multiplies
sm90_codes.py             codes from shared memory to registers, times their scales, as bfloat16
sm90_copy_scales.py       scales of codes from global memory to registers
sm90_registers.py         other weights of few bits from shared memory to registers, as bfloat16
one_token.py              a single token, without a kernel
quantize_activations.py   quantises activations to eight bits"""

from jspec.pallas.matmul.table import matmul as matmul
