"""``prove_exact``: does a seed mean one text and the same log-probabilities, however a text comes about on this machine?

Prompts are completed plainly, one after the other: at temperature 0, and at temperature 1 with a seed. Then they are
completed in every way that should change nothing: together, in another order, with drafts, by an engine of other sizes,
from the prefix cache; and the texts are scored. Counted are texts that are not the same, and bits of log-probabilities,
of tokens that stand behind the same text."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec._validation import is_int, require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.config import EngineConfig, Speculation
from jspec.doctor.diagnosis import PROMPTS, engine_config, with_pages
from jspec.drafting.methods import drafter_for, method_of
from jspec.llm import LLM, Prompt
from jspec.loading.compatibility import check_compatible, with_available_drafts, with_positions
from jspec.loading.kv_cache_dtype import kv_rounding, with_kv_cache_dtype
from jspec.loading.modules import build_draft_module
from jspec.loading.options import Path
from jspec.loading.pair import open_checkpoints
from jspec.models import build
from jspec.models.one_order import without_one_order
from jspec.models.products import first_difference
from jspec.outputs import Result
from jspec.sampling.params import SamplingParams
from jspec.text.prompts import token_ids

PLAIN = Speculation(0)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to complete prompts that should change nothing.

    Attributes:
      name: what it is called.
      promised: whether docs/guides/reproducibility.md promises that it changes nothing.
      speculation: how drafts are made and verified.
      engine: fields of ``EngineConfig`` that are not those of the other ways.
      together: whether all requests are given to the engine at once; in the reverse order if ``backwards``.
      again: whether the same engine has completed them once before, so that prompts are in its prefix cache.
      greedy: whether only texts of temperature 0 count, because another noise decides about others.
    """

    name: str
    promised: bool
    speculation: Speculation = PLAIN
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    together: bool = True
    backwards: bool = False
    again: bool = False
    greedy: bool = False


class Written(NamedTuple):
    """A completion: its new tokens, ids or texts, and the log-probability of each."""

    tokens: Sequence[Any]
    numbers: Sequence[float]

    @classmethod
    def of(cls, result: Result) -> "Written":
        assert result.token_logprobs is not None
        return cls(result.token_ids, result.token_logprobs.tolist())


@dataclasses.dataclass(frozen=True)
class Difference:
    """What differs between texts that came about in one way, and those that were written plainly, one by one.

    Attributes:
      name, promised: those of the way.
      texts, of_texts: how many texts are others, and of how many.
      numbers, of_numbers: how many log-probabilities are others, of how many that stand behind the same text.
      bits: how many bits of these differ.
    """

    name: str
    promised: bool
    texts: int
    of_texts: int
    numbers: int
    of_numbers: int
    bits: int

    @property
    def none(self) -> bool:
        return not (self.texts or self.numbers)


@dataclasses.dataclass(frozen=True)
class Exactness:
    """The result of ``prove_exact``.

    Attributes:
      differences: of each way, in the order in which they are printed.
      kernel: the first kernel of the target whose bits depend on the number of tokens, None if nothing differs.
    """

    differences: tuple[Difference, ...]
    kernel: str | None = None

    @property
    def exact(self) -> bool:
        """Whether nothing differs of what is promised."""
        return all(one.none for one in self.differences if one.promised)

    def summary(self, promised: bool) -> str:
        """A sentence with all figures of the ways that are ``promised``, or of the others."""
        chosen = [one for one in self.differences if one.promised == promised]
        texts, of_texts, bits, of_numbers = (
            sum(getattr(one, name) for one in chosen) for name in ("texts", "of_texts", "bits", "of_numbers")
        )
        return f"{texts} of {of_texts} texts and {bits} bits of {of_numbers} log-probabilities differ"


