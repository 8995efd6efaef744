"""Many requests of every kind, which come, are preempted, given up and end, and the state of the engine after them."""

import contextlib
import dataclasses
import gc
import itertools
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
from engines import EOS, LETTERS, MAX_LEN, Letters, V, draft, drafting, drained, paused, plain_greedy, target

import jspec
from jspec.commands.demo import FAMILY
from jspec.config import EngineConfig, Speculation
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest
from jspec.outputs import Delta, Result
from jspec.sampling.params import SamplingParams

K = 4
WARM = 10  # requests before anything is measured
BUSY = 12  # most requests that are unfinished at a time; the engines have fewer rows
ALONE = 40  # seeded requests that are asked again, alone


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request of the soak."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""

    @staticmethod
    def random(rng: np.random.Generator, prompt: list[int], strings: str, tokens: list[int], most: int) -> "Asked":
        """Ask for up to ``most`` tokens after a prompt, in any way; some of ``strings`` and ``tokens`` may end the text."""

        def one_of(*choices):
            return choices[rng.integers(len(choices))]

        max_tokens = int(rng.integers(1, most + 1))
        params = SamplingParams(
            temperature=one_of(0, 0, 0.6, 1.0, 1.5),
            top_k=one_of(0, 0, 5, 20),
            top_p=one_of(1.0, 1.0, 0.9, 0.5),
            min_p=one_of(0.0, 0.0, 0.1),
            seed=int(rng.integers(2**63)),
            max_tokens=max_tokens,
            min_tokens=int(rng.integers(max_tokens + 1)) if rng.random() < 0.2 else 0,
            stop=[one_of(*strings) for _ in range(one_of(0, 0, 0, 2))],
            stop_token_ids=rng.choice(tokens, size=one_of(0, 0, 1, 3)).tolist(),
            ignore_eos=one_of(True, False),
            repetition_penalty=one_of(1.0, 1.0, 1.0, 1.4),
            presence_penalty=one_of(0.0, 0.0, 0.0, 0.7),
            logit_bias=one_of(None, None, None, {int(rng.choice(tokens)): 1.5}),
            logprobs=one_of(None, None, None, 2),
            prompt_logprobs=one_of(None, None, None, None, None, 1),
        )
        return Asked(prompt, params, one_of(-1, 0, 0, 1), one_of("", "", "", "other"))

    def add(self, engine: Engine) -> int:
        """Let an engine have the request; returns its id there."""
        return engine.add(self.prompt, self.params, priority=self.priority, salt=self.salt)


@dataclasses.dataclass(frozen=True)
class Ended:
    """What of a result is worth keeping."""

    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    text: str | None

    @staticmethod
    def of(result: Result) -> "Ended":
        text = None if result.text is None else result.text.encode().decode()  # a string of this test, and not of jspec
        return Ended(tuple(result.token_ids), result.finish_reason, result.stop_reason, text)


class Soak:
    """Sends requests to an engine, and follows each of them to its one end.

    Args:
      engine: an idle engine.
      asked: the requests.
      seed: of when they come, and which are given up.

    Attributes:
      ended: what became of each request, in the order of ``asked``.
    """

    def __init__(self, engine: Engine, asked: list[Asked], seed: int = 0):
        self.ended: dict[int, Ended] = {}
        self._engine, self._asked, self._sent = engine, asked, 0
        self._rng = np.random.default_rng(seed)
        self._deltas: dict[int, list[Delta]] = {}  # of requests that have not ended, by id
        self._places: dict[int, int] = {}  # of the same in ``asked``

    def run(self, count: int):
        """Send so many requests more, and return when all have ended."""
        rng, engine, last = self._rng, self._engine, self._sent + count
        while engine.unfinished or self._sent < last:
            for _ in range(min(rng.poisson(1.5), last - self._sent, BUSY - len(self._deltas))):
                id = self._asked[self._sent].add(engine)
                assert id not in self._deltas
                self._places[id], self._deltas[id] = self._sent, []
                self._sent += 1
            if self._deltas and rng.random() < 0.05:
                engine.abort(int(rng.choice(list(self._deltas))))
            for delta in engine.step():
                self._follow(delta)
        assert not self._deltas

    def _follow(self, delta: Delta):
        deltas, result = self._deltas[delta.id], delta.result  # a delta behind the last one has no place here
        deltas.append(delta)
        if not delta.finished:
            assert delta.token_ids
            assert result is None
            return
        assert result is not None
        assert [token for one in deltas for token in one.token_ids] == result.token_ids
        assert "".join(one.text or "" for one in deltas) == result.text
        assert len(result.accepted) == len(result.token_ids)
        assert [len(delta.accepted) for delta in deltas] == [len(delta.token_ids) for delta in deltas]
        if result.prompt_logprobs is not None:
            assert [next(iter(one)) for one in result.prompt_logprobs[1:]] == result.prompt_token_ids[1:]
        if result.logprobs is not None:
            assert [next(iter(one)) for one in result.logprobs] == result.token_ids
            assert [one for delta in deltas for one in delta.logprobs or ()] == result.logprobs
        assert result.prompt_token_ids == self._asked[self._places[delta.id]].prompt
        del self._deltas[delta.id]
        self.ended[self._places.pop(delta.id)] = Ended.of(result)


