"""What XLA is told when it compiles decode programs."""

import os
from collections.abc import Sequence

import jax

MANY_ROWS = 32  # of the target in a pass

_GRAPHS = "xla_gpu_enable_command_buffer"
# XLA's own list, and loops whose end the device decides: otherwise the host launches one round after another and has to
# wait for each, so that it cannot send the next call ahead.
_IN_GRAPHS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,WHILE"


def decode_options(target_leaves: Sequence[jax.Array], rows: int) -> dict[str, str | int]:
    """Compiler options for a program in which the target reads ``rows`` tokens at a time; platforms but GPUs ignore
    them.

    The whole program becomes one CUDA graph, unless the user's ``XLA_FLAGS`` say what graphs are for.

    With few rows a product is split along its sums to occupy a GPU. XLA times every product by itself to decide, which
    does not count what it costs to add the parts in kernels of their own: with many rows passes are faster without. Not
    so with quantised weights (``benchmarks/LOG.md``, for both)."""
    options: dict[str, str | int] = {}
    if _GRAPHS not in os.environ.get("XLA_FLAGS", ""):
        options = {_GRAPHS: _IN_GRAPHS, "xla_gpu_graph_min_graph_size": 1}
    quantized = any(leaf.dtype.itemsize == 1 for leaf in target_leaves)
    if rows >= MANY_ROWS and not quantized:
        options["xla_gpu_experimental_force_split_k"] = 1
    return options
