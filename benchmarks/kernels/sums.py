"""A sum over the GPUs of a target in shards, with the residual sum and the norm behind it: five ways to make it.

    python -m benchmarks.kernels.sums                 # needs two NVIDIA GPUs: microseconds of each way, by number of tokens
    python -m benchmarks.kernels.sums --gpus 4        # the same among four
    python -m benchmarks.kernels.sums --smoke         # simulated devices, small, with meaningless times

Two such sums are in every layer: behind attention, and behind the MLP. Each device has a part ``y [tokens, D]`` of what is
to be added up, and the residual stream ``x [tokens, D]``. What follows reads the norm of ``x`` and the sum.

    sum         XLA's sum, then the kernel of ``jspec.pallas.norm.rms_norm``. It is what models do
    scattered   the residual stream is split by tokens: each device receives the sum of its own tokens, norms these, and
                gathers what the others normed (Korthikanti et al., "Reducing activation recomputation", 2022)
    peer        one kernel that reads the other devices' memory, adds up and norms (Pallas Mosaic)
    packets     one kernel that sends packets to the other devices, adds up and norms (``jspec.pallas.collectives``)
    two trips   the same, where each device adds up a part of each token and sends all others the result

A figure is the difference between a program with many sums and one with few, so that what a call costs is not in it. The
results are compared with those of ``sum`` before anything is timed."""

import argparse
import dataclasses
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable

if "--smoke" in sys.argv:  # before JAX starts
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from benchmarks.shapes import LLAMA_8B
from jspec.config import Shards
from jspec.engine.runner.compile import decode_options
from jspec.models.sharding import mesh_of
from jspec.pallas.collectives.peer_sum import Stream, peer_sum_kernel
from jspec.pallas.collectives.peers import Peers
from jspec.pallas.collectives.workspace import Room, Workspace
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.norm.rms_norm import add_norm

AXIS = Shards(2).axis
EPS = 1e-5
SUMS, MORE = 64, 256  # one after another: those of a model of 32 layers, and what is timed beside them
TOKENS = (1, 5, 16, 64, 80, 320)
MOST_TOKENS, MOST_FEATURES = 512, 8192

# (x, y, weight) -> (x and the sum of all y, its norm), ``[tokens, D]`` each, on one device. ``scattered`` has the device's
# own part of x; ``packets`` takes ``Peers`` besides.
Way = Callable[..., tuple[jax.Array, ...]]


def summed(x, y, weight):
    new, normed = add_norm(x[None], jax.lax.psum(y, AXIS)[None], weight, None, EPS, "rms")
    return new[0], normed[0]


def scattered(x, y, weight):
    y = jnp.pad(y, ((0, len(x) * jax.lax.axis_size(AXIS) - len(y)), (0, 0)))
    own = jax.lax.psum_scatter(y, AXIS, tiled=True)
    new, normed = add_norm(x[None], own[None], weight, None, EPS, "rms")
    return new[0], jax.lax.all_gather(normed[0], AXIS, tiled=True)


