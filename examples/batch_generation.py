"""Several prompts in one batch, greedy beside sampled, and the statistics of speculation of each.

Run it with ``python examples/batch_generation.py``. It uses the small family of models that comes with jspec; give the
folders of your own with ``--target`` and ``--draft``.
"""

import argparse

import jspec
from jspec.commands.demo import FAMILY

PROMPTS = {
    "def main(argv=None):": jspec.SamplingParams(temperature=0.0, max_tokens=24),
    "class Queue:\n": jspec.SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24),
    "import os\nimport ": jspec.SamplingParams(temperature=1.0, seed=8, max_tokens=24, stop="\n\n"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(FAMILY / "target"))
    parser.add_argument("--draft", default=str(FAMILY / "draft"))
    args = parser.parse_args()

    llm = jspec.load(args.target, args.draft, max_batch=len(PROMPTS), max_len=128)
    results = jspec.generate(llm, list(PROMPTS), list(PROMPTS.values()))
    for prompt, result in zip(PROMPTS, results, strict=True):
        print(f"--- {prompt!r}: {result.finish_reason}, acceptance length {result.stats.mean_acceptance_length:.2f}")
        print(prompt + result.text)


if __name__ == "__main__":
    main()
