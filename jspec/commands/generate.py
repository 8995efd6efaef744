"""``jspec generate``: its arguments, the prompts it reads, and the printed completions."""

import argparse
import contextlib
import json
import pathlib
import sys
import time
from typing import Any

import jspec
from jspec.commands.model_args import add_download_option
from jspec.commands.terminal import Screen, opened, summary
from jspec.commands.warming import warm_up
from jspec.config import EngineConfig
from jspec.outputs import total_stats
from jspec.text.chat_template import read_template
from jspec.text.token_spans import TokenSpans

SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")
LOADING = ("ngram_corpus", "max_len", "dtype", "tensor_parallel", "generation_config", "download")
STDIN = "-"
SHOWN = 60  # how many characters of a prompt are printed above its completion


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the arguments, except those that ``jspec demo`` has too; ``cli`` declares these."""
    parser.add_argument(
        "target", help="checkpoint folder, GGUF file, or the name of a model on the hub, org/name[@revision][:Q4_K_M]"
    )
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
    parser.add_argument("--stream", action="store_true", help="print the tokens of one prompt as they come")
    parser.add_argument("--plain", action="store_true", help="with --stream: no colours for accepted drafts")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's messages, under the chat template")
    add_template_arguments(parser)
    parser.add_argument("--max-batch", type=int, help="prompts decoded together; default: all of them, up to 8")
    add_request_arguments(parser, max_tokens=128)
    parser.set_defaults(parser=parser)


def add_template_arguments(parser: argparse.ArgumentParser):
    """Declare the system message and the chat template."""
    parser.add_argument("--system", metavar="TEXT", help="the system message of a conversation")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file, instead of the checkpoint's chat template"
    )


def add_request_arguments(parser: argparse.ArgumentParser, max_tokens: int | None):
    """Declare options of sampling and loading; ``cli`` declares the other ones."""
    most = "the end of the context" if max_tokens is None else max_tokens
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help=f"most new tokens; default: {most}")
    parser.add_argument("--min-tokens", type=int)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text to stop at; may be given several times")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of the text")
    add_download_option(parser)
    parser.add_argument("--max-len", type=int, help="longest prompt plus completion, in tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="GPUs that share the target; 1")
    parser.add_argument("--ngram-corpus", metavar="FILE", help="text to look drafts up in, with --draft ngram")
    parser.add_argument(
        "--generation-config", choices=("auto", "jspec"), help="jspec: leave the checkpoint's sampling defaults aside"
    )


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that the arguments set."""
    return {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}


