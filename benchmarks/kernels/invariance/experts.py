"""Routing and experts: which numbers of tokens give a token the same bits, and how fast."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.experts import Layer
from benchmarks.kernels.invariance.products import Way, front_door, measure, say_failures, weights_for
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
from jspec.pallas.moe.grouped_mlp import grouped_mlp, tilings_of
from jspec.pallas.moe.router import route_kernel
from jspec.pallas.moe.router_reference import route_reference

LAYERS = {
    "bf16": Layer(),
    "int4": Layer(stored="int4"),
    "fp8_block": Layer(stored="fp8_block"),
    "gpt-oss, mxfp4": Layer(32, 2880, 2880, 4, four_bits=True),
}
MOST = 640  # tokens
ROWS = 4


def mixture(layer: Layer) -> Callable:
    """For several sets of tokens: their experts, the weights of these, and what each expert makes, which the norm that
    follows adds up in one order."""

    kernel, reference = (
        functools.partial(f, bias=None, routing=layer.routing) for f in (route_kernel, route_reference)
    )

    def one(x, logits, gate_up, down):
        routed = by_platform(kernel, reference, logits)
        return routed.expert, routed.weight, grouped_mlp(x, routed, gate_up, down, clamp=layer.clamp)

    return lambda sets, gate_up, down: [one(x, logits, gate_up, down) for x, logits in sets]


def tokens_of(layer: Layer, number: int, M: int):
    """Hidden states and logits: one token, always the same, first, in the middle and last among others."""
    x, logits = layer.tokens(jax.random.fold_in(jax.random.key(2 + M), number), M)
    (one,), (of_one,) = layer.tokens(jax.random.fold_in(jax.random.key(1), number), 1)
    at = jnp.asarray(places_of(M))
    return x.at[at].set(one), logits.at[at].set(of_one)


def one_layer(run: Run, name: str, layer: Layer, tokens: Sequence[int]):
    """Print the classes of a mixture, and the time for each number of tokens."""
    weights = jax.jit(layer.weights)(jax.random.key(0))
    sets = {M: [jax.eval_shape(functools.partial(tokens_of, layer, 0, M))] * (1 if run.small else ROWS) for M in tokens}
    programs = compile_all({M: Job(mixture(layer), (sets[M], *shape_of(weights))) for M in tokens})
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


def router(run: Run, tokens: Sequence[int]):
    """The router's logits, a product in float32 that XLA computes."""
    shape = (16, 64) if run.small else (128, 2048)
    weights = weights_for("bf16", shape, run.small)
    way = Way(front_door(False, jnp.float32), tuned=True)
    found = say_failures(run, "router logits", measure(run, weights, {M: (M, way) for M in tokens}))
    moved = [M for M, one in found.items() if not one.anywhere]
    note = f"; place or neighbours matter: {moved}" if moved else ""
    times = {str(M): one.took for M, one in found.items()}
    run.say_classes("router logits", {M: one.first for M, one in found.items()}, note, us=times)


def experts(run: Run, tokens: Sequence[int]):
    """The router first."""
    counts = [M for M in tokens if M <= MOST]
    run.attempt("router logits", router, run, counts)
    layers = {"bf16": Layer(8, 64, 96, 2)} if run.small else LAYERS
    for name, layer in layers.items():
        run.attempt(f"experts, {name}", one_layer, run, name, layer, counts)
