"""``diagnose``: checks, a measurement with the engine, trials of alternative settings, and one verdict."""

import dataclasses
import warnings
from collections.abc import Sequence

import jax
import numpy as np

from jspec._validation import is_int, require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.layouts.options import HeadOptions, OpenSetting
from jspec.config import EngineConfig, ModelConfig, Speculation
from jspec.config.heads import DraftConfig
from jspec.doctor import checks
from jspec.doctor.checks import Check
from jspec.doctor.rounding import RoundingCost, require_original
from jspec.doctor.trials import Text
from jspec.doctor.variants import Trial, try_variants, widest_window
from jspec.drafting.methods import drafter_for, method_of
from jspec.llm import LLM, Prompt
from jspec.loading.compatibility import check_compatible, with_available_drafts, with_positions
from jspec.loading.kv_cache_dtype import kv_rounding, with_kv_cache_dtype
from jspec.loading.memory_budget import ModelMemory
from jspec.loading.modules import build_draft_module
from jspec.loading.options import Path
from jspec.loading.pair import open_checkpoints
from jspec.models import build
from jspec.models.products import kernels_of
from jspec.outputs import Stats, total_stats
from jspec.registry import MTP
from jspec.sampling.params import SamplingParams
from jspec.text.prompts import LONGEST_PROMPT, token_ids