def peer(x, y, weight):
    """The sum in the order of the devices, in float32, by one program for each token.

    Every device waits at the end until the others have read its part, which may be overwritten then."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (tokens, D), n = x.shape, jax.lax.axis_size(AXIS)
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=8)

    def kernel(x_ref, y_ref, weight_ref, new_ref, normed_ref, done):
        token, own = jax.lax.axis_index("tokens"), jax.lax.axis_index(AXIS)

        def read(ref):
            return plgpu.layout_cast(ref[...], layout).astype(jnp.float32)

        parts = [read(plgpu.remote_ref(y_ref.at[token], {AXIS: jnp.int32(device)})) for device in range(n)]
        new = read(x_ref.at[token]) + functools.reduce(jnp.add, parts)
        new_ref[token] = new.astype(x.dtype)
        scale = jax.lax.rsqrt(jnp.sum(new * new) / D + EPS)
        normed_ref[token] = (new * scale * read(weight_ref)).astype(x.dtype)
        for other in range(1, n):
            pl.semaphore_signal(done, 1, device_id={AXIS: (own + other) % n})
        pl.semaphore_wait(done, (n - 1) * tokens, decrement=False)

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        grid=(tokens,),
        grid_names=("tokens",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, y, weight)


def packets(x, y, weight, sums: Peers, trips: int = 1):
    y, how = PartialSums(y[:, None], None, AXIS), {"dtype": x.dtype, "eps": EPS, "kind": "rms", "trips": trips}
    result, sums.epochs[...] = peer_sum_kernel(y, Stream(x, weight), sums.exchange(), sums.rank, **how)
    return result


@functools.cache
def workspace(gpus: int) -> Workspace:
    return Workspace.create(mesh_of(gpus, AXIS), Room(MOST_TOKENS, MOST_FEATURES // 2))


WAYS: dict[str, Way] = {"sum": summed, "scattered": scattered, "peer": peer, "packets": packets}
WAYS |= {"two trips": functools.partial(packets, trips=2)}
BY_PACKETS = ("packets", "two trips")
ON_GPUS = ("peer", *BY_PACKETS)
_epochs = itertools.count(1, 2 * MORE)  # of calls: epochs never return


def chained(way: str, tokens: int, mesh: Mesh, sums: int = SUMS) -> Callable:
    """``(x, y, weight, exchange) -> normed``: sums one after another, over all devices. What one of them normed is added up
    next."""

    def one_device(x, y, weight, exchange):
        if way == "scattered":
            rows = -(-tokens // mesh.size)
            own = jax.lax.axis_index(AXIS) * rows
            padded = jnp.pad(x, ((0, rows * mesh.size - tokens), (0, 0)))
            x = jax.lax.dynamic_slice_in_dim(padded, own, rows)

        more = (Peers.begin(exchange, AXIS),) if way in BY_PACKETS else ()
        for _ in range(sums):  # as the layers of a model are, which no loop goes through
            x, normed = WAYS[way](x, y, weight, *more)
            y = normed[:tokens]
        return y

    same = PartitionSpec()
    over = jax.shard_map(
        one_device, mesh=mesh, in_specs=(same, PartitionSpec(AXIS), same, same), out_specs=same, check_vma=False
    )
    return lambda x, y, *others: over(x, y.reshape(-1, x.shape[1]), *others)


def with_exchange(way: str, args: tuple) -> tuple:
    """The arguments of the next call, from those of ``arguments``."""
    if way not in BY_PACKETS:
        return *args, None
    exchange, epoch = workspace(len(args[1])).exchange(), next(_epochs)
    epochs = jax.device_put(np.full(exchange.epochs.shape, epoch, np.int32), exchange.epochs.sharding)
    return *args, dataclasses.replace(exchange, epochs=epochs)


def arguments(tokens: int, D: int, dtype, gpus: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x ``[tokens, D]``, a part y for each device ``[gpus, tokens, D]``, and the norm's weight ``[D]``."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = jax.random.normal(keys[0], (tokens, D), dtype), jax.random.normal(keys[1], (gpus, tokens, D), dtype)
    return x, y, 1 + 0.1 * jax.random.normal(keys[2], (D,), dtype)


def microseconds(way: str, tokens: int, D: int, dtype, repeats: int, gpus: int = 2) -> float:
    """Of one of the sums."""
    args, seconds = arguments(tokens, D, dtype, gpus), []
    for sums in (SUMS, MORE):
        function = chained(way, tokens, mesh_of(gpus, AXIS), sums)
        compiled = (
            jax.jit(function, compiler_options=decode_options(args, tokens)).lower(*with_exchange(way, args)).compile()
        )
        took = []
        for _ in range(repeats + 1):
            given = jax.block_until_ready(with_exchange(way, args))
            began = time.perf_counter()
            jax.block_until_ready(compiled(*given))
            took.append(time.perf_counter() - began)
        seconds.append(statistics.median(took[1:]))
    return 1e6 * (seconds[1] - seconds[0]) / (MORE - SUMS)


def largest_difference(way: str, tokens: int, D: int, dtype, gpus: int) -> float:
    """Of what two sums give, from those of ``sum``; normed numbers are around 1."""
    args, mesh = arguments(tokens, D, dtype, gpus), mesh_of(gpus, AXIS)
    found, wanted = (jax.jit(chained(one, tokens, mesh, sums=2))(*with_exchange(one, args)) for one in (way, "sum"))
    return float(jnp.max(jnp.abs(found.astype(jnp.float32) - wanted.astype(jnp.float32))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="all of them on GPUs")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each program")
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="how many GPUs add up")
    parser.add_argument(
        "--features", type=int, metavar="D", help="of a token, at most 8192; by default those of an 8B model"
    )
    parser.add_argument("--smoke", action="store_true", help="simulated devices, meaningless times")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not args.smoke and (not on_gpu or len(jax.devices()) < args.gpus):
        parser.error(f"fewer than {args.gpus} GPUs: times need them; --smoke runs a small version here")
    ways = args.ways or [way for way in WAYS if on_gpu or way not in ON_GPUS]
    D, dtype = (args.features or LLAMA_8B.hidden_size, jnp.bfloat16) if on_gpu else (64, jnp.float32)
    print("tokens" + "".join(f"{way:>12}" for way in ways) + "   us", flush=True)
    for tokens in args.tokens:
        cells = []
        for way in ways:
            if (off := largest_difference(way, tokens, D, dtype, args.gpus)) > 0.1:
                raise RuntimeError(f"{way}, {tokens} tokens: differs from sum by {off}")
            cells.append(f"{microseconds(way, tokens, D, dtype, args.repeats, args.gpus):12.1f}")
        print(f"{tokens:>6}" + "".join(cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
