"""What memory a load takes, of the host and of the device, and how long it reads.

The goal is the bytes of the file and 5% on the device, and 1 GiB on the host.

    python -m benchmarks.host.memory --dir DIR                         # NF4 of the 8B shape, 5.6 GiB; about 4 minutes
    python -m benchmarks.host.memory --dir DIR --formats nf4 gptq fp8  # one after another
    python -m benchmarks.host.memory --dir DIR --layers 4 --vocabulary 32000  # a smaller one
    python -m benchmarks.host.memory --dir DIR --smoke                 # every format, tiny and anywhere

Writes a checkpoint of random codes to a new folder in DIR, loads it in a fresh process and removes it again. That process
builds the module of the target first, as ``jspec.load`` does it, and then calls ``jspec.load`` itself:

- ``weights``: bytes of the module's arrays; ``peak``: of the device's memory meanwhile, there is no cache yet;
- ``host``: most of the process's own memory (USS) meanwhile, above that before, without arrays of a CPU as the device;
- ``reading``: the seconds of that, and of all processors;
- ``load`` and ``compiled``: the seconds of ``jspec.load`` and of compilations in it.

Folders are not those of real tools, whose numbers the tests compare: only their tensors have the same names and sizes."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.report import results
from jspec.quantization.tables import TABLES

SEED = np.random.default_rng(0)
Arrays = dict[str, np.ndarray]
GIB = 1 << 30


def codes(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    """Random bytes, as numbers of this dtype."""
    return (
        SEED.integers(256, size=int(np.prod(shape)) * np.dtype(dtype).itemsize, dtype=np.uint8)
        .view(dtype)
        .reshape(shape)
    )


def plain(*shape: int) -> np.ndarray:
    """Random weights in bfloat16, between -0.03 and 0.03."""
    bits = SEED.integers(1 << 15, size=shape, dtype=np.uint16)
    return ((bits & 0x80FF) + 0x3C00 | (bits & 1) << 15).astype(np.uint16).view(ml_dtypes.bfloat16)


def _nf4(name: str, out: int, inputs: int) -> Arrays:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, inputs]}
    return {
        f"{name}.weight": codes(out * inputs // 2, 1),
        f"{name}.weight.absmax": np.full(out * inputs // 64, 0.05, np.float32),
        f"{name}.weight.quant_map": np.sort(TABLES["nf4"].values()),
        f"{name}.weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def _gptq(name: str, out: int, inputs: int) -> Arrays:
    return {
        f"{name}.qweight": codes(inputs // 8, out, dtype=np.int32),
        f"{name}.qzeros": np.full((inputs // 128, out // 8), 0x77777777, np.int32),
        f"{name}.scales": np.full((inputs // 128, out), 0.005, np.float16),
        f"{name}.g_idx": (np.arange(inputs) // 128).astype(np.int32),
    }


def _awq(name: str, out: int, inputs: int) -> Arrays:
    return {
        f"{name}.qweight": codes(inputs, out // 8, dtype=np.int32),
        f"{name}.qzeros": np.full((inputs // 128, out // 8), 0x77777777, np.int32),
        f"{name}.scales": np.full((inputs // 128, out), 0.005, np.float16),
    }


def _packed(name: str, out: int, inputs: int) -> Arrays:
    return {
        f"{name}.weight_packed": codes(out, inputs // 8, dtype=np.int32),
        f"{name}.weight_scale": np.full((out, inputs // 128), 0.005, ml_dtypes.bfloat16),
        f"{name}.weight_shape": np.array([out, inputs], np.int64),
    }


def _fp8(name: str, out: int, inputs: int) -> Arrays:
    numbers = (codes(out, inputs) & 0xBF).view(ml_dtypes.float8_e4m3fn)
    return {f"{name}.weight": numbers, f"{name}.weight_scale": np.full((out, 1), 0.01, np.float32)}


def _mxfp8(name: str, out: int, inputs: int) -> Arrays:
    return _fp8(name, out, inputs) | {f"{name}.weight_scale": np.full((out, inputs // 32), 120, np.uint8)}


def _compressed(form: str, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _bfloat16(name: str, out: int, inputs: int) -> Arrays:
    return {f"{name}.weight": plain(out, inputs)}


# Format -> the tensors of a map, and ``quantization_config``; None if there is none.
FORMATS: dict[str, tuple[Callable[[str, int, int], Arrays], dict | None]] = {
    "bfloat16": (_bfloat16, None),
    "nf4": (_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
    "int4": (_packed, _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)),
    "fp8": (_fp8, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "mxfp8": (
        _mxfp8,
        _compressed(
            "mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
        ),
    ),
}


def write(folder: pathlib.Path, form: str, sizes: tuple[int, int, int, int]):
    """A Hugging Face folder of a Llama.

    Args:
      folder: it must not exist.
      form: a key of ``FORMATS``.
      sizes: hidden size, intermediate size, vocabulary, layers.
    """
    (D, F, V, L), of_map = sizes, FORMATS[form][0]
    folder.mkdir()
    heads = {"num_attention_heads": D // 128, "num_key_value_heads": max(D // 512, 1), "head_dim": 128}
    kv, index = 128 * heads["num_key_value_heads"], {}

    def add(file: str, arrays: Arrays):
        save_file(arrays, folder / file)
        index.update(dict.fromkeys(arrays, file))

    add("rest.safetensors", {f"{name}.weight": plain(V, D) for name in ("model.embed_tokens", "lm_head")})
    add("norm.safetensors", {"model.norm.weight": plain(D)})
    maps = {
        **{"self_attn.q_proj": (D, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D)},
        **{"self_attn.o_proj": (D, D), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)},
    }
    for layer in range(L):
        at, arrays = f"model.layers.{layer}.", {}
        for name, (out, inputs) in maps.items():
            arrays |= of_map(at + name, out, inputs)
        norms = ("input_layernorm", "post_attention_layernorm")
        add(f"layer{layer}.safetensors", arrays | {f"{at}{norm}.weight": plain(D) for norm in norms})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    fields = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": F},
        **{"num_hidden_layers": L, **heads, "vocab_size": V, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        **{"max_position_embeddings": 8192, "tie_word_embeddings": False, "eos_token_id": 2, "hidden_act": "silu"},
    }
    if (quantization := FORMATS[form][1]) is not None:
        fields["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(fields))


class Watch:
    """Watches the memory of this process in another thread, from ``start`` to ``stop``."""

    def __init__(self):
        import psutil

        self._process, self._peak, self._arrays, self._stopped = psutil.Process(), 0, 0, threading.Event()
        self._before, self._thread = self._own(), threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _own(self) -> int:
        """Bytes that no other process has: those of pages of files are not among them. Arrays of a CPU do not count, of
        which none is deleted meanwhile; one that a program replaces is in no list for a moment."""
        import jax

        own = self._process.memory_full_info().uss
        if jax.default_backend() == "cpu":
            self._arrays = max(self._arrays, sum(array.nbytes for array in jax.live_arrays()))
        return own - self._arrays

    def _watch(self):
        while not self._stopped.wait(0.05):
            self._peak = max(self._peak, self._own())

    def stop(self) -> int:
        """The most bytes above those at the beginning."""
        self._stopped.set()
        self._thread.join()
        return self._peak - self._before


def measured(folder: pathlib.Path, dtype: str) -> dict[str, float]:
    """The figures of a folder, in this process, which has loaded nothing yet."""
    import jax

    import jspec
    from jspec.checkpoints.checkpoint import Checkpoint
    from jspec.models import build

    compiled = [0.0]

    def compiles(event: str, duration_secs: float, **_):
        compiled.append(duration_secs * ("backend_compile" in event))

    jax.monitoring.register_event_duration_secs_listener(compiles)
    jax.block_until_ready(jax.device_put(np.zeros(1)) + 1)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    watch, began, used = Watch(), time.perf_counter(), time.process_time()
    config, params = Checkpoint.open(folder).language_model(dtype)
    module = build(config, params, dtype)
    arrays = jax.block_until_ready(jax.tree.leaves(module))
    reading, used, host = time.perf_counter() - began, time.process_time() - used, watch.stop()
    weights = sum(array.nbytes for array in arrays)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    compiled_before = sum(compiled)
    del config, params, module, arrays
    watch, began = Watch(), time.perf_counter()
    jspec.load(str(folder), dtype=dtype, max_batch=1, max_len=512)
    load, of_load = time.perf_counter() - began, watch.stop()
    return {
        **{"file": size, "weights": weights, "peak": peak, "host": host, "host of load": of_load},
        **{"reading": reading, "processors": used, "compiled in it": compiled_before},
        **{"load": load, "compiled": sum(compiled) - compiled_before},
    }


def lines(figures: dict[str, float]) -> Iterator[str]:
    """The figures in words."""
    size = figures["file"]
    yield f"file {size / GIB:.3f} GiB; weights {figures['weights'] / GIB:.3f} GiB ({figures['weights'] / size:.3f} of it)"
    if figures["peak"]:
        yield f"peak of the device while they are read {figures['peak'] / GIB:.3f} GiB ({figures['peak'] / size:.3f})"
    yield f"host {figures['host'] / GIB:.3f} GiB while they are read, {figures['host of load'] / GIB:.3f} in jspec.load"
    reading = f"reading {figures['reading']:.1f} s, {figures['compiled in it']:.1f} of which compile"
    yield f"{reading}; {figures['processors']:.1f} s of processors"
    yield f"jspec.load {figures['load']:.1f} s, {figures['compiled']:.1f} of which compile"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="where the folders are written")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=None, help="nf4 by default")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--smoke", action="store_true", help="every format, tiny, any machine, meaningless figures")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where the result goes")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)  # DIR, in this process
    args = parser.parse_args()
    dtype = "float32" if args.smoke else "bfloat16"
    if args.load:
        print(json.dumps(measured(args.dir, dtype)))
        return 0
    sizes = (256, 512, 512, 2) if args.smoke else (4096, 14336, args.vocabulary, args.layers)
    result = results.begin("memory", {"sizes": sizes, "smoke": args.smoke})
    for form in args.formats or (FORMATS if args.smoke else ["nf4"]):
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            write(path := pathlib.Path(folder) / form, form, sizes)
            again = [sys.executable, "-m", "benchmarks.host.memory", "--load", "--dir", str(path)]
            done = subprocess.run(again + ["--smoke"] * args.smoke, stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        print(f"{form}:", *lines(figures), sep="\n  ", flush=True)
        result.measured.update({f"{form}, {key}": value for key, value in figures.items()})
        if args.json is not None:
            results.write(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
