"""Write every measured figure of README.md and docs/ from the results in ``benchmarks/results``.

    python -m benchmarks.tables            # writes the documents
    python -m benchmarks.tables --check    # writes nothing; exits 1 if a document differs from what it would write

Whole documents are docs/results/performance.md, docs/results/beside-vllm.md, docs/results/drafters.md,
docs/results/real-models.md where there are results of it, and docs/results/efficiency-<method>.md, the last with the
table of costs beside it. In README.md and some guides (``documents``) it writes only what stands between the comments
``<!-- name: ... -->`` and ``<!-- /name -->``. The plot of a document is written with it, but not compared: its bytes
depend on the version of matplotlib."""

import argparse
import json
import pathlib
import re
import sys

from benchmarks.acceptance import drafters, editing, small_drafts
from benchmarks.host import fleet
from benchmarks.report import (
    activations_table,
    kv_cache_table,
    peers_table,
    performance,
    real_models_page,
    results,
    trees_table,
)
from benchmarks.rounds import efficiency

GUIDES, PAGES = results.ROOT / "docs" / "guides", results.ROOT / "docs" / "results"


def documents() -> dict[pathlib.Path, str]:
    """What every document should contain."""
    found, small = performance.measurements(), results.latest(results.read_all("small_drafts"))
    peers = results.read_all("peers")
    blocks = {
        results.ROOT / "README.md": {"speed": performance.readme(found), "peers": peers_table.readme(peers)},
        GUIDES / "quantization.md": {
            "distribution": performance.quantized_distribution(found),
            "speed": performance.quantized_speed(found),
            "acceptance": small_drafts.quantized_table(small),
            "activations": activations_table.quality(found.quantization),
            "cache": kv_cache_table.quality(results.latest(results.read_all("kv_cache"))),
        },
        GUIDES / "distributed.md": {"fleet": fleet.markdown()},
        GUIDES / "draft-vocabularies.md": {"acceptance": small_drafts.vocabulary_table(small)},
        GUIDES / "drafting.md": {
            "trees": trees_table.gain(*(results.latest(results.read_all(name)) for name in ("tree_rounds", "trees")))
        },
    }
    written = {file: with_blocks(file, contents) for file, contents in blocks.items()}
    written[PAGES / "performance.md"] = performance.document(found)
    written[PAGES / "beside-vllm.md"] = peers_table.document(peers)
    edited = [editing.markdown(one) for one in results.read_all("editing")[-1:]]
    written[PAGES / "drafters.md"] = "\n".join([drafters.markdown(comparison()), *edited])
    if real := real_models_page.pairs_of(results.read_all("real_models")):
        written[PAGES / "real-models.md"] = real_models_page.markdown(real, results.read_all("greedy"))
    for method, costs in costs_by_method().items():
        written[PAGES / f"efficiency-{method}.md"] = efficiency.markdown(costs)
        written[PAGES / f"efficiency-{method}.json"] = json.dumps(costs.table, indent=1) + "\n"
    return written


def comparison() -> drafters.Comparison:
    return drafters.comparison_of(results.read_all("drafters"))


def costs_by_method() -> dict[str, efficiency.Costs]:
    return {method: efficiency.costs_of(found) for method, found in performance.costs_by_method().items()}


def with_blocks(file: pathlib.Path, contents: dict[str, str]) -> str:
    """The text of a file with each of ``contents`` between the two comments of its name.

    Raises:
      ValueError: the file does not have two such comments, once and in this order.
    """
    text = file.read_text()
    for name, content in contents.items():
        block = rf"(<!-- {name}: .*? -->\n).*?(\n<!-- /{name} -->)"
        text, count = re.subn(block, lambda found, new=content: found[1] + new + found[2], text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{file}: expected one comment <!-- {name}: ... --> and one <!-- /{name} --> after it")
    return text


def differing() -> list[pathlib.Path]:
    """Documents that differ from what this module would write."""
    return [file for file, text in documents().items() if not file.exists() or file.read_text() != text]


def write() -> list[pathlib.Path]:
    """Write every document that differs, and the plots of those; the documents that did."""
    texts, changed = documents(), differing()
    for file in changed:
        file.write_text(texts[file])
    if PAGES / "drafters.md" in changed:
        drafters.plot(comparison(), PAGES / "drafters.png")
    for method, costs in costs_by_method().items():
        if PAGES / f"efficiency-{method}.md" in changed:
            efficiency.plot(costs, PAGES / f"efficiency-{method}.png")
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a document differs")
    args = parser.parse_args()
    changed = differing() if args.check else write()
    names = " ".join(str(file.relative_to(results.ROOT)) for file in changed)
    if args.check:
        print(f"these differ from the results, write them by python -m benchmarks.tables: {names}" if names else "same")
        return 1 if changed else 0
    print(f"wrote {names}" if names else "every document is as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