PROMPTS = (
    "import os\nimport sys\n\n\ndef main(argv=None):",
    'def read_config(path):\n    """Return the configuration',
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter to a landlord about a broken window.",
)
MOST_ROWS = 16
FEWEST_TOKENS = 16  # tokens that the target has to generate in all, for meaningful figures
CHANCE = 0.1  # a draft counts as untrained if a smaller share of its first drafts is accepted
# An alternative is clearly better if its rounds accept more drafts by this many standard errors and by this number.
CLEARLY, AT_LEAST = 3.0, 0.1


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The result of ``diagnose``.

    Attributes:
      verdict: ``healthy``, ``mismatch`` (target and draft do not belong together), ``wrong_setting`` or ``untrained``.
      explanation: the verdict in a sentence or two.
      checks: results of the checks, in the order in which they are printed.
      served: the statistics of a greedy run of the engine; None if the draft does not fit the target.
      trials: the draft head with its given settings, then with each alternative; () for drafts without alternatives.
      rounding: what the rounding of the draft's weights costs, if its original is given, and that of the target's cache, if
        this is rounded.
      products: which kernel multiplies each map of the target in a round of one text, and why no faster one does.

    Example::

        diagnosis = diagnose(Path("path/to/target"), Path("path/to/eagle3"))
        if not diagnosis.healthy:
            print(*[check for check in diagnosis.checks if check.status == "wrong"], *diagnosis.trials)
    """

    verdict: str
    explanation: str
    checks: tuple[Check, ...]
    served: Stats | None = None
    trials: tuple[Trial, ...] = ()
    rounding: tuple[RoundingCost, ...] = ()
    products: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.verdict == "healthy"


def diagnose(
    target: Path,
    draft: Path | None = None,
    prompts: Sequence[Prompt] | None = None,
    *,
    aux_convention: str | None = None,
    norm_output: str | None = None,
    mask_token_id: int | None = None,
    num_draft_tokens: int = 4,
    max_tokens: int = 64,
    dtype: str | None = None,
    chat: bool | None = None,
    download: bool | None = None,
    draft_reference: Path | None = None,
    kv_cache_dtype: str = "auto",
) -> Diagnosis:
    """Diagnose whether a draft fits its target and is used with the settings that it was trained with.

    All texts are greedy, so the same arguments give the same diagnosis again.

    Args:
      target, draft, aux_convention, norm_output, mask_token_id, dtype, download: as in ``jspec.load``; ``draft`` is a
        folder, a name on the hub, or ``"mtp"``. An ``aux_convention`` or ``norm_output`` that the checkpoint needs and
        nobody gives is measured.
      prompts: texts or token ids, best of the kind that the draft was trained on. None takes four built-in prompts.
      num_draft_tokens: K, the drafts of a round.
      max_tokens: how many new tokens each prompt gets at most.
      chat: whether each text goes through the target's chat template as a user's message. None does so if there is a
        template.
      draft_reference: the original of a quantised draft, a folder or a name on the hub, with which acceptance is measured
        too; of multi-token prediction layers, the original of the target.
      kv_cache_dtype: as in ``jspec.load``. If keys and values are rounded, acceptance is measured without that, too.

    Raises:
      ValueError: an argument or a checkpoint cannot be used. A draft of another target raises nothing: it is a verdict.

    Example::

        diagnosis = diagnose(Path("path/to/target"), Path("path/to/eagle3"), ["def main(", "class Queue:"])
        print(diagnosis.verdict, diagnosis.explanation)
    """
    given_options = HeadOptions(aux_convention, norm_output, mask_token_id, mtp=draft == MTP)
    require(is_int(max_tokens) and max_tokens >= 2, "max_tokens", max_tokens, "an integer of at least 2")
    K = num_draft_tokens
    expected = "an integer of at least 1, because drafts are what is looked at"
    require(is_int(K) and K >= 1, "num_draft_tokens", K, expected)
    target_checkpoint, draft_checkpoint = open_checkpoints(target, draft, given_options, download)
    if draft_checkpoint is None:
        raise ValueError(f"draft={draft!r}: expected the folder of a draft model or a draft head")
    draft_checkpoint = _with_open_settings(draft_checkpoint)
    options, assumed = draft_checkpoint.options, _assumed(given_options, draft_checkpoint.options)
    config, tokenizer = target_checkpoint.target_config, target_checkpoint.tokenizer
    given = draft_checkpoint.config
    dtype = dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    results = [
        *checks.compared_tokenizers(tokenizer, checks.own_tokenizer(draft_checkpoint)),
        checks.target_weights(config, target_checkpoint, draft_checkpoint, dtype),
    ]
    try:
        check_compatible(config, given, tokenizer, draft_checkpoint)
    except ValueError as error:
        results.append(Check("fit", "wrong", str(error)))
    if wrong := next((check for check in results if check.status == "wrong"), None):
        return Diagnosis("mismatch", f"Target and draft do not belong together: {wrong.detail}.", tuple(results))

    original = _original(target, draft, draft_reference, draft_checkpoint, download)
    longest = LONGEST_PROMPT + widest_window(given)
    tokens = token_ids(PROMPTS if prompts is None else prompts, tokenizer, config, chat, longest)
    engine = engine_config(config, tokens, max_tokens, dtype)
    with warnings.catch_warnings():  # the checks report the same
        warnings.simplefilter("ignore", UserWarning)
        used = with_positions(config, given, engine.max_len)
        speculation = with_available_drafts(Speculation(num_draft_tokens), used)
    results += [checks.position_limit(config, given, used), *checks.head_inputs(config, used, options)]
    plain = with_pages(engine, config, used, speculation)
    engine = with_kv_cache_dtype(dataclasses.replace(engine, kv_cache_dtype=kv_cache_dtype), target_checkpoint)
    engine = with_pages(engine, config, used, speculation)
    rounding = kv_rounding(engine, target_checkpoint)

    model = build(config.for_length(engine.max_len), target_checkpoint.language_model(dtype)[1], dtype)
    model.kv_rounding = rounding
    params = dict(draft_checkpoint.params(dtype))
    texts, served = _serve(model, used, params, tokens, speculation, engine, max_tokens)
    _require_enough(texts)
    results += [*checks.draft_vocabulary(used, params, texts), *checks.windows(used, texts)]
    trials = try_variants(model, used, params, texts, speculation.most_draft_tokens, dtype, options)
    costs = []
    if original is not None:
        original_config = with_positions(config, original.config, engine.max_len)
        _, unrounded = _serve(model, original_config, original.params(dtype), tokens, speculation, engine, max_tokens)
        stored = f"in {given.formats}" if given.formats else "as stored"
        costs.append(RoundingCost(f"weights of the draft {stored}", served, unrounded))
    if rounding is not None:
        model.kv_rounding = None
        _, unrounded = _serve(model, used, params, tokens, speculation, plain, max_tokens)
        costs.append(RoundingCost(f"cache of the target in {engine.kv_cache_dtype}", served, unrounded))
    together = total_stats(served)
    products = tuple(kernels_of(model, speculation.most_draft_tokens + 1))
    return Diagnosis(*verdict(together, trials, assumed), tuple(results), together, trials, tuple(costs), products)


def _original(
    target: Path, draft: Path | None, reference: Path | None, quantized: Checkpoint, download: bool | None
) -> Checkpoint | None:
    """The checkpoint of the draft whose weights are not rounded, if it is given; arguments as for ``diagnose``, with the
    draft that is."""
    if reference is None:
        return None
    pair = (reference, MTP) if draft == MTP else (target, reference)
    _, original = open_checkpoints(*pair, quantized.options, download)
    assert original is not None
    require_original(original, quantized)
    return original


def with_pages(engine: EngineConfig, target: ModelConfig, draft: DraftConfig, speculation: Speculation) -> EngineConfig:
    return ModelMemory(target, draft, speculation.most_draft_tokens + 1).with_num_pages(engine, share=0.9)


def _with_open_settings(draft: Checkpoint) -> Checkpoint:
    """``draft`` with a value for each setting that its checkpoint leaves open; the others are tried beside it."""
    while True:
        try:
            _ = draft.config
        except OpenSetting as unsaid:
            options = dataclasses.replace(draft.options, **{unsaid.name: unsaid.values[0]})
            draft = draft.with_options(options)
        else:
            return draft


def _assumed(given: HeadOptions, options: HeadOptions) -> str:
    """What of ``options`` was not given: ``aux_convention='input_of'``, for example."""
    names = [field.name for field in dataclasses.fields(given)]
    return " and ".join(f"{n}={getattr(options, n)!r}" for n in names if getattr(options, n) != getattr(given, n))


def engine_config(target: ModelConfig, tokens: Sequence[Sequence[int]], max_tokens: int, dtype: str) -> EngineConfig:
    return EngineConfig(
        max_batch=min(len(tokens), MOST_ROWS),
        max_len=min(max(map(len, tokens)) + max_tokens, target.max_position),
        dtype=dtype,
        page_size=32,
        prefill_chunk=64,
    )


def _require_enough(texts: Sequence[Text]):
    written = sum(len(text.tokens) - text.prompt_length for text in texts)
    if written < FEWEST_TOKENS:
        raise ValueError(
            f"the target wrote {written} tokens in all before it ended its texts: expected at least {FEWEST_TOKENS}; give "
            "more prompts, or others"
        )


def _serve(
    model, config, params, tokens, speculation, engine: EngineConfig, max_tokens: int
) -> tuple[list[Text], tuple[Stats, ...]]:
    """Complete the prompts greedily with the engine; returns the texts and their statistics."""
    config, module = build_draft_module(config, dict(params), engine.dtype, model)
    make_drafter = drafter_for(config, model.config, speculation)
    llm = LLM(model, module, make_drafter, method_of(config), None, speculation, engine)
    greedy, keys = SamplingParams(temperature=0, max_tokens=max_tokens), np.zeros(2, np.uint32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the position limit, which is among the checks
        by_index = {i: result for i, _, result in llm.completions(tokens, [greedy] * len(tokens), [keys] * len(tokens))}
    results = [by_index[i] for i in range(len(tokens))]
    texts = [Text((*result.prompt_token_ids, *result.token_ids), len(result.prompt_token_ids)) for result in results]
    return texts, tuple(result.stats for result in results)


def verdict(served: Stats, trials: Sequence[Trial], assumed: str = "") -> tuple[str, str]:
    """The verdict on a draft that fits its target, and its explanation.

    Args:
      served: the statistics of the engine.
      trials: the first, if there are any, has the given settings of the draft head.
      assumed: which of these neither the user nor the checkpoint gave; empty if there are none.
    """
    first = max([_first_rate(trial.stats) for trial in trials] or [_first_rate(served)])
    length = served.mean_acceptance_length
    if first < CHANCE:
        return "untrained", (
            f"The draft hardly predicts this target: {first:.0%} of first drafts are accepted at best"
            f"{', whatever the settings' * bool(trials)}. It was trained for another target, or not at all."
        )
    better = [trial for trial in trials[1:] if _clearly_better(trial, trials[0])]
    if better:
        best = max(better, key=lambda trial: trial.rounds.mean())
        return "wrong_setting", (
            f"The head was trained with {best.setting}: an acceptance length of {best.stats.mean_acceptance_length:.2f} "
            f"instead of {trials[0].stats.mean_acceptance_length:.2f}."
        )
    reason = ", and no alternative is clearly better" if len(trials) > 1 else ""
    settings = f" Its checkpoint does not say {assumed}, which fits: give it to jspec." * bool(assumed)
    return "healthy", f"An acceptance length of {length:.2f}, greedily{reason}.{settings}"


def _first_rate(stats: Stats) -> float:
    return stats.acceptance_rate_per_position[0]


def _clearly_better(trial: Trial, than: Trial) -> bool:
    ahead = trial.rounds.astype(float) - than.rounds
    error = ahead.std() / np.sqrt(len(ahead))
    return bool(ahead.mean() >= AT_LEAST and ahead.mean() > CLEARLY * error)
