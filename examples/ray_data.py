"""Completions of a file of prompts by the engines of a Ray cluster, in a job that resumes after it was killed.

Run it with ``python examples/ray_data.py prompts.jsonl answers.jsonl``, where each line of the first file is
``{"prompt": text}``. It needs ``pip install 'jspec[ray]'``. On a cluster, start it where ``ray.init()`` finds the head, with
``--engines`` and ``--gpus 1``.

One process writes the answers, a line as soon as it is there, so every finished line is one answer. The next run reads
them and asks the rest. A prompt's seed is its place in the file, so it has the same text whichever run answers it.
"""

import argparse
import json
import os
import pathlib

import ray

import jspec
from jspec.commands.demo import FAMILY


class Completer:
    """An engine in an actor of its own."""

    def __init__(self, target: str, draft: str | None, batch: int, max_tokens: int, temperature: float):
        self._llm = jspec.load(target, draft, max_batch=batch, max_len=256).warmup()
        self._sampling = {"max_tokens": max_tokens, "temperature": temperature}

    def __call__(self, batch: dict) -> dict:
        params = [jspec.SamplingParams(seed=int(seed), **self._sampling) for seed in batch["seed"]]
        results = jspec.generate(self._llm, list(map(str, batch["prompt"])), params)
        return {**batch, "text": [one.text for one in results], "finish_reason": [one.finish_reason for one in results]}


def asked(file: pathlib.Path, seed: int) -> list[dict]:
    """Every prompt of the file, with its place and its seed."""
    lines = [line for line in file.read_text("utf-8").split("\n") if line.strip()]
    return [{"index": i, "seed": seed + i, "prompt": json.loads(line)["prompt"]} for i, line in enumerate(lines)]


def answered(file: pathlib.Path, prompts: list[dict]) -> set[int]:
    """The places of the prompts that have an answer. What a killed run left of a line is cut off.

    Raises:
      ValueError: the answers are of other prompts or seeds.
    """
    if not file.exists():
        return set()
    whole = file.read_bytes().rpartition(b"\n")
    with file.open("r+b") as end:
        end.truncate(len(whole[0]) + len(whole[1]))
    found = [json.loads(line) for line in whole[0].splitlines()]
    for one in found:
        place = one["index"]
        if place >= len(prompts) or any(one[name] != prompts[place][name] for name in ("seed", "prompt")):
            raise ValueError(f"{file}: the answer to prompt {place} is of another prompt or seed; expected a new file")
    return {one["index"] for one in found}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=pathlib.Path)
    parser.add_argument("answers", type=pathlib.Path)
    parser.add_argument("--target", default=str(FAMILY / "target"))
    parser.add_argument("--draft", default=str(FAMILY / "draft"))
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="of each engine")
    parser.add_argument("--batch", type=int, default=8, help="prompts that an engine decodes together")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; the next one's is one more")
    args = parser.parse_args()

    prompts = asked(args.prompts, args.seed)
    done = answered(args.answers, prompts)
    print(f"{len(done)} of {len(prompts)} prompts have answers already", flush=True)
    left = [prompt for prompt in prompts if prompt["index"] not in done]
    if not left:
        return
    blocks = -(-len(left) // args.batch)  # a block is what comes back at once, so it is as large as a batch
    answers = ray.data.from_items(left, override_num_blocks=blocks).map_batches(
        Completer,
        fn_constructor_args=(args.target, args.draft, args.batch, args.max_tokens, args.temperature),
        batch_size=args.batch,
        compute=ray.data.ActorPoolStrategy(size=args.engines),
        num_gpus=args.gpus,
    )
    with args.answers.open("a", encoding="utf-8") as file:
        for answer in answers.iter_rows():
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
    print(f"{len(left)} prompts were answered", flush=True)


if __name__ == "__main__":
    main()
