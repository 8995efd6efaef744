"""A streamed completion, and three clients of one event loop whose requests are decoded together.

Run it with ``python examples/stream_and_serve.py``.
"""

import asyncio
import contextlib

import jspec
from jspec.commands.demo import FAMILY

PROMPTS = ("import os\n", "class Queue:\n", "def main(argv=None):")


async def first_line(engine: jspec.AsyncEngine, prompt: str) -> str:
    """What follows the prompt on its line. The request is given up as soon as that is known."""
    text = ""
    async with contextlib.aclosing(engine.generate(prompt, temperature=0.8, seed=7, max_tokens=48)) as deltas:
        async for delta in deltas:
            text += delta.text
            if "\n" in text:
                break
    return text.partition("\n")[0]


async def serve(llm: jspec.LLM) -> list[str]:
    async with jspec.AsyncEngine(llm) as engine:
        return await asyncio.gather(*(first_line(engine, prompt) for prompt in PROMPTS))


def main():
    llm = jspec.load(FAMILY / "target", FAMILY / "draft", max_batch=4, max_len=128, rounds=1)

    for delta in jspec.stream(llm, PROMPTS[0], temperature=0.8, seed=7, max_tokens=16):
        print(f"{len(delta.token_ids)} tokens: {delta.text!r}")

    for prompt, line in zip(PROMPTS, asyncio.run(serve(llm)), strict=True):
        print(f"{prompt!r} -> {line!r}")
    metrics = llm.engine.metrics()
    print(
        f"{metrics.num_finished} requests, {metrics.rows_per_call:.1f} rows a call, {metrics.pages_used} pages in use"
    )


if __name__ == "__main__":
    main()
