"""The front door: ``load`` a target with its drafter, ``generate`` from it."""

import dataclasses
import os
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import jax

from jspec._validation import is_int, is_number, is_one_of, require, resolve_names
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.compilation_cache import enable_compilation_cache
from jspec.config import VERIFY_RULES, EngineConfig, ModelConfig, Speculation, shards_of
from jspec.config.engine import PASS_TOKENS
from jspec.config.heads import DraftConfig
from jspec.drafting.corpus import Corpus
from jspec.drafting.methods import method_of
from jspec.engine.adaptive.cost_table import CostTable, RoundShape, round_shapes
from jspec.engine.forks import require_not_forked
from jspec.llm import LLM
from jspec.loading.activation_dtype import check_activation_dtype, with_activation_dtype
from jspec.loading.context_length import lengths_up_to, own_length, reproducible_length, within_pool
from jspec.loading.kv_cache_dtype import kv_rounding, with_kv_cache_dtype
from jspec.loading.memory_budget import ModelMemory
from jspec.loading.pair import Path, check_pair, default_params, load_modules, open_pair, require_shards
from jspec.outputs import Delta, Result
from jspec.registry import MTP
from jspec.sampling.params import SamplingParams
from jspec.sampling.request_keys import request_keys
from jspec.sampling.requested import (
    ENGINE_FIELDS,
    LOAD_ALIASES,
    LOAD_ARGUMENTS,
    SAMPLING_FIELDS,
    SPECULATION_FIELDS,
    params_of_each,
    requested,
)
from jspec.text.prompts import Prompt, as_list, flat_ids, text_or_ids


