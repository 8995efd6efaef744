"""A tiny Gemma 4 target and assistants for it, trained with torch on the standard library's sources within minutes.

The classes are those of transformers, the tokenizer is that of the shipped family. An assistant learns the target's whole
distribution behind each token of a text, over ``K`` chained drafts as transformers runs them: draft j reads the token before
it and the hidden state of the pass before, all of them see the same keys, and all have one position. Tokens of drafts are
those of the text (transformers feeds the likeliest draft, which for an accepted draft is the same token). Which position the
drafts have is a parameter here."""

import dataclasses
import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from jspec.commands.demo import FAMILY
from recipes.corpus import is_held_out, read_sources, tokenise
from recipes.tokenizer import END_OF_TEXT_ID

WINDOW = 32
KINDS = ["sliding_attention"] * 3 + ["full_attention"]  # of layers, in target and assistant as in published assistants


@dataclasses.dataclass(frozen=True)
class Plan:
    """How large the models are and how long they are trained.

    Attributes:
      hidden_size: of the target; the assistant has half of it.
      target_steps, assistant_steps: of AdamW.
      target_rows, assistant_rows: pieces of text in a batch.
      length: of a piece, in tokens.
      files: how many files are read, in an order that the seed decides; None for all.
      drafts: K, the passes that an assistant is trained over.
    """

    hidden_size: int = 128
    target_steps: int = 800
    assistant_steps: int = 300
    target_rows: int = 16
    assistant_rows: int = 8
    length: int = 128
    files: int | None = None
    drafts: int = 4


SMOKE = Plan(hidden_size=16, target_steps=2, assistant_steps=2, target_rows=2, assistant_rows=2, length=48, files=8)


def corpus(held_out: bool, files: int | None = None, seed: int = 0) -> np.ndarray:
    """Tokens of standard-library files, of those held out or of the others, uint16 ``[N]``."""
    sources = [s for s in read_sources(Path(sysconfig.get_paths()["stdlib"])) if is_held_out(s.path) == held_out]
    order = np.random.default_rng(seed).permutation(len(sources))[:files]
    return tokenise(Tokenizer.from_file(str(FAMILY / "target" / "tokenizer.json")), [sources[i] for i in order])


