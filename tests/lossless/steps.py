"""Whole decode steps of thousands of rows at once, played until every text has all of its tokens.

A batch mixes several kinds of requests, and the pages of a row are scattered over the pool."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import EngineConfig, Speculation
from jspec.drafting.corpus import END, NGramCorpus
from jspec.drafting.draft_model import DraftModel
from jspec.drafting.lookup import WithLookup
from jspec.drafting.ngram import NGram
from jspec.drafting.plain import NoDrafts
from jspec.engine.round_log import RoundLog
from jspec.engine.runner.state import LIVE, DecodeState, RequestArrays, init_state
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import PrefillInputs
from jspec.sampling.params import SamplingParams
from jspec.sampling.processors import Processors
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES
from lossless import distributions
from lossless.rounds import as_warp, deal
from lossless.statistics import count_pairs
from lossless.table_model import TableConfig, TableModel, V, stored

K, S, N = 2, 9, 6  # drafts of a round, slots of a row, new tokens of a text
CONFIG = EngineConfig(max_batch=4_000, max_len=S, page_size=4)
NGRAM, BESIDE = (1, 2), (2, 3)  # shortest and longest suffix looked up, alone and beside a drafter
CORPUS = ((1, 3), (0, 1, 2), (3, 1, 1, 0), (2, 2, 3, 0, 2))  # texts looked up in, some of them shorter than K
THREADS = 2  # batches in flight
ARGMAX_BELOW = 0.75  # where ``auto`` changes over: between the temperatures of ASKS


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled step is made of: a rule, a drafter, and the source of noise; the slots that a text may have; how many
    tokens the target reads in a round of the whole batch, None for every draft; whether prompt lookup drafts beside the
    draft model; and of which tokens the draft model has logits, in their order, None for the first ``draft_vocab``."""

    verify: str
    method: str = "draft_model"
    draft_sampling: str = "sample"
    draft_temperature: float | None = None
    draft_positions: int = S
    draft_vocab: int = V
    noise: Callable[..., RoundNoise] = RoundNoise
    slots: int = S
    budget: int | None = None
    lookup: bool = False
    draft_tokens: tuple[int, ...] | None = None

    @property
    def rule(self):
        return RULES[self.verify]

    def over_devices(self, function, gives_state: bool):
        """``(target, draft, state, *others)`` on the devices of the program, of which there is one."""
        del gives_state
        return function

    def drafter(self, target, model, drafts: int = K):
        """The drafter for ``target`` that proposes with ``model``."""
        speculation = Speculation(drafts, self.verify, self.draft_sampling, ARGMAX_BELOW, self.draft_temperature)
        if self.method == "draft_model":
            drafter = DraftModel(model, V, speculation)
            return WithLookup(drafter, NGram(drafts, *BESIDE)) if self.lookup else drafter
        if self.method == "ngram_corpus":
            return NGramCorpus(drafts, *NGRAM, corpus=jnp.array([token for text in CORPUS for token in (*text, END)]))
        return NGram(drafts, *NGRAM) if self.method == "ngram" else NoDrafts()

    def models(self, tables) -> tuple[TableModel, TableModel]:
        target, config = TableModel(stored(tables[0]), TableConfig(self.slots)), TableConfig(self.draft_positions)
        if self.draft_tokens is None:
            return target, TableModel(stored(tables[1][:, : self.draft_vocab]), config)
        tokens = jnp.array(self.draft_tokens, jnp.int32)
        ids = jnp.full(V, -1, jnp.int32).at[tokens].set(jnp.arange(len(tokens), dtype=jnp.int32))
        return target, TableModel(stored(tables[1][:, self.draft_tokens]), config, ids, tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SameNoise(RoundNoise):
    """The noise of a program that is not taken for another one, whose trace JAX would reuse where a fault is put in."""


NO_OPTIONS = distributions.Options()


@dataclasses.dataclass(frozen=True)
class Ask:
    """One kind of request in a mixed batch; ``share`` says how many rows of each deal (``rounds.deal``) make it."""

    prompt: distributions.History
    warp: distributions.Warp
    stop_tokens: distributions.History = ()
    min_tokens: int = 0
    share: int = 8
    options: distributions.Options = NO_OPTIONS
    max_drafts: int | None = None  # of a round

    @property
    def params(self) -> SamplingParams:
        """What a user would ask for. Bad words are text there, and their tokens are not taken from it."""
        options = {field.name: getattr(self.options, field.name) for field in dataclasses.fields(self.options)}
        del options["grammar"]
        return SamplingParams(
            **dataclasses.asdict(self.warp),
            max_tokens=N,
            min_tokens=self.min_tokens,
            max_drafts=self.max_drafts,
            **options | {"logit_bias": dict(self.options.logit_bias), "bad_words": ["?"] * len(self.options.bad_words)},
        )


ASKS = (
    Ask((1,), distributions.Warp()),
    Ask((2, 0, 1), distributions.Warp(1.3, top_k=3)),  # to the last slot of the cache
    Ask((3, 1), distributions.Warp(0.6, top_p=0.9, min_p=0.05), stop_tokens=(2,), min_tokens=2),
    Ask((0, 2), distributions.Warp(0.0), share=1),
)


@dataclasses.dataclass(frozen=True)
class Tally:
    """What happened to all requests of one kind.

    Attributes:
      texts: int ``[V + 1] * N``, how often each completion came; V stands for what follows a stop token.
      rounds: int ``[(V + 1) ** N, K + 1, K + 1]``, how often a round began after a completion so far (V stands for the
        tokens to come), had so many drafts and accepted so many.
      recovered: how many texts had at least two rounds after a rejection.
    """

    texts: np.ndarray
    rounds: np.ndarray
    recovered: int


def play(program: Program, tables, samples: int, seed: int, asks: Sequence[Ask] = ASKS) -> list[Tally]:
    """Play at least ``samples`` texts of every kind of request that has a full share."""
    which, full = deal(asks, CONFIG.max_batch)
    state = prefilled(program, [asks[i] for i in which], tables)

    def batch(i: int):
        key_data = jax.random.key_data(jax.random.split(jax.random.fold_in(jax.random.key(seed), i), len(which)))
        return jax.device_get(_decode(program, *program.models(tables), state, key_data))

    batches = -(-samples // full)
    first = batch(0)  # compiles, before there are threads: see rounds.play
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        columns = zip(first, *pool.map(batch, range(1, batches)), strict=True)
    tokens, length, count, drafted, accepted = (np.concatenate(column, axis=-1).T for column in columns)
    return tally(asks, np.tile(which, batches), tokens, length, count, drafted, accepted)


def tally(asks: Sequence[Ask], which, tokens, length, count, drafted, accepted) -> list[Tally]:
    """One tally for each of ``asks``, from n rows.

    Args:
      asks: the kinds of requests.
      which: int ``[n]``, the kind that each row played.
      tokens: ``[n, S]``, the text of each row, prompt included.
      length: ``[n]``.
      count, drafted, accepted: ``[n, rounds]``, of every round of a row. More than K drafts, of a tree, count as K.
    """
    drafted = np.minimum(drafted, K)
    start = np.array([len(ask.prompt) for ask in asks])[which]
    tokens = np.take_along_axis(tokens, np.minimum(start[:, None] + np.arange(N), tokens.shape[1] - 1), axis=1)
    texts = count_pairs(which, _code(tokens, length - start), (len(asks), (V + 1) ** N))
    done = np.cumsum(count, axis=1) - count
    rounds = np.zeros((len(asks), (V + 1) ** N * (K + 1) ** 2), int)
    for i in range(N):
        live = drafted[:, i] >= 0
        what = (_code(tokens, done[:, i]) * (K + 1) + drafted[:, i]) * (K + 1) + accepted[:, i]
        rounds += count_pairs(which[live], what[live], rounds.shape)
    rejected_before = np.cumsum(accepted < drafted, axis=1)[:, :-2] > 0
    recovered = np.any(rejected_before & (drafted[:, 2:] >= 0), axis=1)
    return [
        Tally(texts[i].reshape((V + 1,) * N), rounds[i].reshape(-1, K + 1, K + 1), int(recovered[which == i].sum()))
        for i in range(len(asks))
    ]


def prefilled(program: Program, asks: Sequence[Ask], tables) -> DecodeState:
    """The state of a full batch after ``DecodeStep.prefill`` has read every prompt into its row's scattered pages."""
    B = len(asks)
    column = lambda values, dtype: jnp.array(list(values), dtype)  # noqa: E731
    pages = np.random.default_rng(1).permutation(np.arange(1, CONFIG.pool_pages, dtype=np.int32))
    request = RequestArrays(
        length=column((len(a.prompt) for a in asks), jnp.int32),
        limit=column((len(a.prompt) + N for a in asks), jnp.int32),
        min_length=column((len(a.prompt) + a.min_tokens for a in asks), jnp.int32),
        stop_tokens=column(((*a.stop_tokens, -1, -1)[:2] for a in asks), jnp.int32),
        key_data=jnp.zeros((B, 2), jnp.uint32),
        table=jnp.asarray(pages.reshape(B, CONFIG.pages_per_row)),
        max_drafts=column((K if a.max_drafts is None else a.max_drafts for a in asks), jnp.int32),
        warp=as_warp([a.warp for a in asks]),
        processors=_processors(asks),
        chain=column((a.options != NO_OPTIONS for a in asks), jnp.int32),
    )
    tokens = column(((*a.prompt, *[0] * (S - len(a.prompt))) for a in asks), jnp.int32)
    return _prefill(program, *program.models(tables), tokens, request)


def _processors(asks: Sequence[Ask]) -> Processors | None:
    """Those of every row, without the room for more than any of them uses."""
    if all(ask.options == NO_OPTIONS for ask in asks):
        return None

    def of(ask: Ask) -> Processors:
        whole = Processors.of(ask.params, len(ask.prompt), V, ask.options.bad_words)
        small = {"biased": whole.biased[:2], "bias": whole.bias[:2], "bad_words": whole.bad_words[:3, -3:]}
        return dataclasses.replace(whole, **small)

    known = {ask: of(ask) for ask in set(asks)}
    return jax.tree.map(lambda *values: jnp.asarray(np.stack(values)), *(known[ask] for ask in asks))


def _step(program: Program, target, draft) -> DecodeStep:
    drafter = program.drafter(target, draft)
    tree = getattr(program, "tree", None)
    width = drafter.num_draft_tokens + 1 if tree is None else tree.nodes
    return DecodeStep(target, drafter, program.rule, width, program.noise, budget=program.budget)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(program: Program, target, draft, tokens, request: RequestArrays) -> DecodeState:
    step = _step(program, target, draft)
    state = init_state(CONFIG, target, step.drafter, jnp.float32, estimates=program.budget is not None)
    live = jnp.full_like(state.outcome, LIVE)
    state = dataclasses.replace(state, tokens=tokens, outcome=live, request=request, previous=request.length - 1)

    def read_all(target, draft, state):
        step = _step(program, target, draft)

        def read(state, request):
            row, prompt, length, table = request
            first, count = jnp.zeros(1, jnp.int32), length[None] - 1
            inputs = PrefillInputs(row[None], prompt[None], first, count, table[None], request_row=row[None])
            return step.prefill(state, inputs), None

        request, following = state.request, jnp.pad(state.tokens, ((0, 0), (0, 1)))
        rows = jnp.arange(len(state.tokens), dtype=jnp.int32)
        return jax.lax.scan(read, state, (rows, following, request.length, request.table))[0]

    return program.over_devices(read_all, gives_state=True)(target, draft, state)


@functools.partial(jax.jit, static_argnums=0)
def _decode(program: Program, target, draft, state: DecodeState, key_data):
    """Tokens int32 ``[S, B]``, length int32 ``[B]``, and of N rounds count, drafted and accepted, int32 ``[N, B]``."""
    state = dataclasses.replace(state, request=dataclasses.replace(state.request, key_data=key_data))

    def decode(target, draft, state):
        state, logs = _step(program, target, draft).decode(state, N)
        log = RoundLog.unpacked(logs)
        return state.tokens.T, state.request.length, log.count, log.drafted, log.accepted

    return program.over_devices(decode, gives_state=False)(target, draft, state)


def _code(tokens, count) -> np.ndarray:
    """The first ``count`` of N tokens as one number, ``[B, N], [B] -> [B]``."""
    symbols = np.where(np.arange(N) < count[:, None], tokens, V)
    return symbols @ (V + 1) ** np.arange(N)[::-1]


def decoded(code: int) -> distributions.History:
    """The tokens behind ``_code``."""
    symbols = np.unravel_index(code, (V + 1,) * N)
    return tuple(int(s) for s in symbols if s < V)
