"""``make_plan``: what ``jspec.load`` reads and how it is used, after everything but the weights was read and checked."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import jax

from jspec._validation import require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config import EngineConfig, ModelConfig, Shards, Speculation, shards_of
from jspec.config.heads import DraftConfig
from jspec.drafting.methods import method_of
from jspec.engine.adaptive.cost_table import CostTable, RoundShape, round_shapes
from jspec.loading.activation_dtype import check_activation_dtype
from jspec.loading.compatibility import (
    check_compatible,
    check_options,
    check_tree,
    require_shards,
    with_available_drafts,
    with_positions,
)
from jspec.loading.engine_config import engine_config
from jspec.loading.kv_cache_dtype import with_kv_cache_dtype
from jspec.loading.memory_budget import ModelMemory, lengths_up_to
from jspec.loading.options import LoadOptions, Path
from jspec.loading.pair import Pair
from jspec.registry import DraftMethod
from jspec.sampling.params import SamplingParams
from jspec.text.detokenizer import Tokenizer

# The fields of generation_config.json that jspec follows.
ADOPTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A target and a draft that are compatible and fit on the device. No weights are read yet.

    Attributes:
      asked: the call of ``jspec.load``.
      pair: the checkpoints.
      target: the target's config.
      draft: what drafts: the config of a draft model or draft head, the name of a method that has no checkpoint, or None
        for plain decoding.
      speculation: how to draft, with no more drafts than the draft has weights for.
      engine: what the engine may use.
      shards: those of the target, each on a device of its own, and those of the draft; None for a model that is whole.
      costs: for each batch size, round shape -> seconds per round; None has them measured.
      default_params: the defaults of a request.
      tokenizer: the target's; None if its checkpoint has none.
    """

    asked: LoadOptions
    pair: Pair
    target: ModelConfig
    draft: DraftConfig | str | None
    speculation: Speculation
    engine: EngineConfig
    shards: tuple[Shards | None, Shards | None]
    costs: Mapping[int, Mapping[RoundShape, float]] | None
    default_params: SamplingParams
    tokenizer: Tokenizer | None

    @property
    def draft_config(self) -> DraftConfig | None:
        """The draft's config; None if there is no draft checkpoint."""
        return None if isinstance(self.draft, str) else self.draft


def make_plan(pair: Pair, asked: LoadOptions) -> Plan:
    """The plan of a call of ``jspec.load``.

    Raises:
      ValueError: the draft was made for another target, an option has no use for it, or a file of either is damaged.
      MemoryError: as for ``ModelMemory.with_num_pages``.
    """
    default_params = default_params_of(pair.target, asked.generation_config)
    tokenizer, target = pair.target.tokenizer, pair.target.target_config
    draft, speculation = pair.draft_config, asked.speculation
    share = asked.gpu_memory_utilization
    is_model = pair.draft is None or (draft is not None and draft.language_model is not None)
    shards = shards_of(asked.tensor_parallel, asked.draft_tensor_parallel, is_model, asked.expert_parallel)
    config = engine_config(asked.engine, target, draft, trees=speculation.tree is not None)
    config = with_kv_cache_dtype(config, pair.target)
    check_activation_dtype(config.activation_dtype, target)
    if asked.engine.get("max_len") is None and not config.reproducible:
        require_shards(shards, target, draft)
        K, width = (
            (0, 1) if pair.draft is None else (speculation.most_draft_tokens, speculation.width(config.max_batch))
        )
        memory = ModelMemory(target, draft, max(config.width or 0, width), shards, K)
        longest = memory.longest_that_fits(lengths_up_to(config.max_len), config, share)
        config = dataclasses.replace(config, max_len=longest)
    target = target.for_length(config.max_len)
    drafts_by: DraftConfig | str | None = pair.draft.name if isinstance(pair.draft, DraftMethod) else None
    if isinstance(pair.draft, Checkpoint) and draft is not None:
        speculation = with_available_drafts(speculation, draft)
        check_compatible(target, draft, tokenizer, pair.draft)
        drafts_by = draft = with_positions(target, draft, config.max_len)
    require_shards(shards, target, draft)
    check_options(drafts_by, speculation)
    check_tree(target, drafts_by, speculation.tree, shards)
    K, width = (0, 1) if pair.draft is None else (speculation.most_draft_tokens, speculation.width(config.max_batch))
    config = ModelMemory(target, draft, max(config.width or 0, width), shards, K).with_num_pages(config, share)
    costs = _seconds(asked.costs, method_of(drafts_by), speculation, config.batch_buckets)
    return Plan(asked, pair, target, drafts_by, speculation, config, shards, costs, default_params, tokenizer)


def default_params_of(target: Checkpoint, generation_config: str) -> SamplingParams:
    """The defaults of the arguments of ``generate``.

    As in vLLM, the fields ``ADOPTED`` come from the checkpoint's ``generation_config.json``. Other fields of that file,
    ``do_sample`` for example, are ignored.

    Args:
      target: the target's checkpoint.
      generation_config: ``auto`` reads that file, ``jspec`` does not.

    Raises:
      ValueError: ``generation_config`` is neither, or the file holds a value that cannot be used.
    """
    known = ("auto", "jspec")
    ok = isinstance(generation_config, str) and generation_config in known
    require(ok, "generation_config", generation_config, "'auto', the checkpoint's own defaults, or 'jspec', jspec's")
    if generation_config == "jspec":
        return SamplingParams()
    fields = target.generation_config
    given = {name: fields.raw[name] for name in ADOPTED if fields.raw.get(name) is not None}
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise ValueError(f"{fields.where}: {error}; correct it, or load with generation_config='jspec'") from None


def _seconds(
    costs: CostTable | Path | None, method: str | None, speculation: Speculation, batches: Sequence[int]
) -> dict[int, dict[RoundShape, float]] | None:
    """For each batch size, round shape -> seconds per round; None if no costs were given. Costs of another drafting method
    are refused; costs of another device cause a warning."""
    if costs is None:
        return None
    chooses = speculation.auto or speculation.verify_budget == "auto"
    if method is None or not chooses:
        given = "draft=None" if chooses else f"num_draft_tokens={speculation.num_draft_tokens!r}"
        raise ValueError(
            f"costs has no place with {given}, which leaves nothing to choose; leave it out, or give a draft and "
            "num_draft_tokens='auto', tree='auto' or verify_budget='auto'"
        )
    table, device = costs if isinstance(costs, CostTable) else CostTable.read(costs), jax.devices()[0].device_kind
    if table.method != method:
        raise ValueError(
            f"costs has method={table.method!r}, but the draft is a {method!r}; measure that, or leave costs out to let the "
            "engine measure"
        )
    if table.device != device:
        warnings.warn(f"costs were measured on {table.device!r}, and this is {device!r}", stacklevel=4)
    lengths, budgets = speculation.draft_lengths, speculation.budgets
    shapes = {batch: [*round_shapes(lengths, budgets, batch), *speculation.trees(batch)] for batch in batches}
    return {batch: table.seconds(batch, shapes[batch]) for batch in batches}
