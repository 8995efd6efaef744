"""How an engine serves requests on one GPU with random weights, beside the goals and beside vLLM 0.26.

    python -m benchmarks.engine.serving --shape llama-3.1-8b --out DIR  # every line, about seven minutes on an H200
    python -m benchmarks.engine.serving --only 1 2 6                    # some lines
    python -m benchmarks.engine.serving --only 1 2 --gpus 2             # over a target in shards on two GPUs
    python -m benchmarks.engine.serving --smoke                         # tiny and anywhere, with meaningless times

Weights are in bf16. Drafts are four of an EAGLE head, accepted by chance, each with probability 0.7 if those before it were
("synthetic acceptance"). Requests are sampled at temperature 1, and get as many tokens as they ask for. Everything is
measured from outside: ``Engine.add``, then ``Engine.step`` until all is done; a token counts when ``step`` returns it. All
engines but those of line 12 have ``reproducible=False``. Before anything is timed, an engine is warmed up.

The lines of the table:

    1   a queue of 8 requests per row over 64 rows, all there at the start; plain decoding
    2   the same with an EAGLE head, and where the engine chooses K among numbers up to 4 by costs that it measured
    3   the same over 16 rows, plain and with an EAGLE head
    4   prompts of 512 tokens that arrive together: until the host knows a token of each, while they go on decoding
    5   a prompt of 32,000 tokens, alone: until its first token
    6   a round of one request, in an engine of 64 rows
    7   15 requests decode while a prompt of 32,000 tokens is read: the longest time that one of them gets no token
    8   a queue like that of line 2, of half as many requests, over the time that the device takes to do the same again
        when it is sent all programs at once, so that it never waits for the host
    9   from the construction of the engine of line 2 to the end of ``warmup``, its programs compiled by an earlier process
    10  requests of line 2 that arrive at random, at 70% of the rate of line 2: times to the first token from the arrival
        on, and between tokens; the tokens of a call share the time since the call before
    11  the second turn of a chat, whose first 2,000 tokens are known, over the first turn: time to the first token
    12  lines 1, 2 and 6 with ``reproducible=True``, over what they are without
    13  lines 1 and 2 where every request asks for penalties, or for log-probabilities, or where one of eight asks for both,
        over what they are without
    14  a constrained request among free ones in the engine of line 2, and constrained ones alone, with a grammar that costs
        the host nothing: tokens of the free ones over what they are without it, and rounds of constrained ones
    15  the first, second and tenth turn of an agent's session, whose prompt of 12,000 tokens grows by a call and by what a
        tool has said: time to the first token, and the share of the prompt that was found in the prefix cache

Lines 5, 7, 8, 10, 11 and 15 have an EAGLE head, line 4 is measured with and without. For each queue, the share of padding in
prefill passes is a figure, too; below it stand the rows of a call and the tokens of a round on average, and the time per
call in which the host does not wait for the device. A line fails if anything was compiled while it was measured.

A profiler would not do for line 8: it has the host launch kernels one by one, and the pauses between them are then what it
shows. Lines 4, 5, 6, 7, 11, 14 and 15 are the median of ``--repeats`` measurements, the queues run once.

An engine is made for each of these groups of lines: 1, 4, 13; 2, 4, 6, 8, 10, 13, 14; 3; 5, 7, 11, 15; 12.
Line 10 needs the rate of line 2, line 12 the figures of 1, 2 and 6, line 13 those of 1 and 2; they are measured
where they are missing."""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.engine import start
from benchmarks.engine.engines import Engines, Setting
from benchmarks.engine.loads import Client, Observed, Texts, observed
from benchmarks.engine.scenarios import (
    AGENT_PROMPT,
    AGENT_TURNS,
    ALONGSIDE,
    ALONGSIDE_NEW,
    CALL,
    LONG,
    PROMPT,
    TOOL_RESULT,
    TURN,
    TURN_NEW,
    Scenarios,
)
from benchmarks.report import results
from benchmarks.report.figures import HEADER, Figure, printed
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import PAGE
from benchmarks.shapes import SHAPES
from jspec.compilation_cache import enable_compilation_cache
from jspec.config import Shards

Measure = Callable[[], Iterator[Figure]]

