"""How far ways to choose the scales of ``int4`` move a real model's distribution, in float32 on a CPU.

    python -m benchmarks.host.int4_rules FOLDER                   # a Hugging Face folder; needs pip install 'jspec[parity]'
    python -m benchmarks.host.int4_rules FOLDER --tokens 192 --rules jspec max7
    python -m benchmarks.host.int4_rules FOLDER --no-noise --against jspec --rules products

Weights that were rounded to four bits before would favour the rule that rounded them. So noise of half a step of a grid of
32 numbers is added first, and the model with the noise is the original. The linear maps of its layers are rounded in groups
of 128; embedding and output head are left alone without ``--head``. Printed are, for each rule, the squared error of the
weights, the perplexity, KL(original || rounded) in nats a token and how often both have the same likeliest next token, over
the sources of four modules of Python.

    max7      the largest magnitude / 7, to nearest
    peak8     the number of largest magnitude becomes -8
    squares   the least squared error of peaks -8, -9 and -10
    jspec     ``jspec.quantization.int4``: the least error in which large numbers count more
    convert   what ``jspec-convert --quantize int4`` writes: that, and some maps and the head in int8

Beside them, ``int8`` and ``fp8`` have eight bits with a scale for each output channel, as ``jspec-convert`` stores them.
``nf4`` is what bitsandbytes writes, and ``mxfp8`` and ``nvfp4`` are rounded as NVIDIA Model Optimizer does it.
``products`` is ``jspec`` as kernels multiply x of bfloat16 by it (``Weight.multiplied``), and ``products16`` has the same
with scales of float16 that are no numbers of bfloat16, as most checkpoints have them."""

import argparse
import functools
import heapq
import inspect
import string
import sys
import textwrap
from collections.abc import Callable

import numpy as np
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.tensors.names import tensor_table
from jspec.models.quantization import quantize
from jspec.quantization import codes, int4
from jspec.quantization.formats import known_format
from jspec.quantization.weight import Weight

TEXTS = (argparse, heapq, textwrap, string)
GROUP, NOISE_GROUP, FP8 = 128, 32, torch.finfo(torch.float8_e4m3fn)