def batches(tokens: np.ndarray, rows: int, length: int, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """``steps`` random choices of pieces of text, int64 ``[rows, length]``."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(tokens) - length, size=(rows, 1))
        yield torch.from_numpy(tokens[starts + np.arange(length)].astype(np.int64))


def text_config(hidden_size: int, vocab_size: int, **more) -> Gemma4TextConfig:
    """Of four layers with both kinds of attention; heads of both kinds have sizes of their own, as in published models."""
    of_full_layers = {"global_head_dim": 64}
    return Gemma4TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=len(KINDS),
        layer_types=KINDS,
        sliding_window=WINDOW,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=512,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
        **of_full_layers,
        **more,
    )


def with_even_scores(model):
    """The model with norms of queries and keys that give scores of variance 1: their attention has no scale of its own."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(len(weight) ** -0.25)
    return model


def optimizer_of(parameters, rate: float, steps: int):
    """AdamW, and a schedule that warms up for a twentieth of the steps and falls to a twentieth of the rate."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, steps // 20)

    def share(step: int) -> float:
        return min((step + 1) / warm, 0.525 + 0.475 * math.cos(math.pi * step / steps))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def train_target(tokens: np.ndarray, plan: Plan, seed: int = 0) -> tuple[Gemma4ForCausalLM, float]:
    """The target, and its mean loss over the last twentieth of the steps, in nats a token."""
    torch.manual_seed(seed)
    vocab_size = Tokenizer.from_file(str(FAMILY / "target" / "tokenizer.json")).get_vocab_size()
    model = with_even_scores(Gemma4ForCausalLM(text_config(plan.hidden_size, vocab_size)))
    optimizer, schedule = optimizer_of(model.parameters(), 4e-3, plan.target_steps)
    losses = []
    for batch in batches(tokens, plan.target_rows, plan.length, plan.target_steps, seed):
        logits = model(input_ids=batch, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        _take_step(loss, model, optimizer, schedule)
        losses.append(loss.item())
    return model.eval().requires_grad_(False), _last(losses)


def new_assistant(target: Gemma4ForCausalLM, seed: int) -> Gemma4AssistantForCausalLM:
    """An untrained assistant; one seed gives one."""
    torch.manual_seed(seed)
    c = target.config
    text = text_config(c.hidden_size // 2, c.vocab_size, num_kv_shared_layers=len(KINDS))
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=c.hidden_size, use_ordered_embeddings=False)
    return with_even_scores(Gemma4AssistantForCausalLM(config))


@dataclasses.dataclass(frozen=True)
class Read:
    """What an assistant reads of a target.

    Attributes:
      tokens: int64 ``[B, T]``.
      hidden: after the final norm, ``[B, T, D]``.
      shared: kind of layer -> keys and values ``[B, heads, T, size]``.
      logits: ``[B, T, V]``.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    shared: dict[str, tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor


@torch.no_grad()
def read(target: Gemma4ForCausalLM, tokens: torch.Tensor) -> Read:
    """One pass of the target over pieces of text."""
    out = target(input_ids=tokens, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    return Read(tokens, out.hidden_states[-1], dict(out.shared_kv_states.items()), out.logits)


def drafts(assistant, target, seen: Read, by: int, K: int) -> Iterator[torch.Tensor]:
    """The logits of drafts 1 to K behind every token but the first, ``[B, T - 1, V]`` each.

    Those at index j follow the text up to token j + 1, the newest one, of which the target has read all before it: keys
    0 .. j, of which layers with a window see the newest ``WINDOW`` + 1. Their position is j + 1 + ``by``.
    """
    n = seen.tokens.shape[1] - 1
    key = torch.arange(n)
    back = key[:, None] - key[None]
    full = (back >= 0)[None, None]
    masks = {"full_attention": full, "sliding_attention": full & (back <= WINDOW)}
    shared = {kind: (k[:, :, :n], v[:, :, :n]) for kind, (k, v) in seen.shared.items()}
    hidden = seen.hidden[:, :n]
    for i in range(K):
        fed = target.get_input_embeddings()(seen.tokens.roll(-1 - i, dims=1)[:, :n])
        last = assistant.model(
            inputs_embeds=assistant.pre_projection(torch.cat([fed, hidden], dim=-1)),
            attention_mask=masks,
            position_ids=(key + 1 + by)[None],
            shared_kv_states=shared,
            use_cache=False,
            output_hidden_states=True,  # or transformers would drop all places but the last
        ).last_hidden_state
        hidden = assistant.post_projection(last)
        yield assistant.lm_head(last)


def train_assistants(
    target: Gemma4ForCausalLM, tokens: np.ndarray, positions: Sequence[int], plan: Plan, seed: int
) -> dict[int, tuple[Gemma4AssistantForCausalLM, float]]:
    """An assistant for each of ``positions``, which count from the newest token's: same first weights, same batches.

    Beside each is its mean divergence from the target over the last twentieth of the steps, in nats a draft.
    """
    trained = {by: new_assistant(target, seed) for by in positions}
    steps = {by: optimizer_of(one.parameters(), 4e-3, plan.assistant_steps) for by, one in trained.items()}
    gaps = {by: [] for by in positions}
    for batch in batches(tokens, plan.assistant_rows, plan.length, plan.assistant_steps, 1000 + seed):
        seen = read(target, batch)
        log_p = seen.logits.log_softmax(dim=-1)
        p = log_p.exp()
        for by, assistant in trained.items():
            losses = []
            for i, logits in enumerate(drafts(assistant, target, seen, by, plan.drafts)):
                known = batch.shape[1] - 1 - i  # behind the others, tokens of the text end
                log_q = logits[:, :known].log_softmax(dim=-1)
                losses.append((p[:, 1 + i :] * (log_p[:, 1 + i :] - log_q)).sum(dim=-1).mean())
            loss = torch.stack(losses).mean()
            _take_step(loss, assistant, *steps[by])
            gaps[by].append(loss.item())
    return {by: (one.eval(), _last(gaps[by])) for by, one in trained.items()}


@torch.no_grad()
def overlaps(assistant, target, tokens: np.ndarray, by: int, plan: Plan, count: int = 12) -> np.ndarray:
    """Mean sum of min(p, q) of drafts 1 to K behind tokens of a text, ``[count, K]``, over ``count`` batches of it.

    That is the share of sampled drafts that the target accepts, if all drafts before them are the text's. Batches are the
    same for all assistants and positions. Places with fewer than 16 tokens before them are left out.
    """
    found = []
    for batch in batches(tokens, plan.assistant_rows, plan.length, count, seed=7):
        seen = read(target, batch)
        p, last = seen.logits.softmax(dim=-1), batch.shape[1] - 1
        passes = enumerate(drafts(assistant, target, seen, by, plan.drafts))
        both = [torch.minimum(q[:, 16 : last - i].softmax(dim=-1), p[:, 17 + i :]) for i, q in passes]
        found.append([one.sum(dim=-1).mean().item() for one in both])
    return np.array(found)


def _last(losses: list[float]) -> float:
    return float(np.mean(losses[-max(1, len(losses) // 20) :]))


def _take_step(loss, model, optimizer, schedule):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
