"""How many tokens a round gives with trees of drafts, and with chains, of heads of the shipped family.

    python -m benchmarks.acceptance.trees                        # EAGLE-3 and DSpark, the shapes of tree_rounds
    python -m benchmarks.acceptance.trees --only eagle3 --small  # one head, a few tokens
    python -m benchmarks.acceptance.trees --json FILE            # writes a result: benchmarks/report/results.py

Both are verified by ``match``, with drafts of the target's own noise. What stands behind ± is one standard error, by leaving
out one prompt after another."""

import argparse
import pathlib

import jax

import jspec
from benchmarks.acceptance.drafters import prompts
from benchmarks.real.real_models import tokens_a_round
from benchmarks.report import results
from benchmarks.report.trees_table import acceptance_key
from benchmarks.rounds.tree_rounds import CHAINS, TREES
from jspec.commands.demo import FAMILY
from jspec.config import Speculation

TEMPERATURES = 0.0, 0.7, 1.0


def ways_of(head: str) -> dict[int, Speculation]:
    """The chains and trees of a head, by how many tokens the target reads in a round."""
    chains = {K + 1: Speculation(K, "match", "coupled") for K in CHAINS[head]}
    return chains | {tree.nodes: Speculation(tree=tree) for tree in TREES[head]}


def tokens(name: str, how: Speculation, batch: list[list[int]], new: int) -> list[tuple[float, float]]:
    """Of each temperature the tokens of a round, and their standard error."""
    found = []
    with jspec.load(FAMILY / "target", FAMILY / name, speculation=how, max_batch=8, max_len=48 + new + 8) as llm:
        for temperature in TEMPERATURES:
            params = jspec.SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)
            texts = jspec.generate(llm, batch, params, key=jax.random.key(0))
            assert isinstance(texts, list)
            found.append(tokens_a_round([text.stats for text in texts]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHAINS, default=list(CHAINS), metavar="HEAD", help="these heads")
    parser.add_argument("--small", action="store_true", help="two prompts of sixteen tokens")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="the result")
    args = parser.parse_args()
    batch, new = (prompts(2), 16) if args.small else (prompts(24), 160)
    result = results.begin("trees", {"prompts": len(batch), "new": new, "smoke": args.small})
    print("| head | drafts |", *(f"T = {t:g} |" for t in TEMPERATURES), flush=True)
    print("|---|---|" + "---|" * len(TEMPERATURES))
    for name in args.only:
        for width, how in ways_of(name).items():
            found = tokens(name, how, batch, new)
            for temperature, (mean, error) in zip(TEMPERATURES, found, strict=True):
                key = acceptance_key(name, width, temperature)
                result.measured[key], result.details[key] = mean, {"error": error}
            cells = (f"{mean:.2f} +- {error:.2f} |" for mean, error in found)
            print(f"| {name} | {how.tree or f'K = {width - 1}'} |", *cells, flush=True)
            if args.json:
                results.write(result, args.json)


if __name__ == "__main__":
    main()
