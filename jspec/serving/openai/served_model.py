"""Loads the served model from the options of ``jspec serve``."""

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jspec
from jspec.commands.model_args import chosen_model
from jspec.llm import LLM
from jspec.serving.openai.server_settings import ServerSettings
from jspec.serving.openai.service import TEMPLATE_KWARGS, Service
from jspec.text.chat_template import read_template
from jspec.text.grammar.limits import GrammarLimits

PROGRESS_SECONDS = 10.0  # between two lines while programs are compiled


@contextlib.contextmanager
def _progress(llm: LLM) -> Iterator[None]:
    """Say now and then how many programs have been compiled."""
    started, ended = time.monotonic(), threading.Event()

    def tell():
        while not ended.wait(PROGRESS_SECONDS):
            count, seconds = llm.engine.metrics().num_compilations, time.monotonic() - started
            print(f"jspec serve: compiling, {count} programs after {seconds:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, name="jspec.serve.progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def load_service(args: argparse.Namespace, settings: ServerSettings) -> Callable[[], Service]:
    """Check the options; returns a function that loads and compiles the model and makes a service of it.

    Raises:
      ValueError: an option cannot be used; no weights have been read.
    """
    model = chosen_model(args)
    template = None if args.chat_template is None else read_template(args.chat_template)

    def load() -> Service:
        llm = model.load()
        if llm.tokenizer is None:
            print("jspec serve: the target has no tokenizer, so prompts can only be token ids", file=sys.stderr)
        print(f"jspec serve: the context has {llm.engine.config.max_len:,} tokens", file=sys.stderr)
        print("jspec serve: compiling", file=sys.stderr, flush=True)
        with _progress(llm):
            llm.warmup()
        grammars, limits = llm.engine.frontend.grammars, settings.limits
        grammars.limits = GrammarLimits(limits.max_grammar_seconds, limits.max_grammar_memory, limits.max_grammar_wait)
        grammars.start()  # else the first request with a grammar would wait for it
        return Service(
            engine=jspec.AsyncEngine(llm),
            names=args.served_model_name or [args.target],
            keys=settings.keys,
            limits=settings.limits,
            chat_template=template,
            template_kwargs=TEMPLATE_KWARGS if args.template_kwargs is None else args.template_kwargs,
            priorities=args.scheduling_policy == "priority",
        )

    return load