def prove_exact(
    target: Path,
    draft: Path | None = None,
    prompts: Sequence[Prompt] | None = None,
    *,
    num_draft_tokens: int = 4,
    max_tokens: int = 32,
    dtype: str | None = None,
    kv_cache_dtype: str = "auto",
    chat: bool | None = None,
    download: bool | None = None,
    options: HeadOptions | None = None,
) -> Exactness:
    """Complete prompts in all ways that should change nothing, and count what differs.

    Args:
      target, draft, prompts, dtype, kv_cache_dtype, chat, download: as for ``diagnose``; without a draft, plain decoding
        alone is tried.
      num_draft_tokens: K, the drafts of a round; ways with one draft are tried, too.
      max_tokens: how many new tokens each prompt gets at most.
      options: settings of a draft head that its checkpoint leaves open.

    Raises:
      ValueError: an argument or a checkpoint cannot be used.

    Example::

        found = prove_exact("path/to/target", "path/to/draft")
        print(found.exact, [one for one in found.differences if not one.none], found.kernel)
    """
    require(is_int(max_tokens) and max_tokens >= 2, "max_tokens", max_tokens, "an integer of at least 2")
    K = num_draft_tokens
    require(is_int(K) and K >= 1, "num_draft_tokens", K, "an integer of at least 1")
    whole, head = open_checkpoints(target, draft, options or HeadOptions(), download)
    dtype = dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    tokens = token_ids(PROMPTS if prompts is None else prompts, whole.tokenizer, whole.target_config, chat)
    engine = engine_config(whole.target_config, tokens, max_tokens, dtype)
    engine = with_kv_cache_dtype(dataclasses.replace(engine, kv_cache_dtype=kv_cache_dtype), whole)
    subject = _Subject.of(whole, head, tokens, engine, max_tokens)
    plain = Way("plain, one by one", True, together=False)
    expected = subject.complete(plain)
    unpinned = without_one_order(engine.dtype, subject.model) is None
    tried = ways(K, draft is not None, subject.engine, unpinned, unpinned and subject.drafts_in_one_order())
    differences = [compared(way, expected, subject.complete(way)) for way in tried]
    differences.append(scored(expected, subject.score(expected), unpinned))
    kernel = None
    if any(not one.none for one in differences):
        kernel = first_difference(subject.model, _sizes(K, subject.engine), unpinned)
    return Exactness(tuple(differences), kernel)


def ways(K: int, drafts: bool, engine: EngineConfig, unpinned: bool = False, drafts_too: bool = False) -> list[Way]:
    """The ways that are compared with plain decoding one by one, for K drafts of a draft if there is one. If the target has
    one order of sums (``unpinned``), all of them are promised, that of ``rejection`` only if the draft has one, too."""
    chunk = engine.prefill_chunk
    assert chunk is not None
    found = [
        Way("again", True, together=False),
        Way("together", True),
        Way("together, in reverse order", True, backwards=True),
        Way("found in the prefix cache", True, again=True),
        Way("max_batch 1", unpinned, engine={"max_batch": 1}),
        Way(f"prefill_chunk {2 * chunk}", unpinned, engine={"prefill_chunk": 2 * chunk}),
    ]
    if drafts:
        coupled = functools.partial(Speculation, verify="match", draft_sampling="coupled")
        found += [Way(f"{k} draft{'s' * (k > 1)}, match, coupled", unpinned, coupled(k)) for k in sorted({1, K})]
        found.append(Way(f"{K} drafts, rejection", drafts_too, Speculation(K), greedy=True))
    return found


def compared(way: Way, expected: Sequence[Written], found: Sequence[Written]) -> Difference:
    """What differs between completions and those that are ``expected``; the first half of both is greedy."""
    count = len(expected) // 2 if way.greedy else len(expected)
    texts, ours, theirs = 0, [], []
    for one, other in zip(expected[:count], found[:count], strict=True):
        texts += one.tokens != other.tokens
        pairs = zip(one.tokens, other.tokens, strict=False)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(one.tokens), len(other.tokens)))
        ours += one.numbers[:same]
        theirs += other.numbers[:same]
    return _difference(way.name, way.promised, texts, count, ours, theirs)


def scored(expected: Sequence[Written], scores: Sequence[Sequence[float]], promised: bool = False) -> Difference:
    """What differs between the log-probabilities of texts and their scores."""
    ours, theirs = [x for one in expected for x in one.numbers], [x for one in scores for x in one]
    return _difference("score of the text", promised, 0, 0, ours, theirs)


