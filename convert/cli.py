"""The ``jspec-convert`` command.

Exit codes: 0 if the command succeeded; 1 if the tensors do not match config.json, a converted folder does not match its
manifest, or a verification failed; 2 if the command refused, with one sentence on stderr; 130 after Ctrl-C; 141 if nobody
reads standard output any more.
"""

import argparse
import sys
from collections.abc import Sequence

from convert.choices import COMPRESSED, JSPEC, VERIFICATIONS
from jspec.checkpoints.files.refusal import Mismatch
from jspec.checkpoints.files.tensor import NUMPY_DTYPES
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.commands.interrupts import repeated_interrupts
from jspec.commands.terminal import READER_LEFT, reader_left
from jspec.config import QUANTIZATIONS
from jspec.config.heads import AUX_CONVENTIONS, NORM_OUTPUTS
from jspec.hub.names import is_hub_name

OK, MISMATCH, REFUSED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command, after running it with ``arguments``, by default those of the process."""
    parser = _parser()
    options = parser.parse_args(arguments)
    further = (options.src, options.quantize, options.draft_vocabulary, options.corpus, options.texts)
    if options.check is not None and any(option is not None for option in further):
        parser.error("--check takes a converted folder and nothing else")
    if options.check is None and (options.src is None or (options.out is None and not options.dry_run)):
        parser.error("SRC and OUT are needed; --dry-run needs SRC only")
    if options.format == COMPRESSED:
        _require_export(parser, options)
    if options.texts is not None and (options.verify != "logits" or options.dry_run):
        parser.error(
            f"--texts {options.texts} needs --verify logits, which writes OUT and compares it with transformers"
        )
    try:
        with repeated_interrupts():
            code = _run(options)
        return READER_LEFT if reader_left() else code
    except Mismatch as mismatch:
        print(f"jspec-convert: {_printable(mismatch)}", file=sys.stderr)
        return MISMATCH
    except (ValueError, OSError) as refusal:
        if isinstance(refusal, BrokenPipeError) and reader_left():
            return READER_LEFT
        print(f"jspec-convert: {_printable(refusal)}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("jspec-convert: interrupted; nothing was written", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jspec-convert",
        description="Convert a Hugging Face checkpoint, a language model or a draft head, to Flax params that jspec loads.",
    )
    parser.add_argument(
        "src",
        metavar="SRC",
        nargs="?",
        help="folder with config.json and safetensors, a GGUF file, or a name on the hub, org/name[@revision][:Q4_K_M]",
    )
    parser.add_argument("out", metavar="OUT", nargs="?", help="folder to create")
    parser.add_argument(
        "--download",
        action="store_true",
        default=None,
        help="download SRC and the target from the Hugging Face hub, as far as its local cache lacks them",
    )
    parser.add_argument(
        "--dtype",
        choices=NUMPY_DTYPES,
        help="of the params; default: the narrower one that holds every tensor exactly, and bfloat16 for weights that are "
        "dequantised",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read the tensors of torch.save files (.bin, .pt), in a separate process that runs nothing of them",
    )
    parser.add_argument(
        "--aux-convention",
        choices=AUX_CONVENTIONS,
        help="what the layer ids of an EAGLE-3 head mean: the inputs of these layers (vLLM, speculators) or their outputs "
        "(SpecForge, SGLang, NVIDIA Model Optimizer); never guessed",
    )
    parser.add_argument(
        "--norm-output",
        choices=NORM_OUTPUTS,
        help="what norm_output of an EAGLE-3 head means: the normed output is fed back (vLLM, SGLang, SpecForge since "
        "September 2026) or the output head reads it (SpecForge before); never guessed",
    )
    parser.add_argument(
        "--mask-token-id",
        type=_token_id,
        metavar="ID",
        help="token of a P-EAGLE head's mask slots, if config.json lacks it",
    )
    parser.add_argument(
        "--target",
        metavar="DIR",
        help="folder or name of the model that a draft head is for: refuse one that does not fit; with --draft-vocabulary "
        "also where the rows of an output head come from that a draft head lacks, and the tokenizer that SRC lacks",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="store linear maps and output head in eight bits, a scale for each output channel, or in four, a scale for "
        "each 128 inputs. --dtype is then that of the rest",
    )
    parser.add_argument(
        "--format",
        choices=(JSPEC, COMPRESSED),
        default=JSPEC,
        help="of OUT: Flax params for jspec (default); or with --quantize a language model as safetensors in the formats of "
        "compressed-tensors, which transformers, vLLM and jspec load",
    )
    parser.add_argument(
        "--draft-vocabulary",
        type=_draft_vocabulary,
        metavar="N|FILE",
        help="logits for these tokens only, of a drafter: the N most frequent ones of --corpus, with stop tokens and "
        "special tokens, or the ids in a file (.json, .txt, .npy). Without --mtp a language model is no target any more",
    )
    parser.add_argument("--corpus", metavar="FILE", help="text in UTF-8, like the texts that are to be drafted")
    parser.add_argument(
        "--mtp",
        action=argparse.BooleanOptionalAction,
        help="keep the multi-token prediction layers of a language model's checkpoint, for draft='mtp', or drop them; "
        "default: keep those that there are. With --mtp, --draft-vocabulary is for these layers, and the model stays whole",
    )
    parser.add_argument("--dry-run", action="store_true", help="read headers only, print the mapping, write nothing")
    parser.add_argument(
        "--verify",
        choices=VERIFICATIONS,
        help="read the params back; 'logits' also compares with transformers, and with --quantize prints the KL",
    )
    parser.add_argument(
        "--texts",
        metavar="FILE",
        help="with --verify logits: texts, parted by blank lines, or .jsonl with one under text or prompt; say how "
        "much worse OUT predicts them",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing converted OUT, after success")
    parser.add_argument("--check", metavar="OUT", help="hash a converted folder again and name what is damaged")
    return parser


def _token_id(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a token id, 0 or more")
    return int(text)


def _draft_vocabulary(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _find_on_hub(options: argparse.Namespace):
    """Put folders of the hub's local cache in place of the names of models, which are downloaded if the user agrees."""
    from jspec.hub.folders import local_checkpoints

    names = {key: value for key in ("src", "target") if (value := getattr(options, key)) and is_hub_name(value)}
    folders = local_checkpoints(list(names.values()), options.download, options.allow_pickle)
    for key, folder in zip(names, folders, strict=True):
        setattr(options, key, folder)


