"""Do the bits of a token's results depend on how many tokens a call has, and what would it cost if they did not?

    python -m benchmarks.kernels.invariance --json FILE           # about eight minutes; needs a Hopper GPU
    python -m benchmarks.kernels.invariance --only products --tokens 1 5 80
    python -m benchmarks.kernels.invariance --small               # tiny and anywhere, with meaningless times

A token is computed in calls of several sizes, first, in the middle and last among other tokens. Sizes whose results have the
same bits are printed as a class: ``{1} {2 5 8}`` says that two, five and eight tokens agree, and that one differs from them.
The sections:

    instructions  wgmma at every N, mma.sync, XLA's products: does the instruction's shape change the order of a sum?
    products      the table of kernels (``jspec.pallas.matmul``), by numbers of tokens, with times and the kernel of each
    attention     verify and prefill passes over pages, by rows, query tokens, lengths and neighbours
    costs         products whose sums have one order for any number of tokens, beside the fastest
    steps         a target of two layers, by rows and query tokens, and in prefill: after which layer do bits differ?
    states        the same of targets with recurrent states, which read prompts in chunks and answers in rounds
    experts       routing and experts
    small_ops     norms, activations, rotations, sampling, verification rules, gated delta nets

Each section ends at its share of ``--seconds``, and what it did not begin is named. An error is a line of its own."""

import argparse
import importlib
import pathlib
import sys
import time

import jax

from benchmarks.kernels.invariance.run import Run
from benchmarks.report import results

SHARES = {  # of the time, in the order in which sections run; what one does not need is left to the next
    "instructions": 0.10,
    "products": 0.26,
    "attention": 0.14,
    "costs": 0.18,
    "steps": 0.12,
    "states": 0.04,
    "experts": 0.08,
    "small_ops": 0.08,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES), help="these sections")
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens of products and experts")
    parser.add_argument("--seconds", type=float, default=450, help="begin nothing later than this")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there, line by line")
    parser.add_argument("--small", action="store_true", help="tiny shapes, any machine, meaningless times")
    args = parser.parse_args()
    if not args.small and jax.default_backend() != "gpu":
        parser.error(
            "no GPU: the kernels are compiled for Hopper GPUs; --small runs a tiny version of what is left here"
        )
    tokens = tuple(args.tokens or ((1, 5) if args.small else (1, 2, 5, 8, 16, 17, 40, 64, 80, 320, 512, 640, 2048)))
    result = results.begin("invariance", {"only": args.only, "tokens": tokens, "smoke": args.small})
    run, began = Run(result, args.json, args.small), time.monotonic()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    wanted = [name for name in SHARES if name in args.only]
    total, spent = sum(SHARES[name] for name in wanted), 0.0
    for name in wanted:
        spent += SHARES[name]
        run.until = began + args.seconds * spent / total
        print(f"\n== {name} ({time.monotonic() - began:.0f} s)", flush=True)
        section = getattr(importlib.import_module(f"benchmarks.kernels.invariance.{name}"), name)
        run.attempt(name, section, run, tokens)
    print(f"\n{time.monotonic() - began:.0f} s; left out: {', '.join(run.left_out) or 'nothing'}; ", end="")
    print(f"failed: {', '.join(run.failed) or 'nothing'}", flush=True)
    return int(bool(run.failed))


if __name__ == "__main__":
    sys.exit(main())
