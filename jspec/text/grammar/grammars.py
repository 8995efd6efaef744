"""Compiles the grammars of requests, and caches them for requests with the same one."""

import collections
import copy
import functools
import hashlib
import importlib.util
import queue
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jspec._interrupts import holding_interrupts
from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.detokenizer import Tokenizer
from jspec.text.grammar.constraint import GrammarConstraint
from jspec.text.grammar.limits import MAX_BYTES, GrammarLimits, check_size
from jspec.text.grammar.matcher import make_matcher, make_tokens, prepare
from jspec.text.grammar.process import GrammarBusy, GrammarProcess, Trial
from jspec.text.grammar.source import grammar_text
from jspec.text.grammar.worker import STACK

CACHED_GRAMMARS = 64
CACHED_BYTES = 2**30  # of these together
CACHED_REFUSALS = 1024
MISSING = "structured_outputs needs llguidance: pip install 'jspec[structured]'"
MORE_STACK = STACK + 16 * 2**20  # bytes of the threads that compile what a child compiled with ``STACK``
BUSY = "too many grammars are being compiled: try again later"


@functools.cache
def available() -> bool:
    """Whether llguidance is installed, so that requests may have structured outputs."""
    return importlib.util.find_spec("llguidance") is not None


class CompiledGrammar:
    """A compiled grammar, from which requests get their constraints.

    Args:
      matcher: llguidance's, at the beginning.
      tokens: llguidance's view of the tokenizer.
      num_bytes: its approximate memory.
    """

    def __init__(self, matcher: Any, tokens: Any, num_bytes: int):
        self._matcher, self._tokens, self._lock = matcher, tokens, threading.Lock()
        self.num_bytes = num_bytes

    def constraint(self, vocab_size: int, stop_tokens: Sequence[int]) -> GrammarConstraint:
        """The constraint of one request, at the beginning of its completion."""
        with self._lock:
            matcher = self._matcher.deep_copy()
        return GrammarConstraint(matcher, self._tokens, vocab_size, stop_tokens)


class Compilation(Future):
    """One client's future of a ``CompiledGrammar``, or of the exception of a grammar that cannot be compiled.

    When all futures of a grammar are cancelled, its compilation is cancelled.

    Attributes:
      shared: the compilation that the futures of the same grammar share.
    """

    def __init__(self, shared: "_Shared"):
        super().__init__()
        self.shared = shared


class _Shared:
    """A compilation under way, for all clients that wait for it.

    Attributes:
      waiting: the clients' futures.
      trial: its trial, which can be cancelled.
      started: whether a child was free for it.
    """

    def __init__(self):
        self.waiting: list[Compilation] = []
        self.trial = Trial()
        self.started = False


