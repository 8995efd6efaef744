"""``jspec serve``: its options, and what they mean for ``jspec.load`` and for the server."""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from typing import Any

from jspec._arguments import require, resolve_names
from jspec.config import DRAFT_SAMPLINGS, VERIFY_RULES, Speculation
from jspec.serving.openai.limits import LIMIT_HELP, Limits

PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client")  # of the extra ``serve``

# Option of the command -> argument of ``jspec.load``, where they are the same.
_LOADING = {
    "max_model_len": "max_len",
    "max_num_seqs": "max_batch",
    "dtype": "dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "num_gpu_blocks_override": "num_pages",
    "block_size": "page_size",
    "swap_space": "swap_space",
    "max_waiting": "max_waiting",
    "ngram_corpus": "ngram_corpus",
}
# vLLM's name of a drafting method -> jspec's.
_METHODS = {
    "draft_model": "draft_model",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "mlp_speculator": "mlp",
    "ngram": "ngram",
    "parallel": "parallel",
}


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the arguments. Names are vLLM's where they mean the same."""
    _add_model(parser)
    _add_speculation(parser)
    _add_server(parser)
    limits = parser.add_argument_group("limits of a request")
    for field in dataclasses.fields(Limits):
        option, kind = f"--{field.name.replace('_', '-')}", float if isinstance(field.default, float) else int
        limits.add_argument(
            option, type=kind, default=field.default, help=f"{LIMIT_HELP.get(field.name, '')}; %(default)s"
        )


def _add_model(parser: argparse.ArgumentParser):
    parser.add_argument("target", help="checkpoint folder, or the name of a model in the local hub cache")
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what clients may call it; the target")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus completion; the target's, up to 2048")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests decoded together; %(default)s")
    parser.add_argument("--gpu-memory-utilization", type=float, help="share of the GPU's free memory; 0.9")
    parser.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="pages of the KV cache; what fits")
    parser.add_argument("--block-size", type=int, help="tokens of a page; 64")
    parser.add_argument("--swap-space", type=float, metavar="GIB", help="host memory for preempted requests; 4")
    parser.add_argument("--max-waiting", type=int, default=1024, help="requests that may wait; %(default)s")
    parser.add_argument("--no-enable-prefix-caching", action="store_true", help="read every prompt as a whole")
    parser.add_argument("--reproducible", action="store_true", help="a seed means one text; slower")
    parser.add_argument(
        "--generation-config",
        choices=("auto", "jspec", "vllm"),
        default="auto",
        help="auto: sampling defaults are the checkpoint's; jspec or vllm: they are those of SamplingParams",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template in place of the checkpoint's")
    parser.add_argument(
        "--template-kwargs", nargs="*", metavar="NAME", help="variables of the template that requests may set"
    )


def _add_speculation(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("speculation")
    group.add_argument("--draft", help="checkpoint folder, the name of a model in the local hub cache, or ngram")
    group.add_argument("--num-speculative-tokens", type=_drafts, metavar="K", help="drafts of a round, or auto; 4")
    group.add_argument("--verify", choices=VERIFY_RULES)
    group.add_argument("--draft-sampling", choices=DRAFT_SAMPLINGS)
    group.add_argument("--ngram-corpus", metavar="FILE", help="text to look drafts up in, with --draft ngram")
    group.add_argument(
        "--speculative-config", metavar="JSON", help='vLLM\'s: {"model": .., "num_speculative_tokens": .., ..}'
    )


def _add_server(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines, too; %(default)s")
    group.add_argument("--port", type=int, default=8000, help="0 takes any that is free; %(default)s")
    group.add_argument(
        "--api-key", nargs="+", metavar="KEY", help="clients need one of these; or the variable JSPEC_API_KEY"
    )
    group.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, help="seconds for answers to end at SIGTERM; %(default)s"
    )
    group.add_argument("--ssl-certfile", metavar="FILE")
    group.add_argument("--ssl-keyfile", metavar="FILE")
    group.add_argument("--log-level", choices=("critical", "error", "warning", "info", "debug"), default="info")


def run(args: argparse.Namespace) -> int:
    """Serve until the process is told to end; returns the exit code.

    Raises:
      ValueError: an option cannot be used.
    """
    require_packages()
    import logging

    import jspec
    from jspec.chat import read_template
    from jspec.serving.openai.keys import ENVIRONMENT, Keys
    from jspec.serving.openai.process import listener
    from jspec.serving.openai.process import run as serve
    from jspec.serving.openai.service import TEMPLATE_KWARGS, Service

    draft, speculation, method = speculation_of(args)
    target = found(args.target)
    require_draft(args, target, draft)
    from_environment = [os.environ[ENVIRONMENT]] if os.environ.get(ENVIRONMENT) else []
    keys = Keys(args.api_key or from_environment)
    limits = Limits(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Limits)})
    template = None if args.chat_template is None else read_template(args.chat_template)
    certificate = _certificate(args)
    seconds = args.shutdown_timeout
    require(0 <= seconds < 1e6, "shutdown_timeout", seconds, "a number of seconds, at least 0")
    require(0 <= args.port < 2**16, "port", args.port, "an integer in 0..65535")
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s")
    logging.getLogger("jspec").setLevel(args.log_level.upper())
    with listener(args.host, args.port) as bound:
        llm = jspec.load(target, draft, speculation=speculation, **loading_of(args))
        require(method in (None, llm.method), "speculative_config.method", method, f"{llm.method}, which the draft is")
        if llm.tokenizer is None:
            print("jspec serve: the target has no tokenizer, so prompts are token ids alone", file=sys.stderr)
        print("jspec serve: compiling", file=sys.stderr, flush=True)
        llm.warmup()
        service = Service(
            engine=jspec.AsyncEngine(llm),
            names=args.served_model_name or [args.target],
            keys=keys,
            limits=limits,
            chat_template=template,
            template_kwargs=TEMPLATE_KWARGS if args.template_kwargs is None else args.template_kwargs,
            priorities=args.scheduling_policy == "priority",
        )
        serve(service, bound, shutdown_timeout=seconds, log_level=args.log_level, certificate=certificate)
    return 0


