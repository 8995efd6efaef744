"""The front door: ``load`` a target with its drafter, ``generate`` from it."""

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import jax

from jspec._validation import is_one_of, require, resolve_names
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.in_memory import InMemory
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.compilation_cache import enable_compilation_cache
from jspec.config import EngineConfig, Speculation
from jspec.drafting.corpus import Corpus
from jspec.drafting.methods import method_of
from jspec.engine.adaptive.cost_table import CostTable
from jspec.engine.forks import require_not_forked
from jspec.llm import LLM
from jspec.loading.devices import on_devices
from jspec.loading.modules import load_modules
from jspec.loading.options import LoadOptions, Path
from jspec.loading.pair import open_pair
from jspec.loading.plan import make_plan
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
from jspec.updates.update import Origin


def load(
    target: Path | InMemory,
    draft: Path | InMemory | None = None,
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
    devices: Sequence[Any] | None = None,
    mesh: jax.sharding.Mesh | None = None,
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
      target: a checkpoint folder, either converted by ``jspec-convert`` or in Hugging Face's layout; a GGUF file; or the
        name of a model on the Hugging Face hub, ``"org/name"`` or ``"org/name@revision"``, either with ``":Q4_K_M"``
        behind it for one of its GGUF files. Without ``draft`` it may also be a draft head in the ``speculators`` format,
        which names its target. ``jspec.InMemory`` is a model, or a draft, whose weights are arrays and no files.
      draft: a checkpoint folder, a GGUF file or a name on the hub, ``"ngram"``, ``"mtp"`` for the multi-token prediction
        layers in the target's own checkpoint, or None for plain decoding. The drafting method follows from what a checkpoint
        is: a smaller model with the same vocabulary, a PARD model, an EAGLE, EAGLE-3, P-EAGLE, MLP or Medusa draft head, or
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
      tensor_parallel: over how many devices the target and its KV cache are split, the first that JAX sees, or ``devices``
        (docs/guides/distributed.md). It divides the number of attention heads, and is a divisor or a multiple of that of
        KV heads.
      draft_tensor_parallel: over how many devices a draft model is split, 1 or ``tensor_parallel``. With 1 every device has
        all of it, as every device has all of a draft head.
      expert_parallel: whether each of these devices has some of a mixture's experts, and not a part of each. Experts in
        MXFP4 or with biases are dealt so in any case.
      devices: a list of ``jax.Device`` on which target and draft live, ``tensor_parallel`` of them in the order of the
        shards, all of this process: another model, or a trainer, may have the others. None takes the first that JAX sees.
      mesh: the same as a mesh, of which only the devices in their order count.
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
    asked = LoadOptions.of(
        options,
        speculation,
        engine,
        head=HeadOptions(aux_convention, norm_output, mask_token_id, mask_first, mtp=is_one_of(draft, (MTP,))),
        ngram_corpus=ngram_corpus,
        costs=costs,
        tensor_parallel=tensor_parallel,
        draft_tensor_parallel=draft_tensor_parallel,
        expert_parallel=expert_parallel,
        gpu_memory_utilization=gpu_memory_utilization,
        generation_config=generation_config,
        check_files=check_files,
        download=download,
    )
    enable_compilation_cache(compilation_cache)
    pair = open_pair(target, draft, asked)
    with on_devices(devices, mesh, asked.tensor_parallel):
        plan = make_plan(pair, asked)
        target_module, draft_module, make_drafter = load_modules(plan)
        for checkpoint in pair.checkpoints:
            checkpoint.release()
        return LLM(
            target_module,
            draft_module,
            make_drafter,
            method_of(plan.draft),
            plan.tokenizer,
            plan.speculation,
            plan.engine,
            plan.costs,
            plan.default_params,
            Origin(pair.target, pair.draft if isinstance(pair.draft, Checkpoint) else None),
        )


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


def _check_before_loading(prompts: Sequence[Prompt], params: Sequence[SamplingParams], key: jax.Array | None):
    """Check what can be checked without a model, before minutes go into loading one."""
    for index, prompt in enumerate(prompts):
        given = text_or_ids(index, prompt)
        if not isinstance(given, str):
            flat_ids(given, f"prompt {index}", "a string or ")
    request_keys(params, key)


def _split_options(options: dict) -> tuple[dict, dict]:
    """The keyword arguments of ``generate`` with a folder: those of the request, and those of ``load``."""
    loading = [*LOAD_ARGUMENTS, *SPECULATION_FIELDS, *ENGINE_FIELDS]
    known = [*SAMPLING_FIELDS, "sampling_params", *loading]
    options = resolve_names("generate()", options, known, SamplingParams.aliases | LOAD_ALIASES)
    of_load = {name: value for name, value in options.items() if name in loading}
    return {name: value for name, value in options.items() if name not in of_load}, of_load
