"""What a caller waits for beside the device: ``jspec.generate``, and ``jspec.stream`` with a caller that is idle or busy.

    python -m benchmarks.engine.thread --shape tiny --dtype float32 --new 512

Each line has the median of a few runs. The wall time of ``jspec.generate`` is compared with the time that the device takes
for the same programs when they are sent once more, all of them at once, so that it never waits for the host. Streams
are timed with a caller that does nothing, and with one that computes in Python, for a share of the time between two
deltas, before it asks for the next one.

With ``--simulated 8`` every call of rounds takes 8 ms at least, in which nothing computes. So a GPU looks to a host, and
a machine without one shows what threads and their turns cost.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

import jspec
from benchmarks.rounds.bench import Bench
from benchmarks.shapes import SHAPES
from jspec.config import EngineConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.llm import LLM

SHARES = (0.5, 0.9, 1.5)  # of the time between two deltas of an idle caller, in which a busy one computes


class SimulatedDevice:
    """Has each call of rounds take some time on a device that makes one after the other.

    Args:
      llm: whose calls.
      seconds: of a call.

    Attributes:
      calls: how many were sent.
    """

    def __init__(self, llm: LLM, seconds: float):
        self._seconds, self._free, self.calls = seconds, 0.0, 0
        self._ends: dict[int, float] = {}  # when each call ends that was not read
        runner = llm.engine.runner
        self._decode, self._read = runner._decode, runner.read
        runner._decode, runner.read = self._sent, self._waited_for

    def _sent(self, *plan):
        sent = self._decode(*plan)
        self._free = max(self._free, time.perf_counter()) + self._seconds
        self._ends[id(sent.logs)] = self._free
        self.calls += 1
        return sent

    def _waited_for(self, logs):
        time.sleep(max(0.0, self._ends.pop(id(logs), 0.0) - time.perf_counter()))
        return self._read(logs)


class Caller:
    """One model, and one request of it at a time.

    Args:
      llm: the model, warmed up.
      prompt: tokens of the prompt.
      new: tokens of a completion.
    """

    def __init__(self, llm: LLM, prompt: int, new: int):
        self._llm, self._prompt = llm, (np.arange(prompt) % llm.target.config.vocab_size).tolist()
        self._params = jspec.SamplingParams(max_tokens=new, ignore_eos=True)

    def generate(self) -> float:
        """Seconds of a call of ``jspec.generate``."""
        started = time.perf_counter()
        jspec.generate(self._llm, self._prompt, self._params, key=jax.random.key(0))
        return time.perf_counter() - started

    def device(self) -> float:
        """Seconds that the device takes for the programs of such a call, which are sent once more, all at once."""
        runner, sent = self._llm.engine.runner, []
        send = runner.batch.send

        def noted(program, *args):
            sent.append((program, args))
            return send(program, *args)

        runner.batch.send = noted
        try:
            self.generate()
        finally:
            del runner.batch.send  # the method of its class is there again
        jax.block_until_ready(runner.batch.state.outcome)
        started = time.perf_counter()
        for program, args in sent:
            runner.batch.send(program, *args)
        jax.block_until_ready(runner.batch.state.outcome)
        return time.perf_counter() - started

    def stream(self, busy: float = 0.0) -> tuple[float, float]:
        """Seconds of a stream whose caller computes for ``busy`` seconds after each delta, and seconds between deltas."""
        times = [time.perf_counter()]
        for _ in jspec.stream(self._llm, self._prompt, self._params, key=jax.random.key(0)):
            times.append(time.perf_counter())
            while time.perf_counter() < times[-1] + busy:
                pass
        return time.perf_counter() - times[0], statistics.median(np.diff(times))


def model(shape: str, dtype: str, method: str | None, K: int, max_len: int) -> LLM:
    """A model of random weights, which is compiled."""
    bench, speculation = Bench(SHAPES[shape], dtype, 0.0, 1), Speculation(K)
    config, module = bench.draft(method)
    engine = EngineConfig(max_batch=1, max_len=max_len, dtype=dtype)
    make = drafter_for(config, bench.pair.target, speculation)
    return LLM(bench.target, module, make, method, None, speculation, engine).warmup()


def medians(repeats: int, **what: Callable[[], float]) -> dict[str, float]:
    """The median time of each, which take turns, so that other work of the machine disturbs all of them alike."""
    times = {name: [] for name in what}
    for _ in range(repeats + 1):
        for name, call in what.items():
            times[name].append(call())
    return {name: statistics.median(some[1:]) for name, some in times.items()}


def measure(caller: Caller, repeats: int) -> dict[str, float]:
    """All times in milliseconds."""
    between = statistics.median(caller.stream()[1] for _ in range(3))
    busy = {f"stream, busy {share:.0%}": share * between for share in SHARES}
    found = medians(
        repeats,
        generate=caller.generate,
        device=caller.device,
        **{"stream": lambda: caller.stream()[0]},
        **{name: lambda seconds=seconds: caller.stream(seconds)[0] for name, seconds in busy.items()},
    )
    return {"between deltas": 1e3 * between, **{name: 1e3 * seconds for name, seconds in found.items()}}


def main():
    """Print the times, and those of the caller over the device's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--method", help="how drafts are made; left out, there are none")
    parser.add_argument("--K", type=int, default=4, help="drafts per round")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--simulated", type=float, default=0.0, help="milliseconds that a call takes at least")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    llm = model(args.shape, args.dtype, args.method, args.K, args.prompt + args.new)
    caller = Caller(llm, args.prompt, args.new)
    simulated = SimulatedDevice(llm, args.simulated / 1e3) if args.simulated else None
    times = measure(caller, args.repeats)
    if simulated is not None:
        before = simulated.calls
        caller.generate()
        times["device"] = (simulated.calls - before - 1) * args.simulated  # the last call is not read
    device = times["device"]
    if args.json:
        print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__, **times}))
        return
    for name, milliseconds in times.items():
        print(f"{name:18} {milliseconds:9.3f} ms {milliseconds / device:7.3f} of the device's")


if __name__ == "__main__":
    main()