def load(
    target: Path,
    draft: Path | None = None,
    *,
    speculation: Speculation | None = None,
    engine: EngineConfig | None = None,
    ngram_corpus: Corpus | None = None,
    aux_convention: str | None = None,
    norm_output: str | None = None,
    mask_token_id: int | None = None,
    mask_first: bool | None = None,
    costs: CostTable | Path | None = None,
    tensor_parallel: int = 1,
    draft_tensor_parallel: int = 1,
    expert_parallel: bool = False,
    gpu_memory_utilization: float = 0.9,
    compilation_cache: bool | Path = True,
    generation_config: str = "auto",
    check_files: bool = False,
    download: bool | None = None,
    **options,
) -> LLM:
    """Load a target and what drafts for it; returns a model to generate from.

    Example::

        llm = jspec.load("path/to/target", "path/to/draft", num_draft_tokens=5, max_batch=16, max_len=8192)
        print(llm.generate("def main(", temperature=0, max_tokens=64).text)

    Args:
      target: a checkpoint folder, either converted by ``jspec-convert`` or in Hugging Face's layout, or the name of a model
        on the Hugging Face hub, ``"org/name"`` or ``"org/name@revision"``. Without ``draft`` it may also be a draft head in
        the ``speculators`` format, which names its target.
      draft: a checkpoint folder or a name on the hub, ``"ngram"``, ``"mtp"`` for the multi-token prediction layers in the
        target's own checkpoint, or None for plain decoding. The drafting method follows from what a checkpoint is: a
        smaller model with the same vocabulary, a PARD model, an EAGLE, EAGLE-3, P-EAGLE, MLP or Medusa draft head, or
        layers for multi-token prediction.
      speculation: how many drafts a round makes, how they are drawn and how they are verified. None takes the fields of
        ``Speculation`` among ``options``. With ``num_draft_tokens=0`` the draft is not loaded, and the model decodes
        plainly as it does with ``draft=None``.
      engine: what the engine may use, and the shapes of its programs. None takes the fields of ``EngineConfig`` among
        ``options``, and chooses three that are not among them: ``max_len`` is the number of positions of the target, but
        at most 32,768 on a GPU and 8,192 elsewhere, or with ``reproducible=False`` as long as memory allows
        (docs/guides/serving.md); ``dtype`` is bfloat16 on a GPU and float32 elsewhere; ``reproducible`` is True, but may
        be given up for ``num_draft_tokens="auto"`` or a ``verify_budget``, under which a seed does not mean one text all
        the same. By name, ``reproducible=True`` is refused for ``auto``, and with a ``verify_budget`` of n tokens each
        request verifies n - 1 drafts at most, whatever the others do (docs/guides/reproducibility.md). Where ``num_pages``
        is None, the pool of the KV cache has the pages that fit: on a GPU into ``gpu_memory_utilization`` of its memory,
        beside weights and workspace; elsewhere into 4 GiB, and no more than every row can use.
      ngram_corpus: texts in which ``draft="ngram"`` looks drafts up where the request's own text has no match. It is the
        path of a text file, a list of texts, or a list of lists of token ids, of at most 4,194,304 tokens (2^22)
        together. Every round compares ``ngram_max`` numbers for each of these tokens and each request, on the device,
        and takes up to 4 bytes of memory for each token and request.
      aux_convention: whether the layer ids of an EAGLE-3 checkpoint mean the input of a layer (``input_of``) or its
        output (``output_of``). See ``jspec-convert --help``. Converted folders and ``speculators`` heads say it
        themselves.
      norm_output: what the field ``norm_output`` of an EAGLE-3 checkpoint means, ``recycled`` or ``before_head``. See
        ``jspec-convert --help``. For multi-token prediction layers, which of their outputs is fed back: ``recycled``, the
        normed one, is the default.
      mask_token_id: the token of a P-EAGLE head's mask slots, if its config.json does not name it.
      mask_first: whether multi-token prediction layers read zeros in place of the first embedding of a text, as in vLLM.
        None is False.
      costs: the seconds that rounds take, for ``num_draft_tokens="auto"`` and ``verify_budget="auto"``: a ``CostTable``, or
        the path of one as JSON. With None the engine measures them, in ``warmup`` or when the first prompts come.
      tensor_parallel: over how many devices the target and its KV cache are split, from the first that JAX sees on
        (docs/guides/distributed.md). It divides the number of attention heads, and is a divisor or a multiple of that of
        KV heads.
      draft_tensor_parallel: over how many devices a draft model is split, 1 or ``tensor_parallel``. With 1 every device has
        all of it, as every device has all of a draft head.
      expert_parallel: whether each of these devices has some of a mixture's experts, and not a part of each. Experts in
        MXFP4 or with biases are dealt so in any case.
      gpu_memory_utilization: the share of the GPU's free memory that jspec may use.
      compilation_cache: whether compiled programs are kept on disk for the next process, or the folder for them. True
        takes ``~/.cache/jspec/xla``, unless JAX has been told of another folder (docs/guides/compilation.md).
      generation_config: where a request takes a temperature, top_k, top_p, min_p or repetition_penalty that its call leaves
        open. ``auto`` takes it from the target's ``generation_config.json``, as vLLM does; ``jspec`` takes it from
        ``SamplingParams``. See ``LLM.default_sampling_params``.
      check_files: whether every file of both folders is hashed and compared with the manifest, as ``jspec-convert --check``
        does; only converted folders have one. With False, names, sizes and small files of converted folders are
        compared.
      download: whether the names of models on the hub may be downloaded into its local cache. True downloads what the hub
        has now and the cache lacks, and says how much on standard error. False takes the cache alone. None does so too,
        but asks first where standard input and standard error are terminals (docs/guides/downloading.md).
      **options: fields of ``Speculation`` and of ``EngineConfig`` by name, ``num_draft_tokens=4`` or ``max_batch=16`` for
        example, instead of the objects.

    Raises:
      ValueError: an argument or a checkpoint cannot be used. The message says which, and what would be right.
      TypeError: an argument is unknown. The message says what may have been meant.
      MemoryError: weights, cache and workspace do not fit on the device. The message has the numbers, and nothing has
        been compiled.
      RuntimeError: the process was forked from one that has loaded a model.
    """
    require_not_forked()
    tensor_parallel = _aliased("tensor_parallel", tensor_parallel, options)
    draft_tensor_parallel = _aliased("draft_tensor_parallel", draft_tensor_parallel, options)
    speculation, engine_fields = _speculation_and_engine(speculation, engine, options)
    reproducible, width = engine_fields.get("reproducible"), engine_fields.get("width")
    head_options = HeadOptions(aux_convention, norm_output, mask_token_id, mask_first, mtp=is_one_of(draft, (MTP,)))
    speculation.require_lossless()
    require(isinstance(check_files, bool), "check_files", check_files, "True or False")
    require(is_one_of(download, (True, False, None)), "download", download, "True, False or None")
    known = costs is None or isinstance(costs, CostTable | str | os.PathLike)
    require(known, "costs", costs, "None, a CostTable, or the path of one as JSON")
    _check_reproducible(reproducible, speculation, width)
    if reproducible:
        speculation = speculation.for_each_request()
    share = gpu_memory_utilization
    require(is_number(share) and 0 < share <= 1, "gpu_memory_utilization", share, "a number above 0 and at most 1")
    enable_compilation_cache(compilation_cache)
    pair = open_pair(target, draft, head_options, {"ngram_corpus": ngram_corpus}, speculation, download)
    if check_files:
        pair.require_intact(hash_all=False)  # the rest is hashed when it is loaded
    defaults = default_params(pair.target, generation_config)
    target_config = pair.target.target_config
    draft_config = pair.draft.config if isinstance(pair.draft, Checkpoint) else None
    draft_is_model = pair.draft is None or (draft_config is not None and draft_config.language_model is not None)
    shards = shards_of(tensor_parallel, draft_tensor_parallel, draft_is_model, expert_parallel)
    config = with_kv_cache_dtype(_engine_config(engine_fields, target_config, draft_config), pair.target)
    check_activation_dtype(config.activation_dtype, target_config)
    if engine_fields.get("max_len") is None and not config.reproducible:
        require_shards(shards, target_config, draft_config)
        K = 0 if pair.draft is None else speculation.most_draft_tokens
        lengths = lengths_up_to(within_pool(own_length(target_config), config))
        memory = ModelMemory(target_config, draft_config, width or K + 1, shards, K)
        longest = memory.longest_that_fits(lengths, config, share)
        config = dataclasses.replace(config, max_len=longest)
    checked = check_pair(pair, speculation, config.max_len)
    draft_config, speculation = checked.draft_config, checked.speculation
    require_shards(shards, target_config, draft_config)
    K = checked.num_draft_tokens
    memory = ModelMemory(target_config, draft_config, width or K + 1, shards, K)
    config = memory.with_num_pages(config, share)
    method = method_of(checked.draft)
    seconds = None if costs is None else _seconds(costs, method, speculation, config.batch_buckets)
    rounding = kv_rounding(config, pair.target)
    model, draft_model, make_drafter = load_modules(checked, config.dtype, *shards, check_files=check_files)
    model.kv_rounding = rounding
    model = with_activation_dtype(model, config.activation_dtype)
    return LLM(model, draft_model, make_drafter, method, pair.target.tokenizer, speculation, config, seconds, defaults)


