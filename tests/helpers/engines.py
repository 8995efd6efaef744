"""Tiny models, engines around them, and the plain loop that greedy output is compared with.

``engine`` caches: tests share compiled engines, which are idle between runs.
"""

import contextlib
import dataclasses
import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny import LLAMA

from jspec.config import DeltaNets, EngineConfig, Latent, ModelConfig, Shards, Speculation
from jspec.config.sharding import AXIS
from jspec.drafting.draft_model import DraftModel
from jspec.drafting.lookup import with_lookup
from jspec.drafting.ngram import NGram
from jspec.drafting.plain import NoDrafts
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.loop import Loop
from jspec.engine.mailbox import ThreadCall
from jspec.engine.request import ActiveRequest, Request
from jspec.engine.runner.shard_map import ProgramSharding
from jspec.engine.runner.state import AdmitInputs, DecodeState, RequestArrays, admit, of_rows
from jspec.llm import LLM
from jspec.models import Decoder, build, causal_logits, flat_params
from jspec.models.cache_pools import KVRounding
from jspec.models.flatten import copied, flatten
from jspec.models.quantization import quantize
from jspec.models.sharding import build_shards, mesh_of
from jspec.models.w8a8 import with_quantized_activations
from jspec.outputs import Delta
from jspec.sampling.params import SamplingParams

V, MAX_LEN = LLAMA.vocab_size, 40
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_LEN)
# One layer with a window longer than any K, one without, one with a window shorter than most.
TARGET = dataclasses.replace(LLAMA, windows=(12, None, 3))
DRAFT = dataclasses.replace(TARGET, num_layers=1, windows=(12,))
LATENTS = dataclasses.replace(TARGET, num_kv_heads=4, head_dim=12, windows=(), latent=Latent(16, 4, 8, 10))
OF_HYBRIDS = {  # with keys and values of different sizes
    "architecture": "Qwen3_5ForCausalLM",
    "windows": (),
    "norm": "rms_offset",
    "qk_norm": True,
    "attention_gate": True,
    "delta_nets": DeltaNets(2, 4, 6, 10, taps=3, layers=(True, False, True)),
}
HYBRID = dataclasses.replace(
    TARGET, **OF_HYBRIDS | {"delta_nets": DeltaNets(2, 4, 4, 4, taps=3, layers=(True, False, True))}
)
HYBRID_DRAFT = dataclasses.replace(
    HYBRID, num_layers=2, windows=(), delta_nets=DeltaNets(2, 4, 4, 4, taps=3, layers=(True, False))
)
# Pages that do not divide max_len, prompts read in several chunks, and fewer rows than most tests have prompts.
CONFIG = EngineConfig(max_batch=3, max_len=MAX_LEN, page_size=7, prefill_chunk=8, rounds=4)


@functools.cache
def target() -> Decoder:
    """Its upper layers add little, so that its lowest layer alone, ``draft()``, often agrees with it."""
    params = flat_params(Decoder(TARGET, rngs=nnx.Rngs(0)))
    upper = [name for name in params if name.startswith(("layers.1.", "layers.2."))]
    quiet = {name: 0.4 * params[name] for name in upper if name.endswith(("out.weight", "down.weight"))}
    return build(TARGET, params | quiet)


@functools.cache
def draft() -> Decoder:
    params = flat_params(target())
    return build(DRAFT, {name: params[name] for name in flat_params(Decoder(DRAFT, rngs=nnx.Rngs(0)))})


@functools.cache
def latents() -> Decoder:
    """A target whose attention is over latents."""
    return Decoder(LATENTS, rngs=nnx.Rngs(5))


@functools.cache
def hybrid() -> Decoder:
    """A target with gated delta nets in two layers of three, whose states hold on to what they read."""
    params = flat_params(Decoder(HYBRID, rngs=nnx.Rngs(6)))
    slow = {name: leaf - 3.0 for name, leaf in params.items() if name.endswith("delta_net.decay")}
    return build(HYBRID, params | slow)


