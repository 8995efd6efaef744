"""How far ways to compute the shipped target move its distribution, and the acceptance of its drafters, on any device.

A *kind* is a way to compute it. KL(reference || kind) is in nats for each token of texts that the target has written, beside
the share of tokens of which both have the same likeliest next one. Acceptance lengths are those of the same prompts with
each kind, with at most four drafts a round."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

import jspec
from benchmarks.acceptance.drafters import prompts
from benchmarks.report import results
from convert.verify import compare
from jspec.outputs import total_stats

TEMPERATURES = (0.0, 1.0)
PROMPTS, MAX_TOKENS, TEXTS, TEXT_TOKENS = 48, 64, 16, 160


@dataclasses.dataclass(frozen=True)
class Report:
    """Prints figures as they come, and writes them with all before them to ``file``, if there is one."""

    result: results.Result
    file: pathlib.Path | None

    def add(self, key: str, measured: float, unit: str, floor: float | None = None, **details):
        self.result.measured[key], self.result.details[key] = measured, {"unit": unit} | details
        beside = ""
        if floor is not None:
            self.result.floors[key] = floor
            beside = f", floor {floor:,.3f}, {measured / floor:.2f} of it"
        print(f"{key}: {measured:,.4g} {unit}{beside} {details or ''}", flush=True)
        if self.file is not None:
            results.write(self.result, self.file)


def measure_divergence(
    report: Report,
    load: Callable[[str], jspec.LLM],
    writer: str,
    pairs: Mapping[str, tuple[str, str]],
    smoke: bool,
):
    """Report how far kinds are from others.

    Args:
      report: gets the mean KL under each key of ``pairs``.
      load: the target of a kind.
      writer: the kind that writes the texts.
      pairs: key -> (reference, kind).
      smoke: whether there are two short texts.
    """
    count, tokens = (2, 8) if smoke else (TEXTS, TEXT_TOKENS)
    batch, models = prompts(2 if smoke else PROMPTS)[:count], {writer: load(writer)}
    written = models[writer].generate(batch, jspec.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0))
    assert isinstance(written, list)
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(batch, written, strict=True)]
    logits: dict[str, list[np.ndarray]] = {}
    for kind in dict.fromkeys(kind for pair in pairs.values() for kind in pair):
        llm = models.pop(kind, None) or load(kind)
        logits[kind] = [np.asarray(llm.logits(text)) for text in texts]
    for key, (reference, kind) in pairs.items():
        one = compare(logits[reference], logits[kind])
        report.add(key, one.mean_kl, "nats", **dataclasses.asdict(one))


def measure_acceptance(
    report: Report,
    load: Callable[..., jspec.LLM],
    kinds: Sequence[str],
    drafters: Sequence[str],
    smoke: bool,
    prefix: str = "",
):
    """Report tokens a round under ``<prefix>acceptance, <drafter>, T = <temperature>, <kind>``.

    Args:
      report: gets the figures.
      load: ``(kind, drafter, num_draft_tokens=)`` -> the target of a kind with a drafter of the family.
      kinds, drafters: which.
      smoke: whether texts are few and short.
      prefix: of the keys.
    """
    batch = prompts(2 if smoke else PROMPTS)
    for draft in drafters:
        for kind in kinds:
            llm = load(kind, draft, num_draft_tokens=4)
            for temperature in TEMPERATURES:
                stats = accepted(llm, batch, temperature, 8 if smoke else MAX_TOKENS)
                key = f"{prefix}acceptance, {draft}, T = {temperature:g}, {kind}"
                report.add(key, stats.mean_acceptance_length, "tokens a round", rounds=stats.num_steps)


def accepted(llm: jspec.LLM, batch: list[list[int]], temperature: float, max_tokens: int) -> jspec.Stats:
    """The counts of all prompts together."""
    params = jspec.SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    done = llm.generate(batch, params, key=jax.random.key(0))
    assert isinstance(done, list)
    return total_stats(one.stats for one in done)