class Grammars:
    """Compiles and caches the grammars of requests. Thread-safe.

    A grammar is checked (``check_size``), tried in a child process within ``limits``, and then compiled in a thread of this
    process, because llguidance's matchers cannot be sent between processes. Refusals are cached, too.

    Args:
      tokenizer: the target's, of the ``tokenizers`` library.
      vocab_size: V of the target.
      eos_token_ids: the tokens that end a text.

    Attributes:
      limits: limits of compilation, from the next grammar on; ``children`` is read once, with the first.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self.limits = GrammarLimits()
        self._lock = threading.RLock()  # guards what follows
        self._under_way: dict[StructuredOutputsParams, _Shared] = {}
        self._newest: collections.OrderedDict[StructuredOutputsParams, CompiledGrammar] = collections.OrderedDict()
        self._in_use: weakref.WeakValueDictionary[StructuredOutputsParams, CompiledGrammar]
        self._in_use = weakref.WeakValueDictionary()
        self._refused: collections.OrderedDict[bytes, str] = collections.OrderedDict()  # why, by ``_digest``

    def start(self):
        """Prepare for the first grammar, if this model can have grammars at all."""
        if not available():
            return
        try:
            self._process.start()
        except ValueError:  # requests with a grammar will get this error
            return
        self._tokens  # noqa: B018 - made when it is first used, as are the threads
        self._threads  # noqa: B018

    def close(self):
        """End the process that tries grammars. It is restarted by the next grammar."""
        if "_process" in self.__dict__:
            self._process.close()

    def constraint(self, asked: StructuredOutputsParams, stop_tokens: Sequence[int]) -> GrammarConstraint:
        """The constraint of one request, at the beginning of its completion.

        Args:
          asked: the structured outputs of the request.
          stop_tokens: the tokens that end the request.

        Raises:
          ValueError: llguidance is not installed, there is no tokenizer that it reads, or the grammar cannot be used.
          GrammarBusy: no child was free within ``limits.wait``, or the process failed.
        """
        done: queue.SimpleQueue[Future] = queue.SimpleQueue()
        compilation = self.compile(asked)
        with holding_interrupts():
            compilation.add_done_callback(done.put)
        try:
            try:
                done.get(timeout=self.limits.wait)
            except queue.Empty:
                self.require_begun(compilation)
                done.get()
            with holding_interrupts():
                grammar = compilation.result()
        finally:
            with holding_interrupts():
                compilation.cancel()  # an interrupt may have come
        return grammar.constraint(self._vocab_size, stop_tokens)

    @staticmethod
    def require_begun(compilation: Compilation):
        """Check, after ``limits.wait``, that the compilation has begun.

        Raises:
          GrammarBusy: it still waits for a free child.
        """
        if not (compilation.done() or compilation.shared.started):
            raise GrammarBusy(BUSY)

    def compile(self, asked: StructuredOutputsParams) -> Compilation:
        """Start to compile a grammar; the future is done at once if the grammar is cached."""
        with self._lock:
            shared = self._under_way.get(asked) or _Shared()
            compilation = Compilation(shared)
            try:
                cached = self._known(asked)
            except ValueError as error:
                compilation.set_exception(error)
                return compilation
            if cached is not None:
                compilation.set_result(cached)
                return compilation
            shared.waiting.append(compilation)
            if asked not in self._under_way:
                threads = self._threads
                with holding_interrupts():
                    self._under_way[asked] = shared
                    threads.submit(self._carry_out, asked, shared)
        with holding_interrupts():
            compilation.add_done_callback(functools.partial(self._has_left, asked, shared))
        return compilation

    def _known(self, asked: StructuredOutputsParams) -> CompiledGrammar | None:
        """The cached grammar; None if it has to be compiled.

        Raises:
          ValueError: the grammar is refused without a trial; see ``constraint``.
        """
        if not available():
            raise ValueError(MISSING)
        if (grammar := self._in_use.get(asked)) is not None:
            self._keep(asked, grammar)
            return grammar
        self._process  # noqa: B018 - raises the errors of the tokenizer
        if (why := self._refused.get(_digest(asked))) is not None:
            raise ValueError(why)
        try:
            check_size(asked)
        except ValueError as error:
            raise _refusal(error) from None
        return None

    def _keep(self, asked: StructuredOutputsParams, grammar: CompiledGrammar):
        self._in_use[asked] = self._newest[asked] = grammar
        self._newest.move_to_end(asked)
        while (
            len(self._newest) > CACHED_GRAMMARS or sum(each.num_bytes for each in self._newest.values()) > CACHED_BYTES
        ):
            self._newest.popitem(last=False)

    def _has_left(self, asked: StructuredOutputsParams, shared: _Shared, compilation: Future):
        """Cancel the trial when its last future has been cancelled."""
        if compilation.cancelled():
            with self._lock:
                shared.waiting = [other for other in shared.waiting if other is not compilation]
                if not shared.waiting and self._under_way.get(asked) is shared:
                    del self._under_way[asked]
                    shared.trial.cancel()

    def _carry_out(self, asked: StructuredOutputsParams, shared: _Shared):
        """Try and compile a grammar, and complete all futures of it."""
        shared.started = True
        if shared.trial.cancelled:
            return
        grammar = error = None
        try:
            grammar = self._compiled(asked, shared.trial)
        except BaseException as raised:  # of any kind, since the futures have to be completed
            error = raised
        with self._lock:
            if self._under_way.get(asked) is shared:
                del self._under_way[asked]
            if grammar is not None:
                self._keep(asked, grammar)
            elif isinstance(error, ValueError):
                self._refused[_digest(asked)] = str(error)
                if len(self._refused) > CACHED_REFUSALS:
                    self._refused.popitem(last=False)
            waiting, shared.waiting = shared.waiting, []
        for compilation in waiting:
            if compilation.set_running_or_notify_cancel():
                compilation.set_result(grammar) if error is None else compilation.set_exception(error)

    def _compiled(self, asked: StructuredOutputsParams, trial: Trial) -> CompiledGrammar:
        """Try a grammar, and compile it."""
        tokens = self._tokens
        try:
            text = grammar_text(asked)
            if len(text) > MAX_BYTES:
                raise ValueError(f"it has {len(text)} bytes: expected at most {MAX_BYTES}")
            num_bytes = self._process.try_out(text, self.limits, trial)
            matcher = make_matcher(tokens, text)
            prepare(matcher)
        except (GrammarBusy, MemoryError):
            raise
        except BaseException as error:  # a panic of the Rust code is no Exception
            raise _refusal(error) from None
        return CompiledGrammar(matcher, tokens, num_bytes)

    @functools.cached_property
    def _setup(self) -> dict[str, Any]:
        """The arguments of ``make_tokens``."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and the checkpoint has none")
        ends = self._eos_token_ids or [getattr(tokenizer, "eos_token_id", None)]
        if ends == [None]:
            raise ValueError("structured_outputs: the checkpoint names no token that ends a text (eos_token_id)")
        num_tokens = max(self._vocab_size, max(tokenizer.get_vocab().values(), default=0) + 1)
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "to_str"):
            raise ValueError(
                f"structured_outputs: llguidance cannot read the checkpoint's tokenizer ({type(tokenizer).__name__}: "
                "expected a fast tokenizer, one of the tokenizers library)"
            )
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        return {"tokenizer": backend.to_str(), "vocab_size": num_tokens, "eos_token_ids": ends}

    @functools.cached_property
    def _process(self) -> GrammarProcess:
        return GrammarProcess(self._setup)

    @functools.cached_property
    def _tokens(self) -> Any:
        """llguidance's view of the tokenizer."""
        try:
            return make_tokens(**self._setup)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the Rust code is no Exception
            raise ValueError(
                f"structured_outputs: llguidance cannot read the checkpoint's tokenizer ({type(error).__name__}: {error})"
            ) from None

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """Threads with a large stack, one for each child."""
        before = threading.stack_size(MORE_STACK)  # of every thread that is started until it is set back
        try:
            count = self.limits.children
            threads, all_there = ThreadPoolExecutor(count, "jspec.grammars"), threading.Barrier(count + 1)
            for _ in range(count):
                threads.submit(all_there.wait)
            all_there.wait()
        finally:
            threading.stack_size(before)
        return threads


def _digest(asked: StructuredOutputsParams) -> bytes:
    return hashlib.sha256(repr(asked).encode(errors="surrogatepass")).digest()


def _refusal(error: BaseException) -> ValueError:
    return ValueError(f"structured_outputs has no usable grammar: {error}")