LINES = tuple(range(1, 16))
ACCEPTANCE = 0.7
PER_ROW = 8  # requests of a queue
SHORT_LEN, LONG_LEN = 1024, 33_024  # max_len
SHARE, ARRIVING_PER_ROW = 0.7, 6  # requests of line 10: their rate, of that of line 2, and their number
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
LOGPROBS = {"logprobs": 5}
OPTIONS = (("penalties", 1, PENALTIES), ("log-probabilities", 1, LOGPROBS), ("one of 8", 8, PENALTIES | LOGPROBS))
SMALLER = 16  # lengths and rows of a smoke run are so many times less
FIRST_TOKENS_GOALS = {"qwen3-30b-a3b": {64: (500, 420)}}  # of line 4, in ms, for shapes that have no others


class Table:
    """The lines, measured with one set of weights.

    Args:
      engines: makes engines of it.
      divisor: of all lengths and rows; 1 but for smoke runs.
      repeats: measurements of the lines that are short.
      goals: whether they are for this shape.
    """

    def __init__(self, engines: Engines, divisor: int, repeats: int, goals: bool):
        self._engines, self._divisor, self._repeats, self._goals = engines, divisor, repeats, goals
        self._texts = Texts(engines.bench.pair.target.vocab_size)
        self._scenarios = Scenarios(self._texts, divisor)
        self._queues: dict[Setting, Observed] = {}
        self._lone_rounds: dict[Setting, float] = {}

    def lines(self) -> list[tuple[int, str, Measure]]:
        """(line, the engine, how it is measured), in the order in which few engines have to be made."""
        plain, eagle = self.setting(64), self.setting(64, "eagle")
        auto, few, few_eagle = self.setting(64, "eagle", "auto"), self.setting(16), self.setting(16, "eagle")
        counts = {1: (20, 16, 22), 16: (190, 175, 190), 64: (720, 660, 747)}
        return [
            (1, "plain", lambda: self.queue(1, "", plain, 8000, 8400, 6795)),
            (4, "plain", lambda: self.together(plain, counts)),
            (13, "plain", lambda: self.options(1, plain)),
            (2, "eagle", lambda: self.queue(2, "", eagle, 9300, 9800, 9214)),
            (6, "eagle", lambda: self.lone(eagle)),
            (4, "eagle", lambda: self.together(eagle, counts)),
            (8, "eagle", lambda: self.busy(eagle)),
            (10, "eagle", lambda: self.arrivals(eagle)),
            (13, "eagle", lambda: self.options(2, eagle)),
            (14, "eagle", lambda: self.constrained(eagle)),
            (3, "plain", lambda: self.queue(3, "plain", few, 3000, 3080)),
            (3, "eagle", lambda: self.queue(3, "eagle", few_eagle, 5000, 5200)),
            (5, "eagle", self.long_prompt),
            (7, "eagle", self.alongside),
            (11, "eagle", self.chat),
            (15, "eagle", self.session),
            (12, "plain", lambda: self.reproducible(plain)),
            (12, "eagle", lambda: self.reproducible(eagle)),
            (2, "auto", lambda: self.queue(2, "auto", auto)),
        ]

    def setting(self, rows: int, method: str | None = None, K: Any = 4, max_len: int = SHORT_LEN) -> Setting:
        return setting_of(self._divisor, rows, method, K, max_len)

    @property
    def long_setting(self) -> Setting:
        """With room for one long prompt, for requests beside it, and for a quarter as many pages of old prompts."""
        setting = self.setting(ALONGSIDE + 1, "eagle", max_len=LONG_LEN)
        pages = lambda tokens: -(-tokens // setting.page_size)  # noqa: E731
        beside = (setting.rows - 1) * pages((PROMPT + ALONGSIDE_NEW) // self._divisor + 8)
        return dataclasses.replace(setting, num_pages=(pages(setting.max_len) + beside) * 5 // 4)

    def figure(self, line: int, variant: str, what: str, unit: str, measured: float | None, *goals, **more) -> Figure:
        goal, stretch, vllm = (*(goals if self._goals else ()), None, None, None)[:3]
        return Figure(line, variant, what, unit, measured, goal, stretch, vllm, more)

    def queue(self, line: int, variant: str, setting: Setting, *goals: float) -> Iterator[Figure]:
        found = self.queued(setting)
        more = {
            "rows_per_call": found.rows_per_call,
            "tokens_per_round": found.tokens_per_round,
            "host_ms_per_call": 1e3 * found.host_seconds,
            "preemptions": found.counted("num_preemptions"),
        }
        yield self.figure(line, variant, f"queue; {setting}", "tokens/s", found.rate, *goals, **more)
        padding = f"{variant}, padding" if variant else "padding"
        yield self.figure(line, padding, "padding in its prefill passes", "%", 100 * found.padding, 15)

    def queued(self, setting: Setting) -> Observed:
        """What an engine does while it serves a queue, which it is given the first time that it is asked for."""
        if setting not in self._queues:
            self._queues[setting] = self._served(setting)
        return self._queues[setting]

    def _served(self, setting: Setting, every: int = 1, options: Mapping[str, Any] | None = None) -> Observed:
        """What an engine does while it serves a queue, in which one request of ``every`` so many has ``options``."""
        client = self._client(setting)
        loads = self._texts.queue(PER_ROW * setting.rows, self._divisor)
        loads = [
            dataclasses.replace(load, options=(options or {}) if i % every == 0 else {}) for i, load in enumerate(loads)
        ]
        with observed(client.engine) as found:
            client.serve(loads)
        client.finish()
        return found

    def options(self, line: int, setting: Setting) -> Iterator[Figure]:
        without = self.queued(setting).rate
        for name, every, options in OPTIONS:
            found = self._served(setting, every, options)
            what = f"tokens/s of line {line} with {name}, over without"
            more = {"tokens_per_second": found.rate, "host_ms_per_call": 1e3 * found.host_seconds}
            yield self.figure(13, f"line {line}, {name}", what, "x", found.rate / without, **more)

    def together(self, setting: Setting, goals: Mapping[int, tuple[float, float, float]]) -> Iterator[Figure]:
        method, client = setting.method or "plain", self._client(setting)
        for count, compared in goals.items():
            rows = min(count, setting.rows)
            seconds = self._median(lambda rows=rows: self._scenarios.first_tokens(client, rows))
            what = f"{count} x {PROMPT} tokens together, first tokens; {setting}"
            yield self.figure(4, f"{count} prompts, {method}", what, "ms", 1e3 * seconds, *compared)

    def constrained(self, setting: Setting) -> Iterator[Figure]:
        client, rows = self._client(setting), setting.rows
        measured = {}
        for free, held in ((rows - 1, 0), (rows - 1, 1), (0, 1), (0, rows)):
            found = [self._scenarios.beside_constrained(client, free, held) for _ in range(self._repeats)]
            measured[free, held] = tuple(statistics.median(numbers) for numbers in zip(*found, strict=True))
        without, beside = measured[rows - 1, 0][0], measured[rows - 1, 1][0]
        more = {"tokens_per_second": beside, "tokens_per_second_without": without}
        what = f"tokens of {rows - 1} free requests beside one constrained, over without"
        yield self.figure(14, "free beside one", what, "x", beside / without, 0.95, **more, more_is_better=True)
        for (free, held), goal in {(rows - 1, 1): 15, (0, 1): 7.5, (0, rows): 16}.items():
            what = f"round of {held} constrained beside {free} free requests"
            yield self.figure(14, f"{held} beside {free}", what, "ms", 1e3 * measured[free, held][1], goal)

    def long_prompt(self) -> Iterator[Figure]:
        client = self._client(self.long_setting)
        seconds = self._median(lambda: self._scenarios.first_tokens(client, 1, LONG))
        yield self.figure(5, "", f"{LONG:,} tokens, first token; {self.long_setting}", "s", seconds, 1.2, 1.05, 1.16)

    def lone(self, setting: Setting) -> Iterator[Figure]:
        yield self.figure(6, "", f"round of one request; {setting}", "ms", self.lone_round(setting), 6.0, 5.8, 6.8)

    def lone_round(self, setting: Setting) -> float:
        """Milliseconds of a round of one request, which is measured the first time that it is asked for."""
        if setting not in self._lone_rounds:
            client = self._client(setting)
            self._lone_rounds[setting] = 1e3 * self._median(lambda: self._scenarios.lone_round(client))
        return self._lone_rounds[setting]

    def alongside(self) -> Iterator[Figure]:
        client = self._client(self.long_setting)
        beside = self.long_setting.rows - 1
        found = [self._scenarios.long_beside(client, beside) for _ in range(self._repeats)]
        gap, first = (statistics.median(numbers) for numbers in zip(*found, strict=True))
        what = f"longest gap beside {LONG:,} tokens; {self.long_setting}"
        yield self.figure(7, "", what, "ms", 1e3 * gap, 40, 20, first_token_seconds=first)

    def busy(self, setting: Setting) -> Iterator[Figure]:
        served, repeated, same = self._scenarios.repeated_queue(self._client(setting), PER_ROW * setting.rows // 2)
        what = f"queue over the same programs sent at once; {setting}"
        more = {"queue_seconds": served, "device_seconds": repeated, "same_texts": float(same)}
        yield self.figure(8, "", what, "x", served / repeated, 1.04, 1.02, **more)

    def arrivals(self, setting: Setting) -> Iterator[Figure]:
        queue = self.queued(setting)
        rate = SHARE * PER_ROW * setting.rows / queue.seconds
        loads = self._texts.poisson(self._texts.queue(ARRIVING_PER_ROW * setting.rows, self._divisor), rate)
        client = self._client(setting)
        with observed(client.engine) as found:
            requests = client.serve(loads)
        client.finish()
        times = {
            "first token": [request.first for request in requests],
            "between tokens": [gap for request in requests for gap in request.between],
        }
        for name, seconds in times.items():
            for percent in (50, 99):
                what = f"{rate:.1f} requests a second, {name}, p{percent}"
                more = {"requests_per_second": rate, "tokens_per_second": found.rate}
                milliseconds = 1e3 * float(np.percentile(seconds, percent))
                yield self.figure(10, f"{name}, p{percent}", what, "ms", milliseconds, **more)

    def chat(self) -> Iterator[Figure]:
        client = self._client(self.long_setting)
        found = [self._scenarios.turns(client) for _ in range(self._repeats)]
        first, second = (1e3 * statistics.median(turns) for turns in zip(*found, strict=True))
        what = f"second turn, {TURN:,} + {TURN_NEW} tokens, over the first, first token"
        yield self.figure(11, "", what, "x", second / first, 0.3, 0.22, first_turn_ms=first, second_turn_ms=second)

    def session(self) -> Iterator[Figure]:
        client = self._client(self.long_setting)
        found = [self._scenarios.session(client) for _ in range(self._repeats)]
        for turn in (1, 2, AGENT_TURNS):
            firsts, shares = zip(*(turns[turn - 1] for turns in found), strict=True)
            what = (
                f"turn {turn} of an agent's session, {AGENT_PROMPT:,} + {CALL + TOOL_RESULT} tokens a turn, first token"
            )
            more = {"cached_share_of_prompt": statistics.median(shares)}
            yield self.figure(15, f"turn {turn}", what, "ms", 1e3 * statistics.median(firsts), **more)

    def reproducible(self, setting: Setting) -> Iterator[Figure]:
        slow, line = dataclasses.replace(setting, reproducible=True), 1 if setting.method is None else 2
        fast = self.queued(setting).rate
        lone = self.lone_round(setting) if setting.method is not None else None
        found = self.queued(slow).rate
        what = f"tokens/s of line {line}, reproducible over not"
        yield self.figure(12, f"line {line}", what, "x", found / fast, tokens_per_second=found)
        if lone is not None:
            rounds = self.lone_round(slow)
            what = "a round of line 6, reproducible over not"
            yield self.figure(12, "line 6", what, "x", rounds / lone, ms_a_round=rounds)

    def _median(self, measure: Callable[[], float]) -> float:
        return statistics.median(measure() for _ in range(self._repeats))

    def _client(self, setting: Setting) -> Client:
        return Client(self._engines.get(setting))


def setting_of(divisor: int, rows: int, method: str | None, K: Any = 4, max_len: int = SHORT_LEN) -> Setting:
    """Of an engine, smaller for smoke runs."""
    page = PAGE if divisor == 1 else PAGE // 4
    return Setting(max(rows // divisor, 2), max_len // divisor, method, K, acceptance=ACCEPTANCE, page_size=page)


def chosen(lines: Iterable[tuple[int, str, Measure]], numbers: Sequence[int]) -> list[tuple[int, str, Measure]]:
    return [line for line in lines if line[0] in numbers]


def start_figures(shape: str, divisor: int, cache: pathlib.Path, goals: bool) -> Iterator[Figure]:
    """Line 9, in processes of its own: before this one takes the memory of the GPU."""
    setting = setting_of(divisor, 64, "eagle")
    first, again = (start.in_a_process(shape, setting, cache) for _ in range(2))
    goal, stretch = (5.0, 3.0) if goals else (None, None)
    what = f"construction and warmup, compiled before; {setting}"
    yield Figure(9, "", what, "s", again, goal, stretch, more={"start_before_seconds": first})


def run(args, cache: pathlib.Path) -> bool:
    """Print the lines and write the result; whether all of them could be measured."""
    until, shape = time.monotonic() + args.seconds, "tiny" if args.smoke else args.shape
    divisor, goals = SMALLER if shape == "tiny" else 1, shape == "llama-3.1-8b" and args.gpus == 1
    failed, figures = [], []
    if 9 in args.only:  # before anything here touches the device
        failed += _measured(lambda: start_figures(shape, divisor, cache, goals), 9, "start", figures.append)
    if shape != "tiny" and jax.default_backend() != "gpu":
        raise SystemExit("no GPU: times of this shape need one; --smoke runs a tiny version here")
    enable_compilation_cache(cache)
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    settings = {
        "shape": shape,
        "dtype": dtype,
        "synthetic_acceptance": ACCEPTANCE,
        "gpus": args.gpus,
        "smoke": shape == "tiny",
    }
    result = results.begin("serving", settings | {"repeats": args.repeats, "failed": failed, "left_out": []})
    file = args.json or (args.out and args.out / f"serving-{result.date[:16].replace(':', '')}.json")

    def add(figure: Figure):
        figure.add_to(result)
        verdict = "" if figure.measured is None else results.latest([result])[figure.key].verdict
        print(printed(figure, verdict), flush=True)
        if file:
            results.write(result, file)

    print(f"{shape}, {dtype}, random weights, on {result.device['kind']}; jax {jax.__version__}\n{HEADER}", flush=True)
    for figure in figures:
        add(figure)
    shards = None if args.gpus == 1 else Shards(args.gpus)
    with Engines(Bench(SHAPES[shape], dtype, 0.0, args.repeats, shards=shards)) as engines:
        for line, name, measure in chosen(Table(engines, divisor, args.repeats, goals).lines(), args.only):
            if time.monotonic() > until:
                result.settings["left_out"].append([line, name])
                print(f"{line:>4}  {name} left out: {args.seconds:.0f} seconds are over", flush=True)
            elif missed := _measured(lambda measure=measure: without_compiling(engines, measure), line, name, add):
                engines.drop()  # its requests may still be under way
                failed += missed
    if file:
        results.write(result, file)
    return not failed


def without_compiling(engines: Engines, measure: Measure) -> Iterator[Figure]:
    """The figures of a line.

    Raises:
      RuntimeError: an engine compiled something after its warm-up, once they are all told.
    """
    before = engines.num_late_compilations
    yield from measure()
    late = engines.num_late_compilations - before
    if late:
        raise RuntimeError(f"{late} programs were compiled after warm-up")


def _measured(measure: Measure, line: int, name: str, add: Callable[[Figure], None]) -> list[list]:
    """Add the figures of a line; what goes into the list of failures."""
    try:
        for figure in measure():
            add(figure)
    except Exception:  # the device's time is dear: one line that cannot be measured must not cost the others
        traceback.print_exc()
        print(f"{line:>4}  {name} FAILED", flush=True)
        return [[line, name]]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs that share the target; line 9 is left out with several"
    )
    parser.add_argument("--only", type=int, nargs="+", choices=LINES, default=LINES, metavar="N", help="lines")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of the lines that are short")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=pathlib.Path, metavar="DIR", help="write the result there, named by its date")
    where.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--cache", type=pathlib.Path, metavar="DIR", help="keep compiled programs for a later run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further line after so long")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and lengths, any machine, meaningless times")
    args = parser.parse_args()
    if args.gpus != 1:  # line 9 has processes of its own, before which nothing here may touch a GPU
        if not 1 < args.gpus <= len(jax.devices()):
            parser.error(f"--gpus {args.gpus}: expected 1 to {len(jax.devices())}, the GPUs that there are")
        args.only = [line for line in args.only if line != 9]
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run(args, args.cache or pathlib.Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