def _run(options: argparse.Namespace) -> int:
    if options.check is not None:
        return _check(options.check)
    _find_on_hub(options)
    if options.format == COMPRESSED:
        return _export(options)
    return _dry_run(options) if options.dry_run else _convert(options)


def _check(out: str) -> int:
    from convert.manifest import check

    problems = check(out)
    for problem in problems:
        print(_printable(problem))
    if not problems:
        print(f"{out}: every file matches the manifest")
    return MISMATCH if problems else OK


def _dry_run(options: argparse.Namespace) -> int:
    from convert.listing import listing, matches
    from convert.preparation import mtp_beside, prepared
    from jspec.checkpoints.checkpoint import Checkpoint

    head_options = HeadOptions(options.aux_convention, options.norm_output, options.mask_token_id)
    source = Checkpoint.open(options.src, head_options, options.allow_pickle).hugging_face
    target = None if options.target is None else Checkpoint.open(options.target)
    vocabulary = options.mtp, options.draft_vocabulary, options.corpus
    source = prepared(source, target, options.quantize, *vocabulary)
    for line in listing(source, options.dtype or source.default_dtype):
        print(_printable(line))
    for note in mtp_beside(source, options.allow_pickle, target, *vocabulary)[1]:
        print(f"note: {_printable(note)}")
    return OK if matches(source) else MISMATCH


def _convert(options: argparse.Namespace) -> int:
    from convert.conversion import convert

    report = convert(
        options.src,
        options.out,
        options.dtype,
        options.overwrite,
        options.verify,
        progress=True,
        allow_pickle=options.allow_pickle,
        aux_convention=options.aux_convention,
        norm_output=options.norm_output,
        mask_token_id=options.mask_token_id,
        target=options.target,
        quantize=options.quantize,
        mtp=options.mtp,
        draft_vocabulary=options.draft_vocabulary,
        corpus=options.corpus,
        texts=options.texts,
    )
    kinds = report.dtype if report.quantization is None else f"{report.quantization} and {report.dtype}"
    print(_printable(report.recognised))
    for note in report.notes:
        print(f"note: {_printable(note)}")
    print(
        f"{report.out}: {report.tensors} tensors, {report.parameters:,} parameters in {kinds}, "
        f"{report.seconds:.1f} s, peak memory {report.peak_bytes / 2**20:,.0f} MiB"
    )
    return OK


def _require_export(parser: argparse.ArgumentParser, options: argparse.Namespace):
    """End the program unless no option is given that ``--format compressed-tensors`` has no use for."""
    if options.quantize is None:
        parser.error(f"--format {COMPRESSED} needs --quantize")
    others = ("dtype", "verify", "mtp", "draft_vocabulary", "corpus", "target", "check", "dry_run", "allow_pickle")
    given = [name for name in others if getattr(options, name)]
    if given:
        parser.error(f"--{given[0].replace('_', '-')} does not go with --format {COMPRESSED}")


def _export(options: argparse.Namespace) -> int:
    from convert.compressed import export_quantized

    out = export_quantized(options.src, options.out, options.quantize, options.overwrite, progress=True)
    print(f"{_printable(out)}: {options.quantize} in the formats of compressed-tensors")
    return OK


def _printable(text: object) -> str:
    """``text`` as one printable line, because it may quote names from a checkpoint with line breaks or broken characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


if __name__ == "__main__":
    sys.exit(main())
