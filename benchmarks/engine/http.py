"""What the server costs beside its engine, on one GPU with random weights, measured over HTTP by ``jspec bench serve``.

    python -m benchmarks.engine.http --out DIR    # about eight minutes on an H200
    python -m benchmarks.engine.http --smoke      # tiny and anywhere, with meaningless times

The server is that of ``jspec serve``, in this process; the client is another process. Weights are random, and drafts are
four of an EAGLE head, accepted by chance with probability 0.7 ("synthetic acceptance"), so that no answer means anything;
the model's name, which is in every answer, says so. The tokenizer has a word for each token of the vocabulary.

What is measured:

    queue   8 requests per row over 64 rows, all there at the start, with the lengths of line 2 of
            ``benchmarks.engine.serving``: tokens per second of the engine without text, of the engine with text, and over
            HTTP
    tpot    milliseconds per output token behind the first, by the requests under way at a time, the temperature, and how
            drafts are drawn: always the likeliest, or at random
    gaps    16 requests: times between chunks of streams, while others arrive and while none does
    parsing  the queue once more, as chats with a tool: tokens per second where the server looks for calls and reasoning in
            the texts, and where it does not, in turn
    drafting  parallel drafting beside sequential, each of K = 3, 5 and 7 drafts, over 16 rows: milliseconds to the first
            token and per token behind it, and tokens per second
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.engine.engines import Setting, make_engine
from benchmarks.engine.loads import Client, Load, Texts, observed
from benchmarks.engine.serving import setting_of
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.shapes import SHAPES
from jspec.compilation_cache import enable_compilation_cache
from jspec.config import Speculation
from jspec.engine.engine import Engine
from jspec.llm import LLM
from jspec.serving.async_engine import AsyncEngine
from jspec.serving.generation.service import Service
from jspec.serving.http.server import listener
from jspec.serving.http.settings import ServerSettings
from jspec.serving.server.lifecycle import run

NAME = "random-weights-synthetic-acceptance-0.7"
PER_ROW, SMALLER = 8, 16  # requests of a queue; lengths and rows of a smoke run are so many times less
CONCURRENCIES, TEMPERATURES = (1, 4, 16, 64), (0.0, 0.5, 1.0, 1.5)
TPOT_PROMPT, TPOT_NEW, GAPS_NEW = 128, 128, 384  # tokens
PARTS = ("queue", "tpot", "gaps", "parsing", "drafting")
PARSERS = {"plain": {}, "parsed": {"tool_parser": "hermes", "reasoning_parser": "qwen3"}}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TURNS = 3  # of both kinds of servers
METHODS = {"eagle3": "sequential", "parallel": "parallel"}  # draft heads, and what the keys of figures call them
DRAFTS, AT_A_TIME, DRAFTING_PROMPT, DRAFTING_NEW = (3, 5, 7), (1, 16), 512, 128
# Of ``jspec bench serve``: the name of a field, what the keys of figures call it, what it is, and its unit.
DRAFTING = (
    ("median_ttft_ms", "ttft", "first token", "ms"),
    ("median_tpot_ms", "tpot", "per token", "ms"),
    ("output_throughput", "rate", "all requests", "tokens/s"),
)
DRAWN = {"argmax": "argmax", "sample": "sampled"}  # ``draft_sampling``, and what the keys of figures call it


class RandomLLM(LLM):
    """What a server needs of a model, around an engine whose texts mean nothing.

    Args:
      engine: with synthetic acceptance, which ``LLM`` refuses.
      method: how it drafts.
      bench: its weights.
      tokenizer: its tokenizer.
    """

    def __init__(self, engine: Engine, method: str | None, bench: Bench, tokenizer: Any):
        self.engine, self.target, self.tokenizer = engine, bench.target, tokenizer
        self.method, self.speculation, self.reproducible = method, Speculation(engine.runner.num_draft_tokens), False


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer that has one word for each token, ``t17`` for token 17."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@dataclasses.dataclass
class Loaded:
    """Requests for ``jspec bench serve``, and how they are sent.

    Attributes:
      loads: the requests.
      concurrency: how many are under way at a time.
      fields: of each request.
      chat: whether they are chats.
    """

    loads: list[Load]
    concurrency: int
    fields: dict[str, Any]
    chat: bool = False

    def measured(self, address: str, folder: pathlib.Path) -> dict[str, Any]:
        """What ``jspec bench serve`` writes about them.

        Raises:
          RuntimeError: it failed, or a request did.
        """
        asked = folder / "asked.jsonl"
        lines = [{"prompt": " ".join(f"t{i}" for i in one.prompt), "output_tokens": one.new} for one in self.loads]
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = ["--base-url", address, "--dataset-name", "custom", "--dataset-path", str(asked)]
        options += ["--custom-output-len", "-1", "--num-prompts", str(len(lines)), "--disable-shuffle", "--ignore-eos"]
        options += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"] if self.chat else []
        options += ["--max-concurrency", str(self.concurrency), "--extra-body", json.dumps(self.fields)]
        options += [
            "--ready-check-timeout-sec",
            "60",
            "--save-result",
            "--save-detailed",
            "--result-dir",
            str(folder),
            "--result-filename",
            "found.json",
        ]
        command = [sys.executable, "-m", "jspec.cli", "bench", "serve", *options, "--disable-tqdm"]
        done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr[-2000:] + done.stdout[-2000:]
            raise RuntimeError(f"jspec bench serve exited with {done.returncode}: {said}")
        found = json.loads((folder / "found.json").read_text())
        if found["failed"]:
            raise RuntimeError(f"{found['failed']} requests failed: {[e for e in found['errors'] if e][:1]}")
        return found


class Measuring:
    """Engines and servers over one set of weights, and what is measured of them.

    Args:
      shape: of the weights.
      divisor: of all lengths and rows.
      add: takes down a figure: its key, what it is, its unit and its number.
    """

    def __init__(self, shape: str, divisor: int, add):
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        self._bench, self._divisor, self._add = Bench(SHAPES[shape], dtype, 0.0, 1), divisor, add
        self._texts = Texts(self._bench.pair.target.vocab_size)
        self._tokenizer: Any = word_tokenizer(self._bench.pair.target.vocab_size)

    def measure(self, what: Sequence[str], drafts: Sequence[int] = DRAFTS):
        """Measure, one engine after the other; ``drafts`` are the K at which draft heads are compared."""
        if "drafting" in what:
            for method, K in itertools.product(METHODS, drafts):
                self._drafting(method, K)
        if "parsing" in what:
            self._parsing()
        sampled = ["sample"] if {"queue", "gaps"} & set(what) else []
        for sampling in DRAWN if "tpot" in what else sampled:
            setting = dataclasses.replace(setting_of(self._divisor, 64, "eagle"), draft_sampling=sampling)
            engine = self._engine(setting)
            alone = self._alone(engine, setting) if sampling == "sample" and "queue" in what else {}
            with tempfile.TemporaryDirectory() as folder:
                ask = functools.partial(self._over_http, pathlib.Path(folder), setting, sampling, what, alone)
                self._serve(engine, setting, ask)
            del engine
            gc.collect()  # its memory is needed

    def _serve(self, engine: Engine, setting: Setting, ask: Callable[[str], None], **settings):
        """Serve an engine while ``ask`` runs; ``settings`` are of ``Service``."""
        serve_while(RandomLLM(engine, setting.method, self._bench, self._tokenizer), ask, **settings)

    def _parsing(self):
        """The queue as chats, with parsers of calls and reasoning and without them, in turn."""
        setting = setting_of(self._divisor, 64, "eagle")
        engine, rates = self._engine(setting), {kind: list[float]() for kind in PARSERS}

        def ask(kind: str, address: str):
            fields = {"temperature": 1.0, "tools": [TOOL]}
            with tempfile.TemporaryDirectory() as folder:
                load = Loaded(self._queue(setting), PER_ROW * setting.rows, fields, chat=True)
                rates[kind].append(load.measured(address, pathlib.Path(folder))["output_throughput"])

        for _ in range(TURNS):
            for kind, parsers in PARSERS.items():
                self._serve(engine, setting, functools.partial(ask, kind), chat_template=TEMPLATE, **parsers)
        for kind, found in rates.items():
            self._add(
                f"parsing, {kind}", f"chats over {setting.rows} rows, {kind}", "tokens/s", statistics.median(found)
            )
        ratio = statistics.median(rates["parsed"]) / statistics.median(rates["plain"])
        self._add("parsing, ratio", f"chats over {setting.rows} rows, parsed over plain", "x", ratio)
        del engine
        gc.collect()  # its memory is needed

    def _drafting(self, method: str, K: int):
        """A draft head with K drafts, with few requests at a time and with as many as there are rows."""
        setting = setting_of(self._divisor, max(AT_A_TIME), method, K)
        engine = self._engine(setting)

        def ask(address: str):
            for under_way in (max(n // self._divisor, 1) for n in AT_A_TIME):
                loads = self._same(max(2 * under_way, 4), DRAFTING_PROMPT, DRAFTING_NEW)
                with tempfile.TemporaryDirectory() as folder:
                    found = Loaded(loads, under_way, {"temperature": 1.0}).measured(address, pathlib.Path(folder))
                name = f"{under_way} at a time, {METHODS[method]}, K = {K}"
                for field, key, what, unit in DRAFTING:
                    key = f"drafting, {METHODS[method]}, {K}, {under_way}, {key}"
                    self._add(key, f"{name}, {what}", unit, found[field])

        self._serve(engine, setting, ask)
        del engine
        gc.collect()  # its memory is needed

    def _engine(self, setting: Setting) -> Engine:
        engine = make_engine(self._bench, setting, self._tokenizer, eos_token_ids=())
        engine.warmup()
        return engine

    def _queue(self, setting: Setting, **options) -> list[Load]:
        loads = self._texts.queue(PER_ROW * setting.rows, self._divisor)
        return [dataclasses.replace(load, options=options) for load in loads]

    def _alone(self, engine: Engine, setting: Setting) -> dict[str, float]:
        """Tokens per second of the engine, without text and with it."""
        rates = {}
        for name, detokenize in (("engine", False), ("engine with text", True)):
            client = Client(engine)
            with observed(engine) as found:
                client.serve(self._queue(setting, detokenize=detokenize))
            client.finish()
            rates[name] = found.rate
            self._add(f"queue, {name}", f"queue over {setting.rows} rows, {name}", "tokens/s", found.rate)
        return rates

    def _over_http(self, folder, setting: Setting, sampling: str, what, alone: dict[str, float], address: str):
        if "queue" in what and alone:
            found = Loaded(self._queue(setting), PER_ROW * setting.rows, {"temperature": 1.0}).measured(address, folder)
            rate = found["output_throughput"]
            self._add("queue, HTTP", f"queue over {setting.rows} rows, HTTP", "tokens/s", rate)
            for other, own in alone.items():
                self._add(f"queue, HTTP over {other}", f"queue, HTTP over the {other}", "x", rate / own)
        if "tpot" in what:
            for concurrency, temperature in ((c, t) for c in CONCURRENCIES for t in TEMPERATURES):
                under_way = max(concurrency // self._divisor, 1)
                loads = self._same(max(2 * under_way, 4), TPOT_PROMPT, TPOT_NEW)
                found = Loaded(loads, under_way, {"temperature": temperature}).measured(address, folder)
                key = f"tpot, {DRAWN[sampling]}, {concurrency}, {temperature:g}"
                name = f"{concurrency} at a time, temperature {temperature:g}, {DRAWN[sampling]} drafts, per token"
                self._add(key, name, "ms", found["median_tpot_ms"])
        if "gaps" in what and sampling == "sample":
            for name, count in (("nobody arrives", 1), ("others arrive", 4)):
                under_way = max(16 // self._divisor, 1)
                found = Loaded(self._same(count * under_way, TPOT_PROMPT, GAPS_NEW), under_way, {"temperature": 1.0})
                found = found.measured(address, folder)
                # Behind the first gaps, in which the prompts of those who came together are read.
                gaps = sorted(gap for one in found["itls"] for gap in one[4:] or one)
                for percent in (50, 99):
                    gap = 1e3 * gaps[min(int(percent / 100 * len(gaps)), len(gaps) - 1)]
                    self._add(
                        f"gaps, {name}, p{percent}", f"16 at a time, {name}, between chunks, p{percent}", "ms", gap
                    )

    def _same(self, count: int, prompt: int, new: int) -> list[Load]:
        """Requests of equal lengths, a little different so that they do not end together."""
        each = max(new // self._divisor, 8)
        return [Load(self._texts.prompt(max(prompt // self._divisor, 2)), each - i % 8) for i in range(count)]


def serve_while(llm: LLM, ask: Callable[[str], None], **settings: Any):
    """Serve a model in this thread, as ``jspec serve`` does, while another thread calls ``ask`` with the address.

    Raises:
      Exception: what ``ask`` raised.
    """
    bound, errors = listener("127.0.0.1", 0), []

    def asking():
        try:
            ask(f"http://127.0.0.1:{bound.getsockname()[1]}")
        except Exception as error:
            errors.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=asking)
    thread.start()
    run(Service(AsyncEngine(llm), [NAME], **settings), bound, ServerSettings(shutdown_timeout=5, log_level="warning"))
    thread.join()
    if errors:
        raise errors[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--drafts", nargs="+", type=int, choices=DRAFTS, default=DRAFTS, help="K of the part drafting")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="write the result there, named by its date")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and lengths, any machine, meaningless times")
    args = parser.parse_args()
    shape, divisor = ("tiny", SMALLER) if args.smoke else (args.shape, 1)
    if not args.smoke and jax.default_backend() != "gpu":
        raise SystemExit("no GPU: times of this shape need one; --smoke runs a tiny version here")
    result = results.begin("http", {"shape": shape, "synthetic_acceptance": 0.7, "smoke": args.smoke})
    file = args.out and args.out / f"http-{result.date[:16].replace(':', '')}.json"

    def add(key: str, what: str, unit: str, measured: float):
        result.measured[key], result.details[key] = measured, {"what": what, "unit": unit}
        print(f"{what:<80} {measured:10,.4g} {unit}", flush=True)
        if file:
            results.write(result, file)

    with tempfile.TemporaryDirectory() as folder:
        enable_compilation_cache(pathlib.Path(folder))
        Measuring(shape, divisor, add).measure(args.only, args.drafts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
