"""How long an engine takes from its construction to its first request, with the weights on the device already.

    python -m benchmarks.engine.start --cache DIR           # one start; a second one finds its programs compiled in DIR
    python -m benchmarks.engine.start --cache DIR --smoke   # tiny and anywhere, with meaningless times

Prints the seconds. A start is timed in a process of its own, as a user's would be."""

import argparse
import pathlib
import subprocess
import sys
import time

import jax

from benchmarks.engine.engines import Setting, make_engine
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.shapes import SHAPES
from jspec.compilation_cache import enable_compilation_cache
from jspec.models.flatten import flatten


def seconds(shape: str, setting: Setting, cache: pathlib.Path) -> float:
    """Seconds of a start in this process: ``Engine(...)`` and ``warmup()``, until the device is idle again."""
    enable_compilation_cache(cache)
    bench = Bench(SHAPES[shape], "bfloat16" if jax.default_backend() == "gpu" else "float32", 0.0, 1)
    jax.block_until_ready([flatten(module).leaves for module in (bench.target, bench.draft(setting.method)[1])])
    started = time.perf_counter()
    engine = make_engine(bench, setting)
    engine.warmup()
    jax.block_until_ready(engine.runner.batch.state.outcome)
    return time.perf_counter() - started


def in_a_process(shape: str, setting: Setting, cache: pathlib.Path) -> float:
    """The same in a process of its own, on a device whose memory this process has not taken.

    Raises:
      RuntimeError: it failed.
    """
    options = ["--shape", shape, "--cache", str(cache), "--rows", str(setting.rows), "--max-len", str(setting.max_len)]
    options += ["--page-size", str(setting.page_size)]
    command = [sys.executable, "-m", "benchmarks.engine.start", *options]
    done = subprocess.run(command, cwd=results.ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}")
    return float(done.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--cache", type=pathlib.Path, required=True, metavar="DIR", help="folder of compiled programs")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--smoke", action="store_true", help="tiny shape, any machine, meaningless times")
    args = parser.parse_args()
    shape = "tiny" if args.smoke else args.shape
    if shape != "tiny" and jax.default_backend() != "gpu":
        parser.error("no GPU: times of this shape need one; --smoke runs a tiny version here")
    setting = Setting(args.rows, args.max_len, "eagle", page_size=args.page_size)
    print(f"{seconds(shape, setting, args.cache):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
