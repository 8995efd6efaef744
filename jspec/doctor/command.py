"""``jspec doctor``: diagnosis of the draft, comparison with transformers, or both, or a proof that a seed means one text.
``jspec.cli`` declares its arguments."""

import argparse
import gc
import sys

from jspec._validation import require
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.doctor.comparison import Comparison, compare_with_reference
from jspec.doctor.diagnosis import Diagnosis, diagnose
from jspec.doctor.exact import prove_exact
from jspec.doctor.exact_http import prove_exact_over_http
from jspec.doctor.report import bug_report, show, show_comparison, show_exactness
from jspec.doctor.texts import rounded_cache_on_texts
from jspec.loading.pair import open_checkpoints
from jspec.registry import MTP
from jspec.text.files import read_prompts


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0 if nothing is wrong and 1 otherwise.

    Raises:
      ValueError: an argument or a checkpoint cannot be used.
    """
    if all(getattr(args, name) is None for name in ("target", "url")):
        raise ValueError("target=None: expected --target, a checkpoint, or --exact with the --url of a server")
    if args.exact:
        return _prove(args)
    if args.url is not None:
        raise ValueError(f"url={args.url!r}: expected --exact beside it, which asks a server")
    if args.reference is None and args.draft is None and args.texts is None:
        raise ValueError(
            "draft=None: expected --draft, whose acceptance is measured, or --reference, or both; or --exact"
        )
    if args.reference is None and args.output is not None:
        raise ValueError(f"output={str(args.output)!r}: expected --reference beside it, whose report it is for")
    if args.draft is None and (
        args.draft_reference is not None or (args.kv_cache_dtype != "auto" and args.texts is None)
    ):
        name = "draft_reference" if args.draft_reference is not None else "kv_cache_dtype"
        raise ValueError(
            f"{name}={str(getattr(args, name))!r}: expected --draft beside it, whose acceptance is measured"
        )
    prompts = None if args.prompts is None else read_prompts(args.prompts)
    settings = {"max_tokens": args.max_tokens, "dtype": args.dtype, "chat": False if args.no_chat else None}
    settings["download"] = args.download
    if args.texts is not None:
        cost = rounded_cache_on_texts(args.target, args.texts, args.kv_cache_dtype, args.dtype, args.download)
        expected = "--reference beside it, the original, or a --kv-cache-dtype that rounds"
        require(cost is not None or args.reference is not None, "texts", str(args.texts), expected)
        print(*cost.sentences if cost is not None else (), sep="\n")
    if args.reference is None and args.draft is None:
        return 0
    if args.reference is None:
        diagnosis = _diagnose(args, prompts, settings)
        return 0 if diagnosis.healthy else 1
    comparison = compare_with_reference(
        args.target, args.reference, prompts, reference_dtype=args.reference_dtype, texts=args.texts, **settings
    )
    show_comparison(comparison)
    diagnosis, failure = None, None
    if args.draft is not None:
        gc.collect()  # the weights of the comparison
        try:
            diagnosis = _diagnose(args, prompts, settings)
        except ValueError as error:  # said after the report, which it must not take along
            failure = error
    _report(args, comparison, diagnosis)
    if failure is not None:
        raise failure
    return 0 if comparison.equal and (diagnosis is None or diagnosis.healthy) else 1


def _prove(args: argparse.Namespace) -> int:
    beside = "--exact" if args.url is None else "--url"
    for name in ("reference", "draft_reference", "output", "texts", *([] if args.url is None else ["draft"])):
        if getattr(args, name) is not None:
            raise ValueError(f"{name}={str(getattr(args, name))!r} has no place beside {beside}: leave one of them out")
    prompts = None if args.prompts is None else read_prompts(args.prompts)
    if args.url is not None:
        found = prove_exact_over_http(args.url, args.target, prompts, max_tokens=args.max_tokens)
        if not found.exact:
            print(
                "jspec doctor: a server of jspec gives a seed one text if it was started with --reproducible",
                file=sys.stderr,
            )
        show_exactness(found)
        return 0 if found.exact else 1
    options = HeadOptions(args.aux_convention, args.norm_output, args.mask_token_id, mtp=args.draft == MTP)
    found = prove_exact(
        args.target,
        args.draft,
        prompts,
        num_draft_tokens=args.num_draft_tokens,
        max_tokens=args.max_tokens,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        chat=False if args.no_chat else None,
        download=args.download,
        options=options,
    )
    show_exactness(found)
    return 0 if found.exact else 1


def _diagnose(args: argparse.Namespace, prompts: list[str] | None, settings: dict) -> Diagnosis:
    diagnosis = diagnose(
        args.target,
        args.draft,
        prompts,
        aux_convention=args.aux_convention,
        norm_output=args.norm_output,
        mask_token_id=args.mask_token_id,
        num_draft_tokens=args.num_draft_tokens,
        draft_reference=args.draft_reference,
        kv_cache_dtype=args.kv_cache_dtype,
        **settings,
    )
    show(diagnosis)
    return diagnosis


def _report(args: argparse.Namespace, comparison: Comparison, diagnosis: Diagnosis | None):
    draft = None
    if args.draft is not None:
        _, draft = open_checkpoints(args.target, args.draft, HeadOptions(mtp=args.draft == MTP))
    text = bug_report(comparison, diagnosis, None if draft is None else draft.folder)
    print(f"\nA report for a bug, without your texts and paths:\n\n{text}")
    if args.output is not None:
        args.output.write_text(text, "utf-8")
