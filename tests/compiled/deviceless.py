"""Compile a program for an NVIDIA H200 on a machine that has none: nothing runs, and no array is made.

XLA takes a description of the device in place of one. It has no autotuning then, so products show default tilings: read
structure from the result, not speed.
"""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.rounds.programs import Decoding, decoding_program
from benchmarks.shapes import LLAMA_1B, LLAMA_8B, head_for

UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
os.environ.setdefault(UNCHECKED, "1")  # there is no driver to check

# Drafters of few layers, by the names of their methods.
_DSPARK: Any = head_for(LLAMA_8B, "dspark")
DRAFTERS = {
    None: None,
    "draft_model": dataclasses.replace(LLAMA_1B, num_layers=1, windows=()),
    "eagle3": dataclasses.replace(head_for(LLAMA_8B, "eagle3"), aux_layers=(0, 1, 2)),
    "dspark": dataclasses.replace(
        _DSPARK,
        layers=dataclasses.replace(_DSPARK.layers, num_layers=1, windows=()),
        aux_layers=(0, 1, 2),
        causal=(False,),
    ),
}

# What XLA asks of a device when it cuts programs into kernels. Clocks and widths of its units, which only its cost
# model reads, are left out where it has defaults.
_H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  device_memory_size: 150000000000
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
}
"""


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot compile for an H200, None if it can."""
    if jax.__version_info__ < (0, 11):
        return f"compiling without a device needs jax 0.11, this is {jax.__version__}"
    plugins = importlib.util.find_spec("jax_plugins")  # a package that only plugins make
    if plugins is None or not any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)):
        same = f"=={jax.__version__}"
        return f"compiling without a device needs a plugin: pip install jax-cuda13-plugin{same} jax-cuda13-pjrt{same}"
    try:
        gpus(1, "x")
    except NotImplementedError as error:
        return f"JAX came up without its CUDA plugin ({error}): set {UNCHECKED}=1 before it starts"
    return None


def compiled_for_h200(function: Callable, *args, **jit) -> jax.stages.Compiled:
    """``function`` of arrays, or shapes of them, compiled by XLA's GPU compiler.

    Args:
      function: to be jitted.
      args: its arguments.
      jit: arguments of ``jax.jit``.
    """
    mesh = gpus(1, "x")
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args)
    return compiled_on(mesh, function, *shapes, **jit)


def compiled_on(mesh: jax.sharding.Mesh, function: Callable, *args, **jit) -> jax.stages.Compiled:
    """The same for the GPUs of a mesh; ``args`` are shapes with shardings."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, **jit).lower(*args).compile()


def gpus(count: int, axis: str) -> jax.sharding.Mesh:
    """A mesh of H200s of one host."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=_H200, topology=f"1x1x{count}")
    return topologies.make_mesh(topology, (count,), (axis,))


def compiled_round(what: Decoding, target, module=None, draft=None) -> tuple[jax.stages.Compiled, Any]:
    """Rounds of ``what``, compiled, and the state that they are given and give.

    Args:
      target: its abstract module.
      module: the drafter's abstract module, of the config ``draft``; None for plain rounds.
    """
    program = decoding_program(target, module, draft, what.engine_config("bfloat16"), what)
    state = jax.eval_shape(program.fresh)
    how = {"donate_argnums": 1, "compiler_options": program.options}
    return compiled_for_h200(program.function, program.leaves, state, **how), state