@functools.cache
def hybrid_draft() -> Decoder:
    """A draft model with a gated delta net: the first two layers of ``hybrid()``."""
    params = flat_params(hybrid())
    return build(HYBRID_DRAFT, {name: params[name] for name in flat_params(Decoder(HYBRID_DRAFT, rngs=nnx.Rngs(0)))})


@functools.cache
def in_shards(model: Decoder, count: int, **more) -> Decoder:
    """The same model on so many devices, each with a shard of it; ``more`` are fields of ``Shards``."""
    params = {name: np.asarray(leaf) for name, leaf in flat_params(model).items()}
    return build_shards(model.config, params, "float32", Shards(count, **more), mesh_of(count, AXIS))


@functools.cache
def in_bytes(model: Decoder, kind: str) -> Decoder:
    """``model``, which rounds keys and values, or latents, to eight bits when it caches them: of the ``kind`` ``fp8`` with
    scales of heads that differ, of ``fp8_per_token_head`` with those of tokens."""
    G, rounds = model.config.num_kv_heads, copied(model)
    scales = (tuple(0.01 * (1 + g) for g in range(G)), tuple(0.03 / (1 + g) for g in range(G)))
    scales = scales if model.config.latent is None else ((0.013,), None)
    of_layer = KVRounding(*scales) if kind == "fp8" else KVRounding()
    rounds.kv_rounding = (of_layer,) * model.config.num_layers
    return rounds


@functools.cache
def in_eight_bits(model: Decoder, kind: str, rounds: bool = True) -> Decoder:
    """``model`` with weights of the ``kind`` ``int8`` or ``fp8``, and if ``rounds`` with inputs of its maps rounded, too. A
    number of each norm is far larger than the others, so that rounding changes much."""
    config, params = dataclasses.replace(model.config, quantization=kind), dict(flat_params(model))
    for name in (name for name in params if name.endswith(("attention_norm.weight", "mlp_norm.weight"))):
        params[name] = params[name].at[1].mul(24.0)
    for name, stored in config.stored_params().items():
        params[name], params[stored.names["scale"]] = (
            jnp.asarray(part) for part in quantize(np.asarray(params[name]), kind)
        )
    built = build(config, params)
    return with_quantized_activations(built, kind) if rounds else built


def poisoned(model: Decoder, token: int) -> Decoder:
    """``model``, whose hidden states are NaN from ``token`` on."""
    params = flat_params(model)
    return build(model.config, params | {"embedding": params["embedding"].at[token].set(jnp.nan)})


@functools.cache
def rounded(model: Decoder) -> Decoder:
    """Nearly ``model``: its weights to three significant bits."""
    return build(model.config, {name: _rounded(leaf) for name, leaf in flat_params(model).items()})


def _rounded(leaf):
    mantissa, exponent = jnp.frexp(leaf)
    return jnp.ldexp(jnp.round(8 * mantissa) / 8, exponent)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Bigram:
    """A language model that is a table, ``[V, V]``: logits after each token. It keeps no cache."""

    table: jax.Array
    config: ModelConfig = dataclasses.field(metadata={"static": True})

    def cache_shape(self):
        return ()

    def __call__(self, tokens, positions, cache, view):
        return self.table[tokens], cache

    def logits(self, hidden):
        return hidden


ARMED = {"when it runs": False, "when it is traced": False}  # what makes a ``Fragile`` fail


