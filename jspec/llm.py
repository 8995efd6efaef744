"""A loaded model: target, drafter and engine, ready to generate."""

import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jspec._interrupts import ignoring_interrupts
from jspec._validation import require
from jspec.config import EngineConfig, Speculation
from jspec.config.engine import FP8_CACHES
from jspec.engine.adaptive.cost_table import CostTable, RoundShape
from jspec.engine.beside_trainer import BesideTrainer
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.forks import require_not_forked
from jspec.engine.multihost.leader import Follower
from jspec.engine.runner.follower import FollowerRunner
from jspec.engine.runner.model_runner import keeps_states
from jspec.engine.scores import scores
from jspec.models.one_order import unpinned
from jspec.models.protocols import Target
from jspec.outputs import Delta, Result
from jspec.sampling.params import SamplingParams
from jspec.sampling.request_keys import copied_keys, request_keys
from jspec.sampling.requested import params_of_each, requested
from jspec.text.chat_template import conversation_prompts, prompt_tokens, split_options
from jspec.text.detokenizer import Tokenizer
from jspec.text.prompts import Prompt, as_list, checked_ids
from jspec.updates.replaceable import ReplaceableWeights
from jspec.updates.update import ModelWeights, Origin


class LLM(BesideTrainer, ReplaceableWeights):
    """A model to generate from, made by ``jspec.load``.

    Any thread may call it, and the requests of all of them are decoded together. An exception or Ctrl-C, at any point of
    any call, leaves it usable. ``with jspec.load(...) as llm:`` closes it at the end.

    Attributes:
      target: the Flax module of the target.
      tokenizer: the target's Hugging Face tokenizer; None if its checkpoint has none.
      method: how drafts are made, as an entry of ``jspec.registry`` is named: ``eagle3``; None for plain decoding.
      speculation: how many drafts a round makes, how they are drawn and how they are verified.
      engine: serves requests as they come: ``engine.add``, ``engine.step``, ``engine.abort``, ``engine.metrics``.
      reproducible: whether a seed means one text; see ``Result``.

    Example::

        llm = jspec.load("path/to/target", draft="path/to/draft").warmup()
        print(llm.method, llm.chat([{"role": "user", "content": "Hello"}], max_tokens=32).text)
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
        costs: Mapping[int, Mapping[RoundShape, float]] | None = None,
        default_sampling_params: SamplingParams | None = None,
        origin: Origin | None = None,
    ):
        speculation.require_lossless()
        self.target, self.tokenizer, self.method, self.speculation = target, tokenizer, method, speculation
        if costs is None and speculation.tree is None:  # costs are those of programs that are pinned
            decides = not speculation.same_text_for_every_K(config.width, pins_shapes=False)  # whether drafts do
            config = unpinned(config, target, draft_model if decides else None)
        auto = speculation.auto and method is not None
        budgeted = speculation.verify_budget is not None and method is not None
        drafts_decide = not speculation.same_text_for_every_K(config.width, config.pins_shapes)
        varies = (auto or budgeted) and drafts_decide
        self.reproducible = config.reproducible and not varies
        decoding = Decoding.of(make_drafter, speculation, drafts=method is not None)
        self.engine = Engine(
            target,
            draft_model,
            decoding,
            config,
            costs=costs if auto or budgeted else None,
            tokenizer=tokenizer,
            method=method,
            reproducible=self.reproducible,
            drafts_decide=drafts_decide,
            default_params=default_sampling_params,
        )
        if speculation.tree == "auto" and not self.engine.runner.batch.builder.trees:
            warnings.warn(
                f"tree='auto': every program has {config.max_batch} rows, too many for trees to pay, so that all drafts are "
                "chains; load with reproducible=False, which has programs of fewer rows as well, or with max_batch=16",
                stacklevel=3,
            )
        self._weights = ModelWeights(self.engine, target, draft_model, origin)
        self._forward = self.engine.runner.batch.builder.forward()

    def logits(self, token_ids: Sequence[int]) -> jax.Array:
        """The target's logits after each of n tokens, float32 ``[n, V]``, from one causal forward pass without a cache."""
        require_not_forked()
        if self.engine.runner.batch.group is not None:
            raise RuntimeError("logits() is not available where the target's devices belong to several processes")
        tokens = checked_ids(token_ids, self.target.config.vocab_size, "token_ids")
        if not tokens:
            raise ValueError("token_ids is empty: expected at least one token")
        longest = self.target.config.max_position
        if len(tokens) > longest:
            raise ValueError(f"token_ids has {len(tokens)} tokens: expected at most {longest}, the target's positions")
        padded = np.zeros((1, 1 << (len(tokens) - 1).bit_length()), np.int32)  # few shapes, few compilations
        padded[0, : len(tokens)] = tokens
        with self._weights.standing() as leaves:
            self.engine.handle.require_usable()  # behind the line above: another thread may free them
            return self._forward(leaves, padded)[: len(tokens)]

    def follow(self, when_serving: Callable[[], None] = lambda: None):
        """In every process but process 0: do what process 0 says, until it ends.

        For a target whose GPUs belong to several processes, all of which have loaded it. Ctrl-C is ignored meanwhile: a
        terminal sends it to process 0 as well, which decides what becomes of it.

        Args:
          when_serving: is called when process 0, a server, has compiled and takes requests.

        Raises:
          ProcessLost: process 0 ended without a word.
          RuntimeError: this process has nobody to follow.
        """
        if not isinstance(self.engine.runner.batch.group, Follower):
            raise RuntimeError(f"process {jax.process_index()} of {jax.process_count()} has nobody to follow")
        with ignoring_interrupts():
            FollowerRunner(self.engine.runner.batch, when_serving).run()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        key: jax.Array | None = None,
        **options,
    ) -> Result | list[Result]:
        """Complete prompts. The text has exactly the target's distribution, whatever drafts for it.

        Example::

            results = llm.generate(["def main(", "class Queue:"], temperature=0.8, seed=7, max_tokens=64)
            print(results[0].text, results[0].stats.mean_acceptance_length)

        Args:
          prompts: one prompt, or a list or other iterable of prompts. A prompt is text, token ids, or vLLM's
            ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
          params: one SamplingParams for all prompts, or one for each. It may be given as ``sampling_params``, as in vLLM.
          key: a JAX key for all prompts, of which prompt i gets ``fold_in(key, i)``, or an array of one key for each prompt.
            It takes the place of ``SamplingParams.seed``, with which a prompt has the same text at every place in the
            list. With neither, a fresh key is drawn.
          **options: fields of ``SamplingParams`` by name, instead of ``params``; fields that are not given come from
            ``default_sampling_params``.

        Returns:
          one result for one prompt; for several, a list of results in the order of the prompts. A prompt whose params have
          n > 1 gets a list of n results in place of one.

        Raises:
          ValueError: a prompt is empty, too long, or neither text nor ids, or a value is out of range. Nothing has run then.
          TypeError: an option is unknown or given twice. The message says what may have been meant.
        """
        asked = requested("generate()", params, options, self.default_sampling_params)
        every_prompt, single = as_list(prompts)
        every_params = params_of_each(asked, len(every_prompt))
        keys = request_keys(every_params, key)

        results: list = [[None] * of_prompt.n for of_prompt in every_params]
        total = sum(map(len, results))
        bar = tqdm(total=total, unit="prompt", disable=not sys.stderr.isatty(), leave=False)
        finished = self.completions(every_prompt, every_params, keys)
        with bar:
            try:
                for index, number, result in finished:
                    results[index][number] = result
                    bar.update()
            finally:
                finished.close()  # a traceback that outlives an interrupt would keep the requests alive
        results = [
            copies if of_prompt.n > 1 else copies[0] for of_prompt, copies in zip(every_params, results, strict=True)
        ]
        return results[0] if single else results

    def score(
        self,
        prompts: Prompt | Iterable[Prompt],
        completions: str | Sequence[int] | Iterable[str | Sequence[int]],
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options,
    ) -> list[np.ndarray]:
        """The log-probabilities of given completions. Where ``reproducible=True`` pins no shapes, they are the bits that
        sampling gives the same tokens behind the same prompt with the same settings; elsewhere the last bits may differ.

        They are of the distribution that ``logprobs_mode`` names, as those of a request are: ``raw_logprobs``, the target's
        own, whatever temperature and other settings say, or ``processed_logprobs``, the one that tokens are drawn from.

        Example::

            settings = {"temperature": 0.7, "top_k": 20, "logprobs_mode": "processed_logprobs"}
            result = llm.generate("def main(", seed=7, logprobs=0, **settings)
            (found,) = llm.score("def main(", result.token_ids, **settings)
            print(found.sum(), (found == result.token_logprobs).all())

        Args:
          prompts: as for ``generate``.
          completions: one for each prompt, text or token ids. Text gets no special tokens, and stop tokens end nothing.
          sampling_params: one SamplingParams for all pairs, or one for each. Only ``logprobs_mode`` and
            ``truncate_prompt_tokens`` matter, and in ``processed_logprobs`` what changes the distribution.
          **options: fields of ``SamplingParams`` by name, instead of ``sampling_params``; fields that are not given come
            from ``default_sampling_params``.

        Returns:
          for each completion, float32 ``[n]``: the natural logarithm of the probability of each of its n tokens.

        Raises:
          ValueError: there are not as many completions as prompts, or a prompt, a completion or a value is wrong or too
            long. Nothing has run then, unless a token is one that the settings take out.
          TypeError: an option is unknown, or given beside ``sampling_params``. The message says what may have been meant.
        """
        params = requested("score()", sampling_params, options, self.default_sampling_params)
        every_prompt, _ = as_list(prompts)
        every_completion, _ = as_list(completions, "completions")
        if len(every_completion) != len(every_prompt):
            raise ValueError(
                f"completions has {len(every_completion)} entries: expected one for each prompt, {len(every_prompt)}"
            )
        every_params = params_of_each(params, len(every_prompt))
        return scores(self.engine, every_prompt, every_completion, every_params, keeps_states(self.target))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options) -> Generator[Delta, None, None]:
        """Complete one prompt, and yield what is new after each call to the device.

        Closing the generator cancels the request.

        Example::

            for delta in llm.stream("def main(", max_tokens=64):
                print(delta.text, end="", flush=True)

        Args:
          prompt, params, **options: as for ``Engine.request``: ``key``, ``priority``, ``salt``, ``tenant``, and fields of
            ``SamplingParams`` by name.

        Yields:
          deltas; the last one has the result. An error of the device is its ``finish_reason``.

        Raises:
          ValueError, TypeError: as ``Engine.request`` does. Nothing has run then.
        """
        return self.engine.stream(self.engine.request(prompt, params, **options))

    def __repr__(self) -> str:
        """Target, drafter, K, rule, dtype, devices and pages, for people."""
        config, model = self.engine.config, self.target.config
        shards = getattr(self.target, "shards", None)
        device = jax.devices()[0].device_kind
        drafts = f"draft={self.method!r}"
        if self.method is not None:
            drafts += f", num_draft_tokens={self.speculation.num_draft_tokens!r}, verify={self.speculation.verify!r}"
            drafts += "" if self.speculation.tree is None else f", tree={self.speculation.tree!r}"
        rounded = f", kv_cache_dtype={config.kv_cache_dtype!r}" if config.kv_cache_dtype in FP8_CACHES else ""
        rounded += f", activation_dtype={config.activation_dtype!r}" if config.activation_dtype != "auto" else ""
        return (
            f"LLM({model.architecture}, {model.num_layers} layers, {drafts}, dtype={config.dtype!r}{rounded}, "
            f"devices={1 if shards is None else shards.count} x {device!r}, max_batch={config.max_batch}, "
            f"max_len={config.max_len}, pages={config.pool_pages - 1} of {config.page_size} tokens)"
        )

    def warmup(self) -> "LLM":
        """Compile every program and run it once now, so that no request waits for it; returns this object."""
        self.engine.warmup()
        return self

    def chat_prompt(
        self, messages: Sequence[Any], *, truncate_prompt_tokens: int | None = None, **options
    ) -> list[int]:
        """The tokens that the checkpoint's chat template makes of a conversation: a prompt for ``jspec.generate``,
        ``jspec.stream``, ``llm.engine.add`` and ``AsyncEngine.generate``.

        Args:
          messages: OpenAI's, the oldest first: dictionaries with ``role`` and ``content``, which is text or a list of
            ``{"type": "text", "text": ...}``. An assistant's may have ``tool_calls``, and a tool's ``tool_call_id`` and
            ``name``.
          tools: what the model may call: OpenAI's dictionaries, or Python functions with type hints and a docstring.
          add_generation_prompt: whether to end with what begins an answer of the assistant; True unless it is given.
          continue_final_message: let the model go on with the last message, which the prompt then does not close. It
            needs ``add_generation_prompt=False``.
          chat_template: another template than the checkpoint's: its text, the name of one of several in the
            checkpoint, or the path of a file, as a ``pathlib.Path``.
          documents: texts to answer from, ``{"title": ..., "text": ...}``, for templates that know them.
          truncate_prompt_tokens: return at least so many tokens at the end of a conversation that has more, which a
            request with the same ``SamplingParams.truncate_prompt_tokens`` cuts; None refuses one that is several
            times longer than the context.
          **options: those above by name; all others are variables of the template, ``enable_thinking=False`` for example. As
            in transformers, variables that the template does not know have no effect.

        Raises:
          ValueError: there is no template, a message has no role or no text, the template refuses the messages or fails,
            or the text is far longer than the context. The message has the field, the value and what would be right.
        """
        of_chat, variables = split_options(options)
        return prompt_tokens(
            self.tokenizer,
            self.engine.config.max_len,
            messages,
            truncate_prompt_tokens=truncate_prompt_tokens,
            template_kwargs=variables,
            **of_chat,
        )

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        key: jax.Array | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options,
    ) -> Result | list[Result]:
        """Answer conversations. It is ``generate`` of what ``chat_prompt`` makes of each.

        To have an answer as it grows: ``llm.stream(llm.chat_prompt(messages))``.

        Args:
          messages: one conversation, or a list of conversations.
          params: one SamplingParams for all conversations, or one for each.
          key: a JAX key, as for ``jspec.generate``.
          chat_template_kwargs: variables of the template; ``chat_prompt`` takes them by name.
          **options: ``tools``, ``add_generation_prompt``, ``continue_final_message``, ``chat_template`` and ``documents``,
            as for ``chat_prompt``; and fields of ``SamplingParams`` by name, as for ``jspec.generate``. As there,
            ``max_tokens`` is 16 unless it is given.

        Returns:
          one result for one conversation; for several, a list of results in their order. The text of a result is the
          content of the assistant's next message.

        Raises:
          ValueError: as for ``chat_prompt`` and ``jspec.generate``. Nothing has run then.
          TypeError: an option is unknown or given twice. The message says what may have been meant.
        """
        of_chat, options = split_options(options)
        prompts, single = conversation_prompts(
            self.tokenizer, self.engine.config.max_len, messages, chat_template_kwargs, **of_chat
        )
        return self.generate(prompts[0] if single else prompts, params, key=key, **options)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What keyword arguments of a request start from: the temperature, top_k, top_p and min_p of the checkpoint's
        ``generation_config.json``, as far as it has them. It may be changed. A SamplingParams object that a caller passes
        does not start from these."""
        return self.engine.frontend.default_params

    @default_sampling_params.setter
    def default_sampling_params(self, params: SamplingParams):
        require(isinstance(params, SamplingParams), "default_sampling_params", params, "SamplingParams")
        self.engine.frontend.default_params = params

    @property
    def costs(self) -> CostTable | None:
        """The costs by which ``num_draft_tokens``, ``tree`` and ``verify_budget`` choose where they are ``auto``: those that
        ``load`` was given, or that ``warmup`` measured. None before that, and where there is nothing to choose."""
        controller = self.engine.loop.controller
        if controller is None or self.method is None:
            return None
        return CostTable(jax.devices()[0].device_kind, self.method, controller.seconds)

    def completions(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], keys: Sequence[np.ndarray]
    ) -> Generator[tuple[int, int, Result], None, None]:
        """Decode prompts, and yield (index of the prompt, number of the completion, result) as each completion ends.

        ``generate`` waits for all of them, and checks its arguments first.

        Args:
          prompts: each is text or token ids.
          params: one SamplingParams for each prompt, which asks for n completions of it.
          keys: one Threefry key for each prompt, uint32 ``[2]``.
        """
        places, requests = [], []
        for i, (prompt, several, key) in enumerate(zip(prompts, params, keys, strict=True)):
            for number, (one, own_key) in enumerate(zip(several.copies(), copied_keys(several, key), strict=True)):
                places.append((i, number))
                requests.append(self.engine.frontend.request(i, prompt, one, key_data=own_key))
        place_of = dict(zip(map(id, requests), places, strict=True))
        ended = self.engine.run(requests)
        try:
            for active in ended:
                yield *place_of[id(active.request)], self.engine.frontend.result(active)
        finally:
            ended.close()  # also while a traceback keeps this frame alive
