"""How programs are compiled: before their first call, and with which options."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

MANY_QUERIES = 32  # query tokens of all rows that the target reads in a pass

_GRAPHS = "xla_gpu_enable_command_buffer"
# XLA's own list, and loops whose end the device decides: otherwise the host launches one round after another and has to
# wait for each, so that it cannot send the next call ahead.
_IN_GRAPHS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,WHILE"


class Program:
    """A function of arrays, compiled once for arguments of one shape.

    ``compile`` is a call of its own, and not a part of the first call as in ``jax.jit``, because it may take minutes in
    which Ctrl-C has to work, while calls are shielded from Ctrl-C. Arguments of other shapes are a TypeError: nothing
    is ever compiled again.

    Args:
      function: what to compile.
      donate: the place of the argument whose buffers the results may take over.
      options: XLA's, as ``jax.jit`` takes them.
    """

    def __init__(self, function: Callable, donate: int, options: Mapping[str, str | int] | None = None):
        self.donate = donate
        self._jitted = jax.jit(
            function, donate_argnums=donate, compiler_options=None if options is None else dict(options)
        )
        self._compiled: jax.stages.Compiled | None = None

    @property
    def compiled(self) -> bool:
        """Whether it can be called."""
        return self._compiled is not None

    def compile(self, *args):
        """Compile for these arguments, unless that has been done."""
        if self._compiled is None:
            self._compiled = self._jitted.lower(*args).compile()

    def __call__(self, *args) -> Any:
        """Send it to the device; returns at once with arrays that are still being computed."""
        assert self._compiled is not None, "compile() comes first"
        return self._compiled(*args)


def decode_options(target_leaves: Sequence[jax.Array], queries: int) -> dict[str, str | int]:
    """Compiler options for a program in which the target reads ``queries`` tokens, of all rows, at a time. Platforms
    other than GPUs ignore them.

    The whole program becomes one CUDA graph, unless the user's ``XLA_FLAGS`` say what graphs are for.

    With few query tokens a matrix product is split along its sums to occupy a GPU. XLA decides that by timing each
    product on its own, which does not count the kernels that add the parts up: with many query tokens a pass is faster
    without splitting. This does not hold for quantised weights (``benchmarks/LOG.md`` has both)."""
    options: dict[str, str | int] = {}
    if _GRAPHS not in os.environ.get("XLA_FLAGS", ""):
        options = {_GRAPHS: _IN_GRAPHS, "xla_gpu_graph_min_graph_size": 1}
    quantized = any(leaf.dtype.itemsize == 1 for leaf in target_leaves)
    if queries >= MANY_QUERIES and not quantized:
        options["xla_gpu_experimental_force_split_k"] = 1
    return options