def _fail_if_armed(_) -> np.ndarray:
    if ARMED["when it runs"]:
        raise OSError("a broken device")
    return np.zeros((), np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Fragile(Bigram):
    """A table that fails on the device, or while it is compiled, when it is told to."""

    def __call__(self, tokens, positions, cache, view):
        if ARMED["when it is traced"]:
            raise TypeError("cannot be traced")
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return self.table[tokens] + jax.pure_callback(_fail_if_armed, shape, tokens), cache


def bigram(table, eos_token_ids: tuple[int, ...] = (), max_position: int = 64) -> Bigram:
    table = jnp.asarray(table, jnp.float32)
    config = dataclasses.replace(
        TARGET, vocab_size=table.shape[1], eos_token_ids=eos_token_ids, max_position=max_position
    )
    return Bigram(table, config)


def successor_table(wrong: Sequence[int] = ()) -> np.ndarray:
    """Token t is followed by t + 1 mod V, and by t + 2 after the tokens in ``wrong``; nothing else is likely."""
    step = np.where(np.isin(np.arange(V), wrong), 2, 1)
    return 40.0 * np.eye(V, dtype=np.float32)[(np.arange(V) + step) % V]


def drafting(method: str | None, speculation: Speculation, vocab_size: int = V) -> Callable[..., Any]:
    """``make_drafter`` of an engine."""

    def make(_, model, num_draft_tokens=None):
        how = speculation if num_draft_tokens is None else speculation.fixed(num_draft_tokens)
        if method is None:
            return NoDrafts()
        if method == "ngram":
            return NGram(how.most_draft_tokens, *how.ngram_lengths)
        return with_lookup(DraftModel(model, vocab_size, how), how)

    return make


_shared: list[Callable[[], None]] = []  # what empties each cache


def shared(make: Callable[..., Any]) -> Callable[..., Any]:
    """``functools.cache`` for a function that makes engines, or what holds some; ``drop_shared`` empties it."""
    cached = functools.cache(make)
    _shared.append(cached.cache_clear)
    return cached


def drop_shared():
    """Let go of all shared engines, whose compiled programs keep memory mapped as long as they live."""
    for empty in _shared:
        empty()


@shared
def engine(method: str | None, K: int = 4, verify: Any = "rejection", models=None, config=CONFIG, **speculation):
    """An engine over ``models``, (target, draft), by default those above."""
    settings = Speculation(num_draft_tokens=K, verify=verify, **speculation)
    of, by = models or (target(), draft())
    by = by if method == "draft_model" else None
    return Engine(of, by, Decoding(drafting(method, settings, of.config.vocab_size), verify), config)


def entered(state: DecodeState, row: int, prompt, request: RequestArrays) -> DecodeState:
    """The state after a request has entered a row; ``prompt`` is padded to S tokens."""
    one = jax.tree.map(lambda x: jnp.asarray(x)[None], request)
    entry = AdmitInputs(jnp.array([row]), jnp.asarray(prompt)[None], one)
    return dataclasses.replace(state, **admit(of_rows(state), entry))


EOS, LETTERS = 26, "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A tokenizer: 26 letters, an end of text that is not printed, and two tokens without text."""

    def encode(self, text, *, add_special_tokens=True):
        del add_special_tokens
        return [LETTERS.index(letter) for letter in text if letter != " "]

    def decode(self, token_ids, *, skip_special_tokens):
        printed = LETTERS if skip_special_tokens else LETTERS + "."
        return "".join(printed[token : token + 1] for token in token_ids)

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(LETTERS)}


def table_llm(target: Bigram, draft: Bigram | None = None, tokenizer=None, K: int = 4, **speculation) -> LLM:
    """A model of tables, which compiles in a moment."""
    settings = Speculation(num_draft_tokens=K, **speculation)
    method = None if draft is None else "draft_model"
    config = dataclasses.replace(CONFIG, rounds=8)
    return LLM(target, draft, drafting(method, settings), method, tokenizer, settings, config)


def ragged_prompts(lengths: Sequence[int] = (1, 2, 5, 8, 9, 17, 23, 38), seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(V, size=n).tolist() for n in lengths]


class FindStop:
    """A watcher that asks a function of all tokens so far, and of how many it was asked about before."""

    def __init__(self, find: Callable[[list[int], int], int | None]):
        self._find, self._tokens = find, []

    def add(self, tokens: Sequence[int]) -> int | None:
        before = len(self._tokens)
        self._tokens += tokens
        return self._find(self._tokens, before)


def requests_of(prompts, params=GREEDY, keys=None, find_stop=None, **fields) -> list[Request]:
    """Requests for the prompts, with one SamplingParams or one each, and keys or seeds 0.. ."""
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    keys = [key_of(seed) for seed in range(len(prompts))] if keys is None else keys
    columns = enumerate(zip(prompts, params, keys, strict=True))
    return [Request(i, *column, watcher=find_stop and FindStop(find_stop), **fields) for i, column in columns]


