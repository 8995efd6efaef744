"""What the position of an assistant's drafts is worth: acceptance lengths of assistants of Gemma 4 that were trained with
one position and are served with another.

    python -m benchmarks.acceptance.assistant_position                 # twenty minutes on one core
    python -m benchmarks.acceptance.assistant_position --smoke         # meaningless numbers within seconds
    python -m benchmarks.acceptance.assistant_position --models DIR    # keeps the models in DIR, and takes those there

All drafts of a round have one position. transformers and jspec give them p, that of the newest committed token; vLLM gives
them p - 1, that of the newest token which the target has read. Published assistants do not say which of the two they were
trained with. So a toy target is trained, and assistants for it with either position
(``benchmarks.acceptance.toy_assistant``); jspec loads their folders and serves each at p - 1, p and p + 1, and for
comparison far off, at p - 16. It needs torch and transformers.

An acceptance length is the number of tokens that a round gives, by exact expectation under ``rejection`` with sampled
drafts, as in ``benchmarks.acceptance.drafters``, behind pieces of held-out text. Completions of one prompt differ by chance
at temperature 1. The overlap has no such noise: it is the mean of sum of min(p, q) over drafts 1 to K behind the tokens of
held-out text, computed by torch. Errors are standard errors of means over groups of prompts or batches of text, and those of
differences are of pairs on the same ones. Keys of the result are ``trained at p, served at p - 1``.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers.utils.logging import disable_progress_bar

from benchmarks.acceptance import toy_assistant
from benchmarks.acceptance.expected import Recorder, Texts
from benchmarks.report import results
from benchmarks.report.markdown import table
from convert.folders import load_draft, load_folder
from jspec.config import EngineConfig, Speculation
from jspec.drafting.assistant import Assistant
from jspec.drafting.methods import drafter_for
from jspec.loading.modules import build_draft_module
from jspec.models import build
from jspec.models.heads.assistant import AssistantHead

TRAINED, SERVED = (0, -1), (0, -1, 1, -16)  # positions, counted from that of the newest token
TEMPERATURES = (0.0, 1.0)
K = 4
PROMPT_TOKENS = 48


held_out = functools.cache(functools.partial(toy_assistant.corpus, True))  # the tokens of its files


class Moved(nnx.Module):
    """The head of an assistant, with positions that differ by ``by`` from those that its drafter gives it.

    ``by`` is an array, so that one compiled program serves all positions."""

    def __init__(self, head: AssistantHead, by: int):
        self.head, self.by = head, nnx.Variable(jnp.int32(by))

    @property
    def config(self):
        return self.head.config

    def __call__(self, embedded, hidden, positions, caches, view):
        return self.head(embedded, hidden, positions + self.by[...], caches, view)

    def logits(self, hidden):
        return self.head.logits(hidden)


def position(by: int) -> str:
    return "p" if by == 0 else f"p {'-' if by < 0 else '+'} {abs(by)}"


def key_of(trained: int, served: int) -> str:
    return f"trained at {position(trained)}, served at {position(served)}"


def train(folder: Path, plan: toy_assistant.Plan, seeds: int):
    """Have ``target`` and ``assistant<position>-<seed>`` in the folder; those that are there stay as they are."""
    torch.set_num_threads(
        1
    )  # so small products take longer with more, and much longer on a machine that has other work
    disable_progress_bar()
    started, tokens = time.perf_counter(), functools.cache(lambda: toy_assistant.corpus(False, plan.files))
    if (folder / "target").is_dir():
        target = toy_assistant.Gemma4ForCausalLM.from_pretrained(folder / "target").requires_grad_(False)
    else:
        target, loss = toy_assistant.train_target(tokens(), plan)
        target.save_pretrained(folder / "target")
        print(f"target: {loss:.2f} nats a token; {time.perf_counter() - started:.0f} s", flush=True)
    for seed in range(seeds):
        if not (absent := [by for by in TRAINED if not (folder / f"assistant{by}-{seed}").is_dir()]):
            continue
        for by, (assistant, gap) in toy_assistant.train_assistants(target, tokens(), absent, plan, seed).items():
            assistant.save_pretrained(folder / f"assistant{by}-{seed}")
            seconds = time.perf_counter() - started
            print(f"assistant at {position(by)}, seed {seed}: KL {gap:.3f} nats a draft; {seconds:.0f} s", flush=True)


def groups_of_prompts(groups: int, rows: int) -> list[list[list[int]]]:
    """Token ids of random pieces of held-out files, in groups that are decoded together."""
    tokens = held_out()
    starts = np.random.default_rng(0).integers(0, len(tokens) - PROMPT_TOKENS, size=(groups, rows))
    return tokens[starts[..., None] + np.arange(PROMPT_TOKENS)].astype(int).tolist()


class Service:
    """The target of a folder with any of its assistants, at any position.

    Args:
      folder: where ``train`` has put the models.
      rows: prompts that are decoded together.
    """

    def __init__(self, folder: Path, rows: int):
        self._folder, self._rows, self._recorder = folder, rows, None
        self._config, params = load_folder(folder / "target", "float32")
        self._target = build(self._config, params)

    def acceptance_lengths(self, name: str, served: int, groups: Sequence, max_tokens: int) -> np.ndarray:
        """Of one assistant, ``[temperatures, groups of prompts]``."""
        draft, module = build_draft_module(*load_draft(self._folder / name, "float32"), "float32", self._target)
        assert isinstance(module, AssistantHead)
        build_drafter = drafter_for(draft, self._config, Speculation(K, draft_sampling="sample"))
        head = Moved(module, served)

        def make(model, moved: Moved):
            drafter = build_drafter(model, moved.head)
            assert isinstance(drafter, Assistant)
            return dataclasses.replace(drafter, head=moved)  # pyright: ignore[reportArgumentType]

        if self._recorder is None:
            config = EngineConfig(max_batch=self._rows, max_len=128, page_size=32)
            self._recorder = Recorder(self._target, head, make, config)
        recorder = self._recorder.with_draft(head)
        texts = [[Texts(some, max_tokens, t) for some in groups] for t in TEMPERATURES]
        return np.array([[recorder.acceptance_lengths(one)[0] for one in row] for row in texts])


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Over all seeds and groups: of the groups' means over seeds, because seeds share the prompts. ``[seeds, groups]``."""
    by_group = values.mean(axis=0)
    return float(by_group.mean()), float(by_group.std(ddof=1) / len(by_group) ** 0.5)