def require_packages():
    """Refuse to go on without the packages of the extra.

    Raises:
      ValueError: one of them is not installed.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: expected what pip install 'jspec[serve]' installs")


def loading_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``jspec.load`` that options give, those of speculation apart."""
    given = {name: getattr(args, option) for option, name in _LOADING.items() if getattr(args, option) is not None}
    if given.get("dtype") == "auto":
        del given["dtype"]
    given["reproducible"] = args.reproducible
    given["prefix_cache"] = not args.no_enable_prefix_caching
    given["generation_config"] = "auto" if args.generation_config == "auto" else "jspec"
    return given


def speculation_of(args: argparse.Namespace) -> tuple[str | None, Speculation, str | None]:
    """The draft, how to speculate, and the method that was asked for, from ``--speculative-config`` or single options.

    Raises:
      ValueError: an option is given twice, or a value cannot be used.
      TypeError: a key of the JSON is unknown.
    """
    options = {
        "num_draft_tokens": args.num_speculative_tokens,
        "verify": args.verify,
        "draft_sampling": args.draft_sampling,
    }
    fields = {name: value for name, value in options.items() if value is not None}
    draft, method = args.draft, None
    if args.speculative_config is not None:
        beside = [name for name, value in {"draft": draft, **fields}.items() if value is not None]
        ok = not beside
        require(ok, "speculative_config", args.speculative_config, f"it alone, without --{beside and beside[0]}")
        draft, fields, method = _config(args.speculative_config)
    draft = draft if draft in (None, "ngram") else found(draft)
    return draft, Speculation(**fields), method


def require_draft(args: argparse.Namespace, target: str, draft: str | None):
    """Refuse options of speculation where nothing drafts: there is no draft, and the target is no head that names its own.

    Raises:
      ValueError: that is so.
    """
    from jspec.loading import find_folders

    options = ("num_speculative_tokens", "verify", "draft_sampling", "ngram_corpus")
    given = [name for name in options if getattr(args, name) is not None]
    if draft is None and given and find_folders(target, None)[1] is None:
        value = getattr(args, given[0])
        raise ValueError(f"{given[0]}={value!r}: expected --draft beside it, a checkpoint folder or ngram")


def _config(text: str) -> tuple[str, dict[str, Any], str | None]:
    """What vLLM's JSON says: the draft, fields of ``Speculation``, and the method."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    example = '{"model": "FOLDER", "num_speculative_tokens": 4}'
    if not isinstance(given, dict):
        raise ValueError(f"speculative_config={text!r}: expected a JSON object, {example} for example")
    known = [field.name for field in dataclasses.fields(Speculation) if field.name != "synthetic_acceptance"]
    aliases = {**Speculation.aliases, "prompt_lookup_max": "ngram_max", "prompt_lookup_min": "ngram_min"}
    fields = resolve_names("speculative_config", given, [*known, "model", "method"], aliases)
    draft, method = fields.pop("model", None), fields.pop("method", None)
    ok = method is None or method in _METHODS
    require(ok, "speculative_config.method", method, f"one of {', '.join(sorted(_METHODS))}, or none")
    if method == "ngram":
        require(draft in (None, "ngram"), "speculative_config.model", draft, "none beside the method ngram")
        draft = "ngram"
    require(isinstance(draft, str), "speculative_config.model", draft, "a checkpoint folder, or the method ngram")
    return draft, fields, None if method in (None, "ngram") else _METHODS[method]


def found(name: str) -> str:
    """The folder of a checkpoint: ``name`` itself, or where the local hub cache has the model of that name.

    Nothing is downloaded.

    Raises:
      ValueError: it is neither.
    """
    if os.path.exists(name):
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        raise ValueError(
            f"{name!r} is no folder, and the local hub cache has no such model: expected a checkpoint folder, or run "
            f"hf download {name} first"
        ) from None


def _certificate(args: argparse.Namespace) -> tuple[str, str] | None:
    chain, key = args.ssl_certfile, args.ssl_keyfile
    require(
        (chain is None) == (key is None), "ssl_certfile", chain, "both --ssl-certfile and --ssl-keyfile, or neither"
    )
    for name, file in (("ssl_certfile", chain), ("ssl_keyfile", key)):
        require(file is None or os.path.isfile(file), name, file, "a file")
    return None if chain is None else (chain, key)


def _drafts(text: str) -> int | str:
    return text if text == "auto" else int(text)
