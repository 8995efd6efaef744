"""What docs/guides/quantization.md says of a cache in eight bits, from the results of ``benchmarks.rounds.kv_cache``."""

from collections.abc import Mapping

from benchmarks.report.markdown import paragraph, scientific, table
from benchmarks.report.results import Figure
from jspec.config.engine import FP8_CACHES

KINDS = ("none", *FP8_CACHES)


def quality(found: Mapping[str, Figure]) -> str:
    """How far the cache moves the shipped target's distribution, and the acceptance of its drafters."""
    measured = [kind for kind in FP8_CACHES if f"kl, {kind}" in found]
    if not measured:
        return ""
    positions = found[f"kl, {measured[0]}"].details["positions"]
    about = f"""For the shipped family, on a CPU in float32 (`python -m benchmarks.rounds.kv_cache --only quality`): KL from
    the target without rounding, in nats for each of {positions:,} tokens of texts that it wrote; and tokens that a round of
    at most four drafts gives, over the same prompts with each cache."""
    more = [found[f"kl, {kind}"].details for kind in measured]
    rows = [
        (kind, *(scientific(one[name]) for name in ("mean_kl", "max_kl")), f"{one['top1']:.1%}")
        for kind, one in zip(measured, more, strict=True)
    ]
    parts = [paragraph(about), table(("cache", "mean KL", "largest", "top-1 agreement"), rows)]
    lengths = [key.rsplit(", ", 1)[0] for key in found if key.startswith("acceptance, ") and key.endswith(", none")]
    complete = [key for key in lengths if all(f"{key}, {kind}" in found for kind in KINDS)]
    if complete:
        rows = [
            (key.removeprefix("acceptance, "), *(f"{found[f'{key}, {kind}'].measured:.2f}" for kind in KINDS))
            for key in complete
        ]
        parts.append(table(("drafter, temperature", "float32", *FP8_CACHES), rows))
    return "\n\n".join(parts)