def loading(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``jspec.load`` that the command's arguments set."""
    return {name: getattr(args, name) for name in LOADING if getattr(args, name) is not None}


def speculation_of(args: argparse.Namespace) -> "jspec.Speculation":
    """The settings of speculation, which ``cli`` declares."""
    return jspec.Speculation(
        num_draft_tokens=args.num_draft_tokens,
        verify=args.verify,
        draft_sampling=args.draft_sampling,
        max_draft_tokens=args.max_draft_tokens,
        verify_budget=args.verify_budget,
        lookup=bool(args.lookup),
        tree=args.tree,
    )


def run(args: argparse.Namespace) -> int:
    """Complete the prompts, and print the completions in the order of the prompts; returns the exit code."""
    speculation, prompts = speculation_of(args), _prompts(args)
    _check(args, len(prompts))
    options = {**loading(args), "draft": args.draft, "speculation": speculation}
    options["max_batch"] = min(len(prompts), EngineConfig.max_batch) if args.max_batch is None else args.max_batch
    if args.stream:
        return _stream(args, prompts[0], options)
    if args.chat:
        llm, conversations = _conversations(args, prompts, options)
        results = jspec.generate(llm, conversations, **sampling(args))
    else:
        results = jspec.generate(args.target, prompts, **options, **sampling(args))
    assert isinstance(results, list)
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        if args.json:
            print(json.dumps(_record(index, prompt, result), ensure_ascii=False))
        else:
            if len(prompts) > 1:
                print(f"==> prompt {index}: {_shown(prompt)} ({result.finish_reason}, {len(result.token_ids)} tokens)")
            print(result.token_ids if result.text is None else result.text)
    stats = total_stats(result.stats for result in results)
    print(f"acceptance length {stats.mean_acceptance_length:.2f}", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace, num_prompts: int):
    """Raise a ValueError if options exclude each other."""
    for name, value in (("--system", args.system), ("--chat-template", args.chat_template)):
        if value is not None and not args.chat:
            raise ValueError(f"{name} {_shown(value)} goes into a chat template: give --chat as well")
    if args.plain and not args.stream:
        raise ValueError("--plain turns off colours, which only --stream has: leave it out")
    if args.stream and args.json:
        raise ValueError("--stream prints text as it comes, and --json prints whole completions: give one of them")
    if args.stream and num_prompts != 1:
        raise ValueError(f"--stream shows one prompt as it grows, and there are {num_prompts}: leave --stream out")


def _conversations(
    args: argparse.Namespace, prompts: list, options: dict[str, Any]
) -> "tuple[jspec.LLM, list[list[int]]]":
    """The model, and the tokens of one conversation per prompt, with the prompt as the user's message."""
    texts = [prompt.get("prompt") if isinstance(prompt, dict) else prompt for prompt in prompts]
    for prompt, text in zip(prompts, texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"--chat: expected prompts of text, and one is {_shown(prompt)}; leave --chat out")
    jspec.SamplingParams(**sampling(args))  # refuses bad values before the model is loaded, which takes minutes
    template = None if args.chat_template is None else read_template(args.chat_template)
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    llm = jspec.load(args.target, **options)
    chats = [[*first, {"role": "user", "content": text}] for text in texts]
    return llm, [llm.chat_prompt(messages, chat_template=template) for messages in chats]


def _stream(args: argparse.Namespace, prompt, options: dict[str, Any]) -> int:
    """Print a completion as it comes; returns the exit code."""
    screen, result = Screen(args.plain), None
    jspec.SamplingParams(**sampling(args))  # refuses bad values before the model is loaded, which takes minutes
    if args.chat:
        llm, [prompt] = _conversations(args, [prompt], options)
    else:
        llm = jspec.load(args.target, **options)
    request = llm.engine.request(prompt, **sampling(args))
    spans = TokenSpans(llm.tokenizer, request.prompt)
    warm_up(llm, "jspec generate")  # so that the measured time does not include compilation
    if llm.method is not None:
        screen.legend()
    start = time.perf_counter()
    try:
        with contextlib.closing(llm.engine.stream(request)) as deltas:
            for delta in deltas:
                screen.write(spans.of(delta))
                result = delta.result
    finally:
        screen.end_text()
    assert result is not None
    if result.finish_reason == "error":
        raise ValueError(f"the completion failed: {result.stop_reason}")
    print(summary(result, time.perf_counter() - start), file=sys.stderr)
    return 0


def _prompts(args: argparse.Namespace) -> list:
    given = [*args.prompts, *([] if args.file is None else [args.file])]
    if not given:
        args.parser.error("give a prompt, --prompts FILE, or - to read one prompt from standard input")
    if given.count(STDIN) > 1:
        raise ValueError("standard input can be read once: give - only once")
    # A prompt from a pipe, of echo for example, ends with a newline that is not part of it.
    prompts: list = [_standard_input().removesuffix("\n") if prompt == STDIN else prompt for prompt in args.prompts]
    if args.file is not None:
        prompts += _lines(args.file)
    if not prompts:
        raise ValueError(f"--prompts {args.file}: expected a prompt a line, and there is none")
    return prompts


def _standard_input() -> str:
    """All of standard input.

    Raises:
      ValueError: it is closed, or no text in UTF-8.
    """
    try:
        return opened(sys.stdin, "standard input").read()
    except UnicodeDecodeError:
        raise ValueError("standard input: expected text in UTF-8") from None


def _lines(name: str) -> list:
    """The prompts in a file or in standard input, one a line. Empty lines are skipped."""
    path = pathlib.Path(name)
    if name != STDIN and not path.is_file():
        raise ValueError(f"--prompts {name}: expected a file with a prompt a line")
    try:
        text = _standard_input() if name == STDIN else path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--prompts {name}: expected text in UTF-8") from None
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_json_prompt(f"--prompts {name}, line {number}", line) for number, line in lines]


def _json_prompt(where: str, line: str) -> dict:
    """The prompt in a line of .jsonl, as vLLM's dictionary. Other fields of the object are ignored."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    keys = ("prompt", "prompt_token_ids")
    prompt = {key: entry[key] for key in keys if key in entry} if isinstance(entry, dict) else {}
    if not prompt:
        raise ValueError(f'{where}: expected a JSON object with "prompt" or "prompt_token_ids"')
    return prompt


def _shown(prompt) -> str:
    text = repr(_text_or_ids(prompt))
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def _text_or_ids(prompt):
    return prompt.get("prompt", prompt.get("prompt_token_ids")) if isinstance(prompt, dict) else prompt


def _record(index: int, prompt, result: "jspec.Result") -> dict:
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
