"""Growth of a server's speculation counters at ``/metrics`` during a run. Their names are vLLM's, which jspec has too."""

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
    """Numbers of drafts and accepted drafts.

    Attributes:
      drafts: rounds that had drafts, each counted once for every request in it.
      draft_tokens: drafts that were verified.
      accepted_tokens: drafts that were accepted.
      accepted_at: how many drafts were accepted at each position of a round.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_at: tuple[int, ...] = ()

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
        """Accepted drafts at each position over rounds that had drafts, as vLLM has it."""
        return [accepted / self.drafts for accepted in self.accepted_at]


def counters_of(text: str) -> Counters | None:
    """The counters in the text of ``/metrics``, summed over engines; None if it has none.

    Raises:
      ValueError: the text is not in Prometheus' format.
    """
    totals: dict[str, int] = collections.defaultdict(int)
    places: dict[int, int] = collections.defaultdict(int)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == ACCEPTED_AT:
                places[int(sample.labels["position"])] += int(sample.value)
            elif sample.name in (DRAFTS, DRAFT_TOKENS, ACCEPTED):
                totals[sample.name] += int(sample.value)
    if DRAFTS not in totals:
        return None
    accepted_at = tuple(places[i] for i in range(max(places, default=-1) + 1))
    return Counters(totals[DRAFTS], totals[DRAFT_TOKENS], totals[ACCEPTED], accepted_at)


def counter_growth(before: Counters | None, after: Counters | None) -> Counters | None:
    """The difference of two readings; None if nothing was drafted, or it is unknown.

    It is unknown where a reading is missing, and where the server was restarted, which sets its counters to zero.
    """
    if before is None or after is None:
        return None
    width = max(len(before.accepted_at), len(after.accepted_at))
    older, newer = (counters.accepted_at + (0,) * (width - len(counters.accepted_at)) for counters in (before, after))
    growth = Counters(
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
        tuple(now - then for then, now in zip(older, newer, strict=True)),
    )
    grew = growth.drafts > 0 and growth.draft_tokens > 0 and min(growth.accepted_tokens, *growth.accepted_at, 0) >= 0
    return growth if grew else None


async def read_counters(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> Counters | None:
    """The counters of a server; None if it has none."""
    try:
        async with session.get(url, headers=headers) as http_response:
            return counters_of(await http_response.text()) if http_response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
        return None
