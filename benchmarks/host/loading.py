"""How fast a large checkpoint is loaded from a local disk, beside the rate of that disk.

    python -m benchmarks.host.loading --dir DIR              # three layers of Llama-3.3-70B, 5.4 GB; within a minute
    python -m benchmarks.host.loading --dir DIR --layers 12  # 20.8 GB
    python -m benchmarks.host.loading --dir DIR --converted  # also a folder that jspec-convert writes, as large again
    python -m benchmarks.host.loading --dir DIR --smoke      # tiny and anywhere, with meaningless times

Writes a checkpoint of random weights to a new folder in DIR, which has to be on the disk in question, and removes it again.
Before each reading the files are put out of the page cache, as far as an ordinary user can; the result says which share
of them was there all the same. It times:

- the disk: the files from beginning to end, by one reader, and by as many threads as jspec has;
- a load onto one device, and what a process reads and sends that has one shard of two, as ``jspec.load`` does it;
- the load onto one device again, with the files in the page cache, which shows what is not the disk's time.

Figures are seconds. The floor of a load is its bytes over the faster of both rates of the disk. Needs Linux."""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from benchmarks.peers.folders import model_fields
from benchmarks.report import results
from benchmarks.shapes import LLAMA_70B, TINY
from convert import convert
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.ranges import PIECE, THREADS
from jspec.checkpoints.tensors.names import tensor_table
from jspec.config import ModelConfig, Shards
from jspec.models import build
from jspec.models.flatten import flatten
from jspec.models.sharding import indices_of

VOCABULARY = 8192  # tokens: embedding and output head of all 128,256 would be 4.2 GB of any number of layers
SAMPLES = 1000  # pages of a file that are looked for in the page cache
PAGE = 4096
ATTEMPTS = 5  # to evict a file: pages that were just written may take a moment to count as such


def config_of(layers: int, smoke: bool) -> ModelConfig:
    """The shape that is loaded."""
    whole = TINY if smoke else dataclasses.replace(LLAMA_70B, vocab_size=VOCABULARY)
    return dataclasses.replace(whole, num_layers=layers, windows=())


