"""What a GPU holds of a model that several GPUs share, in bfloat16, and how many GPUs a model needs at least: the tables of
docs/guides/distributed.md. And what a GPU holds of a draft head that is trained for one of them: the table of
docs/guides/training.md.

    python -m benchmarks.host.shards

It counts what ``jspec.load`` counts when it chooses how many pages the KV cache has. Nothing is measured, so it needs no
GPU."""

import dataclasses
import math
import sys

from benchmarks.report.markdown import table
from benchmarks.shapes import SHAPES
from jspec.config import ModelConfig, Shards
from jspec.registry import trained
from jspec.train.methods import Sizes, make_objective

MODELS = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "llama-3.3-70b": "Llama-3.3-70B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "glm-4.7-flash": "GLM-4.7-Flash",
}
MODELS |= {"gpt-oss-20b": "gpt-oss-20b", "gpt-oss-120b": "gpt-oss-120b"}
COUNTS = (1, 2, 4, 8)
CARDS = {"H100 (78 GiB)": 78 << 30, "H200 (139 GiB)": 139 << 30}  # bytes that are free on each
USED = 0.9  # of these, the default of ``gpu_memory_utilization``
MOST_WEIGHTS = 0.75  # of the bytes used; the rest is for the cache
BYTES = 2  # of a number in bfloat16
TAUGHT = "llama-3.3-70b"
KEPT = 4 * 4  # bytes for a parameter of a head: its fp32 weight, Adam's two moments, and the best weight so far
IN_A_STEP = 4 + 2 * BYTES  # further ones in a step: the fp32 gradient, and weight and gradient in bfloat16


def held(config: ModelConfig, count: int) -> str:
    """Gigabytes of weights on a GPU, and kilobytes of its cache for a token; a dash if the model cannot be split so."""
    if count == 1:
        return f"{config.weight_bytes(BYTES) / 1e9:.1f} GB, {config.kv_bytes(1, BYTES) / 1e3:.0f} kB"
    shards = Shards(count)
    try:
        local = shards.local(config)
    except ValueError:
        return "-"
    return f"{shards.weight_bytes(config, BYTES) / 1e9:.1f} GB, {local.kv_bytes(1, BYTES) / 1e3:.0f} kB"


def fewest(config: ModelConfig, card: int) -> str:
    """With how many GPUs of a card weights leave room for a cache, and how many tokens that has."""
    for count in COUNTS:
        try:
            weights, local = (
                (config.weight_bytes(BYTES), config)
                if count == 1
                else (Shards(count).weight_bytes(config, BYTES), Shards(count).local(config))
            )
        except ValueError:
            continue
        if weights <= MOST_WEIGHTS * USED * card:
            tokens = int((USED * card - weights) / local.kv_bytes(1, BYTES))
            digits = 10 ** max(int(math.log10(tokens)) - 1, 0)  # two that count
            return f"{count}: {tokens // digits * digits:,} tokens"
    return "-"


def needed() -> list[tuple[str, ...]]:
    """The fewest GPUs for each model, in bfloat16 and in eight bits."""
    rows = []
    for shape, name in MODELS.items():
        config = SHAPES[shape].target
        rows.append((name, *(fewest(config, card) for card in CARDS.values())))
        if config.experts is None:
            eight = dataclasses.replace(config, quantization="int8")
            rows.append((f"{name}, int8 or fp8", *(fewest(eight, card) for card in CARDS.values())))
    return rows


def trained_head(method: str) -> tuple[str, ...]:
    """Parameters of a new draft head of the usual size for ``TAUGHT``, and what training it takes on each GPU."""
    count = make_objective(method, SHAPES[TAUGHT].target, Sizes()).config.num_parameters
    return method, f"{count / 1e9:.1f} billion", f"{KEPT * count / 1e9:.0f} GB", f"{IN_A_STEP * count / 1e9:.0f} GB"


def main() -> int:
    rows = [(name, *(held(SHAPES[shape].target, count) for count in COUNTS)) for shape, name in MODELS.items()]
    print(table(("model", *(f"{count} GPU{'s' * (count > 1)}" for count in COUNTS)), rows))
    print(f"\n{table(('model', *CARDS), needed())}")
    columns = ("`--method`", "parameters", "kept", "more in a step")
    print(f"\nDraft heads for {MODELS[TAUGHT]}:\n\n{table(columns, map(trained_head, trained()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
