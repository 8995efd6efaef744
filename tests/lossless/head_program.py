"""Trained kinds of heads in whole steps: real drafters over a real decoder, so small that every history can be asked.

Distributions come from causal passes over all histories that a completion can have; nothing of a cache is used.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np
from causal_heads import causal_drafts
from engines import in_eight_bits
from flax import nnx
from heads import before_serving, compile_fast, random_head, serving
from tiny import ARCHITECTURES, FAMILY_KEYS, tiny_config

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.config import model_config
from jspec.config import OF_TARGET, ModelConfig, Speculation
from jspec.config.heads import (
    AssistantConfig,
    BlockConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MLPConfig,
    MTPConfig,
    PardConfig,
)
from jspec.config.heads.block_corrections import DominoConfig, LiLiCorrConfig
from jspec.config.model_fields import PLAIN_HEAD
from jspec.drafting.methods import drafter_for
from jspec.models import build_head, causal_logits, flat_params, init
from jspec.models.cache_pools import KVRounding
from jspec.models.flatten import copied
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES
from lossless import distributions
from lossless.oracle import Oracle, prompt_lookup
from lossless.rounds import node
from lossless.steps import ARGMAX_BELOW, BESIDE, K, N, S
from lossless.table_model import V

D, LLAMA = 8, "LlamaForCausalLM"
TARGET = ModelConfig(LLAMA, V, D, 12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, max_position=S)
LAYER = dataclasses.replace(TARGET, num_layers=1, windows=())
BLOCK = dataclasses.replace(LAYER, qk_norm=True)


def assistant_for(target: ModelConfig, clusters: int | None = None, best: int | None = None) -> AssistantConfig:
    """An assistant with a layer for each kind of attention that ``target`` has."""
    kinds = {target.windows[i]: i for i in range(target.num_layers) if target.layer(i).reads_cache_of is None}
    own = [dataclasses.replace(target.layer(i), intermediate_size=12, reads_cache_of=OF_TARGET) for i in kinds.values()]
    layers = dataclasses.replace(
        TARGET,
        architecture="Gemma4ForCausalLM",
        hidden_size=6,
        num_layers=len(own),
        num_heads=target.num_heads,
        windows=tuple(kinds),
        qk_norm=True,
        norm="rms_wide",
        norm_placement="around",
        layer_scalars=True,
        layers=tuple(dataclasses.replace(layer, keys_are_values=False) for layer in own),
    )
    return AssistantConfig(layers, target.hidden_size, clusters, best)


HEADS: dict[str, HeadConfig] = {
    "eagle": EagleConfig(LAYER),
    "eagle3": Eagle3Config(LAYER, 2, D, 2, aux_layers=(0, 2)),  # knows two tokens of four
    "p-eagle": Eagle3Config(LAYER, 3, D, 2, aux_layers=(1, 2), mask_token_id=2),
    "pard": PardConfig(LAYER, 0),
    "mlp": MLPConfig(V, D, 8, K),
    "medusa": MedusaConfig(V, D, K),
    "mtp": MTPConfig(LAYER),
    "dflash": BlockConfig(BLOCK, V, D, (1, 2), K + 2, 2, False, (False,)),  # a slot more than drafts
    "dspark": BlockConfig(BLOCK, 3, D, (0, 2), K, 1, True, (False,), "gated", 4, own_head=True),  # knows three tokens
    "jetspec": BlockConfig(BLOCK, V, D, (1,), K + 1, 0, False, (True,)),
    "eagle-small": EagleConfig(LAYER, draft_vocab_size=2).with_quantization("int8"),  # knows two tokens of four
    "mlp-small": MLPConfig(V, D, 8, K, quantization="fp8", draft_vocab_size=3),
    "dspark-rnn": BlockConfig(BLOCK, V, D, (1, 2), K + 1, 3, False, (False,), "rnn", 4),
    "dspark-sure": BlockConfig(BLOCK, V, D, (0, 2), K, 1, True, (False,), "vanilla", 4, "markov"),  # or not so sure
    "dflash2": BlockConfig(  # a slot has three candidates of four tokens
        BLOCK, V, D, (0, 1), K + 1, 1, False, (False,), conv_taps=2, conv_group=4, selector_rank=4, candidates=3
    ),
    "domino": BlockConfig(BLOCK, V, D, (0, 1), K, 1, True, (False,), domino=DominoConfig(4, 6, 1)),
    "lilicorr": BlockConfig(  # three candidates of four tokens
        *(BLOCK, V, D, (1, 2), K + 1, 2, False, (False,)),
        candidates=3,
        lilicorr=LiLiCorrConfig(6, num_layers=1, num_heads=2, inner_size=8, factor_size=4, scale=2.0, eps=1e-3),
    ),
    "xpress": BlockConfig(  # draft 1 reads another draft 0 than the one that is proposed
        BLOCK, V, D, (0, 1), K + 1, 1, False, (False,), refiner_rank=4, refiner_ratio=2, refine_passes=1
    ),
    "mtp-small": MTPConfig(LAYER, draft_vocab_size=3).with_quantization("int8"),
    "assistant": assistant_for(TARGET, clusters=2, best=1),  # knows two tokens of four, which depend on the text
}


def family_config(architecture: str) -> ModelConfig:
    """A target of another family, with every choice of that family, windows shorter than a text among them."""
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 12, "ffn_dim": 12, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if "kv_lora_rank" in FAMILY_KEYS.get(architecture, {}):
        heads["num_key_value_heads"] = 2  # with latents, each attention head has a key of its own
    keys = tiny_config(architecture, **sizes, **heads, bos_token_id=None, eos_token_id=None)
    return model_config(Fields(keys, architecture), architecture).for_length(S)


FOUR_HEADS = "four heads"
TARGETS = {**{name: family_config(name) for name in ARCHITECTURES}, LLAMA: TARGET}
TARGETS[FOUR_HEADS] = dataclasses.replace(TARGET, num_heads=4, num_kv_heads=2)
FP8_BLOCKS = "experts and maps of latents in FP8 blocks"
_LATENTS = TARGETS["DeepseekV3ForCausalLM"]
TARGETS[FP8_BLOCKS] = dataclasses.replace(  # with two scales for each output of the maps of latents
    _LATENTS, quantization="fp8_block", other_formats=PLAIN_HEAD, latent=dataclasses.replace(_LATENTS.latent, rank=160)
)
ROUNDED = "rounded activations"
TARGETS[ROUNDED] = dataclasses.replace(TARGET, quantization="int8")
ROUNDED_LATENTS = "latents in eight bits"
TARGETS[ROUNDED_LATENTS] = _LATENTS
FOUR_BITS, NVFP4, MXFP4 = "codes of four bits with zeros", "NVFP4", "MXFP4"
TARGETS[FOUR_BITS] = dataclasses.replace(TARGET, quantization="int4_32_float16_zeros")
TARGETS[NVFP4] = dataclasses.replace(TARGET, quantization="nvfp4")
TARGETS[MXFP4] = dataclasses.replace(TARGET, quantization="mxfp4")
OF_LLAMA = tuple(HEADS)  # the heads that fit a target of Llama's family, and below those that fit any
ANY_TARGET = tuple(name for name in HEADS if name != "assistant")
GEMMA4_ASSISTANT = "assistant of Gemma 4"
HEADS[GEMMA4_ASSISTANT] = assistant_for(TARGETS["Gemma4ForCausalLM"])


@dataclasses.dataclass(frozen=True)
class HeadProgram:
    """What is compiled once, as ``steps.Program``: a rule, a head, how it draws, and a fault put in on purpose.

    Attributes:
      architecture: the family of the target.
      fault: what is put in place of the rule.
      broken: what is put in place of the target.
      lookup: whether prompt lookup drafts beside the head.
      budget: how many tokens the target reads in a round of the whole batch, None for every draft.
    """

    verify: str
    head: str
    draft_sampling: str = "sample"
    draft_temperature: float | None = None
    architecture: str = LLAMA
    fault: Callable = lambda rule: rule
    broken: Callable = lambda target: target
    lookup: bool = False
    budget: int | None = None
    noise = RoundNoise

    @property
    def method(self) -> str:
        return self.head

    @property
    def rule(self):
        return self.fault(RULES[self.verify])

    def over_devices(self, function, gives_state: bool):
        """``(target, draft, state, *others)`` on the devices of the program, of which there is one."""
        del gives_state
        return function

    def drafter(self, target, head):
        how = (K, self.verify, self.draft_sampling, ARGMAX_BELOW, self.draft_temperature, *BESIDE)
        speculation = Speculation(*how, lookup=self.lookup)
        return drafter_for(HEADS[self.head], TARGETS[self.architecture], speculation)(target, head)

    def models(self, tables):
        """Target and head; ``tables`` are for other programs."""
        del tables
        return self.broken(target(self.architecture)), serving(HEADS[self.head], head_of(self.head))


@functools.cache
def target(architecture: str):
    if architecture == ROUNDED:
        return in_eight_bits(target(LLAMA), "int8")
    if (
        architecture == ROUNDED_LATENTS
    ):  # with a scale that cuts off many numbers: who reads others, reads another model
        rounds = copied(target("DeepseekV3ForCausalLM"))
        rounds.kv_rounding = (KVRounding((0.002,)),) * rounds.config.num_layers
        return rounds
    with_codes = architecture in (FOUR_BITS, NVFP4, MXFP4)  # which only checkpoints have, or random numbers
    return (
        init(TARGETS[architecture], nnx.Rngs(3))
        if with_codes or architecture == LLAMA
        else random_head(TARGETS[architecture])
    )


@functools.cache
def head_of(name: str):
    """The head of a name. A draft vocabulary is the first tokens in descending order, so that an index is no token."""
    config = HEADS[name]
    if not config.reduced:
        return random_head(config)
    params = flat_params(random_head(config))
    ids = np.full(V, -1, np.int32)
    ids[: config.dimensions["Vd"]] = np.arange(config.dimensions["Vd"])[::-1]
    return build_head(config, params | {"draft_ids": ids})


def histories(prompt: distributions.History, depth: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The prompt and every sequence of at most ``depth`` tokens after it, in the order of their nodes.

    Returns:
      int32 ``[nodes(depth), length]``, padded, and how many tokens each has.
    """
    rows = [prompt + after for many in range(depth + 1) for after in itertools.product(range(V), repeat=many)]
    return np.array([[*row, *[0] * (length - len(row))] for row in rows], np.int32), np.array(
        [len(row) for row in rows]
    )


