"""The front door: ``load`` a target with its drafter, ``generate`` from it."""

import contextlib
import dataclasses
import inspect
import os
import secrets
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jspec._arguments import is_int, require, resolve_names
from jspec.checkpoints.heads.options import HeadOptions
from jspec.checkpoints.loading import load_folder, read_draft_config, read_model_config, require_intact
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.config import VERIFY_RULES, EngineConfig, ModelConfig, Speculation
from jspec.drafting.corpus import Corpus
from jspec.drafting.methods import drafter_for, method_of
from jspec.engine.costs import CostTable
from jspec.llm import LLM, check_lossless
from jspec.loading import (
    Path,
    check_fit,
    check_options,
    default_params,
    find_folders,
    load_draft_module,
    prepared,
    with_positions,
    within_reach,
)
from jspec.memory import check_memory
from jspec.models import build
from jspec.prompts import Prompt, as_list, flat_ids, text_or_ids
from jspec.registry import choose
from jspec.results import Result
from jspec.sampling.params import SamplingParams


def load(
    target: Path,
    draft: Path | None = None,
    *,
    ngram_corpus: Corpus | None = None,
    aux_convention: str | None = None,
    norm_output: str | None = None,
    mask_token_id: int | None = None,
    speculation: Speculation | None = None,
    costs: CostTable | Path | None = None,
    max_batch: int = 8,
    max_len: int | None = None,
    dtype: str | None = None,
    page_size: int = 64,
    num_pages: int | None = None,
    prefill_chunk: int = 256,
    rounds: int = 8,
    width: int | None = None,
    generation_config: str = "auto",
    verify: bool | str = False,
    **options,
) -> LLM:
    """Load a target and the way to draft for it.

    Args:
      target: a checkpoint folder, converted by ``jspec-convert`` or as Hugging Face has it; or, without ``draft``, the
        folder of a ``speculators`` head, which names its target.
      draft: a checkpoint folder, ``"ngram"``, or None for plain decoding. How it drafts follows from the checkpoint: a
        smaller model with the same vocabulary, a PARD model, or an EAGLE, EAGLE-3, P-EAGLE, MLP or Medusa head.
      ngram_corpus: texts to look drafts up in, with ``draft="ngram"``, where the request's own text has no match: the path
        of a text file, a list of texts, or a list of lists of token ids. At most 4,194,304 tokens (2^22); every round
        compares ``ngram_max`` times as many numbers for each request, on the device, in up to 4 bytes a token and request.
      aux_convention: what the layer ids of an EAGLE-3 checkpoint count, ``input_of`` or ``output_of`` a layer; see
        ``jspec-convert --help``. Converted folders and ``speculators`` heads know it.
      norm_output: what ``norm_output`` of an EAGLE-3 checkpoint means, ``recycled`` or ``before_head``; see there too.
      mask_token_id: the token of a P-EAGLE head's mask slots, where its config.json does not name it.
      speculation: how drafts are made and judged; the default is ``Speculation()``. With ``num_draft_tokens=0`` the draft
        is not loaded: the model decodes plainly, as it does with ``draft=None``.
      costs: what rounds cost, for ``num_draft_tokens="auto"``: a table or the path of one as JSON, see ``CostTable``.
        None lets the engine measure, in ``warmup`` or when the first prompts come.
      max_batch: requests decoded together; more prompts than that wait.
      max_len: longest prompt plus completion, in tokens; None takes the target's own, at most 2048.
      dtype: ``float32`` or ``bfloat16``; None takes bfloat16 on a GPU and float32 elsewhere.
      page_size, num_pages, prefill_chunk, rounds, width: see ``EngineConfig``.
      generation_config: where ``generate`` takes the temperature, top_k, top_p and min_p that a call does not give:
        ``auto``, from the target's ``generation_config.json``, as vLLM does; ``jspec``, from ``SamplingParams``. See
        ``LLM.default_sampling_params``.
      verify: True hashes every file of the folders, which have to be converted ones, as ``jspec-convert --check`` does.
        Without it, names, sizes and small files of converted folders are compared with their manifests. The name of a
        verification rule is the field of ``Speculation`` that is called so.
      **options: fields of ``Speculation`` instead of ``speculation``, as in ``num_draft_tokens=4``.

    Raises:
      ValueError: an argument or a checkpoint that cannot be used; the message says which and what would be right.
      TypeError: an unknown argument, with what it may have meant.
      MemoryError: weights, cache and workspace do not fit, with the numbers, before anything is compiled.
    """
    if isinstance(verify, str):
        options, verify = {**options, "verify": verify}, False
    speculation = _speculation(speculation, options)
    said = HeadOptions(aux_convention, norm_output, mask_token_id)
    check_lossless(speculation)
    ok = isinstance(verify, bool)
    require(ok, "verify", verify, f"True or False, or the rule of speculation: {', '.join(VERIFY_RULES)}")
    _check_costs(costs)
    arguments = {"ngram_corpus": ngram_corpus}
    method = choose(draft, arguments)
    target_path, draft_path = find_folders(target, draft)
    if speculation.most_draft_tokens == 0:
        method = draft_path = None
    for folder in (target_path, draft_path) if verify else ():
        if folder is not None:
            require_intact(folder)
    defaults = default_params(target_path, generation_config)
    target_config = read_model_config(target_path)
    config = EngineConfig(
        max_batch=max_batch,
        max_len=_max_len(max_len, target_config),
        dtype=("bfloat16" if jax.default_backend() == "gpu" else "float32") if dtype is None else dtype,
        page_size=page_size,
        num_pages=num_pages,
        prefill_chunk=prefill_chunk,
        rounds=rounds,
        width=width,
    )
    tokenizer = load_tokenizer(target_path)
    draft_config = None
    if draft_path is not None:
        draft_config = read_draft_config(draft_path, **dataclasses.asdict(said))
        speculation = within_reach(speculation, draft_config)
        check_fit(target_config, draft_config, tokenizer, draft_path)
        draft_config = with_positions(target_config, draft_config, config.max_len)
    how = draft_config if method is None else method.name
    if how is not None:
        check_options(how, speculation)
    K = 0 if how is None else speculation.most_draft_tokens
    check_memory(target_config, draft_config, config, width or K + 1)
    seconds = None if costs is None else _seconds(costs, method_of(how), speculation, max_batch)

    head = None if method is None else prepared(method, arguments, tokenizer, target_config)
    model = build(*load_folder(target_path, config.dtype), config.dtype)
    if draft_path is not None and draft_config is not None:
        how, head = load_draft_module(draft_path, config.dtype, said, draft_config, model)
    make_drafter = drafter_for(how, target_config, speculation)
    return LLM(model, head, make_drafter, method_of(how), tokenizer, speculation, config, seconds, defaults)


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
      prompts: text or token ids, or vLLM's ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, or a list or other
        iterable of such; one prompt gives one result, several a list in the same order.
      params: one for all prompts or one per prompt.
      key: a JAX key for all prompts (prompt i gets ``fold_in(key, i)``) or an array of one key per prompt; instead of
        ``SamplingParams.seed``, which gives a prompt the same text at every place in the list. With neither, a fresh
        key is drawn.
      **options: fields of ``SamplingParams`` instead of ``params``, over ``LLM.default_sampling_params``; with a folder
        also ``draft``, the arguments of ``load`` and the fields of ``Speculation``.

    Raises:
      ValueError: a prompt that is empty, too long or no text or ids; a value out of range. Nothing has run then.
      TypeError: an unknown or doubled option, with what it may have meant.
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
    keys = _keys(every_params, key)

    results: list = [None] * len(every_prompt)
    bar = tqdm(total=len(results), unit="prompt", disable=not sys.stderr.isatty(), leave=False)
    # Closed also when this loop is interrupted: a traceback that outlives it would keep the engine's rows occupied.
    with bar, contextlib.closing(llm.generate(every_prompt, every_params, keys)) as finished:
        for index, result in finished:
            results[index] = result
            bar.update()
    return results[0] if single else results


