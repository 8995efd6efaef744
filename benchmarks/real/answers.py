"""A target's own answers to many questions, as the token ids that ``jspec train --data`` reads.

    python -m benchmarks.real.answers path/to/target answers.npz                  # 6 million tokens
    python -m benchmarks.real.answers path/to/target answers.npz --seconds 240    # or as many as come in that time
    python -m benchmarks.real.answers path/to/target more.npz --seed 1                       # others

Answers are sampled at temperature 1, a third of them greedily, and end by themselves or after ``--new`` tokens. One
conversation in fifty is held out from training, as ``jspec train`` does with documents."""

import argparse
import itertools
import pathlib
import time

import jax
import numpy as np

import jspec
from benchmarks.real.questions import questions

AT_ONCE = 4096  # questions
HELD_OUT = 50  # of so many conversations, one is held out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tokens", type=float, default=6e6)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--new", type=int, default=384)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0, help="another has questions in another order, and other answers")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    began, kept, count, asked = time.perf_counter(), [], 0, questions(args.seed)
    with jspec.load(args.target, dtype=args.dtype, max_batch=args.rows, max_len=args.new + 128).warmup() as llm:
        print(f"ready in {time.perf_counter() - began:.0f} s", flush=True)
        for turn in itertools.count():
            some = list(itertools.islice(asked, min(AT_ONCE, 8 * args.rows)))
            params = [
                jspec.SamplingParams(temperature=0.0 if i % 3 == 0 else 1.0, max_tokens=args.new)
                for i in range(len(some))
            ]
            conversations = [[{"role": "user", "content": one}] for one in some]
            for text in llm.chat(conversations, params, key=jax.random.fold_in(jax.random.key(args.seed), turn)):
                kept.append([*text.prompt_token_ids, *text.token_ids])
                count += len(kept[-1])
            passed = time.perf_counter() - began
            print(f"{len(kept)} conversations, {count / 1e6:.2f} million tokens, {passed:.0f} s", flush=True)
            if count >= args.tokens or passed >= args.seconds:
                break
    parts = {"held_out": kept[::HELD_OUT], "train": [one for i, one in enumerate(kept) if i % HELD_OUT]}
    np.savez_compressed(
        args.out, **{name: np.array(list(itertools.chain(*of)), np.int32) for name, of in parts.items()}
    )


if __name__ == "__main__":
    main()