def generate(
    llm: LLM | Path,
    prompts: Prompt | Iterable[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    key: jax.Array | None = None,
    **options,
) -> Result | list[Result]:
    """Complete prompts with a model, or with a target folder that is loaded for this call: see ``LLM.generate``.

    Example::

        result = jspec.generate("path/to/target", "def main(", draft="path/to/draft", max_tokens=64)

    Args:
      llm: what ``load`` returned, or a target folder.
      prompts, params, key: as for ``LLM.generate``.
      **options: as for ``LLM.generate``. If ``llm`` is a folder, also ``draft`` and the other arguments of ``load``.

    Returns:
      what ``LLM.generate`` returns.

    Raises:
      ValueError, TypeError: as ``LLM.generate`` and ``load`` do. What can be checked without the model is checked before it
        is loaded.
    """
    if not isinstance(llm, LLM):
        options, loading = _split_options(options)
        asked = requested("generate()", params, options, SamplingParams())
        every_prompt, single = as_list(prompts)  # an iterator is read once
        every_params = params_of_each(asked, len(every_prompt))
        _check_before_loading(every_prompt, every_params, key)
        llm, prompts = load(llm, **loading), every_prompt[0] if single else every_prompt
    return llm.generate(prompts, params, key=key, **options)


def stream(llm: LLM, prompt: Prompt, params: SamplingParams | None = None, **options) -> Generator[Delta, None, None]:
    """Complete one prompt with a model, and yield what is new after each call to the device: see ``LLM.stream``.

    Example::

        llm = jspec.load("path/to/target")
        for delta in jspec.stream(llm, "def main(", max_tokens=64):
            print(delta.text, end="", flush=True)
    """
    require(isinstance(llm, LLM), "llm", llm, "a model that jspec.load() returned")
    return llm.stream(prompt, params, **options)


def _aliased(name: str, value, options: dict):
    """The value of an argument that may also be given under vLLM's name, ``name_size``, which is taken from ``options``."""
    alias = f"{name}_size"
    if alias not in options:
        return value
    if value != 1:
        raise TypeError(f"load(): {alias!r} and {name!r} are the same argument; give one of them")
    return options.pop(alias)


def _check_before_loading(prompts: Sequence[Prompt], params: Sequence[SamplingParams], key: jax.Array | None):
    """Check what can be checked without a model, before minutes go into loading one."""
    for index, prompt in enumerate(prompts):
        given = text_or_ids(index, prompt)
        if not isinstance(given, str):
            flat_ids(given, f"prompt {index}", "a string or ")
    request_keys(params, key)


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
    return Speculation(**given), of_engine


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


def _engine_config(fields: Mapping[str, Any], target: ModelConfig, draft: DraftConfig | None) -> EngineConfig:
    """The settings of an engine for a target and its draft; what is left open is chosen for these and the device."""
    fields = dict(fields)
    chooses = fields.get("max_len") is None
    if chooses:
        fields["max_len"] = reproducible_length(target, jax.default_backend())
    _require_positions(fields["max_len"], target)
    if fields.get("dtype") is None:
        fields["dtype"] = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    if fields.get("reproducible") is None:
        fields["reproducible"] = True
    config = EngineConfig(**fields)
    if chooses:
        config = dataclasses.replace(config, max_len=within_pool(config.max_len, config))
    if config.prefill_tokens is None and not config.reproducible and jax.default_backend() != "gpu":
        # A CPU is no faster at larger batches, and runs every size of them at warm-up, padding included.
        config = dataclasses.replace(config, prefill_tokens=max(PASS_TOKENS["reproducible"], config.chunk))
    return config.for_target(target, None if draft is None else draft.language_model)


def _split_options(options: dict) -> tuple[dict, dict]:
    """The keyword arguments of ``generate`` with a folder: those of the request, and those of ``load``."""
    loading = [*LOAD_ARGUMENTS, *SPECULATION_FIELDS, *ENGINE_FIELDS]
    known = [*SAMPLING_FIELDS, "sampling_params", *loading]
    options = resolve_names("generate()", options, known, SamplingParams.aliases | LOAD_ALIASES)
    of_load = {name: value for name, value in options.items() if name in loading}
    return {name: value for name, value in options.items() if name not in of_load}, of_load


def _seconds(
    costs: CostTable | Path, method: str | None, speculation: Speculation, batches: Sequence[int]
) -> dict[int, dict[RoundShape, float]]:
    """For each batch size, round shape -> seconds per round. Costs of another drafting method are refused; costs of
    another device cause a warning."""
    chooses = speculation.auto or speculation.verify_budget == "auto"
    if method is None or not chooses:
        given = "draft=None" if chooses else f"num_draft_tokens={speculation.num_draft_tokens!r}"
        raise ValueError(
            f"costs has no place with {given}, which leaves nothing to choose; leave it out, or give a draft and "
            "num_draft_tokens='auto' or verify_budget='auto'"
        )
    table, device = costs if isinstance(costs, CostTable) else CostTable.read(costs), jax.devices()[0].device_kind
    if table.method != method:
        raise ValueError(
            f"costs has method={table.method!r}, but the draft is a {method!r}; measure that, or leave costs out to let the "
            "engine measure"
        )
    if table.device != device:
        warnings.warn(f"costs were measured on {table.device!r}, and this is {device!r}", stacklevel=3)
    lengths, budgets = speculation.draft_lengths, speculation.budgets
    return {batch: table.seconds(batch, round_shapes(lengths, budgets, batch)) for batch in batches}


def _check_reproducible(reproducible: bool | None, speculation: Speculation, width: int | None):
    known = reproducible is None or isinstance(reproducible, bool)
    require(known, "reproducible", reproducible, "True, False or None")
    if reproducible and speculation.auto and not speculation.same_text_for_every_K(width):
        raise ValueError(
            "reproducible=True has no place with num_draft_tokens='auto', under which K depends on measured times; give a "
            "number of drafts, or verify='match', draft_sampling='coupled' and a width, or leave reproducible out"
        )
    budget = speculation.verify_budget
    fits = not reproducible or budget is None or is_int(budget)
    expected = "a whole number of tokens for each request under reproducible=True, where no text depends on another"
    require(fits, "verify_budget", budget, expected)


def _require_positions(max_len: int, config: ModelConfig):
    longest = config.max_position
    fits = not is_int(max_len) or max_len <= longest  # EngineConfig speaks of what is no integer
    require(fits, "max_len", max_len, f"at most {longest}, the positions the target has")
