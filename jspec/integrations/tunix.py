"""jspec as the rollout engine of google-tunix 0.1.7, which trains with JAX.

Two things in Tunix are easily fallen over:

* Tunix compares ``rollout.model()`` with the model that it trains, and **never calls update_params if both have the same
  arrays**: the rollouts stay those of the first weights, without a word. The engine has weights of its own here, and
  ``model()`` is None, which is never the same. ``ClusterConfig(offload_to_cpu=True)`` wants to move that model, and fails.
* Where the padding token is the one that ends a text, as in every Llama of Hugging Face, ``completion_ids != pad`` takes the
  end of a completion out of the loss, too.

::

    llm = jspec.load("org/target", "org/draft", max_batch=64).warmup()
    ClusterConfig(rollout_engine=functools.partial(JspecRollout, llm=llm), offload_to_cpu=False, ...)
"""

import concurrent.futures
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]  # of Python 3.12 alone

from jspec.llm import LLM
from jspec.sampling.params import SamplingParams

NamedArrays = Iterable[tuple[str, jax.Array]]

# Names in Tunix's Llama 3, Qwen2 and Qwen3 -> those of Hugging Face, and how an array becomes ``[out, in]``.
_TURNED = lambda array: array.reshape(array.shape[0], -1).T  # noqa: E731  # [in, heads, head] and [in, out]
_RULES: tuple[tuple[str, str, Callable[[jax.Array], jax.Array]], ...] = (
    (r"embedder\.input_embedding", "model.embed_tokens.weight", lambda array: array),
    (r"final_norm\.w", "model.norm.weight", lambda array: array),
    (r"lm_head\.w", "lm_head.weight", _TURNED),
    (r"layers\.(\d+)\.attn\.([qkv])_proj\.w", r"model.layers.\1.self_attn.\2_proj.weight", _TURNED),
    (r"layers\.(\d+)\.attn\.([qkv])_bias", r"model.layers.\1.self_attn.\2_proj.bias", lambda array: array.reshape(-1)),
    (
        r"layers\.(\d+)\.attn\.o_proj\.w",
        r"model.layers.\1.self_attn.o_proj.weight",
        lambda array: array.reshape(-1, array.shape[-1]).T,  # [heads, head, out]
    ),
    (r"layers\.(\d+)\.attn\.([qk])_norm\.w", r"model.layers.\1.self_attn.\2_norm.weight", lambda array: array),
    (r"layers\.(\d+)\.mlp\.(\w+)_proj\.kernel", r"model.layers.\1.mlp.\2_proj.weight", _TURNED),
    (r"layers\.(\d+)\.(\w+)_layernorm\.w", r"model.layers.\1.\2_layernorm.weight", lambda array: array),
)


def hugging_face_names(state: Any) -> Iterator[tuple[str, jax.Array]]:
    """The weights of Tunix's Llama 3, Qwen2 or Qwen3 under the names of Hugging Face, one after another.

    Raises:
      ValueError: a name is that of another model; give ``JspecRollout`` a function of your own.
    """
    named = []  # all of them, before the first array is handed on
    for path, leaf in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        rules = ((re.fullmatch(old, name), new, turn) for old, new, turn in _RULES)
        found = next(((match.expand(new), turn) for match, new, turn in rules if match), None)
        if found is None:
            raise ValueError(
                f"{name!r} is no parameter of Tunix's Llama 3, Qwen2 or Qwen3; give named= a function for it"
            )
        named.append((*found, leaf))
    for name, turn, leaf in named:
        yield name, turn(leaf[...] if hasattr(leaf, "get_value") else jnp.asarray(leaf))


