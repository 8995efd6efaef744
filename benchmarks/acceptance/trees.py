"""How many tokens a round gives with trees of drafts, and with chains, of heads of the shipped family.

    python -m benchmarks.acceptance.trees                        # EAGLE-3, EAGLE and DSpark, of seven shapes each
    python -m benchmarks.acceptance.trees --only eagle3 --small  # one head, a few tokens

Both are verified by ``match``, with drafts of the target's own noise. What stands behind ± is one standard error, by leaving
out one prompt after another."""

import argparse

import jax

import jspec
from benchmarks.acceptance.drafters import prompts
from benchmarks.real.real_models import tokens_a_round
from jspec.commands.demo import FAMILY
from jspec.config import Speculation, TreeShape

TEMPERATURES = 0.0, 0.7, 1.0
HEADS = "eagle3", "eagle", "dspark"
CHAINS = 4, 6
TREES = TreeShape(8, 4, 2), TreeShape(12, 5, 3), TreeShape(16, 5, 4), TreeShape(32, 6, 4), TreeShape(64, 6, 8)


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
    parser.add_argument("--only", nargs="+", choices=HEADS, default=list(HEADS), metavar="HEAD", help="these heads")
    parser.add_argument("--small", action="store_true", help="two prompts of sixteen tokens")
    args = parser.parse_args()
    batch, new = (prompts(2), 16) if args.small else (prompts(24), 160)
    print("| head | drafts |", *(f"T = {t:g} |" for t in TEMPERATURES), flush=True)
    print("|---|---|" + "---|" * len(TEMPERATURES))
    for name in args.only:
        ways: dict[str, Speculation] = {f"K = {K}": Speculation(K, "match", "coupled") for K in CHAINS}
        ways |= {f"nodes {t.nodes}, depth {t.depth}, branch {t.branch}": Speculation(tree=t) for t in TREES}
        for way, how in ways.items():
            cells = (f"{mean:.2f} +- {error:.2f} |" for mean, error in tokens(name, how, batch, new))
            print(f"| {name} | {way} |", *cells, flush=True)


if __name__ == "__main__":
    main()
