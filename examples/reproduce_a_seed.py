"""A seed gives one text: alone, in a batch, at any index of the list, and with any drafter at a pinned width.

Run it with ``python examples/reproduce_a_seed.py``.
"""

import jspec
from jspec.commands.demo import FAMILY

PROMPT = "class Queue:\n"
PARAMS = jspec.SamplingParams(temperature=0.8, seed=7, max_tokens=16)
K = 3


def main():
    # The last bits of logits depend on how many query tokens the target reads at once, so one width is pinned: K + 1.
    options = {"max_batch": 2, "max_len": 64, "width": K + 1, "dtype": "float32"}
    coupled = jspec.Speculation(num_draft_tokens=K, verify="match", draft_sampling="coupled")
    llm = jspec.load(FAMILY / "target", FAMILY / "draft", speculation=coupled, **options)

    alone = jspec.generate(llm, PROMPT, PARAMS)
    in_company = jspec.generate(llm, ["import os\n", "def main(", PROMPT], PARAMS)[2]
    print(f"{alone.text!r}")
    assert in_company.token_ids == alone.token_ids

    # ``match`` accepts a draft that equals the target's own seeded sample, so the text does not depend on who drafted.
    plain = jspec.generate(jspec.load(FAMILY / "target", **options), PROMPT, PARAMS)
    assert plain.token_ids == alone.token_ids
    drafted, undrafted = alone.stats.num_steps, plain.stats.num_steps
    print(f"the same text in {drafted} rounds with drafts and in {undrafted} without")


if __name__ == "__main__":
    main()
