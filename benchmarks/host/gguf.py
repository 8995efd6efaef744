"""How long a GGUF file takes to load beside a safetensors folder of the same model, and how many bytes stay.

    python -m benchmarks.host.gguf model.gguf path/to/folder    # both from the page cache, in turns, on any machine

The time is that of ``jspec.load`` without compilations: reading, packing anew and sending to the device, and the tokenizer.
The least of some rounds is printed, because other programs only add to it."""

import argparse
import gc
import pathlib
import sys
import time

import jax

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.models import build


def load(path: pathlib.Path) -> tuple[float, int]:
    """Seconds, and bytes of the arrays."""
    began = time.perf_counter()
    checkpoint = Checkpoint.open(path)
    config, params = checkpoint.language_model("bfloat16")
    module = build(config, params, "bfloat16")
    arrays = jax.block_until_ready(jax.tree.leaves(module))
    assert checkpoint.tokenizer is not None, path
    return time.perf_counter() - began, sum(array.nbytes for array in arrays)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path, help="the file")
    parser.add_argument("folder", type=pathlib.Path, help="of the same model in safetensors")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is loaded, after once")
    args = parser.parse_args()
    best: dict[pathlib.Path, float] = {}
    for round_ in range(args.rounds + 1):
        for path in (args.gguf, args.folder):
            seconds, held = load(path)
            gc.collect()
            if round_:
                best[path] = min(seconds, best.get(path, seconds))
            files = [path] if path.is_file() else list(path.glob("*.safetensors"))
            size = sum(file.stat().st_size for file in files)
            print(f"{path.name}: {seconds:.2f} s, {held / 1e6:,.0f} MB of {size / 1e6:,.0f} MB", flush=True)
    ours, theirs = best[args.gguf], best[args.folder]
    print(f"GGUF over safetensors: {ours / theirs:.2f}, {ours:.2f} and {theirs:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
