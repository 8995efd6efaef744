"""The kernels on trial against the operations that XLA makes of a layer, checked and timed beside the floor.

``python -m benchmarks.trials`` needs an NVIDIA GPU; ``--smoke`` runs tiny layers anywhere, with meaningless times.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.shapes import LLAMA_1B, LLAMA_8B, TINY
from benchmarks.trials.layer import LayerWeights, Stream, attention_kernel, decoder_layer_kernel
from benchmarks.trials.plan import Tiling
from jspec.cache import LayerKV, PagedView
from jspec.config import ModelConfig
from jspec.models.decoder import Layer
from jspec.models.layers import rotary_frequencies
from jspec.models.split import split

BANDWIDTH = 4.25e12  # bytes / s that a float32 sum over 4 GB of bfloat16 reads at on one H200
AGREES = 0.02  # relative difference after all layers, in bfloat16
LAYERS = 4  # distinct ones in a row, so that no weight is still in the cache when it is read again
PAGE, LIVE = 64, 1024
SHAPES = {
    "8b": LLAMA_8B,
    "1b": LLAMA_1B,
    "tiny": dataclasses.replace(TINY, hidden_size=256, intermediate_size=512, head_dim=32),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """Layers in a loop: ``run(*args) -> args``, and the bytes that one layer has to read."""

    name: str
    run: Callable
    args: Callable[[], tuple]
    bytes: float


@functools.cache
def layers_of(shape: str):
    """(merge, leaves of each layer): random weights, made on the device."""
    config = SHAPES[shape]
    make = jax.jit(lambda key: split(Layer(config, 0, dtype=jnp.bfloat16, rngs=nnx.Rngs(key))).leaves)
    merge = split(nnx.eval_shape(lambda: Layer(config, 0, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))).merge
    return merge, [make(jax.random.key(i)) for i in range(LAYERS)]


def inputs(shape: str, B: int, T: int):
    """Stream, pools of every layer, and where the tokens stand: the last T of the live slots."""
    config, M = SHAPES[shape], LIVE // PAGE
    keys = jax.random.split(jax.random.key(0), 2)
    pool_shape = config.num_kv_heads, 1 + B * M, PAGE, config.head_dim
    pool = jax.jit(lambda key: LayerKV(*jax.random.normal(key, (2, *pool_shape), jnp.bfloat16)))
    table = 1 + jax.random.permutation(keys[0], B * M).reshape(B, M).astype(jnp.int32)
    positions = jnp.broadcast_to(LIVE - T + jnp.arange(T, dtype=jnp.int32), (B, T))
    x = jax.random.normal(keys[1], (B, T, config.hidden_size), jnp.bfloat16)
    return x, [pool(jax.random.key(i)) for i in range(LAYERS)], PagedView(table, positions, jnp.ones((B, T), bool))


def xla_layers(config: ModelConfig, layers, x, pools, view):
    written = []
    for layer, kv in zip(layers, pools, strict=True):
        x, kv = layer(x, view.positions, kv, view)
        written.append(kv)
    return x, written


def one_launch_layers(config: ModelConfig, layers, x, pools, view, *, tiling: Tiling, interpret: bool):
    rotation, arrivals = rotation_of(config, view), jnp.zeros(1, jnp.int32)
    norms = [layer.attention_norm.weight[...] for layer in layers]
    stream, written = Stream.of(x, norms[0], tiling), []
    for layer, next_norm, kv in zip(layers, [*norms[1:], norms[0]], pools, strict=True):
        weights = LayerWeights(
            layer.attention.qkv.weight[...],
            layer.attention.out.weight[...],
            layer.mlp_norm.weight[...],
            layer.mlp.gate_up.weight[...],
            layer.mlp.down.weight[...],
            next_norm,
        )
        stream, k, v, arrivals = decoder_layer_kernel(
            *(stream, weights, *kv, view.table, view.positions, view.valid, rotation, arrivals),
            heads=config.num_heads,
            eps=config.rms_norm_eps,
            window=None,
            tiling=tiling,
            interpret=interpret,
        )
        written.append(LayerKV(k, v))
    return stream.value, written


def chained_layers(config: ModelConfig, layers, x, pools, view, *, tiling: Tiling, rings: Any, interpret: Any = None):
    """Attention in one launch, the products up to the next attention in another."""
    from benchmarks.trials.chain import ROWS, run_chain  # needs jax 0.11

    B, T, D = x.shape
    padded = lambda flat: jnp.pad(flat, ((0, ROWS - B * T), (0, 0)))  # noqa: E731
    rotation, arrivals = rotation_of(config, view), jnp.zeros(1, jnp.int32)
    qkv = padded(layers[0].attention.qkv(layers[0].attention_norm(x)).reshape(B * T, -1))
    x, written = padded(x.reshape(B * T, D)), []
    for layer, following, kv in zip(layers, [*layers[1:], layers[0]], pools, strict=True):
        attended, k, v, arrivals = attention_kernel(
            *(qkv, *kv, view.table, view.positions, view.valid, rotation, arrivals),
            heads=config.num_heads,
            rows=ROWS,
            window=None,
            tiling=tiling,
            interpret=interpret is not None,
        )
        x, qkv = run_chain(
            *(attended, x, chain_of(layer, following)),
            tokens=8 * -(-B * T // 8),
            eps=config.rms_norm_eps,
            rings=rings,
            programs=tiling.programs or 132,
            apart=interpret is not None,
            interpret=interpret,
        )
        written.append(LayerKV(k, v))
    return x[: B * T].reshape(B, T, D), written


def rotation_of(config: ModelConfig, view: PagedView):
    """Cosines and sines, float32 ``[B, T, H / 2]`` each."""
    frequency = rotary_frequencies(config.rope, config.head_dim).reshape(1, 1, -1)
    angles = view.positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angles), jnp.sin(angles)


def chain_of(layer: Layer, following: Layer):
    """What the products between two attentions read."""
    from benchmarks.trials.chain import Chain

    assert layer.attention_norm is not None
    assert following.attention_norm is not None
    return Chain(
        layer.attention.out.weight[...],
        layer.mlp.gate_up.weight[...],
        layer.mlp.down.weight[...],
        following.attention.qkv.weight[...],
        layer.mlp_norm.weight[...],
        following.attention_norm.weight[...],
    )


def layer_trial(
    shape: str, B: int, T: int, tiling: Tiling | None = None, rings: Any = None, interpret: Any = None
) -> Trial:
    """Whole layers: XLA's, or in one launch with a ``tiling``, or in two with ``rings`` as well."""
    config, (merge, leaves) = SHAPES[shape], layers_of(shape)
    name, run_layers = f"{shape} {B}x{T} layer, ", xla_layers
    if tiling is None:
        name += "XLA"
    elif rings is None:
        run_layers = functools.partial(one_launch_layers, tiling=tiling, interpret=interpret is not None)
        name += f"one launch {changes(tiling)}"
    else:
        run_layers = functools.partial(chained_layers, tiling=tiling, rings=rings, interpret=interpret)
        name += f"attention {changes(tiling)} and a chain {changes(rings)}"

    def run(leaves, x, pools, view):
        y, pools = run_layers(config, [merge(one) for one in leaves], x, pools, view)
        return leaves, y, pools, view

    read = sum(leaf.nbytes for leaf in leaves[0]) + B * config.kv_bytes(LIVE, 2) / config.num_layers
    return Trial(name, run, lambda: (leaves, *inputs(shape, B, T)), read)