def decode(engine: Engine, prompts, params=GREEDY, keys=None, find_stop=None, **fields) -> list[ActiveRequest]:
    """Run the requests of ``requests_of``; in the order of the prompts."""
    ended = engine.run(requests_of(prompts, params, keys, find_stop, **fields))
    return sorted(ended, key=lambda active: active.request.index)


def drained(engine: Engine) -> dict[int, list[Delta]]:
    """All deltas until nothing is left, by request."""
    found: dict[int, list[Delta]] = {}
    while engine.unfinished:
        for delta in engine.step():
            found.setdefault(delta.id, []).append(delta)
    assert engine.metrics().pages_used == 0
    return found


@contextlib.contextmanager
def paused(engine: Engine) -> Iterator[Loop]:
    """The engine's loop, which its thread leaves alone meanwhile."""
    pausing, go_on = queue.SimpleQueue(), queue.SimpleQueue()

    def pause():
        pausing.put(None)
        go_on.get()

    engine.handle.running().mailbox.post(ThreadCall(pause, idle=False))
    pausing.get()
    try:
        yield engine.loop
    finally:
        go_on.put(None)


def assert_nothing_is_held(engine: Engine):
    """When the engine's thread has obeyed all commands, no request has a row or a page, or waits."""
    with paused(engine) as loop:
        scheduler = loop.scheduler
        assert not scheduler.unfinished
        assert scheduler.rows == [None] * engine.config.num_rows
        assert scheduler.pages.used == scheduler.pages_swapped == 0


def key_of(seed: int) -> np.ndarray:
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


def tokens_of(ended: Sequence[ActiveRequest]) -> list[list[int]]:
    return [active.tokens for active in ended]


@functools.cache
def causal(model) -> Callable[[Any], jax.Array]:
    """tokens int32 ``[B, S]`` -> logits ``[B, S, V]``: one pass, nothing cached."""
    leaves, merge = flatten(model)

    @jax.jit
    def forward(leaves, tokens):
        return causal_logits(merge(leaves), tokens)

    return functools.partial(forward, leaves)


@functools.cache
def _plain_greedy(model, prompts: tuple[tuple[int, ...], ...]) -> np.ndarray:
    forward = causal(model)
    tokens = np.zeros((len(prompts), MAX_LEN), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    length = np.array([len(prompt) for prompt in prompts])
    for end in range(min(length), MAX_LEN):
        following = np.argmax(np.asarray(forward(jnp.asarray(tokens)))[:, end - 1], axis=-1)
        tokens[:, end] = np.where(length <= end, following, tokens[:, end])
    return tokens


def plain_greedy(model, prompts) -> list[list[int]]:
    """What the model alone continues each prompt with, up to MAX_LEN, without a cache or an engine."""
    tokens = _plain_greedy(model, tuple(map(tuple, prompts)))
    return [row[len(prompt) :].tolist() for row, prompt in zip(tokens, prompts, strict=True)]


def spread_logits(model, tokens) -> np.ndarray:
    """The logits of a model in shards."""
    leaves, merge = flatten(model)
    spread = ProgramSharding.of(model, None)
    assert spread is not None
    return np.asarray(
        jax.jit(spread.forward(lambda leaves, tokens: causal_logits(merge(leaves), tokens)))(leaves, tokens)
    )


def error_in_shards(model: Decoder, tokens=None, count: int = 2, **more) -> float:
    """The largest difference of the logits of a model in shards from its own, of the largest logit.

    Args:
      tokens: int32 ``[B, S]``. None means random ones.
      count, more: as for ``in_shards``.
    """
    if tokens is None:
        tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=(2, 12)).astype(np.int32)
    wanted = np.asarray(causal(model)(tokens))
    return np.abs(spread_logits(in_shards(model, count, **more), tokens) - wanted).max() / np.abs(wanted).max()
