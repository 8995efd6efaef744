"""The ``jspec`` command: ``jspec demo``, ``generate``, ``chat``, ``serve``, ``bench``, ``train`` and ``doctor``."""

import argparse
import contextlib
import importlib
import pathlib
import sys
from collections.abc import Sequence

import jspec
from jspec._validation import MISTAKES
from jspec.bench.command import add_arguments as add_bench_arguments
from jspec.commands.chat import add_arguments as add_chat_arguments
from jspec.commands.generate import add_arguments as add_generate_arguments
from jspec.commands.interrupts import repeated_interrupts
from jspec.commands.model_args import KV_CACHE_DTYPES, add_download_option, add_verifying_options, draft_count_of
from jspec.commands.terminal import READER_LEFT, reader_left
from jspec.commands.xla_alarms import without_alarms
from jspec.config import DRAFT_SAMPLINGS, VERIFY_RULES
from jspec.config.heads import AUX_CONVENTIONS, NORM_OUTPUTS
from jspec.serving.server.command import add_arguments as add_serve_arguments
from jspec.train.command import add_arguments as add_train_arguments

# The module of a command, whose ``run`` gives the exit code. It is imported when the command runs, since most need JAX.
MODULES = {
    "demo": "jspec.commands.demo",
    "generate": "jspec.commands.generate",
    "chat": "jspec.commands.chat",
    "serve": "jspec.serving.server.command",
    "bench": "jspec.bench.command",
    "train": "jspec.train.command",
    "doctor": "jspec.doctor.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
      the exit code. 0 is success, and 1 means that ``jspec doctor`` found something wrong. 2 is a mistake in the arguments
      or a checkpoint, with a message of one sentence, 130 is an interruption by Ctrl-C, and 141 means that whatever read
      standard output has gone.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command == "generate" and not any(text.startswith("-") for text in rest):
        args.prompts += rest  # argparse ends a list of prompts at the first option; these came after one
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        # A server does that itself, and only while it compiles.
        alarms = contextlib.nullcontext() if args.command == "serve" else without_alarms()
        with repeated_interrupts(), alarms:
            code = importlib.import_module(MODULES[args.command]).run(args)
        return READER_LEFT if reader_left() else code
    except MISTAKES as error:
        if isinstance(error, BrokenPipeError) and reader_left():
            return READER_LEFT
        print(f"jspec {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"jspec {args.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jspec", description="Lossless speculative decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"jspec {jspec.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="complete a few prompts with and without speculation, and compare")
    demo.add_argument("--checkpoints", type=pathlib.Path, help="folder that holds target/ and drafters beside it")
    demo.add_argument("--all", action="store_true", help="compare every drafter in one table")
    demo.add_argument("--max-tokens", type=int, default=96)
    # Three drafts instead of four, because on a CPU every query token of the target costs time.
    demo.set_defaults(temperature=0.8, top_p=1.0, num_draft_tokens=3, verify_budget=None, lookup=None, tree=None)

    generate = commands.add_parser(
        "generate",
        help="complete prompts",
        description="Complete prompts. Sampling defaults are those of the checkpoint's generation_config.json.",
    )
    add_generate_arguments(generate)
    generate.set_defaults(num_draft_tokens=4)

    chat = commands.add_parser(
        "chat",
        help="converse with a chat model",
        description="A conversation in the terminal; from a pipe, each line is a turn of the user. Sampling defaults are "
        "those of the checkpoint's generation_config.json.",
    )
    add_chat_arguments(chat)
    chat.set_defaults(num_draft_tokens=4)

    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI and vLLM do",
        description="An HTTP server that speaks OpenAI's protocol. It needs pip install 'jspec[serve]'.",
    )
    add_serve_arguments(serve)

    bench = commands.add_parser("bench", help="measure a server, or an engine in this process")
    add_bench_arguments(bench)

    train = commands.add_parser("train", help="train a draft head for a target")
    add_train_arguments(train)

    doctor = commands.add_parser(
        "doctor",
        help="why few drafts are accepted, whether a target computes what transformers does, whether a seed means one text",
    )
    doctor.add_argument(
        "--target", help="checkpoint folder, GGUF file, or a name on the hub; with --url the name of a model"
    )
    doctor.add_argument("--draft", help="the same of a draft model or a draft head; or mtp. Needed without --reference")
    add_download_option(doctor)
    doctor.add_argument(
        "--exact",
        action="store_true",
        help="prove that a seed means one text: count the texts and the bits of log-probabilities that depend on how they "
        "come about",
    )
    doctor.add_argument("--url", help="with --exact: ask a server of OpenAI's protocol in place of a checkpoint")
    doctor.add_argument(
        "--reference",
        metavar="PATH",
        help="compare the target with transformers on this original checkpoint, a folder (no GGUF) or a name on the hub: "
        "logits, greedy texts and where they first differ",
    )
    doctor.add_argument(
        "--draft-reference",
        metavar="PATH",
        help="the original of a quantised draft, a folder or a name on the hub: say what quantisation costs in acceptance",
    )
    doctor.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        help="as for serve; if it rounds, say what that costs in acceptance",
    )
    doctor.add_argument("--reference-dtype", choices=("float32", "bfloat16"), default="float32", help="of transformers")
    doctor.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of jspec; bfloat16 on a GPU, float32 elsewhere"
    )
    doctor.add_argument(
        "--output", type=pathlib.Path, metavar="FILE", help="with --reference: write the report there, too"
    )
    doctor.add_argument(
        "--prompts", type=pathlib.Path, help="a text file with one prompt a line, or .jsonl with the text under prompt"
    )
    doctor.add_argument(
        "--texts",
        type=pathlib.Path,
        metavar="FILE",
        help="texts, parted by blank lines, or .jsonl with one under text or prompt: with --reference or a --kv-cache-dtype "
        "that rounds, say how much worse the target predicts them",
    )
    doctor.add_argument("--aux-convention", choices=AUX_CONVENTIONS, help="as for jspec-convert")
    doctor.add_argument("--norm-output", choices=NORM_OUTPUTS, help="as for jspec-convert")
    doctor.add_argument("--mask-token-id", type=int, help="as for jspec-convert")
    doctor.add_argument("--num-draft-tokens", type=int, default=4)
    doctor.add_argument("--max-tokens", type=int, default=64, help="new tokens per prompt")
    doctor.add_argument(
        "--no-chat",
        action="store_true",
        help="give prompts to the target as plain text, even if it has a chat template",
    )

    for command in (demo, generate, chat):
        command.add_argument(
            "--draft",
            help="checkpoint folder, GGUF file, name on the hub, ngram or mtp; for the demo also a name beside its target",
        )
        command.add_argument("--temperature", type=float, default=command.get_default("temperature"))
        command.add_argument("--top-p", type=float, default=command.get_default("top_p"))
        command.add_argument("--seed", type=int, default=0)
        command.add_argument(
            "--num-draft-tokens",
            type=draft_count_of,
            default=command.get_default("num_draft_tokens"),
            help="drafts per round, 0 for none, or auto: as many as pay, measured on this machine",
        )
        command.add_argument("--max-draft-tokens", type=int, help="the most that auto may choose")
        command.add_argument("--verify", choices=VERIFY_RULES, default="auto")
        command.add_argument("--draft-sampling", choices=DRAFT_SAMPLINGS, default="auto")
    for command in (generate, chat):  # not for the demo, which compares drafters request by request
        add_verifying_options(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