def changes(settings) -> str:
    """What differs from the defaults."""
    return str({f.name: v for f in dataclasses.fields(settings) if (v := getattr(settings, f.name)) != f.default} or "")


def chain_trial(shape: str, tokens: int, rings: Any = None, apart: bool = False) -> Trial:
    """The products of layers without their attention."""
    from benchmarks.trials.chain import ROWS, Rings, run_chain  # needs jax 0.11

    config, (merge, leaves) = SHAPES[shape], layers_of(shape)
    NH = config.num_heads * config.head_dim

    def run(leaves, attended, x):
        layers = [merge(one) for one in leaves]
        for layer, following in zip(layers, [*layers[1:], layers[0]], strict=True):
            x, qkv = run_chain(
                *(attended, x, chain_of(layer, following)),
                tokens=tokens,
                eps=config.rms_norm_eps,
                rings=rings or Rings(),
                apart=apart,
            )
            attended = qkv[:, :NH]
        return leaves, attended, x

    def args():
        keys = jax.random.split(jax.random.key(0), 2)
        attended, x = (
            jax.random.normal(key, (ROWS, width), jnp.bfloat16)
            for key, width in zip(keys, (NH, config.hidden_size), strict=True)
        )
        return leaves, attended, x

    name = f"{shape} {tokens} tokens, products{', apart' if apart else ''} {rings or ''}"
    return Trial(name, run, args, sum(leaf.nbytes for leaf in leaves[0]))


