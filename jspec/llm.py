"""A loaded model: target, drafter and engine, ready to generate."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import EngineConfig, Speculation
from jspec.engine.costs import CostTable
from jspec.engine.engine import Engine
from jspec.engine.request import FINISH_REASONS, ActiveRequest, Request
from jspec.models.causal import causal_logits
from jspec.models.contract import Target
from jspec.models.split import split
from jspec.prompts import Prompt, checked_ids, text_or_ids
from jspec.results import Result, Stats
from jspec.sampling.params import SamplingParams
from jspec.text import Detokenizer, StopStrings, Tokenizer, encode


def check_lossless(speculation: Speculation):
    """Refuse settings under which the text would not have the target's distribution."""
    if speculation.synthetic_acceptance is not None:
        raise ValueError(
            f"synthetic_acceptance={speculation.synthetic_acceptance!r} accepts drafts by chance and not by the target, so "
            "the text would not have the target's distribution; it is for the programs in benchmarks/, leave it out here"
        )


class LLM:
    """A model to generate from, made by ``jspec.load``.

    Any thread may call it; callers take turns. An exception or Ctrl-C, at any point of any call, leaves it usable.

    Attributes:
      target: the Flax module of the target.
      tokenizer: the target's Hugging Face tokenizer; None if its checkpoint has none.
      method: how drafts are made: the name of an entry in ``jspec.registry``, ``eagle3`` for example; None for plain
        decoding.
      speculation: how many drafts a round makes, how they are drawn and how they are verified.
      engine: decodes token ids.
      reproducible: whether a seed means one text; see ``Result``.
      default_sampling_params: what keyword arguments of ``jspec.generate`` start from: the temperature, top_k, top_p and
        min_p of the checkpoint's ``generation_config.json``, as far as it has them. A SamplingParams object that a caller
        passes does not start from these.
    """

    def __init__(
        self,
        target: Target,
        draft_model: Any,
        make_drafter: Callable,
        method: str | None,
        tokenizer: Tokenizer | None,
        speculation: Speculation,
        config: EngineConfig,
        costs: Mapping[int, float] | None = None,
        default_sampling_params: SamplingParams | None = None,
    ):
        check_lossless(speculation)
        self.target, self.tokenizer, self.method, self.speculation = target, tokenizer, method, speculation
        self.default_sampling_params = default_sampling_params or SamplingParams()
        auto = speculation.auto and method is not None
        coupled = speculation.verify == "match" and speculation.draft_sampling == "coupled"
        invariant = coupled and config.width is not None  # then the text is the same for every K
        self.reproducible = not auto or invariant
        self.engine = Engine(
            target,
            draft_model,
            make_drafter,
            speculation.verify,
            config,
            draft_lengths=speculation.draft_lengths if auto else None,
            costs=costs if auto else None,
        )
        self._warned_of_limit = False
        self._leaves, merge = split(target)

        def forward(leaves, tokens):
            return causal_logits(merge(leaves), tokens)[0].astype(jnp.float32)

        self._forward = jax.jit(forward)

    def logits(self, token_ids: Sequence[int]) -> jax.Array:
        """The target's logits after each of n tokens, float32 ``[n, V]``, from one causal forward pass without a cache."""
        tokens = checked_ids(token_ids, self.target.config.vocab_size, "token_ids")
        if not tokens:
            raise ValueError("token_ids is empty: expected at least one token")
        longest = self.target.config.max_position
        if len(tokens) > longest:
            raise ValueError(f"token_ids has {len(tokens)} tokens: expected at most {longest}, the target's positions")
        padded = np.zeros((1, 1 << (len(tokens) - 1).bit_length()), np.int32)  # few shapes, few compilations
        padded[0, : len(tokens)] = tokens
        return self._forward(self._leaves, padded)[: len(tokens)]

    def warmup(self) -> "LLM":
        """Compile every program now, so that no request waits for it; returns this object."""
        self.engine.warmup()
        return self

    @property
    def costs(self) -> CostTable | None:
        """The costs by which ``num_draft_tokens="auto"`` chooses K: those given to ``load``, or those that ``warmup``
        measured. None before they are measured, and where there is nothing to choose."""
        controller = self.engine.controller
        if controller is None or self.method is None:
            return None
        return CostTable(jax.devices()[0].device_kind, self.method, {self.engine.config.max_batch: controller.seconds})

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], keys: Sequence[np.ndarray]
    ) -> Generator[tuple[int, Result], None, None]:
        """Decode prompts, and yield (index of the prompt, result) as each ends. Users call ``jspec.generate``, which checks
        its arguments first.

        Args:
          prompts: each is text or token ids.
          params: one SamplingParams for each prompt.
          keys: one Threefry key for each prompt, uint32 ``[2]``.
        """
        requests = [
            self._request(i, prompt, p, key)
            for i, (prompt, p, key) in enumerate(zip(prompts, params, keys, strict=True))
        ]
        with contextlib.closing(self.engine.run(requests)) as ended:  # also while a traceback keeps this frame alive
            for active in ended:
                yield active.request.index, self._result(active)

    def _request(self, index: int, prompt: Prompt, params: SamplingParams, key_data: np.ndarray) -> Request:
        tokens = self._tokens(index, prompt)
        stop_tokens = params.stop_tokens(self.target.config.eos_token_ids)
        checked_ids(params.stop_token_ids, self.target.config.vocab_size, "stop_token_ids")
        find_stop = None
        if params.stop:
            strings = self._stop_strings(tokens, params)
            find_stop = lambda new, seen: (stop := strings.find(new)) and stop.tokens  # noqa: E731
        return Request(index, tokens, params, key_data, stop_tokens, find_stop)

    def _tokens(self, index: int, prompt: Prompt) -> list[int]:
        prompt = text_or_ids(index, prompt)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompt {index} is text, but the checkpoint has no tokenizer; pass token ids")
            prompt = encode(self.tokenizer, prompt, f"prompt {index}")
        return checked_ids(prompt, self.target.config.vocab_size, f"prompt {index}", "a string or ")

    def _detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        assert self.tokenizer is not None
        return Detokenizer(functools.partial(self.tokenizer.decode, skip_special_tokens=True), prompt)

    def _stop_strings(self, prompt: Sequence[int], params: SamplingParams) -> StopStrings:
        if self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} is text, but the checkpoint has no tokenizer; use stop_token_ids")
        return StopStrings(self._detokenizer(prompt), params.stop, params.min_tokens)

    def _text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """The text of new tokens after those of a prompt."""
        detokenizer = self._detokenizer(prompt)
        detokenizer.add(new)
        return detokenizer.text + detokenizer.held

    def _result(self, active: ActiveRequest) -> Result:
        request, tokens = active.request, active.tokens
        finish_reason = FINISH_REASONS[active.outcome]
        ended_by_token = finish_reason == "stop" and tokens and tokens[-1] in request.stop_tokens
        text = stop_reason = None
        if self.tokenizer is not None:
            text = self._text(request.prompt, tokens[:-1] if ended_by_token else tokens)
        if ended_by_token and tokens[-1] in request.params.stop_token_ids:
            stop_reason = tokens[-1]
        elif finish_reason == "stop" and not ended_by_token:
            stop = self._stop_strings(request.prompt, request.params).find(tokens)
            assert stop is not None
            text, stop_reason = stop.text, stop.string
        elif finish_reason == "error":
            stop_reason = f"the target's logits at position {len(request.prompt) + len(tokens)} are not finite"
        limit = self.engine.longest_text
        stats = Stats.of(self.engine.num_draft_tokens, active.drafted, active.accepted, len(request.prompt), limit)
        if stats.num_steps_past_draft_limit and not self._warned_of_limit:
            self._warned_of_limit = True
            warnings.warn(
                f"the {self.method} drafter has no positions for texts of more than {limit} tokens: "
                f"{stats.num_steps_past_draft_limit} of {stats.num_steps} rounds of prompt {request.index} drafted nothing "
                "(stats.num_steps_past_draft_limit)",
                stacklevel=3,
            )
        return Result(
            text=text,
            token_ids=tokens,
            prompt_token_ids=list(request.prompt),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            stats=stats,
            accepted=active.from_draft,
            reproducible=self.reproducible,
        )
