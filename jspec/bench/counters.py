"""How a server speculated during a run: what its counters at ``/metrics`` grew by. Their names are vLLM's and jspec's."""

import collections
import dataclasses

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclasses.dataclass(frozen=True)
class Counters:
    """What was drafted and accepted.

    Attributes:
      drafts: rounds that had drafts, each counted once for every request in it.
      draft_tokens: drafts that were verified.
      accepted_tokens: drafts that were accepted.
      accepted_at: how many drafts were accepted at each place of a round.
    """

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    accepted_at: tuple[float, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of all that were verified, in percent."""
        return 100 * self.accepted_tokens / self.draft_tokens

    @property
    def acceptance_length(self) -> float:
        """Tokens of a round that had drafts, the recovered or bonus token included."""
        return 1 + self.accepted_tokens / self.drafts

    @property
    def acceptance_rates_at(self) -> list[float]:
        """Accepted drafts at each place over rounds that had drafts, as vLLM has it."""
        return [accepted / self.drafts for accepted in self.accepted_at]


def counters_of(text: str) -> Counters | None:
    """The counters in what ``/metrics`` answered, those of several engines added up; None if it has none.

    Raises:
      ValueError: the text is none of Prometheus'.
    """
    totals: dict[str, float] = collections.defaultdict(float)
    places: dict[int, float] = collections.defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == ACCEPTED_AT:
                places[int(sample.labels["position"])] += sample.value
            elif sample.name in (DRAFTS, DRAFT_TOKENS, ACCEPTED):
                totals[sample.name] += sample.value
    if DRAFTS not in totals:
        return None
    accepted_at = tuple(places[i] for i in range(max(places, default=-1) + 1))
    return Counters(totals[DRAFTS], totals[DRAFT_TOKENS], totals[ACCEPTED], accepted_at)


def grown(before: Counters | None, after: Counters | None) -> Counters | None:
    """What was counted in between; None if that is nothing, or not known.

    A server that was started anew in between counts from zero again, so its difference is not known either.
    """
    if before is None or after is None:
        return None
    width = max(len(before.accepted_at), len(after.accepted_at))
    older, newer = (one.accepted_at + (0.0,) * (width - len(one.accepted_at)) for one in (before, after))
    found = Counters(
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
        tuple(now - then for then, now in zip(older, newer, strict=True)),
    )
    whole = found.drafts > 0 and found.draft_tokens > 0 and min(found.accepted_tokens, *found.accepted_at, 0) >= 0
    return found if whole else None


async def read_counters(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> Counters | None:
    """The counters of a server; None if it has no such page, or no such counters."""
    try:
        async with session.get(url, headers=headers) as response:
            return counters_of(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
        return None
