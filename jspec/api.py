"""The front door: ``load`` a target with its drafter, ``generate`` from it."""

import contextlib
import dataclasses
import inspect
import os
import sys
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence

import jax
from tqdm import tqdm

from jspec._validation import is_int, is_number, require, resolve_names
from jspec.checkpoints.heads.options import HeadOptions
from jspec.checkpoints.loading import read_model_config, require_intact
from jspec.compilation_cache import enable_compilation_cache
from jspec.config import VERIFY_RULES, EngineConfig, ModelConfig, Speculation, shards_of
from jspec.drafting.corpus import Corpus
from jspec.drafting.methods import method_of
from jspec.engine.adaptive.cost_table import CostTable, RoundShape, round_shapes
from jspec.llm import LLM, check_lossless, same_text_for_every_K
from jspec.loading.memory_budget import fitted
from jspec.loading.pair import Path, default_params, find_source, load_modules, read_pair, require_shards
from jspec.outputs import Delta, Result
from jspec.registry import MTP
from jspec.sampling.params import SamplingParams
from jspec.sampling.request_keys import request_keys
from jspec.text.prompts import Prompt, as_list, flat_ids, text_or_ids


def load(
    target: Path,
    draft: Path | None = None,
    *,
    ngram_corpus: Corpus | None = None,
    aux_convention: str | None = None,
    norm_output: str | None = None,
    mask_token_id: int | None = None,
    mask_first: bool | None = None,
    speculation: Speculation | None = None,
    costs: CostTable | Path | None = None,
    tensor_parallel: int = 1,
    draft_tensor_parallel: int = 1,
    expert_parallel: bool = False,
    max_batch: int = 8,
    max_len: int | None = None,
    dtype: str | None = None,
    page_size: int = 64,
    num_pages: int | None = None,
    prefill_chunk: int | None = None,
    prefill_tokens: int | None = None,
    rounds: int = 4,
    width: int | None = None,
    reproducible: bool | None = None,
    prefix_cache: bool = True,
    swap_space: float = 4.0,
    max_waiting: int | None = None,
    read_ahead: int | None = None,
    logprobs_mode: str = "raw_logprobs",
    gpu_memory_utilization: float = 0.9,
    compilation_cache: bool | Path = True,
    generation_config: str = "auto",
    verify: bool | str = False,
    **options,
) -> LLM:
    """Load a target and what drafts for it; returns a model for ``jspec.generate``.

    Args:
      target: a checkpoint folder, either converted by ``jspec-convert`` or in Hugging Face's layout. Without ``draft`` it
        may also be the folder of a draft head in the ``speculators`` format, which names its target.
      draft: a checkpoint folder, ``"ngram"``, ``"mtp"`` for the multi-token prediction layers in the target's own
        checkpoint, or None for plain decoding. The drafting method follows from what a checkpoint is: a smaller model with
        the same vocabulary, a PARD model, an EAGLE, EAGLE-3, P-EAGLE, MLP or Medusa draft head, or layers for multi-token
        prediction.
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
      speculation: how many drafts a round makes, how they are drawn and how they are verified; the default is
        ``Speculation()``. With ``num_draft_tokens=0`` the draft is not loaded, and the model decodes plainly as it does
        with ``draft=None``.
      costs: the seconds that rounds take, for ``num_draft_tokens="auto"`` and ``verify_budget="auto"``: a ``CostTable``, or
        the path of one as JSON. With None the engine measures them, in ``warmup`` or when the first prompts come.
      tensor_parallel: over how many devices the target and its KV cache are split, from the first that JAX sees on
        (docs/guides/distributed.md). It divides the number of attention heads, and is a divisor or a multiple of that
        of KV heads.
      draft_tensor_parallel: over how many devices a draft model is split, 1 or ``tensor_parallel``. With 1 every device has
        all of it, as every device has all of a draft head.
      expert_parallel: whether each of these devices has some of a mixture's experts, and not a part of each. Experts in
        MXFP4 or with biases are dealt so in any case.
      max_batch: how many requests are decoded together. More prompts than that wait.
      max_len: the longest prompt plus completion, in tokens. None takes the target's own limit, but at most 2048.
      dtype: ``float32`` or ``bfloat16``. None takes bfloat16 on a GPU and float32 elsewhere.
      page_size, prefill_chunk, prefill_tokens, rounds, width: see ``EngineConfig``.
      num_pages: how many pages the pool of the KV cache has. None takes what fits: on a GPU into
        ``gpu_memory_utilization`` of its memory, beside weights and workspace; elsewhere into 4 GiB, and no more than
        every row can use.
      reproducible: with True a seed means one text, whatever else the engine does; with False the engine may choose
        between programs of several sizes, which is faster, and whose results differ in the last bits
        (docs/guides/reproducibility.md). None is True, but under ``num_draft_tokens="auto"`` or a ``verify_budget`` a
        seed means no one text all the same. True by name is refused for ``auto``, and with a ``verify_budget`` of n
        tokens each request verifies n - 1 drafts at most, whatever the others do.
      prefix_cache, swap_space, max_waiting, read_ahead, logprobs_mode: see ``EngineConfig``.
      gpu_memory_utilization: the share of the GPU's free memory that jspec may use.
      compilation_cache: whether compiled programs are kept on disk for the next start, or the folder for them. True
        takes ``~/.cache/jspec/xla``, unless JAX has been told of another folder (docs/guides/compilation.md).
      generation_config: where ``generate`` takes a temperature, top_k, top_p or min_p that a call leaves open. ``auto``
        takes it from the target's ``generation_config.json``, as vLLM does; ``jspec`` takes it from ``SamplingParams``.
        See ``LLM.default_sampling_params``.
      verify: True hashes every file of both folders and compares it with the manifest, as ``jspec-convert --check``
        does; only converted folders have one. With False, names, sizes and small files of converted folders are
        compared. If it is the name of a verification rule, it is the field ``verify`` of ``Speculation``.
      **options: fields of ``Speculation`` by name, ``num_draft_tokens=4`` for example, instead of ``speculation``.

    Raises:
      ValueError: an argument or a checkpoint cannot be used. The message says which, and what would be right.
      TypeError: an argument is unknown. The message says what may have been meant.
      MemoryError: weights, cache and workspace do not fit on the device. The message has the numbers, and nothing has
        been compiled.
    """
    if isinstance(verify, str):  # the field of Speculation
        options, verify = {**options, "verify": verify}, False
    tensor_parallel = _aliased("tensor_parallel", tensor_parallel, options)
    draft_tensor_parallel = _aliased("draft_tensor_parallel", draft_tensor_parallel, options)
    speculation = _speculation(speculation, options)
    head_options = HeadOptions(aux_convention, norm_output, mask_token_id, mask_first, mtp=draft == MTP)
    check_lossless(speculation)
    _check_verify(verify)
    _check_costs(costs)
    _check_reproducible(reproducible, speculation, width)
    if reproducible:
        speculation = speculation.for_each_request()
    share = gpu_memory_utilization
    require(is_number(share) and 0 < share <= 1, "gpu_memory_utilization", share, "a number above 0 and at most 1")
    enable_compilation_cache(compilation_cache)
    source = find_source(target, draft, {"ngram_corpus": ngram_corpus}, speculation)
    for folder in (source.target, source.draft) if verify else ():
        if folder is not None:
            require_intact(folder)
    defaults = default_params(source.target, generation_config)
    target_config = read_model_config(source.target)
    config = EngineConfig(
        max_batch=max_batch,
        max_len=_max_len(max_len, target_config),
        dtype=("bfloat16" if jax.default_backend() == "gpu" else "float32") if dtype is None else dtype,
        page_size=page_size,
        num_pages=num_pages,
        prefill_chunk=prefill_chunk,
        prefill_tokens=prefill_tokens,
        rounds=rounds,
        width=width,
        reproducible=reproducible is not False,
        prefix_cache=prefix_cache,
        swap_space=swap_space,
        max_waiting=max_waiting,
        read_ahead=read_ahead,
        logprobs_mode=logprobs_mode,
    ).for_target(target_config)
    pair = read_pair(source, target_config, head_options, speculation, config.max_len)
    draft_is_model = pair.draft is None or (
        pair.draft_config is not None and pair.draft_config.language_model is not None
    )
    shards = shards_of(tensor_parallel, draft_tensor_parallel, draft_is_model, expert_parallel)
    require_shards(shards, target_config, pair.draft_config)
    config = fitted(target_config, pair.draft_config, config, width or pair.num_draft_tokens + 1, share, shards)
    method = method_of(pair.draft)
    seconds = None if costs is None else _seconds(costs, method, pair.speculation, config.batch_buckets)
    model, draft_model, make_drafter = load_modules(pair, config.dtype, *shards)
    return LLM(model, draft_model, make_drafter, method, pair.tokenizer, pair.speculation, config, seconds, defaults)


