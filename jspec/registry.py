"""The list of drafting methods: for each method, the import strings of its config, module, drafter, formats and objective.

An entry is data. It names a class or function of another layer by an import string, ``"module:name"``, which ``resolve``
imports when it is first used. This module itself imports nothing of jspec, so that configs, the command line and error
messages can read it without JAX. Code that needs a part of a method looks it up here, and no other file names a method:

    jspec.models        builds the module                    ``DraftMethod.module``
    jspec.drafting      builds the drafter                   ``DraftMethod.drafter``
    jspec.checkpoints   recognises, reads and writes         ``DraftMethod.formats``, ``config``
                        checkpoints
    jspec.train         builds config and objective          ``DraftMethod.objective``, ``sizes``
    jspec.api           checks options, prepares data        ``DraftMethod.options``, ``argument``, ``prepare``

docs/guides/adding-a-drafter.md shows how a new entry is made.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.config.heads import DraftConfig

# Options of every method that samples its drafts from logits; ``lookup`` puts looked-up drafts in their place.
DRAWN = ("draft_temperature", "argmax_below", "lookup")


@dataclasses.dataclass(frozen=True)
class DraftMethod:
    """One way of proposing tokens.

    Attributes:
      name: the name that users see: ``LLM.method``, the method of a cost table, ``jspec train --method``.
      help: one line of description.
      drafter: a class that implements ``jspec.drafting.base.Drafter``.
      config: the dataclass that describes a checkpoint, with the properties of ``jspec.config.heads.DraftConfig``. None
        for a method that has no checkpoint.
      module: the NNX module that is built from the config and holds its parameters, ``module(config, dtype=, rngs=)``.
      formats: the public layouts of its checkpoints, each a ``jspec.checkpoints.layouts.format.CheckpointFormat``. An export
        writes the first of them that can be written. An unknown checkpoint is tried against the formats in the order of
        ``METHODS``.
      draft: the value of ``jspec.load(draft=)`` that chooses a method without a checkpoint of its own: it has no weights,
        or they are in the target's checkpoint. Two methods may share a value, and ``argument`` then decides between them.
      argument: the argument of ``jspec.load`` that this method needs besides ``draft``. None if it needs only that.
      prepare: ``prepare(value, tokenizer, target config)`` turns the value of that argument into the arrays that the
        drafter reads, a pytree. They are arguments of the compiled programs, as weights are.
      argmax_below: the temperature from which ``draft_sampling="auto"`` samples its drafts, as measured in
        docs/results/drafters.md. None for a method that samples nothing.
      options: the fields of ``jspec.Speculation`` that this method uses and some other methods do not. By default those of
        a method that samples its drafts from logits.
      objective: ``objective(target config, sizes)`` builds the ``jspec.train.objectives.Objective`` of a new draft head.
        None for a method that ``jspec train`` does not train.
      sizes: fields of ``jspec.train.methods.Sizes`` that a user may choose for a new draft head of this method.

    Example::

        method = entry_of("ngram")
        assert method.drafter == "jspec.drafting.ngram:NGram" and "ngram_max" in method.options
    """

    name: str
    help: str
    drafter: str
    config: str | None = None
    module: str | None = None
    formats: tuple[str, ...] = ()
    draft: str | None = None
    argument: str | None = None
    prepare: str | None = None
    argmax_below: float | None = None
    options: tuple[str, ...] = DRAWN
    objective: str | None = None
    sizes: tuple[str, ...] = ()


NGRAM, MTP = "ngram", "mtp"
LOOKED_UP = ("ngram_min", "ngram_max")  # options of prompt lookup, as a method and under ``lookup``
# Entries whose checkpoints and drafters serve two methods.
EAGLE3 = DraftMethod(
    name="eagle3",
    help="an EAGLE-3 head: K passes over its own outputs, fed with hidden states of several layers of the target",
    drafter="jspec.drafting.eagle:Eagle",
    config="jspec.config.heads.eagle3:Eagle3Config",
    module="jspec.models.heads.eagle3:Eagle3Head",
    formats=("jspec.checkpoints.layouts.speculators:FORMAT", "jspec.checkpoints.layouts.eagle3:FORMAT"),
    argmax_below=0.4,
    objective="jspec.train.methods:eagle3",
    sizes=("num_draft_tokens", "layers", "intermediate_size", "draft_vocab_size", "aux_layers"),
)
DFLASH = DraftMethod(
    name="dflash",
    help="a DFlash, DFlash2, JetSpec, Domino or LiLiCorr head: one pass fills a block of mask tokens",
    drafter="jspec.drafting.block:Block",
    config="jspec.config.heads.block:BlockConfig",
    module="jspec.models.heads.block:BlockHead",
    formats=("jspec.checkpoints.layouts.block:FORMAT", "jspec.checkpoints.layouts.block_speculators:FORMAT"),
    argmax_below=0.3,
    objective="jspec.train.methods:dflash",
    sizes=(*EAGLE3.sizes, "loss", "anchor_spacing"),
)


METHODS = (
    DraftMethod(
        name="assistant",
        help="an assistant of Gemma 4: K passes over the target's own keys and values, fed with its last hidden state",
        drafter="jspec.drafting.assistant:Assistant",
        config="jspec.config.heads.assistant:AssistantConfig",
        module="jspec.models.heads.assistant:AssistantHead",
        formats=("jspec.checkpoints.layouts.assistant:FORMAT",),
        argmax_below=0.3,  # as for EAGLE heads; not measured on a checkpoint with an assistant
    ),
    dataclasses.replace(
        DFLASH,
        name="dspark",
        help="a DSpark head: one pass fills a block of mask tokens, and each draft depends on the one before it",
        argmax_below=0.6,
        objective="jspec.train.methods:dspark",
        sizes=(*DFLASH.sizes, "markov", "markov_rank"),
    ),
    DFLASH,
    dataclasses.replace(
        DFLASH,
        name="xpress",
        help="an XPress head: one pass fills a block of mask tokens, and a refiner then corrects the drafts by each other",
        argmax_below=None,  # it samples nothing
        options=("lookup",),
        objective=None,
        sizes=(),
    ),
    EAGLE3,
    dataclasses.replace(
        EAGLE3,
        name="parallel",
        help="a P-EAGLE head: an EAGLE-3 head that fills K - 1 mask slots in one pass",
        drafter="jspec.drafting.parallel:ParallelHead",
        objective="jspec.train.methods:parallel",
    ),
    DraftMethod(
        name="eagle",
        help="an EAGLE or EAGLE-2 head: K passes over its own outputs, fed with the target's last hidden state",
        drafter="jspec.drafting.eagle:Eagle",
        config="jspec.config.heads.eagle:EagleConfig",
        module="jspec.models.heads.eagle:EagleHead",
        formats=("jspec.checkpoints.layouts.eagle:FORMAT",),
        argmax_below=0.3,
        objective="jspec.train.methods:eagle",
        sizes=("intermediate_size",),
    ),
    DraftMethod(
        name=MTP,
        help="the target's own multi-token prediction layers: K passes, fed with its last hidden state",
        drafter="jspec.drafting.mtp:MTP",
        config="jspec.config.heads.mtp:MTPConfig",
        module="jspec.models.heads.mtp:MTPHead",
        formats=("jspec.checkpoints.layouts.mtp:FORMAT", "jspec.checkpoints.layouts.mtp_speculators:FORMAT"),
        draft=MTP,
        argmax_below=0.3,  # as for EAGLE heads; not measured on a checkpoint with such layers
        objective="jspec.train.methods:mtp",
        sizes=("num_draft_tokens", "intermediate_size"),
    ),
    DraftMethod(
        name="mlp",
        help="an MLP speculator: a small recurrent state, one stage a token",
        drafter="jspec.drafting.mlp:MLP",
        config="jspec.config.heads.mlp:MLPConfig",
        module="jspec.models.heads.mlp_speculator:MLPSpeculator",
        formats=("jspec.checkpoints.layouts.mlp:FORMAT",),
        argmax_below=0.3,
        objective="jspec.train.methods:mlp",
        sizes=("num_draft_tokens", "inner_size", "tie"),
    ),
    DraftMethod(
        name="medusa",
        help="Medusa heads: head i predicts the token i + 2 places ahead, independently of the others",
        drafter="jspec.drafting.medusa:MedusaHeads",
        config="jspec.config.heads.medusa:MedusaConfig",
        module="jspec.models.heads.medusa:Medusa",
        formats=("jspec.checkpoints.layouts.medusa:FORMAT",),
        argmax_below=0.6,
        objective="jspec.train.methods:medusa",
        sizes=("num_draft_tokens", "borrow_head"),
    ),
    DraftMethod(
        name="parallel",
        help="a PARD model: a small language model that fills K - 1 mask tokens in one pass",
        drafter="jspec.drafting.parallel:ParallelModel",
        config="jspec.config.heads.pard:PardConfig",
        module="jspec.models.decoder:Decoder",
        formats=("jspec.checkpoints.layouts.language_model:PARD",),
        argmax_below=0.4,
    ),
    DraftMethod(
        name="draft_model",
        help="a smaller language model of the same tokenizer, K passes",
        drafter="jspec.drafting.draft_model:DraftModel",
        config="jspec.config.model:ModelConfig",
        module="jspec.models.decoder:Decoder",
        formats=("jspec.checkpoints.layouts.language_model:PLAIN",),
        argmax_below=0.3,
    ),
    DraftMethod(
        name=NGRAM,
        help="what followed the last occurrence of the text's own ending",
        drafter="jspec.drafting.ngram:NGram",
        draft=NGRAM,
        options=LOOKED_UP,
    ),
    DraftMethod(
        name="ngram_corpus",
        help="what followed the text's own ending, in the text itself or else in a corpus",
        drafter="jspec.drafting.corpus:NGramCorpus",
        draft=NGRAM,
        argument="ngram_corpus",
        prepare="jspec.drafting.corpus:prepare",
        options=LOOKED_UP,
    ),
)


def entry_of(draft: "DraftConfig | str") -> DraftMethod:
    """The entry of a drafter's method.

    Args:
      draft: the config of a drafter, or the name of a method that has no checkpoint.

    Raises:
      ValueError: no entry has this config or this name.
    """
    if isinstance(draft, str):
        for entry in METHODS:
            if entry.name == draft and entry.config is None:
                return entry
        raise ValueError(f"{draft!r} is no method without a checkpoint in jspec.registry")
    path = f"{type(draft).__module__}:{type(draft).__qualname__}"
    for entry in METHODS:
        if entry.config == path and entry.name == draft.method:
            return entry
    raise ValueError(f"{path} of method {draft.method!r} has no entry in jspec.registry")


def chosen_by_name() -> tuple[str, ...]:
    """The values of ``jspec.load(draft=)`` that are no paths, such as ``"ngram"``."""
    return tuple(dict.fromkeys(entry.draft for entry in METHODS if entry.draft is not None))


def choose(draft: Any, given: Mapping[str, Any]) -> DraftMethod | None:
    """The entry that ``jspec.load(draft=draft)`` chooses by name. None if ``draft`` is a path or None.

    Args:
      draft: one of ``chosen_by_name``, the path of a checkpoint, or None.
      given: those arguments of ``jspec.load`` that some method needs, by name. The value is None where the user left the
        argument out.

    Raises:
      ValueError: the user gave an argument that no method with this ``draft`` needs.
    """
    present = {name for name, value in given.items() if value is not None}
    for entry in METHODS:
        if isinstance(draft, str) and entry.draft == draft and present == {entry.argument} - {None}:
            return entry
    for name in sorted(present):
        needed = " or ".join(repr(entry.draft) for entry in METHODS if entry.argument == name)
        raise ValueError(
            f"{name} has no place with draft={None if draft is None else str(draft)!r}: expected draft={needed}"
        )
    return None


def trained() -> dict[str, DraftMethod]:
    """The entries of all methods that ``jspec train`` trains, by name."""
    return {entry.name: entry for entry in METHODS if entry.objective is not None}


def argmax_below(name: str) -> float:
    """The temperature from which ``draft_sampling="auto"`` samples its drafts, for the method ``name``."""
    return next(entry.argmax_below for entry in METHODS if entry.name == name and entry.argmax_below is not None)


def particular_options() -> frozenset[str]:
    """The fields of ``jspec.Speculation`` that only some methods use."""
    return frozenset(option for entry in METHODS for option in entry.options)


@functools.cache
def resolve(path: str) -> Any:
    """The object of an import string ``"module:name"``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