def _check_before_loading(prompts: Sequence[Prompt], params: Sequence[SamplingParams], key: jax.Array | None):
    """Refuse what needs no model to be refused, before minutes go into loading one."""
    for index, prompt in enumerate(prompts):
        given = text_or_ids(index, prompt)
        if not isinstance(given, str):
            flat_ids(given, f"prompt {index}", "a string or ")
    _keys(params, key)


def _params_list(params, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of ``count`` prompts."""
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
    """How to speculate: as given in one piece or by its fields, which are the remaining keywords of ``load``."""
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
    """Options of ``generate`` as fields of SamplingParams and, for a folder, as arguments of ``load``."""
    known, aliases, elsewhere = list(_SAMPLING), dict(SamplingParams.aliases), {}
    loading = [*_LOADING, *_SPECULATION]
    if loadable:
        known, aliases = known + loading, aliases | Speculation.aliases
    else:
        why = "it is chosen when a model is loaded: give it to jspec.load()"
        elsewhere = dict.fromkeys([*loading, *Speculation.aliases], why)
    options = resolve_names("generate()", options, known, aliases, elsewhere)
    # ``verify`` is both: the name of a rule, and whether to hash the files of the folders.
    fields = {name: value for name, value in options.items() if name in _SPECULATION and not isinstance(value, bool)}
    chosen = {name: value for name, value in options.items() if name in _LOADING and name not in fields}
    if fields or "speculation" in chosen:
        chosen["speculation"] = _speculation(chosen.get("speculation"), fields)
    return {name: value for name, value in options.items() if name in _SAMPLING}, chosen


def _check_costs(costs: CostTable | Path | None):
    known = costs is None or isinstance(costs, CostTable | str | os.PathLike)
    require(known, "costs", costs, "None, a CostTable, or the path of one as JSON")


def _seconds(costs: CostTable | Path, method: str | None, speculation: Speculation, max_batch: int) -> dict[int, float]:
    """K -> seconds per round; a table of another way to draft is refused, one of another device warned of."""
    if method is None or not speculation.auto:
        given = "draft=None" if speculation.auto else f"num_draft_tokens={speculation.num_draft_tokens!r}"
        raise ValueError(
            f"costs has no place with {given}, which leaves nothing to choose; leave it out, or give a draft and "
            "num_draft_tokens='auto'"
        )
    table, device = costs if isinstance(costs, CostTable) else CostTable.read(costs), jax.devices()[0].device_kind
    if table.method != method:
        raise ValueError(
            f"costs has method={table.method!r}, but the draft is a {method!r}; measure that, or leave costs out to let the "
            "engine measure"
        )
    if table.device != device:
        warnings.warn(f"costs were measured on {table.device!r}, and this is {device!r}", stacklevel=3)
    return table.seconds(max_batch, speculation.draft_lengths)


def _keys(params: Sequence[SamplingParams], key: jax.Array | None) -> list[np.ndarray]:
    """A Threefry key per prompt, uint32 ``[2]``."""
    if key is None:
        seeds = [secrets.randbits(63) if p.seed is None else p.seed for p in params]
        return [np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32) for seed in seeds]
    if any(p.seed is not None for p in params):
        raise ValueError("key and SamplingParams.seed are both given: expected one of them")
    ok = hasattr(key, "dtype") and hasattr(key, "shape")
    require(ok, "key", key, "a JAX key; a number goes into SamplingParams.seed")
    keys = key
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        ok = key.dtype == np.uint32 and key.shape[-1:] == (2,)
        require(ok, "key", key, "a JAX key, of jax.random.key, or its data, uint32 [2]")
        keys = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    implementation = str(jax.random.key_impl(keys))
    if implementation != "threefry2x32":
        raise ValueError(f"key has implementation {implementation}: expected jax.random's default, threefry2x32")
    if keys.ndim == 0:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, np.arange(len(params), dtype=np.uint32))
    if keys.shape != (len(params),):
        raise ValueError(f"key has shape {keys.shape}: expected one key, or one per prompt, ({len(params)},)")
    return list(np.asarray(jax.random.key_data(keys)))


def _max_len(max_len: int | None, config: ModelConfig) -> int:
    longest = config.max_position
    if max_len is None:
        return min(longest, 2048)
    fits = not is_int(max_len) or max_len <= longest  # EngineConfig speaks of what is no integer
    require(fits, "max_len", max_len, f"at most {longest}, the positions the target has")
    return max_len


_SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
_SPECULATION = [field.name for field in dataclasses.fields(Speculation)]
_LOADING = [
    name
    for name, parameter in inspect.signature(load).parameters.items()
    if name != "target" and parameter.kind != parameter.VAR_KEYWORD
]
