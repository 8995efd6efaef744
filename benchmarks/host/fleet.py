"""How many GPUs answer 1,000 requests a second with Qwen3.6-27B, for docs/guides/distributed.md: times that one GPU was
measured to take, added up. ``benchmarks.tables`` writes it. No fleet ever ran."""

import dataclasses
import math

from benchmarks.report import results
from benchmarks.report.figures import shown
from benchmarks.report.markdown import paragraph, table

REQUESTS, PROMPT, ANSWER = 1000, 1024, 256  # a second, and tokens of each
BUSY = 0.7  # part of a GPU's time that is planned for
ROWS, FEWER = 64, 16  # of an engine, and of its shorter rounds
A_HOST, SPARE = 8, 1  # GPUs of a host, and hosts that may be away
WINDOW = 10  # seconds of a burst
READ = 32_000  # tokens of the prompt that was timed
PLAIN, DRAFTING, PREFILL = (f"hybrids-2026-11-{name}-27b" for name in ("27", "27T2051", "28T0352"))
ONE, TWO = "serving-2026-11-27T0155", "serving-2026-11-27T0153-two-gpus"


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to decode, on one GPU.

    Attributes:
      few, many: seconds of a round of ``FEWER`` rows and of ``ROWS``.
      tokens: of a row in a round of ``ROWS``.
      prompt: seconds in which the GPU reads a prompt.
      answer: seconds of the GPU that an answer takes, in rounds that it shares with others.
      most, planned: requests a second, of a GPU that is always busy, and of one that is ``BUSY``.
      replicas, hosts: for ``REQUESTS``.
      rows: requests that are being answered at the planned rate; the times of rounds are taken to lie on a line.
      burst: by how many standard deviations of a Poisson process arrivals of a ``WINDOW`` may exceed their mean.
    """

    few: float
    many: float
    tokens: float
    prompt: float

    @property
    def answer(self) -> float:
        return ANSWER * self.many / (ROWS * self.tokens)

    @property
    def most(self) -> float:
        return 1 / (self.prompt + self.answer)

    @property
    def planned(self) -> float:
        return BUSY * self.most

    @property
    def replicas(self) -> int:
        return math.ceil(REQUESTS / self.planned)

    @property
    def hosts(self) -> int:
        return math.ceil(self.replicas / A_HOST) + SPARE

    @property
    def burst(self) -> float:
        return WINDOW * (self.most - self.planned) / math.sqrt(WINDOW * self.planned)

    @property
    def rows(self) -> float:
        slope = (self.many - self.few) / (ROWS - FEWER)
        rounds = (
            self.planned * ANSWER / self.tokens / (1 - self.planned * self.prompt)
        )  # of one row, a second of decoding
        return rounds * (self.few - slope * FEWER) / (1 - rounds * slope)


def measured(name: str) -> results.Result:
    return results.read(results.RESULTS / f"{name}.json")


def ways() -> dict[str, Way]:
    """Without drafts, and with those of the target's own layer."""
    prompt = PROMPT / READ * measured(PREFILL).measured[f"3, qwen3.6-27b, {READ} tokens"] / 1e3
    found = {}
    for heading, line, name in (("no drafts", 1, PLAIN), ("its MTP layer, K = 4", 2, DRAFTING)):
        of = measured(name)
        few, many = (f"{line}, qwen3.6-27b, batch {rows}" for rows in (FEWER, ROWS))
        tokens = of.details[many].get("tokens", 1.0)
        found[heading] = Way(of.measured[few] / 1e3, of.measured[many] / 1e3, tokens, prompt)
    return found


def markdown() -> str:
    """The table, and what it rests on beside it."""
    found = ways()
    link = lambda name: f"[{measured(name).day}](../../benchmarks/results/{name}.json)"  # noqa: E731
    # fmt: off
    rows = [
        (f"round of {FEWER} rows, ms", lambda way: shown(1e3 * way.few), f"measured {link(PLAIN)}, {link(DRAFTING)}"),
        (f"round of {ROWS} rows, ms", lambda way: shown(1e3 * way.many), "measured, the same"),
        ("tokens of a row in a round", lambda way: f"{way.tokens:.2f}", "measured, the same: synthetic acceptance of 0.7"),
        ("prompt, ms of a GPU", lambda way: shown(1e3 * way.prompt), f"{READ:,} tokens measured {link(PREFILL)}"),
        ("answer, ms of a GPU", lambda way: shown(1e3 * way.answer), f"arithmetic, rounds of {ROWS} rows"),
        ("requests a second of a GPU at most", lambda way: shown(way.most), "arithmetic"),
        (f"the same, {BUSY:.0%} busy", lambda way: shown(way.planned), "arithmetic"),
        ("tokens a second of a GPU then, read + written",
         lambda way: f"{way.planned * PROMPT:,.0f} + {way.planned * ANSWER:,.0f}", "arithmetic"),
        ("requests under way on a GPU", lambda way: shown(way.rows), "arithmetic, rounds interpolated"),
        ("an answer takes, s", lambda way: shown(way.rows / way.planned), "arithmetic"),
        (f"arrivals that a replica serves in {WINDOW} s, over the mean",
         lambda way: f"{way.burst:.1f} standard deviations", "arithmetic, for a Poisson process"),
        ("**replicas of one GPU**", lambda way: f"**{way.replicas}**", "arithmetic"),
        (f"**hosts of {A_HOST}, {SPARE} of them spare**", lambda way: f"**{way.hosts}**", "arithmetic"),
    ]
    # fmt: on
    cells = [(what, *map(figure, found.values()), source) for what, figure, source in rows]
    serving = results.latest(results.read_all("serving", "NVIDIA H200"))
    first = [serving[f"10, first token, {p}"].measured for p in ("p50", "p99")]
    factor = measured(TWO).measured["1"] / measured(ONE).measured["1"]
    queue, day = serving["8"], serving["10, first token, p50"].result.day
    rests = paragraph(f"""Two measured figures of the 8B say how far such sums hold. A queue takes {queue.measured:.3f} of
    the time that the GPU needs for the same programs ({queue.result.day}), so that GPU times add up. At {BUSY:.0%} of a
    queue's rate, requests that arrive at random get their first token within {first[0]:.0f} ms, 99% of them within
    {first[1]:.0f} ({day}), which is why {BUSY:.0%} are planned for. Both are of one H200. Replicas of two GPUs
    (`tensor_parallel=2`) answer sooner and cost more: two H100s make {factor:.2f} times the tokens of one ({link(TWO)},
    {link(ONE)}), so that the fleet would need {2 / factor:.1f} times the GPUs, if that holds for this model.""")
    return "\n\n".join([table(("", *found, "from"), cells), rests])