def generate(
    llm: LLM | Path,
    prompts: Prompt | Iterable[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    key: jax.Array | None = None,
    **options,
) -> Result | list[Result]:
    """Complete prompts. The text has exactly the target's distribution, whatever drafts for it.

    Args:
      llm: what ``load`` returned, or a target folder, which is then loaded for this call.
      prompts: one prompt, or a list or other iterable of prompts. A prompt is text, token ids, or vLLM's
        ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
      params: one SamplingParams for all prompts, or one for each.
      key: a JAX key for all prompts, of which prompt i gets ``fold_in(key, i)``, or an array of one key for each prompt.
        It takes the place of ``SamplingParams.seed``, with which a prompt has the same text at every place in the list.
        With neither, a fresh key is drawn.
      **options: fields of ``SamplingParams`` by name, instead of ``params``; fields that are not given come from
        ``LLM.default_sampling_params``. If ``llm`` is a folder, also ``draft`` and the other arguments of ``load``.

    Returns:
      one result for one prompt; for several, a list of results in the order of the prompts. A prompt whose params have
      n > 1 gets a list of n results in place of one.

    Raises:
      ValueError: a prompt is empty, too long, or neither text nor ids, or a value is out of range. Nothing has run then.
      TypeError: an option is unknown or given twice. The message says what may have been meant.
    """
    sampling, loading = _split_options(options, loadable=not isinstance(llm, LLM))
    if params is not None and sampling:
        raise TypeError(f"{', '.join(sampling)}: give either params or its fields, not both")
    every_prompt, single = as_list(prompts)
    every_params = _params_list(SamplingParams(**sampling) if params is None else params, len(every_prompt))
    if not isinstance(llm, LLM):
        _check_before_loading(every_prompt, every_params, key)
        llm = load(llm, **loading)
    if params is None:
        every_params = [dataclasses.replace(llm.default_sampling_params, **sampling)] * len(every_prompt)
    keys = request_keys(every_params, key)

    results: list = [[None] * one.n for one in every_params]
    bar = tqdm(total=sum(one.n for one in every_params), unit="prompt", disable=not sys.stderr.isatty(), leave=False)
    # Closed also when this loop is interrupted: a traceback that outlives it would keep the engine's rows occupied.
    with bar, contextlib.closing(llm.generate(every_prompt, every_params, keys)) as finished:
        for index, copy, result in finished:
            results[index][copy] = result
            bar.update()
    results = [several if one.n > 1 else several[0] for one, several in zip(every_params, results, strict=True)]
    return results[0] if single else results


def stream(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    key: jax.Array | None = None,
    priority: int = 0,
    salt: str = "",
    **options,
) -> Generator[Delta, None, None]:
    """Complete one prompt, and yield what is new after each call to the device. Closing the generator gives it up.

    Args:
      llm: what ``load`` returned.
      prompt: text or token ids, as for ``generate``.
      params: how to sample, and when to end.
      key: a JAX key, in place of ``SamplingParams.seed``.
      priority: requests with a lower number go first.
      salt: only requests with the same salt share cached pages of their prompts.
      **options: fields of ``SamplingParams`` by name, instead of ``params``; fields that are not given come from
        ``LLM.default_sampling_params``.

    Yields:
      deltas; the last one has the result. An error of the device is its ``finish_reason``.

    Raises:
      ValueError: the prompt is empty, too long, or several, or a value is out of range. Nothing has run then.
      TypeError: an option is unknown or given twice. The message says what may have been meant.
    """
    require(isinstance(llm, LLM), "llm", llm, "a model that jspec.load() returned")
    return llm.engine.stream(llm.engine.request(prompt, params, key=key, priority=priority, salt=salt, **options))


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


def _params_list(params, count: int) -> list[SamplingParams]:
    """A list with one SamplingParams for each of ``count`` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    several = isinstance(params, Iterable) and not isinstance(params, Mapping | str | bytes | set | frozenset)
    listed: list = list(params) if several else [params]
    for one in listed:
        hint = f": SamplingParams(**{one!r})" if isinstance(one, Mapping) else ""
        require(isinstance(one, SamplingParams), "params", one, f"SamplingParams, one or one per prompt{hint}")
    if len(listed) != count:
        raise ValueError(f"params has {len(listed)} entries: expected one, or one per prompt, {count}")
    return listed


def _speculation(speculation: Speculation | None, options: dict) -> Speculation:
    """The Speculation that a call of ``load`` means, which gives either the object or its fields as ``options``."""
    why = "it belongs to a request: give it to jspec.generate(), by name or in SamplingParams"
    elsewhere = dict.fromkeys([*_SAMPLING, *SamplingParams.aliases], why)
    fields = resolve_names("load()", options, [*_LOADING, *_SPECULATION], Speculation.aliases, elsewhere)
    if speculation is None:
        return Speculation(**fields)
    if fields:
        raise TypeError(f"{', '.join(fields)}: give either speculation or its fields, not both")
    if not isinstance(speculation, Speculation):
        fix = f"**{speculation!r}" if isinstance(speculation, Mapping) else f"num_draft_tokens={speculation!r}"
        raise TypeError(f"speculation={speculation!r}: expected Speculation, as in jspec.Speculation({fix})")
    return speculation


def _split_options(options: dict, loadable: bool) -> tuple[dict, dict]:
    """The keyword arguments of ``generate``, split into fields of SamplingParams and arguments of ``load``.

    Arguments of ``load`` are refused unless ``loadable``: then ``generate`` was given a folder and loads it.
    """
    known, aliases, elsewhere = list(_SAMPLING), dict(SamplingParams.aliases), {}
    loading, loading_aliases = [*_LOADING, *_SPECULATION], Speculation.aliases | _LOADING_ALIASES
    if loadable:
        known, aliases = known + loading, aliases | loading_aliases
    else:
        why = "it is chosen when a model is loaded: give it to jspec.load()"
        elsewhere = dict.fromkeys([*loading, *loading_aliases], why)
    options = resolve_names("generate()", options, known, aliases, elsewhere)
    # ``verify`` is both: the name of a rule, and whether to hash the files of the folders.
    to_load = {name for name, value in options.items() if name in _LOADING and isinstance(value, bool)}
    fields = {name: value for name, value in options.items() if name in _SPECULATION and name not in to_load}
    chosen = {name: value for name, value in options.items() if name in _LOADING and name not in fields}
    if fields or "speculation" in chosen:
        chosen["speculation"] = _speculation(chosen.get("speculation"), fields)
    return {name: value for name, value in options.items() if name in _SAMPLING}, chosen


def _check_verify(verify: bool):
    known = isinstance(verify, bool)
    require(known, "verify", verify, f"True or False, or the rule of speculation: {', '.join(VERIFY_RULES)}")


def _check_costs(costs: CostTable | Path | None):
    known = costs is None or isinstance(costs, CostTable | str | os.PathLike)
    require(known, "costs", costs, "None, a CostTable, or the path of one as JSON")


def _seconds(
    costs: CostTable | Path, method: str | None, speculation: Speculation, batches: Sequence[int]
) -> dict[int, dict[RoundShape, float]]:
    """For each batch size, way of making rounds -> seconds per round. Costs of another drafting method are refused; costs of
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
    if reproducible and speculation.auto and not same_text_for_every_K(speculation, width):
        raise ValueError(
            "reproducible=True has no place with num_draft_tokens='auto', under which K depends on measured times; give a "
            "number of drafts, or verify='match', draft_sampling='coupled' and a width, or leave reproducible out"
        )
    budget = speculation.verify_budget
    fits = not reproducible or budget is None or is_int(budget)
    expected = "a whole number of tokens for each request under reproducible=True, where no text depends on another"
    require(fits, "verify_budget", budget, expected)


def _max_len(max_len: int | None, config: ModelConfig) -> int:
    longest = config.max_position
    if max_len is None:
        return min(longest, 2048)
    fits = not is_int(max_len) or max_len <= longest  # EngineConfig speaks of what is no integer
    require(fits, "max_len", max_len, f"at most {longest}, the positions the target has")
    return max_len


_SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
_LOADING_ALIASES = {f"{name}_size": name for name in ("tensor_parallel", "draft_tensor_parallel")}
_SPECULATION = [field.name for field in dataclasses.fields(Speculation)]
_LOADING = [
    name
    for name, parameter in inspect.signature(load).parameters.items()
    if name != "target" and parameter.kind != parameter.VAR_KEYWORD
]
