"""Write the tables of docs/guides/models.md from the registry of families, the tests' table of cases, and results of
tests.

PYTHONPATH=.:tests/helpers python docs/models_table.py                       # writes the page
PYTHONPATH=.:tests/helpers python docs/models_table.py --check               # writes nothing; exits 1 if the page differs
PYTHONPATH=.:tests/helpers python docs/models_table.py --results FILE ...    # takes the results of these runs first

The results are files that pytest wrote with --junitxml. Tests that were not run again keep the result that they had, in
docs/models_results.json:

python -m pytest -m "long or not long" tests/convert/test_convert_output.py tests/convert/test_convert_parity.py \\
    tests/models/test_family_serving.py --junitxml FILE
python -m pytest -m long -k "joint and 00000" tests/lossless/test_families.py tests/lossless/test_heads.py --junitxml FILE
"""

import argparse
import collections
import importlib.metadata
import json
import pathlib
import platform
import re
import sys
import xml.etree.ElementTree

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.config import model_config
from jspec.checkpoints.huggingface.families import FAMILIES
from jspec.checkpoints.huggingface.multimodal import WRAPPERS
from jspec.config import ModelConfig

PAGE = pathlib.Path(__file__).parent / "guides" / "models.md"
RESULTS = pathlib.Path(__file__).parent / "models_results.json"
BLOCKS = {
    name: re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.S)
    for name in ("families", "multimodal", "tests")
}
PACKAGES = ("jax", "flax", "transformers")
# Heading of a column -> the tests that it counts, by the name that pytest gives them.
DRAFT_MODEL, REFUSED = "draft model", "refused"  # such a model cannot draft, but may be drafted for
COLUMNS = {
    "converted": r"test_converted_folder_equals_the_source\[.*{architecture}.*\]",
    "logits": r"test_logits_equal_transformers\[({cases})\]",
    "pages": r"test_pages_give_the_logits_of_one_causal_pass\[.*{architecture}.*\]",
    DRAFT_MODEL: r"test_drafts_leave_the_greedy_text_of_the_target\[{architecture}-draft_model\]",
    "lookup": r"test_drafts_leave_the_greedy_text_of_the_target\[{architecture}-ngram\]",
    "EAGLE": r"test_drafts_leave_the_greedy_text_of_the_target\[{architecture}-eagle\]",
    "EAGLE-3": r"test_drafts_leave_the_greedy_text_of_the_target\[{architecture}-eagle3\]",
    "P-EAGLE": r"test_drafts_leave_the_greedy_text_of_the_target\[{architecture}-p_eagle\]",
    "lossless": r"test_joint_distribution_of_completions\[.*-{family}-[12]00000\]",  # texts; shorter runs do not count
}

# Sizes that every class is read with to see what it chooses; longer windows and lists follow from its defaults.
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
NORMS = {"rms": "RMS", "rms_wide": "RMS", "rms_offset": "RMS with 1 + weight", "layer": "LayerNorm"}
PLACEMENTS = {"before": "before", "after": "after", "around": "before and after", "after_sum": "after the sum"}


def choices(config: ModelConfig) -> list[str]:
    """What is particular to a family, in a few words each, as its class has it by default."""
    found = [f"{NORMS[config.norm]} {PLACEMENTS[config.norm_placement]}"]
    if config.delta_nets is not None:
        many, count = sum(config.delta_nets.layers), config.num_layers
        share = "three of four" if 4 * many == 3 * count else f"{many} of {count}"
        found.append(f"gated delta nets in {share} layers")
    if config.attention_gate:
        found.append("attention with a gate")
    if config.qk_norm:
        where = " after the rotation" if config.qk_norm_after_rope else ""
        found.append(
            f"norms of {'query, key and value' if config.value_norm else 'query and key'}{where}"
            + (", over all heads" if config.qk_norm_over == "projection" else "")
        )
    if len({config.layer(layer).head_dim for layer in range(config.num_layers)}) > 1:
        found.append("larger heads in some layers")
    if config.per_layer_inputs is not None:
        found.append("inputs of each layer")
    if config.layer_scalars:
        found.append("a scalar for each layer")
    if config.position_offset is not None:
        found.append("learned positions")
    if None in config.layer_ropes:
        found.append("layers without positions")
    elif config.layer_ropes:
        found.append("another rope for windows")
    if config.rope is not None and config.rope.fraction < 1:
        found.append("a part of each head rotated")
    if config.rope is not None and config.rope.query_growth:
        found.append("queries scaled by position")
    if any(config.windows):
        found.append("windows" if all(config.windows) else "windows in some layers")
    if config.latent is not None:
        found.append(f"latent attention, {config.latent.cached} numbers cached")
    if config.experts is not None:
        shared = f" and {config.experts.shared} shared" if config.experts.shared else ""
        by = ", chosen by sigmoids" if config.experts.scores == "sigmoid" else ""
        gated = " with a gate" if config.experts.shared_gate else ""
        found.append(f"{config.experts.chosen} of {config.experts.count} experts{shared}{gated}{by}")
    clamped = "clamped " if config.experts is not None and config.experts.clamp is not None else ""
    found.append(f"{clamped}{config.activation.replace('_', ' ')} {'gated' if config.gated_mlp else 'plain'} MLP")
    if config.qkv_bias:
        found.append("biases")
    if config.attention_softcap or config.logit_softcap:
        found.append("soft caps")
    if config.attention_sinks:
        found.append("attention sinks")
    return found


