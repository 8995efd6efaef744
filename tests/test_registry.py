"""Tests that every drafting method of the registry has to pass. A new method adds one line to ``EXAMPLES``."""

import dataclasses
import functools
import inspect
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from engines import (
    CONFIG,
    DRAFT,
    MAX_LEN,
    TARGET,
    decode,
    draft,
    key_of,
    plain_greedy,
    ragged_prompts,
    target,
    tokens_of,
)
from heads import HEADS, SHORT, random_head, serving

from jspec.checkpoints.layouts import stored
from jspec.checkpoints.layouts.format import CheckpointFormat
from jspec.checkpoints.tensors.params import stored_params
from jspec.config import ModelConfig, Speculation
from jspec.config.heads import HeadConfig
from jspec.drafting.corpus import prepare
from jspec.drafting.methods import drafter_for, method_of
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.loading.compatibility import check_options
from jspec.models import abstract_params, build, flat_params
from jspec.registry import (
    METHODS,
    DraftMethod,
    argmax_below,
    chosen_by_name,
    entry_of,
    particular_options,
    resolve,
    trained,
)
from jspec.sampling.params import SamplingParams
from jspec.train.methods import Sizes

K = 3
PROMPTS = ragged_prompts((1, 2, 9, 23))


@dataclasses.dataclass(frozen=True)
class Example:
    """A drafter for ``engines.TARGET``.

    Attributes:
      draft: its config, or the name of a method that has no checkpoint.
      config: its config again, or None if it has none.
    """

    draft: Any
    config: Any = None

    @functools.cached_property
    def module(self):
        """The draft model or draft head with its weights, or the arrays that the drafter reads."""
        if self.draft == "ngram_corpus":
            return prepare(
                [[*p, *text] for p, text in zip(PROMPTS, plain_greedy(target(), PROMPTS), strict=True)], None, TARGET
            )
        if self.config is None:
            return None
        if isinstance(self.draft, ModelConfig):
            return build(self.draft, flat_params(draft()))
        return serving(self.draft, random_head(self.draft))