def write_checkpoint(folder: pathlib.Path, config: ModelConfig):
    """A Hugging Face folder with random weights in bfloat16, a safetensors file for each layer and one for the rest."""
    (folder / "config.json").write_text(json.dumps(model_fields(config)))
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, at in tensor_table(config).items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = at.shape
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    bits = np.random.default_rng(0).integers(0x3000, 0x3F00, PIECE // 2, dtype=np.uint16)  # positive numbers below 1
    for file, shapes in files.items():
        _write_tensors(folder / file, shapes, memoryview(bits).cast("B"))


def _write_tensors(path: pathlib.Path, shapes: dict[str, tuple[int, ...]], numbers: memoryview):
    """A safetensors file of bfloat16 tensors, each made of the bytes ``numbers`` again and again."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(numbers)):
            file.write(numbers[: min(len(numbers), end - start)])
        file.flush()
        os.fsync(file.fileno())


def put_out(files: Sequence[pathlib.Path]) -> float | None:
    """Evict files from the page cache. Returns the share that is still there, None if unknown."""
    cached, looked = 0, 0
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            # A look at a page must not bring in those behind it.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            pages = path.stat().st_size // PAGE
            sampled = range(0, pages, max(pages // SAMPLES, 1))
            left, attempts = len(sampled), 0
            while left and attempts < ATTEMPTS:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                left, attempts = sum(_is_cached(descriptor, page * PAGE) for page in sampled), attempts + 1
            cached, looked = cached + left, looked + len(sampled)
        except NotImplementedError:
            return None
        finally:
            os.close(descriptor)
    return cached / max(looked, 1)


def _is_cached(descriptor: int, start: int) -> bool:
    """Whether a byte of a file can be read without waiting for a disk.

    Raises:
      NotImplementedError: the file system does not say.
    """
    try:
        return os.preadv(descriptor, [bytearray(1)], start, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError as error:
        raise NotImplementedError from error


def read_all(files: Sequence[pathlib.Path], threads: int) -> int:
    """Read files from beginning to end, so many pieces at a time. Returns how many bytes they have."""

    def read(place: tuple[pathlib.Path, int]) -> int:
        with place[0].open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), [bytearray(PIECE)], place[1])

    pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, PIECE)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, pieces))


def load(folder: pathlib.Path) -> int:
    """Load a checkpoint onto the first device. Returns the bytes of its weights."""
    config, params = Checkpoint.open(folder).language_model("bfloat16")
    leaves = jax.block_until_ready(flatten(build(config, params, "bfloat16")).leaves)
    return sum(leaf.nbytes for leaf in leaves)


def load_shard(folder: pathlib.Path, count: int) -> int:
    """Read what the last of so many shards has, and send it to the first device. Returns the bytes of these weights."""
    config, params = Checkpoint.open(folder).language_model("bfloat16")
    shards, sent = Shards(count), []
    for name, one in shards.splits(config).items():
        indices = indices_of(params.shapes[name], one, config.dimensions, shards, count - 1)
        sent += jax.block_until_ready([jax.device_put(part) for part in params.parts(name, indices)])
    return sum(part.nbytes for part in sent)


class Loading:
    """The result of a run, to which one figure after another is added and printed."""

    def __init__(self, settings: dict, file: pathlib.Path | None):
        self.result, self._file = results.begin("loading", settings), file

    def time(self, key: str, do: Callable[[], int], cold: Sequence[pathlib.Path] = (), rate: float = 0) -> float:
        """Time one reading. Returns its rate in bytes per second.

        Args:
          key: of the figure.
          do: reads, and returns how many bytes.
          cold: the files that are put out of the page cache before.
          rate: of the disk, from which the floor follows; 0 for none.
        """
        cached = put_out(cold) if cold else 1.0
        began = time.perf_counter()
        nbytes = do()
        seconds = time.perf_counter() - began
        self.result.measured[key] = seconds
        self.result.details[key] = {"unit": "s", "bytes": nbytes, "rate": nbytes / seconds, "cached": cached}
        beside = ""
        if rate:
            self.result.floors[key] = nbytes / rate
            beside = f", {100 * nbytes / seconds / rate:.0f}% of the disk's rate"
        state = "unknown" if cached is None else f"{100 * cached:.0f}%"
        print(
            f"{key:<40} {seconds:8.2f} s {nbytes / seconds / 1e9:7.2f} GB/s, cached before: {state}{beside}", flush=True
        )
        if self._file is not None:
            results.write(self.result, self._file)
        return nbytes / seconds


def measure(folder: pathlib.Path, config: ModelConfig, loading: Loading, converted: bool):
    """Write the checkpoint and time all there is."""
    (source := folder / "safetensors").mkdir()
    began = time.perf_counter()
    write_checkpoint(source, config)
    size = sum(path.stat().st_size for path in source.iterdir())
    print(f"{size / 1e9:.1f} GB written in {time.perf_counter() - began:.0f} s", flush=True)
    folders = {"safetensors": source}
    if converted:
        convert(source, folder / "converted")
        folders["converted"] = folder / "converted"
    for kind, at in folders.items():
        files = sorted(path for path in at.rglob("*") if path.is_file() and path.stat().st_size >= PAGE)
        alone = loading.time(f"{kind}, disk, one reader", lambda files=files: read_all(files, 1), files)
        several = f"{kind}, disk, {THREADS} readers"
        rate = max(alone, loading.time(several, lambda files=files: read_all(files, THREADS), files))
        loading.time(f"{kind}, load, one device", lambda at=at: load(at), files, rate)
        loading.time(f"{kind}, load, a shard of two", lambda at=at: load_shard(at, 2), files, rate)
        read_all(files, THREADS)
        loading.time(f"{kind}, load, one device, cached", lambda at=at: load(at))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="a folder on the disk in question")
    parser.add_argument("--layers", type=int, default=3, help="of 1.7 GB each")
    parser.add_argument("--converted", action="store_true", help="also load a folder that jspec-convert writes")
    parser.add_argument("--smoke", action="store_true", help="tiny shape, any machine, meaningless times")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where the result goes")
    args = parser.parse_args()
    config = config_of(args.layers, args.smoke)
    need, free = (1 + args.converted) * config.weight_bytes(2), os.statvfs(args.dir)
    if need > 0.95 * free.f_bavail * free.f_frsize:
        parser.error(f"--layers {args.layers}: {need:,} bytes are more than {args.dir} has free; give fewer layers")
    jax.block_until_ready(jax.device_put(np.zeros(1)))  # the device is started
    settings = {
        "layers": args.layers,
        "vocabulary": config.vocab_size,
        "converted": args.converted,
        "smoke": args.smoke,
    }
    loading = Loading(settings, args.json)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        measure(pathlib.Path(folder), config, loading, args.converted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
