"""Loads the served model from the options of ``jspec serve``."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jspec
from jspec._validation import require
from jspec.commands.model_args import chosen_model
from jspec.commands.warming import warm_up
from jspec.commands.xla_alarms import without_alarms
from jspec.sampling.params import SamplingParams
from jspec.serving.generation.service import TEMPLATE_KWARGS, Service
from jspec.serving.http.settings import ServerSettings
from jspec.text.chat_template import read_template, reserved_names
from jspec.text.grammar.limits import GrammarLimits
from jspec.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, detect_of

AUTO, NONE = "auto", "none"  # values of the options that name formats


def load_service(args: argparse.Namespace, settings: ServerSettings) -> Callable[[], Service]:
    """Check the options; returns a function that loads and compiles the model and makes a service of it.

    Raises:
      ValueError: an option cannot be used; no weights have been read.
    """
    model = chosen_model(args)
    template = None if args.chat_template is None else read_template(args.chat_template)
    variables = _default_variables(args.default_chat_template_kwargs)
    _require_variables("default_chat_template_kwargs", variables)
    _require_variables("template_kwargs", args.template_kwargs or ())
    for option, known in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        name = getattr(args, option)
        require(name in (AUTO, NONE, *known), option, name, f"auto, none, or one of {', '.join(sorted(known))}")

    def load() -> Service:
        llm = model.load()
        if llm.tokenizer is None:
            print("jspec serve: the target has no tokenizer, so prompts can only be token ids", file=sys.stderr)
        print(f"jspec serve: the context has {llm.engine.config.max_len:,} tokens", file=sys.stderr)
        print(f"jspec serve: {sampling_defaults(llm.default_sampling_params)}", file=sys.stderr, flush=True)
        with without_alarms():
            warm_up(llm, "jspec serve")
        grammars, limits = llm.engine.frontend.grammars, settings.limits
        grammars.limits = GrammarLimits(limits.max_grammar_seconds, limits.max_grammar_memory, limits.max_grammar_wait)
        grammars.start()  # else the first request with a grammar would wait for it
        by_template = detect_of(llm.tokenizer, template, llm.target.config.architecture)
        options = zip((args.tool_call_parser, args.reasoning_parser), by_template, strict=True)
        tool_parser, reasoning_parser = (
            detected if name == AUTO else None if name == NONE else name for name, detected in options
        )
        formats = f"calls as {tool_parser or 'text'}, reasoning as {reasoning_parser or 'text'}"
        print(f"jspec serve: chats have {formats}", file=sys.stderr)
        return Service(
            engine=jspec.AsyncEngine(llm),
            names=args.served_model_name or [args.target],
            keys=settings.keys,
            limits=settings.limits,
            chat_template=template,
            template_kwargs=TEMPLATE_KWARGS if args.template_kwargs is None else args.template_kwargs,
            priorities=args.scheduling_policy == "priority",
            default_template_kwargs=variables,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )

    return load


def sampling_defaults(params: SamplingParams) -> str:
    """What the checkpoint's generation_config.json says of requests that leave a field open, in one line."""
    defaults = SamplingParams()
    fields = ((name, value) for name, value in dataclasses.asdict(params).items() if value != getattr(defaults, name))
    adopted = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in fields]
    if not adopted:
        return "a field of sampling that a request leaves out has jspec's default"
    penalised = params.repetition_penalty != defaults.repetition_penalty
    hint = ", so that temperature 0 is not the argmax of the model's own logits" if penalised else ""
    return f"sampling defaults are those of generation_config.json, {', '.join(adopted)}{hint} (--generation-config)"


def _require_variables(option: str, names: Iterable[str]):
    """Check that a template can have variables of these names; else every chat that has them would be refused.

    Raises:
      ValueError: jspec or transformers sets one of them itself.
    """
    for name in names:
        require(name not in reserved_names(), option, name, "names of variables that are the chat template's own")


def _default_variables(given: str | None) -> dict[str, Any]:
    """The option ``--default-chat-template-kwargs``.

    Raises:
      ValueError: it is not the JSON of an object.
    """
    try:
        variables = json.loads(given or "{}")
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise ValueError(f"default_chat_template_kwargs={given!r}: expected the JSON of an object")
    return variables
