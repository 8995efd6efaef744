"""Pallas kernels for NVIDIA GPUs, each beside the jnp reference implementation that is its specification."""