def check_idle(engine: Engine):
    """Nothing is left of requests that have ended, but the pages that the prefix cache keeps."""
    with paused(engine):  # what the last step has done is known by then
        pages, scheduler, metrics = engine.scheduler.pages, engine.scheduler, engine.metrics()
    assert metrics.pages_used == metrics.pages_swapped == metrics.num_running == metrics.num_waiting == 0
    assert pages.free + pages.cached == pages.total
    assert not [*scheduler.waiting, *scheduler.swapped, *scheduler.ending, *filter(None, scheduler.rows)]
    assert len(pages._index._links) == len(pages._index._pages) == pages.cached
    assert not [*pages._holders, *pages._outdated]
    assert engine._added.outputs.empty()
    assert not [
        *engine._added.unfinished,
        *engine.handle._core._subscribers,
        *engine.loop.progress,
        *engine.loop.meter._counted,
    ]
    assert len(engine.loop._dispatched) <= 1
    gc.collect()
    kept = sum(type(thing) is ActiveRequest and thing.subscriber is engine._added for thing in gc.get_objects())
    assert kept <= engine.config.max_batch, "more requests are kept than the last call decoded, which is not read yet"


@contextlib.contextmanager
def memory(of_process: bool) -> Iterator[Callable[[], int]]:
    """How many bytes are in use: of the process, or of those that Python code of jspec has allocated meanwhile."""
    if of_process:
        yield lambda: psutil.Process().memory_info().rss
        return
    tracemalloc.start()
    inside = [tracemalloc.Filter(True, "*/jspec/*")]
    yield lambda: sum(each.size for each in tracemalloc.take_snapshot().filter_traces(inside).statistics("filename"))
    tracemalloc.stop()


