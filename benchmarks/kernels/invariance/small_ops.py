"""What is between products: norms, activations, rotations, sampling, verification rules and gated delta nets. Does XLA, or a
kernel, give a row other bits in calls of other sizes?"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import delta_net
from benchmarks.kernels.invariance.run import Job, Run, bits, compile_all, picked, places_of
from benchmarks.kernels.verify import FILTERS, judged, rule_inputs
from jspec.config import Rope
from jspec.models.layers import rotation_at
from jspec.pallas.attention.reference import apply_rope
from jspec.pallas.delta_net.chunked import CHUNK
from jspec.pallas.delta_net.prefill import prefill
from jspec.pallas.delta_net.state import init_state
from jspec.pallas.delta_net.verify import verify
from jspec.pallas.norm.gated_norm import gated_norm, gated_norm_reference
from jspec.pallas.norm.qk_norm import qk_norm
from jspec.pallas.norm.rms_norm import add_norm, norm, norm_tokens
from jspec.pallas.sampling.sample import sample
from jspec.sampling.logprobs import token_logprobs

D, F, H, HEADS, VOCABULARY, EPS = 4096, 14336, 128, 40, 128256, 1e-5
ROPE = Rope(theta=5e5)
ROWS = (1, 4, 16, 64)
ROWS_OF_TOKENS = 8  # tokens whose bits are compared
QUERIES = (1, 2, 5, 8, 16)
verify_pass, prefill_pass = jax.jit(verify), jax.jit(prefill)  # one program for each shape


def _normal(seed: int, *shape: int, dtype="bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def ops_of_tokens() -> dict[str, tuple[Callable, tuple[int, ...]]]:
    """Functions of ``x [1, M, *shape]`` and of nothing else but weights, with the shape."""
    weight = _normal(7, D)
    rotation = lambda x: rotation_at(jnp.full(x.shape[:2], 777, jnp.int32), ROPE, H)  # noqa: E731
    half = lambda x: jnp.split(x, 2, axis=-1)  # noqa: E731
    return {
        "add_norm": (lambda x: add_norm(half(x)[0], half(x)[1], weight, None, EPS, "rms"), (2 * D,)),
        "norm by XLA": (lambda x: norm(x, weight, None, EPS, "rms"), (D,)),
        "norm": (lambda x: norm_tokens(x, weight, None, EPS, "rms"), (D,)),
        "norm of 512 by XLA": (lambda x: norm(x, weight[:512], None, EPS, "rms"), (512,)),
        "norm of 512": (lambda x: norm_tokens(x, weight[:512], None, EPS, "rms"), (512,)),
        "norms of queries and keys": (
            lambda x: qk_norm(x, (weight[:H],) * 2, (None,) * 2, (HEADS - 8, 4), EPS, "rms"),
            (HEADS, H),
        ),
        "gated norm by XLA": (lambda x: gated_norm_reference(*_gated(x), weight[:H], EPS), (2 * HEADS * H,)),
        "gated norm": (lambda x: gated_norm(*_gated(x), weight[:H], EPS), (2 * HEADS * H,)),
        "silu(gate) up": (lambda x: jax.nn.silu(half(x)[0]) * half(x)[1], (2 * F,)),
        "gelu_tanh(gate) up": (lambda x: jax.nn.gelu(half(x)[0], approximate=True) * half(x)[1], (2 * F,)),
        "residual sum": (lambda x: half(x)[0] + half(x)[1], (2 * D,)),
        "rotation by XLA": (lambda x: apply_rope(x, rotation(x)), (HEADS, H)),
        "cosines and sines": (lambda x: jax.tree.leaves(rotation(x)), (HEADS, H)),
        "softmax over 128": (lambda x: jax.nn.softmax(x.astype(jnp.float32), axis=-1), (128,)),
        "sum in float32": (lambda x: jnp.sum(x.astype(jnp.float32), axis=-1), (D,)),
    }


def of_tokens(run: Run, tokens: Sequence[int]):
    """Each function with M tokens in a row, one of which is always the same."""
    shrink = 64 if run.small else 1
    for name, (function, shape) in ops_of_tokens().items():
        if run.small and not name.startswith(("silu", "sum")):
            continue
        shape = (max(shape[0] // shrink, 4), *shape[1:])

        def one(name=name, function=function, shape=shape):
            of = {M: jax.ShapeDtypeStruct((1, M, *shape), jnp.bfloat16) for M in tokens}
            programs = compile_all({M: Job(function, (x,), tuned=True) for M, x in of.items()})
            found, moved = {}, []
            for M in tokens:
                if isinstance(programs[M], Exception):
                    raise programs[M]
                outs = [jax.tree.leaves(programs[M](_tokens(number, M, shape))) for number in range(ROWS_OF_TOKENS)]
                places = [np.asarray(picked(y[0], places_of(M))) for out in outs for y in out]
                found[M] = [y[0] for y in places]
                if len({bits([y[i] for y in places]) for i in range(3)}) > 1:
                    moved.append(M)
            run.say_classes(name, found, f"; place or neighbours matter: {moved}" if moved else "")

        run.attempt(name, one)


def _gated(x):
    """Outputs of the heads of a delta net, and what has their gates."""
    return x[..., : HEADS * H].reshape(*x.shape[:2], HEADS, H), x


@functools.partial(jax.jit, static_argnums=(1, 2))
def _tokens(number, M: int, shape: tuple[int, ...]) -> jax.Array:
    """One token, always the same, in three places among others."""
    own, others = (jax.random.fold_in(jax.random.key(seed), number) for seed in (1, 10 + M))
    x = jax.random.normal(others, (1, M, *shape), jnp.bfloat16)
    return x.at[0, jnp.asarray(places_of(M))].set(jax.random.normal(own, shape, jnp.bfloat16))


def sampled(run: Run, tokens):
    """A row of logits among J of each of B rows: its token, its normaliser and its threshold."""
    del tokens
    V = 500 if run.small else VOCABULARY
    own = (6 * _normal(1, V, dtype="float32")).astype("bfloat16")
    pairs = [(1, 1), (2, 5)] if run.small else [*((1, J) for J in QUERIES), *((B, J) for B in (16, 64) for J in (1, 5))]
    for label in ("off",) if run.small else ("off", "top-k 50, top-p .95"):
        _, top_k, top_p, min_p = FILTERS[label]

        def function(logits, keys, top_k=top_k, top_p=top_p, min_p=min_p):
            full = lambda value: jnp.full(len(logits), value)  # noqa: E731
            token, warped = sample(logits, full(0.8), full(top_k), full(top_p), full(min_p), keys)
            return token, warped.lse, warped.cutoff

        def one(label=label, function=function):
            found, draw = {}, jax.jit(function)
            for B, J in pairs:
                logits = jnp.asarray(_normal(2, B, J, V)).at[-1, J // 2].set(own)
                keys = jnp.full((B, J, 2), 5, jnp.uint32)
                found[f"{B}x{J}"] = [np.asarray(x[-1, J // 2]) for x in draw(logits, keys)]
            run.say_classes(f"sample, filters {label}", found)

        run.attempt(f"sample, filters {label}", one)


def logprobs(run: Run, tokens):
    """The normaliser of a row of logits among J of each of B rows, by XLA and as log-probabilities have it."""
    del tokens
    V = 500 if run.small else VOCABULARY
    own = 6 * _normal(1, V, dtype="float32")
    pairs = [(1, 1), (2, 5)] if run.small else [(1, 1), (1, 5), (16, 1), (16, 5), (64, 5), (1, 512)]
    ways = {
        "by XLA": lambda logits, token: logits[..., 7] - jax.nn.logsumexp(logits, axis=-1),
        "as it is": lambda logits, token: token_logprobs(logits, token).chosen,
    }
    for way, function in ways.items():

        def one(way=way, function=function):
            found, ask = {}, jax.jit(function)
            for B, J in pairs:
                logits = jnp.asarray(_normal(2, B, J, V, dtype="float32")).at[-1, J // 2].set(own)
                found[f"{B}x{J}"] = [np.asarray(ask(logits, jnp.full((B, J), 7, jnp.int32))[-1, J // 2])]
            run.say_classes(f"log-probability {way}", found)

        run.attempt(f"log-probability {way}", one)


def rules(run: Run, tokens):
    """A row's verdict among B rows, by each verification rule."""
    del tokens
    most = 2 if run.small else ROWS[-1]
    inputs = functools.partial(rule_inputs, rows=most, V=500 if run.small else VOCABULARY, settings=FILTERS["off"])
    args = jax.jit(inputs)(jax.random.key(3))
    for rule in ("match",) if run.small else ("rejection", "block", "match"):

        def one(rule=rule):
            found, decide = {}, jax.jit(functools.partial(judged, rule=rule, draft_too=False))
            for B in (1, most) if run.small else ROWS:
                for own in dict.fromkeys((0, B - 1)):
                    order = jnp.asarray([*range(1, own + 1), 0, *range(own + 1, B)])
                    some = jax.tree.map(lambda x, order=order: x[order] if x.ndim else x, args)
                    verdict = decide(*some)
                    found[f"{B} rows, row {own}"] = [np.asarray(x[own]) for x in verdict]
            run.say_classes(f"rule {rule}", found)

        run.attempt(f"rule {rule}", one)


