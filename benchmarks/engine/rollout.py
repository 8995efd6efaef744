"""How long a rollout of 512 prompts takes whose answers have a long tail of lengths, with drafts and without, on one GPU.

    python -m benchmarks.engine.rollout            # needs an NVIDIA GPU: the 8B shape, about eight minutes
    python -m benchmarks.engine.rollout --small    # tiny and anywhere, with meaningless times

A trainer gives all prompts at once and waits for the last answer, so that the longest answers, which decode in few rows,
hold all others up. Weights are random. Prompts have 256 tokens, no two alike; the new tokens of each are a line of
``rollout_lengths.txt``, 1 to 2,048, drawn once from a log-normal law (median 256, sigma 1.1), in the order in which they
were drawn: nobody knows the lengths before. 64 rows decode. Drafts are four of an EAGLE-3 head, accepted by chance, each
with the probability of the line if those before it were. The seconds of the last 5% are those from the end of the 486th
answer to that of the last one. Figures of drafts are over those of plain decoding in the same run."""

import argparse
import pathlib
import time

import jax

from benchmarks.engine.engines import Engines, Setting
from benchmarks.engine.loads import Client, Load, Texts
from benchmarks.rounds.bench import Bench
from benchmarks.shapes import SHAPES

LENGTHS = pathlib.Path(__file__).with_name("rollout_lengths.txt")
GOALS = {0.7: (1.45, 2.0), 0.8: (1.7, 2.4)}  # of all, and of the last 5%: plain seconds over those with drafts
ROWS, PROMPT, LONGEST, TAIL = 64, 256, 2048, 0.05


def lengths() -> list[int]:
    """The new tokens of each prompt."""
    return [int(line) for line in LENGTHS.read_text().split()]


def rollout(engines: Engines, setting: Setting, divisor: int) -> tuple[float, float, float]:
    """Seconds of all answers, seconds of the last of them, and tokens that a round gave a request on average."""
    engine = engines.get(setting)
    texts, new = Texts(engines.bench.pair.target.vocab_size), [max(length // divisor, 1) for length in lengths()]
    loads = [Load(texts.prompt(PROMPT // divisor), length) for length in new]
    client, before = Client(engine), engine.metrics()
    began = time.perf_counter()
    found = client.serve(loads)
    ended = sorted(request.told[-1][0] for request in found)
    after = engine.metrics()
    tokens, rounds = (getattr(after, name) - getattr(before, name) for name in ("num_generation_tokens", "num_rounds"))
    most = ended[round(len(ended) * (1 - TAIL)) - 1]
    return ended[-1] - began, ended[-1] - most, tokens / max(rounds, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.7, 0.8])
    parser.add_argument(
        "--draft-tokens", nargs="+", default=["4", "auto"], help="K of the lines: a number, or auto, up to 4"
    )
    parser.add_argument("--repeats", type=int, default=2, help="the best of so many is the figure")
    parser.add_argument("--small", action="store_true", help="a tiny shape, any machine, meaningless times")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {sum(lengths()):,} tokens", flush=True)
    divisor = 32 if args.small else 1
    size = {"rows": ROWS // divisor, "max_len": (LONGEST + 2 * PROMPT) // divisor}
    if args.small:
        size["page_size"] = 16
    plain = Setting(**size)
    with Engines(
        Bench(SHAPES["tiny" if args.small else args.shape], "float32" if args.small else "bfloat16", 0.0, 1)
    ) as engines:

        def best(setting: Setting) -> tuple[float, float, float]:
            return min(rollout(engines, setting, divisor) for _ in range(args.repeats))

        usual = best(plain)
        print(f"plain                 {usual[0]:7.2f} s, the last 5% {usual[1]:6.2f} s", flush=True)
        for acceptance in args.acceptance:
            for K in args.draft_tokens:
                setting = Setting(**size, method="eagle3", K="auto" if K == "auto" else int(K), acceptance=acceptance)
                whole, tail, tokens = best(setting)
                goals = GOALS.get(acceptance)
                wanted = f" (goals {goals[0]}, {goals[1]})" if goals else ""
                times = f"{usual[0] / whole:.2f} and {usual[1] / tail:.2f} times{wanted}"
                print(
                    f"K = {K:4} at {acceptance:.2f}      {whole:7.2f} s, the last 5% {tail:6.2f} s: {times}, "
                    f"{tokens:.2f} tokens a round",
                    flush=True,
                )
        print(f"late programs: {engines.num_late_compilations}")


if __name__ == "__main__":
    main()
