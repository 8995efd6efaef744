"""Routing and experts: which numbers of tokens give a token the same bits, and how fast."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.experts import Layer
from benchmarks.kernels.invariance.run import (
    Job,
    Run,
    compile_all,
    microseconds,
    picked,
    places_of,
    same_everywhere,
    shape_of,
)
from jspec.pallas.dispatch import by_platform
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.moe.grouped_mlp import grouped_mlp, tilings_of
from jspec.pallas.moe.router import route, route_kernel
from jspec.pallas.moe.router_reference import route_reference

LAYERS = {
    "bf16": Layer(),
    "int4": Layer(stored="int4"),
    "nvfp4": Layer(stored="nvfp4"),
    "fp8_block": Layer(stored="fp8_block"),
    "GLM-4.7-Flash": Layer(65, 1536, 2048, 5, shared=1),
    "gpt-oss, mxfp4": Layer(32, 2880, 2880, 4, four_bits=True),
}
ROWS = 4
ROUTERS = (128, 2048), (32, 2880)  # experts and hidden states of 30B-A3B and gpt-oss


def mixture(layer: Layer, mlp: Callable = grouped_mlp) -> Callable:
    """For several sets of tokens: their experts, the weights of these, and what each expert makes, which the norm that
    follows adds up in one order."""

    kernel, reference = (
        functools.partial(f, bias=None, routing=layer.routing) for f in (route_kernel, route_reference)
    )

    def one(x, logits, gate_up, down):
        routed = by_platform(kernel, reference, logits)
        return routed.expert, routed.weight, mlp(x, routed, gate_up, down, clamp=layer.clamp)

    return lambda sets, gate_up, down: [one(x, logits, gate_up, down) for x, logits in sets]


def tokens_of(layer: Layer, number: int, M: int):
    """Hidden states and logits: one token, always the same, first, in the middle and last among others."""
    x, logits = layer.tokens(jax.random.fold_in(jax.random.key(2 + M), number), M)
    (one,), (of_one,) = layer.tokens(jax.random.fold_in(jax.random.key(1), number), 1)
    at = jnp.asarray(places_of(M))
    return x.at[at].set(one), logits.at[at].set(of_one)


def one_layer(run: Run, name: str, layer: Layer, tokens: Sequence[int], mlp: Callable = grouped_mlp):
    """Print the classes of a mixture, and the time for each number of tokens; ``mlp`` is that of the experts."""
    weights = jax.jit(layer.weights)(jax.random.key(0))
    sets = {M: [jax.eval_shape(functools.partial(tokens_of, layer, 0, M))] * (1 if run.small else ROWS) for M in tokens}
    programs = compile_all({M: Job(mixture(layer, mlp), (sets[M], *shape_of(weights))) for M in tokens})
    found, times, moved = {}, {}, []
    for M in tokens:

        def one(M=M):
            if isinstance(programs[M], Exception):
                raise programs[M]
            given = [tokens_of(layer, number, M) for number in range(len(sets[M]))]
            with run.watched():
                out = programs[M](given, *weights)
                results = [
                    [[np.asarray(picked(x, places_of(M))[place]) for x in result] for place in range(3)]
                    for result in out
                ]
                times[M] = microseconds(lambda: programs[M](given, *weights), len(given), run.small)
            if not all(map(same_everywhere, results)):
                moved.append(M)
            found[M] = [result[0] for result in results]

        run.attempt(f"experts, {name}, {M} tokens", one)
    note = f"; place or neighbours matter: {moved}" if moved else ""
    run.say_classes(f"experts, {name}", found, note, us={str(M): took for M, took in times.items()})
    run.say_classes(f"experts, {name}, routing alone", {M: [one[:2] for one in sets] for M, sets in found.items()})
    for M, took in times.items():
        up, down = (
            tuple(one) for one in map(_fields, tilings_of(M * layer.Y, layer.X, jnp.bfloat16, weights[0].weight))
        )
        print(f"    {M:>5} {took:>8.1f} us  up {up}, down {down}", flush=True)
        run.result.measured[f"experts, {name}, {M} tokens"] = took


def _fields(tiling):
    return tiling.assignments, tiling.outputs, tiling.inputs, tiling.num_warps, tiling.num_stages


def router(run: Run, name: str, function: Callable, shape: tuple[int, int], tokens: Sequence[int]):
    """The experts of each token and their weights, by ``function`` of tokens ``[M, D]`` and the router ``[X, D]``."""
    X, D = (16, 64) if run.small else shape
    layer = Layer(X, 1, D, min(8, X))
    weight = jax.random.normal(jax.random.key(0), (X, D), jnp.bfloat16)
    sets = 1 if run.small else ROWS

    def both(xs, weight):
        return [function(x, weight, layer.routing) for x in xs]

    abstract = {M: [jax.ShapeDtypeStruct((M, D), jnp.bfloat16)] * sets for M in tokens}
    programs = compile_all({M: Job(both, (abstract[M], shape_of(weight)), tuned=True) for M in tokens})
    found, times = {}, {}
    for M in tokens:

        def one(M=M):
            if isinstance(programs[M], Exception):
                raise programs[M]
            given = [tokens_of(layer, number, M)[0] for number in range(sets)]
            out = programs[M](given, weight)
            found[M] = [np.asarray(x) for one in out for x in jax.tree.leaves(picked_of(one, M))]
            times[str(M)] = microseconds(lambda: programs[M](given, weight), sets, run.small)

        run.attempt(f"{name}, {M} tokens", one)
    run.say_classes(name, found, us=times)
    print("    us: " + "  ".join(f"{M} {took:.1f}" for M, took in times.items()), flush=True)


def picked_of(routed, M: int):
    """What a token has that is always the same, and lies last among others."""
    return [x[M - 1] for x in routed[:2]]


def by_xla(x, weight, routing):
    """Routing by the logits of XLA's product, as it was."""
    logits = matmul_reference(x, weight, jnp.float32)
    ways = (functools.partial(f, routing=routing) for f in (route_kernel, route_reference))
    return by_platform(*ways, logits, None)


def by_kernels(x, weight, routing):
    """Routing as models call it."""
    return route(x, weight, None, routing)


def experts(run: Run, tokens: Sequence[int]):
    """Routers first."""
    for shape in ROUTERS[: 1 if run.small else None]:
        for way in (by_xla, by_kernels):
            name = f"routing {shape}, {way.__name__}"
            run.attempt(name, router, run, name, way, shape, tokens)
    layers = {"bf16": Layer(8, 64, 96, 2)} if run.small else LAYERS
    for name, layer in layers.items():
        run.attempt(f"experts, {name}", one_layer, run, name, layer, tokens)
