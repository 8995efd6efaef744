"""What docs/guides/quantization.md says of rounded activations, from the results of ``benchmarks.rounds.quantization``."""

from collections.abc import Mapping

from benchmarks.report.markdown import paragraph, scientific, table
from benchmarks.report.results import Figure

_ACCEPTANCE = "activations, acceptance, "
KINDS = ("float32", "int8", "int8, rounded", "fp8", "fp8, rounded")
NAMES = {"int8": "int8 weights", "int8, rounded": "and int8 activations"}
NAMES |= {"fp8": "fp8 weights", "fp8, rounded": "and fp8 activations"}
PAIRS = (
    *((kind, "float32") for kind in KINDS[1:]),
    *((f"{kind}, rounded", kind) for kind in ("int8", "fp8")),
)


def quality(found: Mapping[str, Figure]) -> str:
    """How far rounded activations move the shipped target's distribution, and the acceptance of its drafters."""
    figures = {pair: found.get("activations, kl, {} from {}".format(*pair)) for pair in PAIRS}
    measured = {pair: figure.details for pair, figure in figures.items() if figure is not None}
    if len(measured) < len(PAIRS):
        return ""
    positions = measured[PAIRS[0]]["positions"]
    about = f"""For the shipped family, on a CPU in float32 (`python -m benchmarks.rounds.quantization --only activations`):
    KL in nats for each of {positions:,} tokens of texts that the target in float32 wrote, and tokens that a round of at
    most four drafts gives, over the same prompts with each target and the same drafters."""
    rows = [
        (
            *(_whole(kind), _whole(reference)),
            *(scientific(one[name]) for name in ("mean_kl", "max_kl")),
            f"{one['top1']:.1%}",
        )
        for (kind, reference), one in measured.items()
    ]
    parts = [paragraph(about), table(("target", "compared with", "mean KL", "largest", "top-1 agreement"), rows)]
    keys = [key.removesuffix(", float32") for key in found if key.startswith(_ACCEPTANCE) and key.endswith(", float32")]
    rows = [
        (key.removeprefix(_ACCEPTANCE), *(f"{found[f'{key}, {kind}'].measured:.2f}" for kind in KINDS))
        for key in keys
        if all(f"{key}, {kind}" in found for kind in KINDS)
    ]
    if rows:
        parts.append(table(("drafter, temperature", *(NAMES.get(kind, kind) for kind in KINDS)), rows))
    return "\n\n".join(parts)


def _whole(kind: str) -> str:
    """The name of a kind in a row of its own."""
    weights, _, rounded = kind.partition(", ")
    return f"{NAMES[weights]} {NAMES[kind]}" if rounded else NAMES.get(kind, kind)