class JspecRollout(base_rollout.BaseRollout):
    """Samples for Tunix, by a model that ``jspec.load`` returned. Texts have exactly its distribution, whatever drafts.

    Args:
      rollout_actor, mesh, rollout_config: of Tunix; the engine has weights and devices of its own.
      tokenizer: Tunix's.
      llm: the model.
      named: Tunix's parameters -> pairs of a name of Hugging Face and an array, as ``LLM.update_weights`` takes them.
      draft: a function without arguments that returns new weights of the draft, under the names of Hugging Face, behind
        each update; None leaves the draft as it is.
    """

    def __init__(
        self,
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: Any = None,
        rollout_config: Any = None,
        *,
        llm: LLM,
        named: Callable[[Any], NamedArrays] = hugging_face_names,
        draft: Callable[[], dict[str, jax.Array]] | None = None,
    ):
        del rollout_actor, mesh, rollout_config
        self.llm, self._tokenizer, self._named, self._draft = llm, tokenizer, named, draft
        self._calls = 0
        # Tunix calls some of this under ``jax.transfer_guard``, of which this thread has nothing.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jspec.tunix")

    def generate(self, prompts: list[str], rollout_config: Any, **_) -> Any:
        """Complete prompts, the ends of which are taken where they are longer than ``max_prompt_length``."""
        return self._thread.submit(self._generate, prompts, rollout_config).result()

    def _generate(self, prompts: list[str], rollout: Any) -> Any:
        ids = [list(self._tokenizer.encode(str(prompt)))[-rollout.max_prompt_length :] for prompt in prompts]
        params = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p or 1.0,
            top_k=max(rollout.top_k or 0, 0),
            max_tokens=rollout.max_tokens_to_generate,
            stop_token_ids=list(rollout.eos_tokens or [self.eos_id()]),
            logprobs=0,
            logprobs_mode="processed_logprobs",
        )
        key = jax.random.key(self._calls) if rollout.seed is None else rollout.seed
        self._calls += 1
        results: Any = self.llm.generate(ids, params, key=key)
        padded = np.full((len(ids), rollout.max_prompt_length), self.pad_id(), np.int32)
        for row, own in zip(padded, ids, strict=True):
            row[len(row) - len(own) :] = own
        return base_rollout.RolloutOutput(
            text=[result.text for result in results],
            logits=None,
            tokens=[np.asarray(result.token_ids, np.int32) for result in results],
            left_padded_prompt_tokens=padded,
            logprobs=[result.token_logprobs for result in results] if rollout.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """The target's log-probabilities of completions ``[B, C]`` behind prompts ``[B, P]``, float32 ``[B, C]``. Prompts
        are padded on the left and completions on the right; padding has 0."""
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        return jnp.asarray(self._thread.submit(self._scores, prompts, completions).result())

    def _scores(self, prompts: np.ndarray, completions: np.ndarray) -> np.ndarray:
        is_prompt, is_completion = prompts != self.pad_id(), completions != self.pad_id()
        texts = [(row[kept.argmax() :].tolist()) for row, kept in zip(prompts, is_prompt, strict=True)]
        lengths = [int(kept.nonzero()[0].max(initial=-1)) + 1 for kept in is_completion]
        answers = [row[:length].tolist() for row, length in zip(completions, lengths, strict=True)]
        found, raw = np.zeros(completions.shape, np.float32), SamplingParams(logprobs_mode="raw_logprobs")
        if some := [i for i, length in enumerate(lengths) if length]:
            scores = self.llm.score([texts[i] for i in some], [answers[i] for i in some], sampling_params=raw)
            for i, score in zip(some, scores, strict=True):
                found[i, : lengths[i]] = score
        return found

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None):
        """Sample with new weights from now on.

        Raises:
          ValueError: they are those of LoRA adapters, which have to be merged first.
        """
        if any(issubclass(kind, nnx.LoRAParam) for kind in filter_types or () if isinstance(kind, type)):
            raise ValueError("update_params got LoRA adapters: merge them into the weights, or train all of these")
        self._thread.submit(self._update, params).result()

    def _update(self, params: Any):
        self.llm.update_weights(self._named(params), draft=None if self._draft is None else self._draft())

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: the engine's weights are no model of Tunix."""
