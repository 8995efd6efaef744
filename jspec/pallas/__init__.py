"""Pallas kernels for NVIDIA GPUs, each beside the jnp twin that is its specification."""