def overlaps(folder: Path, name: str, served: int, plan: toy_assistant.Plan) -> np.ndarray:
    """Of one assistant, ``[batches of held-out text, K]``."""
    target = toy_assistant.Gemma4ForCausalLM.from_pretrained(folder / "target").eval()
    assistant = toy_assistant.Gemma4AssistantForCausalLM.from_pretrained(folder / name).eval()
    return toy_assistant.overlaps(assistant, target, held_out(), served, plan)


@dataclasses.dataclass(frozen=True)
class Pair:
    """What was measured of assistants trained at one position and served at one.

    Attributes:
      lengths: acceptance lengths, ``[seeds, temperatures, groups]``.
      overlaps: ``[seeds, batches, K]``.
    """

    lengths: np.ndarray
    overlaps: np.ndarray

    def columns(self) -> list[np.ndarray]:
        """What the table has means of, ``[seeds, groups]`` each."""
        return [*np.moveaxis(self.lengths, 1, 0), self.overlaps.mean(axis=2)]


def comparison(pairs: dict[tuple[int, int], Pair]) -> str:
    """A table of the pairs by (trained, served). Behind each figure is what it is more than that of the same assistants
    served as they were trained."""
    names = (*(f"at {t:g}" for t in TEMPERATURES), "overlap")
    columns = ("trained at", "served at", *(column for name in names for column in (name, "difference")))
    rows = []
    for (trained, served), pair in pairs.items():
        cells = []
        for here, own in zip(pair.columns(), pairs[trained, trained].columns(), strict=True):
            cells.append("{:.3f} ± {:.3f}".format(*mean_and_error(here)))
            cells.append("" if served == trained else "{:+.4f} ± {:.4f}".format(*mean_and_error(here - own)))
        rows.append((position(trained), position(served), *cells))
    return table(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="of assistants; %(default)s")
    parser.add_argument("--groups", type=int, default=16, help="of eight prompts; %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each completion; %(default)s")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where models are, or will be")
    parser.add_argument("--smoke", action="store_true", help="tiny models, hardly trained, and few prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, by default in benchmarks/results/")
    args = parser.parse_args()
    plan, rows = toy_assistant.Plan(drafts=K), 8
    if args.smoke:
        plan, rows, args.seeds, args.groups, args.max_tokens = toy_assistant.SMOKE, 2, 1, 2, 6
    settings = {"num_draft_tokens": K, "seeds": args.seeds, "prompts": args.groups * rows, "groups": args.groups}
    settings |= {"prompt_tokens": PROMPT_TOKENS, "max_tokens": args.max_tokens, "temperatures": TEMPERATURES}
    settings |= {"dtype": "float32", "plan": dataclasses.asdict(plan), "smoke": args.smoke}
    result = results.begin("assistant_position", settings)
    file, pairs = args.json or results.RESULTS / f"assistant_position-{result.day}.json", {}
    with contextlib.ExitStack() as stack:
        folder = args.models or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        train(folder, plan, args.seeds)
        groups, service = groups_of_prompts(args.groups, rows), Service(folder, rows)
        for trained, served in itertools.product(TRAINED, SERVED):
            names = [f"assistant{trained}-{seed}" for seed in range(args.seeds)]
            found = np.array([service.acceptance_lengths(one, served, groups, args.max_tokens) for one in names])
            over, key = np.array([overlaps(folder, one, served, plan) for one in names]), key_of(trained, served)
            pairs[trained, served] = Pair(found, over)
            of_seeds = found.mean(axis=2)
            result.measured[key] = float(of_seeds[:, -1].mean())
            result.details[key] = {"unit": "tokens", "more_is_better": True, "lengths": found.tolist()}
            result.details[key]["overlaps"] = over.tolist()
            shown = "; ".join(", ".join(f"{x:.3f}" for x in seed) for seed in of_seeds)
            print(f"{key}: {shown} tokens a round, by seed and temperature", flush=True)
    if not args.smoke or args.json:
        results.write(result, file)
    print(comparison(pairs))


if __name__ == "__main__":
    main()