def difference(one: Trial, other: Trial, pick: Callable, runs: int = 3) -> float:
    """The largest relative difference of ``pick(result)`` in some runs of each."""
    first, second = jax.jit(one.run), jax.jit(other.run)
    worst = 0.0
    for _ in range(runs):
        a, b = (pick(run(*trial.args())).astype(jnp.float32) for run, trial in ((first, one), (second, other)))
        worst = max(worst, float(jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2))))
    print(f"{one.name} against {other.name}: relative difference {worst:.2e}", flush=True)
    return worst


def measure(trials: list[Trial], rounds: int, repeats: int):
    """Print a line for each: the median time of a layer, in a device loop."""

    def looped(trial: Trial):
        def step(_, args):
            out = trial.run(*args)
            x = args[1] + 0 * out[1]  # the same numbers in every trip, but not before the last trip's
            return out[0], x, *out[2:]

        return jax.jit(lambda *args: jax.lax.fori_loop(0, rounds, step, args))

    lowered = [looped(trial).lower(*jax.eval_shape(trial.args)) for trial in trials]
    print(f"{'us a layer':>10} {'floor':>6} {'ratio':>6}")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for trial, future in list(zip(trials, pool.map(lambda low: low.compile, lowered), strict=True)):
            try:
                compiled, args, times = future(), trial.args(), []
                for _ in range(repeats + 1):
                    started = time.perf_counter()
                    jax.block_until_ready(compiled(*args))
                    times.append((time.perf_counter() - started) / (rounds * LAYERS))
                seconds, least = statistics.median(times[1:]), trial.bytes / BANDWIDTH
                print(f"{1e6 * seconds:10.1f} {1e6 * least:6.1f} {seconds / least:6.2f}  {trial.name}", flush=True)
            except Exception as error:  # a tiling that does not fit says so, and the others go on
                print(f"{'':>24}  {trial.name}: {str(error)[:200]}", flush=True)


def sweep() -> list[Trial]:
    """What to try: how deep the pipeline of one launch is, and how long the rings of a chain are."""
    trials = []
    for per_core, tile, stages in (
        (1, 16384, 4),
        (1, 16384, 6),
        (1, 32768, 4),
        (2, 8192, 4),
        (2, 8192, 6),
        (2, 16384, 3),
    ):
        for chains in (1, 4):
            trials.append(layer_trial("8b", 1, 5, Tiling(per_core=per_core, tile=tile, stages=stages, chains=chains)))
    for ahead, before in ((0, 0), (65536, 0), (0, 262144), (131072, 262144)):
        trials.append(layer_trial("8b", 1, 5, Tiling(ahead=ahead, ahead_of_attention=before)))
    return trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--chain", action="store_true", help="the products alone, in one launch; needs jax 0.11")
    args = parser.parse_args()
    stream = lambda result: result[1]  # noqa: E731
    if args.smoke:
        few = Tiling(programs=4, slots=16, chains=1)
        pair = [layer_trial("tiny", 1, 5, tiling, interpret=True) for tiling in (few, None)]
        good = difference(*pair, stream) < AGREES
        measure(pair, 1, 1)
        return 0 if good else 1
    good = True
    if args.chain:
        one, apart = (chain_trial("8b", 8, apart=apart) for apart in (False, True))
        good = difference(one, apart, lambda result: result[2][:8]) < AGREES
        from benchmarks.trials.chain import Rings

        rings = [Rings(n, m) for n, m in ((4, 3), (6, 3), (9, 2), (10, 2))]
        measure(
            [one, apart, *(chain_trial("8b", 8, r) for r in rings), chain_trial("8b", 16), chain_trial("1b", 8)], 25, 5
        )
    else:
        xla, one = (layer_trial("8b", 1, 5, tiling) for tiling in (None, Tiling()))
        good = difference(one, xla, stream) < AGREES
        few = [layer_trial(shape, B, T, t) for shape, B, T in (("8b", 1, 1), ("8b", 16, 1)) for t in (None, Tiling())]
        measure([xla, one, *few, *(sweep() if args.sweep else [])], 25, 5)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
