"""What a verification budget gains where requests differ: tokens per second with it, over the best fixed number of drafts.

    python -m benchmarks.rounds.budget                    # an 8B shape, EAGLE-3, 64 rows, on one GPU
    python -m benchmarks.rounds.budget --json FILE        # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.rounds.budget --family           # what estimates are worth for the shipped family, on any machine
    python -m benchmarks.rounds.budget --smoke            # tiny and anywhere, with meaningless times

Weights are random, so that drafts are accepted by chance: with one probability in half of the requests, and with another in
the others. Rounds verify every one of K drafts, for several K; or the target reads R tokens of all rows together, and those
drafts that are likeliest to be accepted by what was accepted in the rounds before
(``jspec.engine.adaptive.draft_selection``). Such rounds begin with no estimates at all, and their tokens are those of
all rounds. The floors are as in ``benchmarks.rounds.round``.

With ``--family``, real drafts of the family are verified, 64 prompts over 16 rows. Tokens a round with a budget of three
tokens for each request stand beside those that as many verified drafts would give if every request had as many of them,
which is read off rounds of two and of three drafts."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

import jspec
from benchmarks.acceptance.drafters import prompts
from benchmarks.kernels import bandwidth
from benchmarks.report import results
from benchmarks.report.markdown import paragraph, table
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import Decoding
from benchmarks.rounds.round import Figure
from benchmarks.shapes import SHAPES
from jspec.commands.demo import FAMILY
from jspec.outputs import total_stats

LINE = 20  # of docs/results/performance.md
START, NEW, SMALLER = 512, 512, 16


def ways(args) -> list[tuple[int, int | None]]:
    """(drafts of a round, tokens read in a round), every draft verified first."""
    return [*((K, None) for K in args.fixed), *((args.drafts, round(share * args.batch)) for share in args.shares)]


def measure(args) -> results.Result:
    """Time every way, and compare; the result is written at the end."""
    rates, rate = bandwidth.for_floors(args.bandwidth)
    shape, divisor = ("tiny", SMALLER) if args.smoke else (args.shape, 1)
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    settings = {"shape": shape, "dtype": dtype, "method": args.method, "batch": args.batch, "K": args.drafts}
    acceptance = tuple(args.acceptance)
    result = results.begin("budget", settings | {"acceptance": acceptance, "smoke": args.smoke}, rate, rates)
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s", flush=True)
    bench = Bench(SHAPES[shape], dtype, rate, 1 if args.smoke else args.repeats, args.profile)
    speeds: dict[tuple[int, int | None], float] = {}
    for K, R in ways(args):
        what = Decoding(args.method, K, args.batch, START // divisor, NEW // divisor, acceptance, budget=R)
        timed = bench.time(what)
        speeds[K, R] = args.batch * timed.tokens / timed.seconds
        variant = f"K = {K}" if R is None else f"K = {K}, R = {R}"
        milliseconds = 1e3 * timed.seconds, 1e3 * timed.floor
        Figure(LINE, variant, str(what), "ms", *milliseconds, kernels=timed.kernels, tokens=timed.tokens).add_to(result)
        print(
            f"{variant:<16} {milliseconds[0]:7.3f} ms, floor {milliseconds[1]:6.3f}, {timed.tokens:5.3f} tokens a row, "
            f"{timed.kernels} launches: {speeds[K, R]:9,.0f} tokens/s",
            flush=True,
        )
    fixed = max(speed for (_, R), speed in speeds.items() if R is None)
    gain = max(speed for (_, R), speed in speeds.items() if R is not None) / fixed
    goals = (1.05, 1.10) if shape == "llama-3.1-8b" else ()
    what = f"tokens per second with a budget over the best fixed K, {args.method}, batch {args.batch}"
    Figure(LINE, "", what, "x", gain, 0, *goals).add_to(result)
    result.details[str(LINE)]["more_is_better"] = True
    print(f"{what}: {gain:.3f}")
    if args.json:
        results.write(result, args.json)
    return result


def family(names: Sequence[str]) -> str:
    """A table of tokens a round: of the likeliest of four drafts, and of the same number of first ones."""
    batch = prompts(64)

    def mean(name: str, K: int, budget: float | None, temperature: float) -> tuple[float, float]:
        """Tokens, and verified drafts, of a round."""
        where = FAMILY / "target", FAMILY / name
        how: dict[str, Any] = {"num_draft_tokens": K, "verify_budget": budget, "reproducible": False}
        llm = jspec.load(*where, max_batch=16, max_len=128, page_size=32, **how)
        params = jspec.SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True)
        texts: Any = jspec.generate(llm, batch, params, key=jax.random.key(0))
        stats = total_stats(text.stats for text in texts)
        return stats.mean_acceptance_length, stats.num_draft_tokens / stats.num_steps

    rows = []
    for name in names:
        for temperature in (0.0, 1.0):
            tokens, verified = mean(name, 4, 3.0, temperature)
            two, three = (mean(name, K, None, temperature)[0] for K in (2, 3))
            alike = two + (verified - 2) * (three - two)
            rows.append((name, f"{temperature:g}", *(f"{x:.2f}" for x in (verified, alike, tokens, tokens / alike))))
            print(*rows[-1], flush=True)
    return table(("drafter", "temperature", "drafts verified", "each as many", "the likeliest", "times"), rows)


def section(runs: Sequence[results.Result]) -> str:
    """The section of docs/results/performance.md, from results of this benchmark."""
    last = runs[-1]
    figures, batch = results.latest([last]), last.settings["batch"]
    gain, rounds = figures.pop(str(LINE)), figures.values()
    rows = [
        (
            one.key.removeprefix(f"{LINE}, "),
            f"{one.floor:.2f}",
            f"{one.measured:.2f}",
            f"{one.details['tokens']:.3f}",
            str(one.details["kernels"]),
            f"{1e3 * batch * one.details['tokens'] / one.measured:,.0f}",
        )
        for one in rounds
    ]
    rates = " and ".join(f"{rate:g}" for rate in last.settings["acceptance"])
    introduction = f"""`{last.current_command}` (line {LINE}), {batch} rows, method {last.settings["method"]}, synthetic
    acceptance {rates}, each in as many requests. With R the target reads so many tokens of all rows in a round. The best
    budget gives {gain.measured:.3f} times as many tokens per second as the best number of drafts that are all verified; the
    goal is {gain.goal:.2f}, the stretch goal {gain.stretch:.2f}."""
    columns = ("rounds", "floor, ms", "measured, ms", "tokens a row", "launches", "tokens/s")
    return "\n\n".join(["## A verification budget", paragraph(introduction), table(columns, rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--method", choices=("eagle", "eagle3", "dspark"), default="eagle3")
    parser.add_argument("--batch", type=int, default=64, metavar="B")
    parser.add_argument("--drafts", type=int, default=4, metavar="K", help="of rounds with a budget")
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 2, 3, 4], metavar="K", help="of rounds without")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.8, 0.3], help="of each kind of request")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.5, 2, 2.5, 3], help="R over B")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--family", nargs="*", metavar="DRAFTER", help="measure drafters of the shipped family instead")
    parser.add_argument("--profile", action="store_true", help="print which kernels take the time of a round, too")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and lengths, any machine, meaningless times")
    args = parser.parse_args()
    if args.family is not None:
        print(family(args.family or ["draft", "eagle3", "dspark"]))
        return 0
    if not args.smoke and args.shape != "tiny" and jax.default_backend() != "gpu":
        parser.error("no GPU: times of this shape need one; --smoke runs a tiny version here")
    measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