@functools.cache
def target_logits(architecture: str, prompt: distributions.History) -> np.ndarray:
    """Of the token after each history, a block of drafts included: ``[nodes(N + K - 1), V]``."""
    text, length = histories(prompt, N + K - 1, len(prompt) + N + K - 1)
    logits = compile_fast(causal_logits)(target(architecture), text)
    return np.asarray(logits)[np.arange(len(text)), length - 1]


@functools.cache
def draft_logits(name: str, architecture: str, prompt: distributions.History) -> np.ndarray:
    """Of all drafts after each history, for every block of drafts: ``[nodes(N - 1), V] * (K - 1), K, V]``."""
    config, drafts = HEADS[name], np.array(list(itertools.product(range(V), repeat=K - 1)), np.int32)
    text, length = histories(prompt, N - 1, len(prompt) + N + 2 * K)
    many = len(text)
    text, length = np.repeat(text, len(drafts), axis=0), np.repeat(length, len(drafts))
    np.put_along_axis(text, length[:, None] + np.arange(K - 1), np.tile(drafts, (many, 1)), axis=1)
    by_hand = compile_fast(lambda *modules_and_text: causal_drafts(config, *modules_and_text, K).logits)
    logits = by_hand(before_serving(config, head_of(name)), target(architecture), text, length.astype(np.int32))
    return np.asarray(logits).reshape(many, *(V,) * (K - 1), K, V)