def delta_nets(run: Run, tokens):
    """A state after 73 tokens and 12 more: decoded in verify passes of T, a row of B, or read by prefill at once or cut."""
    del tokens
    heads, T_most, N, B = delta_net.QWEN, QUERIES[-1], 12, 2
    start = init_state(B, heads, delta_net.W, T_most, jnp.bfloat16)
    prompt = delta_net.tokens_of(heads, B, CHUNK + 9, 1)
    texts = delta_net.tokens_of(heads, B, N, 2)
    read = prefill_pass(start, delta_net.prefill_rows(B, CHUNK + 9, True), *prompt)[1]
    outputs, states, among_others = {}, {}, {}
    for T in QUERIES:

        def one(T=T):
            o, state = delta_net.decode(verify_pass, read, texts, T)
            outputs[f"T = {T}"], states[f"T = {T}"] = np.asarray(o), np.asarray(state.S)

        run.attempt(f"delta net, verify T = {T}", one)
    both = [jnp.concatenate(pair, axis=1) for pair in zip(prompt, texts, strict=True)]
    whole = both[0].shape[1]

    def cut(*sizes: int):
        state, first, out = start, 0, []
        for size in sizes:
            rows = delta_net.prefill_rows(B, size, first == 0)
            o, state = prefill_pass(state, rows, *(x[:, first : first + size] for x in both))
            out.append(o)
            first += size
        return np.asarray(jnp.concatenate(out, axis=1))[:, -N:], np.asarray(state.S)

    cuts = {"prefill": (whole,), "prefill cut at 64": (CHUNK, whole - CHUNK), "prefill cut at 73": (whole - N, N)}
    for name, sizes in cuts.items():

        def two(name=name, sizes=sizes):
            outputs[name], states[name] = cut(*sizes)

        run.attempt(f"delta net, {name}", two)
    for name, (rows_of_pass, T) in {"2 x 64": (2, CHUNK), "16 x 64": (16, CHUNK), "2 x 512": (2, 512)}.items():

        def among(rows_of_pass=rows_of_pass, T=T, name=name):
            """The first row beside others, in segments of T of which only the first tokens are valid."""
            state, first, out = init_state(rows_of_pass, heads, delta_net.W, T_most, jnp.bfloat16), 0, []
            others = delta_net.tokens_of(heads, rows_of_pass, T, 5)
            while first < whole:
                size = min(T, whole - first)
                numbers = [x.at[0, :size].set(y[0, first : first + size]) for x, y in zip(others, both, strict=True)]
                rows = delta_net.prefill_rows(rows_of_pass, T, first == 0)
                rows = dataclasses.replace(rows, tokens=rows.tokens.at[0].set(size))
                o, state = prefill_pass(state, rows, *numbers)
                out.append(o[:1, :size])
                first += size
            among_others[name] = np.asarray(jnp.concatenate(out, axis=1))[0, -N:], np.asarray(state.S[0])

        run.attempt(f"delta net, prefill {name}", among)
    among_others["prefill"] = outputs["prefill"][0], states["prefill"][0]
    run.say_classes("delta net, prefill among others", among_others)
    run.say_classes("delta net, outputs of 12 tokens", outputs)
    run.say_classes("delta net, states", states)
    rows_of = {}
    for count in ROWS:

        def three(count=count):
            numbers = [jnp.concatenate([x[:1]] * count) for x in texts]
            state = dataclasses.replace(
                init_state(count, heads, delta_net.W, T_most, jnp.bfloat16), S=jnp.concatenate([read.S[:1]] * count)
            )
            rows = delta_net.verify_rows(count, 5, 0, 0)
            o, after = verify_pass(state, rows, *(x[:, :5] for x in numbers))
            rows_of[f"{count} rows"] = [np.asarray(o[-1]), np.asarray(after.u[1, -1, :5])]

        run.attempt(f"delta net, {count} rows", three)
    run.say_classes("delta net, rows", rows_of)


def small_ops(run: Run, tokens):
    """Each of them by itself; of gated delta nets ``benchmarks.kernels.delta_net`` has a small run."""
    counts = [M for M in tokens if M != 40 and M != 512]
    run.attempt("ops of tokens", of_tokens, run, counts)
    for function in (logprobs, sampled, rules) if run.small else (delta_nets, logprobs, sampled, rules):
        run.attempt(function.__name__, function, run, counts)
