"""Write the table of docs/models.md from the registry of families and from the tests' table of cases.

PYTHONPATH=.:tests/convert python docs/models_table.py            # writes the page
PYTHONPATH=.:tests/convert python docs/models_table.py --check    # writes nothing; exits 1 if the page differs
"""

import argparse
import pathlib
import re
import sys

from jspec.checkpoints.families import FAMILIES
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.hf_config import model_config
from jspec.config import ModelConfig

PAGE = pathlib.Path(__file__).parent / "models.md"
BLOCK = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- /families -->)", re.S)

# Sizes that every class is read with to see what it chooses; longer windows and lists follow from its defaults.
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NORMS = {"rms": "RMS", "rms_wide": "RMS", "rms_offset": "RMS with 1 + weight", "layer": "LayerNorm"}
PLACEMENTS = {"before": "before", "after": "after", "around": "before and after", "after_sum": "after the sum"}


def choices(config: ModelConfig) -> list[str]:
    """What is particular to a family, in a few words each, as its class has it by default."""
    found = [f"{NORMS[config.norm]} {PLACEMENTS[config.norm_placement]}"]
    if config.qk_norm:
        found.append("norms of query and key" + (", over all heads" if config.qk_norm_over == "projection" else ""))
    if config.position_offset is not None:
        found.append("learned positions")
    if None in config.layer_ropes:
        found.append("layers without positions")
    elif config.layer_ropes:
        found.append("another rope for windows")
    if any(config.windows):
        found.append("windows" if all(config.windows) else "windows in some layers")
    if config.experts is not None:
        found.append(f"{config.experts.chosen} of {config.experts.count} experts")
    found.append(f"{config.activation.replace('_', ' ')} {'gated' if config.gated_mlp else 'plain'} MLP")
    if config.qkv_bias:
        found.append("biases")
    if config.attention_softcap or config.logit_softcap:
        found.append("soft caps")
    if config.attention_sinks:
        found.append("attention sinks")
    return found


def table(cases) -> str:
    """The rows of all families; ``cases`` are those of tests/convert/parity_cases.py."""
    lines = ["| `architectures` | models | by default | logits compared with transformers |", "|---|---|---|---|"]
    for architecture, family in FAMILIES.items():
        config = model_config(Fields(SIZES, architecture), architecture)
        mine = [name for name, (prefix, _) in cases.items() if f"{prefix}ForCausalLM" == architecture]
        cells = f"`{architecture}`", family.models, ", ".join(choices(config)), ", ".join(mine)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(cases) -> str:
    """What docs/models.md should contain."""
    return BLOCK.sub(lambda _: table(cases), PAGE.read_text("utf-8"))


def main(cases, check: bool) -> int:
    """Write the page, or compare it; returns the exit status."""
    wanted = page(cases)
    if wanted == PAGE.read_text("utf-8"):
        return 0
    if check:
        print(f"{PAGE} is not what the registry says; run docs/models_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    from parity_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and exit 1 if the page differs")
    sys.exit(main(CASES, parser.parse_args().check))