def soak(engine: Engine, asked: list[Asked], compiled: list[str], slack: int, of_process: bool) -> list[Ended]:
    """Serve requests, and check that the engine is afterwards as it was when half of them had ended.

    Args:
      engine: an idle engine.
      asked: the requests, ``WARM`` of which come first.
      compiled: grows whenever XLA compiles anything.
      slack: by how many bytes memory may grow during the second half.
      of_process: whether that is the memory of the process.

    Returns:
      what became of each request.
    """
    count, sending, start = len(asked) - WARM, Soak(engine, asked), engine.metrics()
    engine.warmup()
    sending.run(WARM)
    before, programs = len(compiled), engine.num_compilations
    sending.run(count // 2)
    check_idle(engine)
    with memory(of_process) as in_use:
        at_half = in_use()
        sending.run(count - count // 2)
        check_idle(engine)
        assert in_use() - at_half < slack
    assert (len(compiled), engine.num_compilations) == (before, programs)

    assert sorted(sending.ended) == list(range(len(asked)))
    ended, metrics = [sending.ended[i] for i in range(len(asked))], engine.metrics()
    assert metrics.num_finished - start.num_finished == len(asked)
    assert metrics.num_preemptions - start.num_preemptions > count // 20
    assert metrics.num_cached_tokens - start.num_cached_tokens > count // 2
    reasons = [one.finish_reason for one in ended]
    assert set(reasons) == {"stop", "length", "abort"}
    assert {type(one.stop_reason) for one in ended} == {int, str, type(None)}
    assert count // 100 < reasons.count("abort") < count // 4
    return ended


def check_alone(engine: Engine, asked: list[Asked], ended: list[Ended]):
    """Some of the requests have the same answer when they are asked again with nothing around them."""
    whole = [i for i, one in enumerate(ended) if one.finish_reason != "abort" and not asked[i].params.greedy]
    for i in np.random.default_rng(1).choice(whole, ALONE, replace=False):
        engine.scheduler.pages.forget_prefixes()
        asked[i].add(engine)
        (deltas,) = drained(engine).values()
        assert Ended.of(deltas[-1].result) == ended[i]


def check_greedy(asked: list[Asked], ended: list[Ended], plain: list[list[int]], which: list[int]):
    """Greedy answers are what the target alone says, to where they end."""
    for i, tokens in zip(which, plain, strict=True):
        one, params = ended[i], asked[i].params
        assert list(one.token_ids) == tokens[: len(one.token_ids)]
        if one.finish_reason == "length":
            assert len(one.token_ids) == min(params.max_tokens or len(tokens), len(tokens))


def greedy(asked: list[Asked]) -> list[int]:
    """Greedy requests that nothing keeps from the likeliest token."""
    alike = (one.params.greedy and not one.params.min_tokens and not one.params.processes_logits for one in asked)
    return [i for i, one in enumerate(alike) if one]


def tiny_engine(method: str | None, num_pages: int) -> Engine:
    """The tiny models with letters for tokens."""
    config = EngineConfig(
        max_batch=4, max_len=MAX_LEN, page_size=4, prefill_chunk=4, prefill_tokens=64, rounds=4, num_pages=num_pages
    )
    make = drafting(method, Speculation(num_draft_tokens=K))
    return Engine(
        target(),
        draft() if method == "draft_model" else None,
        Decoding(make, "rejection"),
        config,
        tokenizer=Letters(),
        eos_token_ids=(EOS,),
    )


def tiny_requests(count: int) -> list[Asked]:
    """Most prompts begin as one of two long ones does."""
    rng = np.random.default_rng(3)
    common = rng.integers(V, size=(2, 18)).tolist()

    def prompt() -> list[int]:
        shared = common[rng.integers(2)][: rng.integers(4, 19)] if rng.random() < 0.8 else []
        return [*shared, *rng.integers(V, size=rng.integers(1, 10)).tolist()]

    return [Asked.random(rng, prompt(), LETTERS, list(range(V)), 24) for _ in range(count)]


def soak_tiny(method: str | None, count: int, compiled: list[str]):
    engine, asked = tiny_engine(method, num_pages=MAX_LEN // 4 + 8), tiny_requests(WARM + count)
    ended = soak(engine, asked, compiled, slack=64_000, of_process=False)
    check_alone(engine, asked, ended)
    which = greedy(asked)
    check_greedy(asked, ended, plain_greedy(target(), [asked[i].prompt for i in which]), which)


def test_soak_of_five_hundred_requests(xla_compilations):
    soak_tiny("draft_model", 500, xla_compilations)


@pytest.mark.long
@pytest.mark.parametrize("method", ["ngram", None])
def test_soak_of_twenty_thousand_requests(method, xla_compilations):
    soak_tiny(method, 20_000, xla_compilations)


TEXTS = [
    "import os\nimport sys\n\n\ndef main(argv=None):\n    return 0\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    'def read_config(path):\n    """Return the configuration in a file."""\n',
]


def family_llm(name: str | None) -> jspec.LLM:
    source = FAMILY / name if name in ("draft", "eagle", "eagle3", "parallel", "mlp", "medusa") else name
    settings = jspec.Speculation(num_draft_tokens=3)
    return jspec.load(
        FAMILY / "target",
        source,
        speculation=settings,
        dtype="float32",
        max_batch=4,
        max_len=48,
        page_size=4,
        num_pages=16,
        prefill_chunk=4,
        prefill_tokens=64,
        rounds=4,
        width=4,
    )


def family_requests(llm: jspec.LLM, count: int) -> list[Asked]:
    """Beginnings of a few texts, or pieces out of the middle of one."""
    rng, asked = np.random.default_rng(4), []
    assert llm.tokenizer is not None
    texts = [llm.tokenizer.encode(text) for text in TEXTS]
    for _ in range(count):
        text = texts[rng.integers(len(texts))]
        begin = 0 if rng.random() < 0.6 else int(rng.integers(len(text) - 1))
        prompt = list(text[begin : begin + int(rng.integers(1, 29))])
        asked.append(Asked.random(rng, prompt, "\n:(=", list(itertools.chain(*texts)), 14))
    return asked


def soak_family(name: str | None, count: int, compiled: list[str]):
    llm, plain = family_llm(name), family_llm(None)
    asked = family_requests(llm, WARM + count)
    ended = soak(llm.engine, asked, compiled, slack=2**25, of_process=True)
    check_alone(llm.engine, asked, ended)
    which = greedy(asked)[:200]
    unbounded = [
        jspec.SamplingParams(temperature=0, max_tokens=asked[i].params.max_tokens, ignore_eos=True) for i in which
    ]
    results = jspec.generate(plain, [asked[i].prompt for i in which], unbounded)
    check_greedy(asked, ended, [result.token_ids for result in results], which)


@pytest.mark.long
@pytest.mark.parametrize("name", ["draft", "ngram", None, "eagle", "eagle3", "parallel", "mlp", "medusa"])
def test_soak_of_twenty_thousand_family_requests(name, xla_compilations):
    soak_family(name, 20_000, xla_compilations)