def table(cases) -> str:
    """The rows of all families; ``cases`` are those of tests/helpers/parity_cases.py."""
    lines = ["| `architectures` | models | by default | logits compared with transformers |", "|---|---|---|---|"]
    for architecture, family in FAMILIES.items():
        config = model_config(Fields(SIZES, architecture), architecture)
        cells = f"`{architecture}`", family.models, ", ".join(choices(config)), ", ".join(_cases(architecture, cases))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def multimodal() -> str:
    """The rows of the multimodal classes whose text is read."""
    lines = ["| `architectures` | models | the text model is read as |", "|---|---|---|"]
    for name, wrapper in WRAPPERS.items():
        classes = ", ".join(f"`{one}`" for one in dict.fromkeys(wrapper.texts.values()))
        lines.append(f"| `{name}` | {wrapper.models} | {classes} |")
    return "\n".join(lines) + "\n"


def _cases(architecture: str, cases) -> list[str]:
    return [name for name, (prefix, _) in cases.items() if f"{prefix}ForCausalLM" == architecture]


def tested(cases, results) -> str:
    """How many tests of a family passed in each column, and with which versions.

    Args:
      cases: as for ``table``.
      results: what ``RESULTS`` has.
    """
    lines = [f"| `architectures` | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for architecture in FAMILIES:
        cells = [_passed(results["tests"], pattern, architecture, cases) for pattern in COLUMNS.values()]
        if FAMILIES[architecture].has_delta_nets:
            cells[list(COLUMNS).index(DRAFT_MODEL)] = REFUSED
        lines.append(f"| `{architecture}` | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return "\n".join([*lines, "", f"Tests that passed, with {versions}."]) + "\n"


def _passed(tests, pattern: str, architecture: str, cases) -> str:
    """``3``, or ``2 of 3``; ``-`` if no such test was run."""
    fields = {"architecture": architecture, "family": architecture.removesuffix("ForCausalLM")}
    names = re.compile(pattern.format(**fields, cases="|".join(_cases(architecture, cases))))
    found = [passed for name, passed in tests.items() if names.fullmatch(name)]
    if not found:
        return "-"
    return f"{sum(found)}" if all(found) else f"{sum(found)} of {len(found)}"


def add_results(files: list[pathlib.Path]):
    """Take what pytest wrote about the tests of ``COLUMNS`` into ``RESULTS``."""
    anything = {"architecture": r"\w+", "family": r"\w+", "cases": ".+"}
    counted = re.compile("|".join(pattern.format(**anything) for pattern in COLUMNS.values()))
    stored = json.loads(RESULTS.read_text("utf-8"))["tests"] if RESULTS.exists() else {}
    found: dict[str, bool] = collections.OrderedDict(stored)
    for file in files:
        for case in xml.etree.ElementTree.parse(file).iter("testcase"):
            name = case.get("name", "")
            if counted.fullmatch(name) and case.find("skipped") is None:
                found[name] = case.find("failure") is None and case.find("error") is None
    versions = {"Python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}
    written = {"versions": versions, "tests": dict(sorted(found.items()))}
    RESULTS.write_text(json.dumps(written, indent=1) + "\n", "utf-8")


def page(cases) -> str:
    """What docs/guides/models.md should contain."""
    results = json.loads(RESULTS.read_text("utf-8"))
    text = PAGE.read_text("utf-8")
    for name, block in {"families": table(cases), "multimodal": multimodal(), "tests": tested(cases, results)}.items():
        text = BLOCKS[name].sub(lambda _, block=block: block, text)
    return text


def main(cases, check: bool) -> int:
    """Write the page, or compare it; returns the exit status."""
    wanted = page(cases)
    if wanted == PAGE.read_text("utf-8"):
        return 0
    if check:
        print(f"{PAGE} is not what registry and results say; run docs/models_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    from parity_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit 1 if the page differs")
    parser.add_argument("--results", nargs="+", type=pathlib.Path, default=[], metavar="FILE", help="written by pytest")
    arguments = parser.parse_args()
    if arguments.results:
        add_results(arguments.results)
    sys.exit(main(CASES, arguments.check))