class HeadOracle(Oracle):
    """What an ask of a head's program should lead to."""

    @functools.cached_property
    def target(self) -> distributions.Model:
        logits = target_logits(self.program.architecture, self.ask.prompt)
        return lambda history: self._distribution(logits[node(self._after_prompt(history))], history, self.ask.warp)

    def drafts(self, history) -> tuple[int, distributions.Model]:
        """How many drafts a round after this history has, and their distribution."""
        logits = draft_logits(self.program.head, self.program.architecture, self.ask.prompt)[
            node(self._after_prompt(history))
        ]
        room, first = min(K, S - 1 - len(history)), isinstance(HEADS[self.program.head], PardConfig)
        beside = prompt_lookup(history, K, BESIDE) if self.program.lookup else ()
        if beside:
            return room, lambda seen: np.eye(V)[beside[len(seen) - len(history)]]

        def draft(seen):
            block = (*seen[len(history) :], *[0] * (K - 1))[: K - 1]
            return self._distribution(logits[block][len(seen) - len(history)], seen, self._draft_warp)

        return (room if first or len(history) > 1 else 0), draft

    @property
    def _draft_warp(self) -> distributions.Warp:
        how, warp = self.program, self.ask.warp
        temperature = warp.temperature if how.draft_temperature is None else how.draft_temperature
        if (
            HEADS[how.head].method == "xpress"
            or how.draft_sampling == "argmax"
            or (how.draft_sampling == "auto" and warp.temperature < ARGMAX_BELOW)
        ):
            temperature = 0.0
        return dataclasses.replace(warp, temperature=temperature)

    def _distribution(self, logits, text: distributions.History, warp: distributions.Warp) -> np.ndarray:
        logits = distributions.processed(logits, text, len(self.ask.prompt), self.ask.options)
        if len(text) < len(self.ask.prompt) + self.ask.min_tokens:
            logits[list(self.ask.stop_tokens)] = -np.inf
        return distributions.distribution(logits, warp)

    def _after_prompt(self, history) -> distributions.History:
        return tuple(history[len(self.ask.prompt) :])
