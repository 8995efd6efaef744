"""``LoadOptions``: what a call of ``jspec.load`` asks for, checked as far as that needs no checkpoint."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jspec._validation import is_int, is_number, is_one_of, require, resolve_names
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.config import VERIFY_RULES, EngineConfig, Speculation
from jspec.drafting.corpus import Corpus
from jspec.engine.adaptive.cost_table import CostTable
from jspec.sampling.params import SamplingParams
from jspec.sampling.requested import ENGINE_FIELDS, LOAD_ARGUMENTS, SAMPLING_FIELDS, SPECULATION_FIELDS

Path = str | pathlib.Path


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The arguments of ``jspec.load`` beside the two checkpoints. Those that are not listed here are as it has them.

    Attributes:
      speculation: how to draft and to verify; with ``reproducible=True``, each request by itself.
      engine: the fields of ``EngineConfig`` that the caller gave.
      head: what the caller said of a draft head.
    """

    speculation: Speculation
    engine: Mapping[str, Any]
    head: HeadOptions
    ngram_corpus: Corpus | None
    costs: CostTable | Path | None
    tensor_parallel: int
    draft_tensor_parallel: int
    expert_parallel: bool
    gpu_memory_utilization: float
    generation_config: str
    check_files: bool
    download: bool | None

    def __post_init__(self):
        require(isinstance(self.check_files, bool), "check_files", self.check_files, "True or False")
        require(is_one_of(self.download, (True, False, None)), "download", self.download, "True, False or None")
        known = self.costs is None or isinstance(self.costs, CostTable | str | os.PathLike)
        require(known, "costs", self.costs, "None, a CostTable, or the path of one as JSON")
        share = self.gpu_memory_utilization
        require(is_number(share) and 0 < share <= 1, "gpu_memory_utilization", share, "a number above 0 and at most 1")

    @staticmethod
    def of(
        options: dict[str, Any], speculation: Speculation | None, engine: EngineConfig | None, **others
    ) -> "LoadOptions":
        """From the arguments of ``jspec.load``, whose ``options`` have fields of settings, and vLLM's names of some."""
        for name in ("tensor_parallel", "draft_tensor_parallel"):
            others[name] = _aliased(name, others[name], options)
        chosen, fields = _speculation_and_engine(speculation, engine, options)
        return LoadOptions(chosen, fields, **others)

    @property
    def method_arguments(self) -> dict[str, Any]:
        """The arguments that drafting methods without a checkpoint need, by name; None for those that are not given."""
        return {"ngram_corpus": self.ngram_corpus}


def _aliased(name: str, value, options: dict):
    """The value of an argument that may also be given under vLLM's name, ``name_size``, which is taken from ``options``."""
    alias = f"{name}_size"
    if alias not in options:
        return value
    if value != 1:
        raise TypeError(f"load(): {alias!r} and {name!r} are the same argument; give one of them")
    return options.pop(alias)


def _speculation_and_engine(
    speculation: Speculation | None, engine: EngineConfig | None, options: dict
) -> tuple[Speculation, dict[str, Any]]:
    """The Speculation that a call of ``load`` means, and the fields of EngineConfig that it gives.

    Either comes as an object or as its fields among ``options``.
    """
    why = "it belongs to a request: give it to LLM.generate(), by name or in SamplingParams"
    elsewhere = dict.fromkeys([*SAMPLING_FIELDS, *SamplingParams.aliases], why)
    known = [*LOAD_ARGUMENTS, *SPECULATION_FIELDS, *ENGINE_FIELDS]
    fields = resolve_names("load()", options, known, Speculation.aliases, elsewhere)
    given = _object_or_fields("speculation", speculation, Speculation, fields, SPECULATION_FIELDS)
    of_engine = _object_or_fields("engine", engine, EngineConfig, fields, ENGINE_FIELDS)
    if isinstance(given.get("verify"), bool):
        raise ValueError(
            f"verify={given['verify']!r}: expected a rule, one of {', '.join(VERIFY_RULES)}; files are hashed "
            "with check_files=True"
        )
    chosen = Speculation(**given)
    chosen.require_lossless()
    _check_reproducible(of_engine.get("reproducible"), chosen, of_engine.get("width"))
    return chosen.for_each_request() if of_engine.get("reproducible") else chosen, of_engine


def _object_or_fields(
    name: str, value, kind: type, options: Mapping[str, Any], fields: Sequence[str]
) -> dict[str, Any]:
    """The fields of a settings object, which a caller gives as the object or by name."""
    chosen = {field: options[field] for field in fields if field in options}
    if value is None:
        return chosen
    if chosen:
        raise TypeError(f"{', '.join(chosen)}: give either {name} or its fields, not both")
    if not isinstance(value, kind):
        fix = f"**{value!r}" if isinstance(value, Mapping) else f"{fields[0]}={value!r}"
        raise TypeError(f"{name}={value!r}: expected {kind.__name__}, as in jspec.{kind.__name__}({fix})")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}


def _check_reproducible(reproducible: bool | None, speculation: Speculation, width: int | None):
    known = reproducible is None or isinstance(reproducible, bool)
    require(known, "reproducible", reproducible, "True, False or None")
    if reproducible and speculation.tree == "auto":
        raise ValueError(
            "reproducible=True has no place with tree='auto', under which measured times choose between chains and trees, "
            "whose sums have other orders; leave either out"
        )
    if reproducible and speculation.auto and not speculation.same_text_for_every_K(width):
        raise ValueError(
            "reproducible=True has no place with num_draft_tokens='auto', under which K depends on measured times; give a "
            "number of drafts, or verify='match', draft_sampling='coupled' and a width, or leave reproducible out"
        )
    budget = speculation.verify_budget
    fits = not reproducible or budget is None or is_int(budget)
    expected = "a whole number of tokens for each request under reproducible=True, where no text depends on another"
    require(fits, "verify_budget", budget, expected)
