"""``jspec generate``: its arguments, the prompts that it reads, and how it prints their completions."""

import argparse
import functools
import json
import operator
import pathlib
import sys

import jspec
from jspec.config import EngineConfig

SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")
LOADING = ("ngram_corpus", "max_len", "dtype", "generation_config")
STDIN = "-"
SHOWN = 60  # how many characters of a prompt are printed above its completion


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the arguments, except those that ``jspec demo`` has too; ``cli`` declares these."""
    parser.add_argument("target", help="checkpoint folder")
    parser.add_argument(
        "prompts", nargs="*", metavar="prompt", help="text to complete; - reads one prompt from standard input"
    )
    parser.add_argument(
        "--prompts",
        dest="file",
        metavar="FILE",
        help='one prompt a line; .jsonl: an object with "prompt" or "prompt_token_ids" a line; -: standard input',
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each prompt, in order")
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens of a prompt; default: 128")
    parser.add_argument("--min-tokens", type=int)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text to stop at; may be given several times")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of the text")
    parser.add_argument("--max-len", type=int, help="longest prompt plus completion, in tokens")
    parser.add_argument("--max-batch", type=int, help="prompts decoded together; default: all of them, up to 8")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--ngram-corpus", metavar="FILE", help="text to look drafts up in, with --draft ngram")
    parser.add_argument(
        "--generation-config", choices=("auto", "jspec"), help="jspec: leave the checkpoint's sampling defaults aside"
    )
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace, speculation: jspec.Speculation) -> int:
    """Complete the prompts, and print the completions in the order of the prompts; returns the exit code."""
    prompts = _prompts(args)
    sampling = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    loading = {name: getattr(args, name) for name in LOADING if getattr(args, name) is not None}
    loading["max_batch"] = min(len(prompts), EngineConfig.max_batch) if args.max_batch is None else args.max_batch
    results = jspec.generate(args.target, prompts, draft=args.draft, speculation=speculation, **loading, **sampling)
    assert isinstance(results, list)
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        if args.json:
            print(json.dumps(_record(index, prompt, result), ensure_ascii=False))
        else:
            if len(prompts) > 1:
                print(f"==> prompt {index}: {_shown(prompt)} ({result.finish_reason}, {len(result.token_ids)} tokens)")
            print(result.token_ids if result.text is None else result.text)
    stats = functools.reduce(operator.add, (result.stats for result in results))
    print(f"acceptance length {stats.mean_acceptance_length:.2f}", file=sys.stderr)
    return 0


def _prompts(args: argparse.Namespace) -> list:
    given = [*args.prompts, *([] if args.file is None else [args.file])]
    if not given:
        args.parser.error("give a prompt, --prompts FILE, or - to read one prompt from standard input")
    if given.count(STDIN) > 1:
        raise ValueError("standard input can be read once: give - only once")
    # A prompt that is piped in, from echo for example, ends with a newline that is not part of it.
    prompts: list = [sys.stdin.read().removesuffix("\n") if prompt == STDIN else prompt for prompt in args.prompts]
    if args.file is not None:
        prompts += _lines(args.file)
    if not prompts:
        raise ValueError(f"--prompts {args.file}: expected a prompt a line, and there is none")
    return prompts


def _lines(name: str) -> list:
    """The prompts in a file or in standard input, one a line. Empty lines are skipped."""
    path = pathlib.Path(name)
    if name != STDIN and not path.is_file():
        raise ValueError(f"--prompts {name}: expected a file with a prompt a line")
    try:
        text = sys.stdin.read() if name == STDIN else path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--prompts {name}: expected text in UTF-8") from None
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_json_prompt(f"--prompts {name}, line {number}", line) for number, line in lines]


def _json_prompt(where: str, line: str) -> dict:
    """The prompt in a line of .jsonl, as vLLM's dictionary. Other fields of the object are ignored."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    keys = ("prompt", "prompt_token_ids")
    prompt = {key: found[key] for key in keys if key in found} if isinstance(found, dict) else {}
    if not prompt:
        raise ValueError(f'{where}: expected a JSON object with "prompt" or "prompt_token_ids"')
    return prompt


def _shown(prompt) -> str:
    text = repr(_text_or_ids(prompt))
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def _text_or_ids(prompt):
    return prompt.get("prompt", prompt.get("prompt_token_ids")) if isinstance(prompt, dict) else prompt


def _record(index: int, prompt, result: jspec.Result) -> dict:
    return {
        "index": index,
        "prompt": _text_or_ids(prompt),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "num_tokens": len(result.token_ids),
        "acceptance_length": round(result.stats.mean_acceptance_length, 4),
        "token_ids": result.token_ids,
    }