def example(config) -> Example:
    """An example with a checkpoint. Its decoder layers, if it has any, have fewer positions than the target."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    layers = {name: value for name, value in fields.items() if isinstance(value, ModelConfig)}
    shorter = {name: dataclasses.replace(value, max_position=SHORT) for name, value in layers.items()}
    short = {"max_position": SHORT} if isinstance(config, ModelConfig) else shorter
    config = dataclasses.replace(config, **short)
    return Example(config, config)


EXAMPLES = [example(DRAFT), *(example(config) for config in HEADS.values()), Example("ngram"), Example("ngram_corpus")]
every_example = pytest.mark.parametrize(
    "case", EXAMPLES, ids=lambda case: f"{entry_of(case.draft).drafter.split(':')[1]}"
)
CHECKPOINTS = [case for case in EXAMPLES if case.config is not None]


def test_every_method_has_an_example():
    assert {entry_of(case.draft) for case in EXAMPLES} == set(METHODS)


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.drafter)
def test_entries_name_existing_objects(entry):
    drafter = resolve(entry.drafter)
    for name in (
        "build",
        "init",
        "prefill",
        "propose",
        "num_draft_tokens",
        "aux_layers",
        "longest_text",
        "slots_beyond",
    ):
        assert hasattr(drafter, name) or name in {field.name for field in dataclasses.fields(drafter)}, name
    assert (entry.config is None) == (entry.module is None) == (not entry.formats)
    assert entry.config is not None or entry.draft is not None
    assert (entry.prepare is None) == (entry.argument is None)
    assert set(entry.options) <= {field.name for field in dataclasses.fields(Speculation)}
    assert set(entry.sizes) <= {field.name for field in dataclasses.fields(Sizes)}
    assert (entry.objective is None) == (not entry.sizes)
    assert ("argmax_below" in entry.options) == (entry.argmax_below is not None)
    if entry.config is not None:
        assert dataclasses.is_dataclass(resolve(entry.config))
        assert all(isinstance(resolve(path), CheckpointFormat) for path in entry.formats)
    for path in (entry.module, entry.prepare, entry.objective):
        assert path is None or callable(resolve(path))
    if entry.argument is not None:
        import jspec

        assert entry.argument in inspect.signature(jspec.load).parameters


def test_methods_are_found_by_config_name_and_argument():
    assert chosen_by_name() == ("mtp", "ngram")
    assert set(trained()) == {"dspark", "dflash", "eagle", "eagle3", "mtp", "parallel", "mlp", "medusa"}
    assert (argmax_below("eagle"), argmax_below("parallel")) == (0.3, 0.4)
    assert method_of(None) is None
    with pytest.raises(ValueError, match="'lookahead' is no method without a checkpoint"):
        entry_of("lookahead")


@every_example
def test_options_of_other_methods_are_refused(case):
    entry = entry_of(case.draft)
    values = {"ngram_min": 2, "ngram_max": 5, "draft_temperature": 0.5, "argmax_below": 0.1, "lookup": True}
    assert values.keys() == particular_options()
    for option, value in values.items():
        speculation = Speculation(**{option: value})
        if option in entry.options:
            check_options(case.draft, speculation)
        else:
            with pytest.raises(
                ValueError, match=f"{option}={value} has no place with the drafting method '{entry.name}'"
            ):
                check_options(case.draft, speculation)


def test_a_head_that_samples_nothing_is_not_asked_to():
    check_options(HEADS["xpress"], Speculation(draft_sampling="argmax"))
    with pytest.raises(
        ValueError, match=r"draft_sampling='sample': expected 'argmax' or 'auto' .* 'xpress', an XPress"
    ):
        check_options(HEADS["xpress"], Speculation(draft_sampling="sample"))


def test_lengths_to_look_up_go_with_lookup_beside_any_drafter():
    for case in CHECKPOINTS:
        check_options(case.draft, Speculation(lookup=True, ngram_min=2, ngram_max=5))
    with pytest.raises(ValueError, match=r"lookup=True: expected draft= .* draft='ngram' looks drafts up alone"):
        check_options(None, Speculation(lookup=True))


@pytest.mark.parametrize("case", CHECKPOINTS, ids=lambda case: type(case.config).__name__)
def test_config_and_params(case):
    """The module has the declared parameters, and a manifest gives the config back."""
    config = case.config
    for dtype in ("float32", "bfloat16"):
        built = {name: (leaf.shape, leaf.dtype) for name, leaf in abstract_params(config, dtype).items()}
        assert built == stored_params(config, dtype)
    config.require_fit(TARGET)
    if not isinstance(config, ModelConfig):
        head: HeadConfig = config
        assert stored.from_json(json.loads(json.dumps(stored.to_json(head))), "manifest.json") == head


@pytest.mark.parametrize("name", ["eagle", "mlp", "medusa"])
def test_folders_that_were_written_with_an_empty_choice_of_layers(name):
    written = stored.to_json(HEADS[name])
    written["config"]["aux_layers"] = []
    assert stored.from_json(written, "manifest.json") == HEADS[name]
    written["config"]["aux_layers"] = [1]
    with pytest.raises(ValueError, match=r"manifest\.json: head is damaged"):
        stored.from_json(written, "manifest.json")


@functools.cache
def engine_of(index: int) -> Engine:
    case = EXAMPLES[index]
    speculation = Speculation(K, draft_sampling="auto" if case.config is None else "sample")
    return Engine(target(), case.module, Decoding(drafter_for(case.draft, TARGET, speculation), "rejection"), CONFIG)


@every_example
def test_text_is_the_targets_and_drafts_keep_within_bounds(case):
    """Greedy text equals plain decoding. No round drafts past the end of the text or past the drafter's positions."""
    progresses = decode(engine_of(EXAMPLES.index(case)), PROMPTS)
    assert tokens_of(progresses) == plain_greedy(target(), PROMPTS)
    early = 0
    for progress in progresses:
        length = len(progress.request.prompt)
        for drafted, accepted in zip(progress.drafted, progress.accepted, strict=True):
            assert 0 <= accepted <= drafted <= min(K, MAX_LEN - 1 - length)
            if case.config is not None and case.config.decoder is not None:
                assert drafted == 0 or length < SHORT + 2, "drafted without a position of its own"
            early += drafted * (length < SHORT)
            length += accepted + 1
    assert early > 0


@every_example
def test_the_same_key_gives_the_same_drafts(case):
    engine, sampled = engine_of(EXAMPLES.index(case)), SamplingParams(temperature=1.0, max_tokens=8)

    def run(seed: int):
        return [
            (progress.tokens, progress.drafted, progress.accepted)
            for progress in decode(engine, PROMPTS, sampled, [key_of(seed + i) for i in range(len(PROMPTS))])
        ]

    assert run(0) == run(0) != run(100)
    assert np.sum([sum(drafted) for _, drafted, _ in run(0)]) > 0


def test_guide_shows_the_registry():
    """docs/guides/adding-a-drafter.md quotes code that exists, and names every field of an entry."""
    root = pathlib.Path(__file__).parents[1]
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/guides/adding-a-drafter.md").read_text(), re.DOTALL)
    sources = "jspec/drafting/corpus.py", "jspec/registry.py", "tests/test_registry.py"
    for block, source in zip(blocks, sources, strict=True):
        assert "".join(block.split()) in "".join((root / source).read_text().split())
    fields = {field.name for field in dataclasses.fields(DraftMethod)}
    assert all(f"`{name}`" in (root / "docs/guides/adding-a-drafter.md").read_text() for name in fields)