def in_groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    """``[out, in]`` -> ``[out, groups, size]``, with zeros behind the last input."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).reshape(len(weight), -1, size)


def rounded(groups: torch.Tensor, scale: torch.Tensor, lowest: int = -8) -> torch.Tensor:
    scale = torch.where(scale == 0, 1.0, scale.bfloat16().float())
    return torch.clamp(torch.round(groups / scale), lowest, 7) * scale


def with_peaks(weight: torch.Tensor, peaks: tuple[float, ...]) -> torch.Tensor:
    groups = in_groups(weight, GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    candidates = torch.stack([rounded(groups, largest / -peak) for peak in peaks])
    best = (candidates - groups).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return candidates.gather(0, best.expand(1, *groups.shape))[0].reshape(len(weight), -1)


def with_max7(weight: torch.Tensor) -> torch.Tensor:
    groups = in_groups(weight, GROUP)
    return rounded(groups, groups.abs().amax(-1, keepdim=True) / 7).reshape(len(weight), -1)


def with_jspec(weight: torch.Tensor) -> torch.Tensor:
    packed, scale = int4.quantize(weight.numpy())
    numbers = codes.unpack_codes(packed, weight.shape[1]).astype(np.float32) - codes.ZERO
    return torch.from_numpy(numbers * np.repeat(scale.astype(np.float32), GROUP, axis=1)[:, : weight.shape[1]])


def as_multiplied(weight: torch.Tensor, dtype: str = "bfloat16") -> torch.Tensor:
    packed, scale = int4.quantize(weight.numpy())
    factors = np.float32(1 if dtype == "bfloat16" else 1 + 2.0**-9)  # between two numbers of bfloat16
    form, scale = known_format(f"int4_{GROUP}_{dtype}"), (scale.astype(np.float32) * factors).astype(dtype)
    return torch.from_numpy(Weight(packed, scale, form=form, inputs=weight.shape[1]).multiplied() / factors)


def with_eight_bits(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    numbers, scale = quantize(weight.numpy(), quantization)
    return torch.from_numpy(numbers.astype(np.float32) * scale[:, None])


def formats_of(folder: str) -> dict[str, str]:
    """Name of each quantised tensor -> the rule by which ``jspec-convert --quantize int4`` rounds it."""
    config = Checkpoint.open(folder).target_config.with_quantization("int4")
    stored, rules = config.stored_params(), {"int4": "jspec", "int8": "int8"}
    return {name: rules[stored[at.param].form.name] for name, at in tensor_table(config).items() if at.param in stored}


def with_nf4(weight: torch.Tensor) -> torch.Tensor:
    return dequantize_4bit(*quantize_4bit(weight, blocksize=64, quant_type="nf4"))


def with_mxfp8(weight: torch.Tensor) -> torch.Tensor:
    groups = in_groups(weight, 32)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(largest / FP8.max)))
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).reshape(len(weight), -1)


def with_nvfp4(weight: torch.Tensor) -> torch.Tensor:
    groups = in_groups(weight, 16)
    overall = weight.abs().max() / (6 * FP8.max)
    scale = (groups.abs().amax(-1, keepdim=True) / 6 / overall).to(torch.float8_e4m3fn).float() * overall
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    each = (groups / scale.clamp(min=2.0**-100)).abs()
    nearest = magnitudes[torch.bucketize(each, (magnitudes[1:] + magnitudes[:-1]) / 2)]
    return (nearest * groups.sign() * scale).reshape(len(weight), -1)


RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max7": with_max7,
    "peak8": lambda weight: with_peaks(weight, (8.0,)),
    "squares": lambda weight: with_peaks(weight, (8.0, 9.0, 10.0)),
    "jspec": with_jspec,
    "products": as_multiplied,
    "products16": functools.partial(as_multiplied, dtype="float16"),
    "int8": functools.partial(with_eight_bits, quantization="int8"),
    "fp8": functools.partial(with_eight_bits, quantization="fp8"),
    "nf4": with_nf4,
    "mxfp8": with_mxfp8,
    "nvfp4": with_nvfp4,
}


def with_noise(weight: torch.Tensor) -> torch.Tensor:
    groups = in_groups(weight, NOISE_GROUP)
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    return (groups + (torch.rand_like(groups) - 0.5) * step).reshape(len(weight), -1)[:, : weight.shape[1]].contiguous()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--head", action="store_true", help="round embedding and output head, too")
    parser.add_argument(
        "--no-noise", action="store_true", help="for rules of eight bits, which no grid of four favours"
    )
    parser.add_argument("--against", choices=RULES, help="the rule whose model others are compared with")
    parser.add_argument("--rules", nargs="+", choices=[*RULES, "convert"], default=[*RULES, "convert"])
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    sources = (inspect.getsource(module)[2000 : 2000 + 8 * args.tokens] for module in TEXTS)
    texts = [torch.tensor(tokenizer.encode(source)[: args.tokens]) for source in sources]
    maps = {n: p for n, p in model.named_parameters() if p.ndim == 2 and (args.head or ".layers." in n)}
    for weight in () if args.no_noise else maps.values():
        weight.data = with_noise(weight.data)
    converted = formats_of(args.folder)
    original = {name: weight.data.clone() for name, weight in maps.items()}

    def log_probabilities() -> list[torch.Tensor]:
        with torch.no_grad():
            return [torch.log_softmax(model(text[None]).logits[0], -1) for text in texts]

    def perplexity(predicted: list[torch.Tensor]) -> float:
        each = [-p[:-1].gather(1, t[1:, None]).mean() for p, t in zip(predicted, texts, strict=True)]
        return float(torch.stack(each).mean().exp())

    for name, weight in maps.items() if args.against else ():
        weight.data = RULES[args.against](original[name])[:, : weight.shape[1]].contiguous()
    expected = log_probabilities()
    print(f"original: perplexity {perplexity(expected):.2f}", flush=True)
    for rule in args.rules:
        error = size = 0.0
        for name, weight in maps.items():
            chosen = converted[name] if rule == "convert" else rule
            weight.data = RULES[chosen](original[name])[:, : weight.shape[1]].contiguous()
            error += float((weight.data - original[name]).square().sum())
            size += float(original[name].square().sum())
        found = log_probabilities()
        pairs = list(zip(expected, found, strict=True))
        divergence = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs]).mean()
        same = torch.cat([(p.argmax(-1) == q.argmax(-1)).float() for p, q in pairs]).mean()
        print(
            f"{rule:8} squared error {error / size:.4f}  perplexity {perplexity(found):.2f}  KL {divergence:.3g}  "
            f"same token {same:.1%}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