def _difference(
    name: str, promised: bool, texts: int, of_texts: int, ours: Sequence[float], theirs: Sequence[float]
) -> Difference:
    one, other = (np.array(numbers, np.float32).view(np.uint32) for numbers in (ours, theirs))
    different = (one ^ other).tolist()
    numbers, bits = sum(map(bool, different)), sum(map(int.bit_count, different))
    return Difference(name, promised, texts, of_texts, numbers, len(different), bits)


def _sizes(K: int, engine: EngineConfig) -> tuple[int, ...]:
    """How many tokens passes of the target have in the ways above."""
    B = engine.max_batch
    return tuple(sorted({1, 2, K + 1, B, 2 * B, (K + 1) * B, 64, 512}))


@dataclasses.dataclass(frozen=True)
class _Subject:
    """The models under test: a target, perhaps a draft, and the prompts.

    Attributes:
      model: the target's module.
      draft: config and params of the draft, None if there is none.
      tokens: the prompts.
      engine: the config of the engine for all ways.
    """

    model: Any
    draft: tuple[Any, Mapping[str, Any]] | None
    tokens: list[list[int]]
    engine: EngineConfig
    max_tokens: int

    @classmethod
    def of(
        cls, whole: Checkpoint, head: Checkpoint | None, tokens: list[list[int]], engine: EngineConfig, max_tokens: int
    ) -> "_Subject":
        """That of a target, and of a draft or None; a ``ValueError`` if they do not belong together."""
        config, used = whole.target_config, None
        if head is not None:
            check_compatible(config, head.config, whole.tokenizer, head)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about positions, which these texts do not reach
                used = with_positions(config, head.config, engine.max_len)
        model = build(config.for_length(engine.max_len), whole.language_model(engine.dtype)[1], engine.dtype)
        model.kv_rounding = kv_rounding(engine, whole)
        return cls(model, None if head is None else (used, dict(head.params(engine.dtype))), tokens, engine, max_tokens)

    def drafts_in_one_order(self) -> bool:
        """Whether the draft has one order of sums, so that ``LLM`` pins no shapes where drafts decide a text, either."""
        if self.draft is None:
            return True
        config, params = self.draft
        _, module = build_draft_module(config, dict(params), self.engine.dtype, self.model)
        return without_one_order(self.engine.dtype, module) is None

    def complete(self, way: Way) -> list[Written]:
        """The greedy completions of all prompts, then those with seeds."""
        llm = self._llm(way.speculation, **way.engine)
        greedy = SamplingParams(temperature=0, max_tokens=self.max_tokens, logprobs=0)
        sampled = dataclasses.replace(greedy, temperature=1.0)
        requests = [(prompt, params) for params in (greedy, sampled) for prompt in self.tokens]
        keys = [np.array([0, i], np.uint32) for i in range(len(requests))]
        places = list(range(len(requests)))[:: -1 if way.backwards else 1]
        found: dict[int, Written] = {}
        for _ in range(2 if way.again else 1):
            for chosen in [places] if way.together else [[place] for place in places]:
                prompts, params = zip(*(requests[place] for place in chosen), strict=True)
                for i, _, result in llm.completions(prompts, params, [keys[place] for place in chosen]):
                    found[chosen[i]] = Written.of(result)
        return [found[place] for place in range(len(requests))]

    def score(self, texts: Sequence[Written]) -> list[list[float]]:
        """The log-probability that the target gives each new token of texts."""
        found = self._llm(PLAIN).score([*self.tokens, *self.tokens], [text.tokens for text in texts])
        return [numbers.tolist() for numbers in found]

    def _llm(self, speculation: Speculation, **changes) -> LLM:
        engine = dataclasses.replace(
            self.engine, **changes, max_len=self.engine.max_len + 1
        )  # a score has one token more
        if self.draft is None or not speculation.num_draft_tokens:
            return LLM(self.model, None, drafter_for(None, self.model.config, PLAIN), None, None, PLAIN, engine)
        config, params = self.draft
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a head makes as many drafts as it can
            speculation = with_available_drafts(speculation, config)
        engine = with_pages(engine, self.model.config, config, speculation)
        config, module = build_draft_module(config, dict(params), engine.dtype, self.model)
        make = drafter_for(config, self.model.config, speculation)
        return LLM(self.model, module, make, method_of(config), None, speculation, engine)
