"""Pallas kernels for NVIDIA GPUs, each beside the jnp reference implementation that is its specification.

attention/    paged attention, and the rotary embedding
mla/          multi-head latent attention
moe/          mixtures of experts
matmul/       matmuls of few tokens, quantised or not
weights/      weights as kernels read them: tiles of stored numbers, unpacked
delta_net/    gated delta nets, recurrent layers
norm/         norms
sampling/     from logits to tokens
collectives/  sums over the GPUs of a process
sums.py       products and sums in one order for any number of rows, on a CPU
dispatch.py   kernel or reference implementation, chosen when a program is lowered
triton.py     how a Triton kernel is called, how it reads blocks and tiles, and single instructions"""
