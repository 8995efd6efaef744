"""Proof that a converted folder is the same model: shapes against jspec's modules, logits against transformers.

Quantised weights are another model. Of them the rounding is repeated and has to agree bit for bit, and how far it moves
the distribution is reported: KL has no limit here, because what is too much depends on the use. The unquantised
weights, read by the same code, have to pass the ordinary comparison."""

import dataclasses
import importlib.util
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from convert.quantize import quantized_param
from jspec.checkpoints.json_files import reason_of
from jspec.checkpoints.loading import load_draft, load_folder
from jspec.checkpoints.quantized import quantization_of
from jspec.checkpoints.refusal import Mismatch, Refusal
from jspec.checkpoints.source import Source
from jspec.models.causal import causal_logits
from jspec.models.params import abstract_params, build
from jspec.models.split import split

LENGTHS = (5, 33, 128)
MAX_REASON = 500  # characters

# Both sides compute in fp32. With weights kept exactly only rounding differs; weights rounded to bfloat16 move the
# distribution.
EXACT_KL, EXACT_RELATIVE_ERROR = 1e-5, 1e-3
ROUNDED_KL = 0.015


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far two sets of logits are apart.

    Attributes:
      mean_kl, max_kl: KL(reference || ours) in nats, over positions.
      relative_error: largest absolute difference over the largest reference logit.
      top1: share of positions where both prefer the same token.
      positions: how many.
    """

    mean_kl: float
    max_kl: float
    relative_error: float
    top1: float
    positions: int

    def __str__(self) -> str:
        return (
            f"KL divergence mean {self.mean_kl:.2e}, max {self.max_kl:.2e} nats; "
            f"max relative logit error {self.relative_error:.2e}"
        )

    @property
    def exact(self) -> bool:
        """Whether both are the same but for fp32 rounding."""
        return self.max_kl <= EXACT_KL and self.relative_error <= EXACT_RELATIVE_ERROR


def verify_shapes(folder: Path, dtype: str) -> str:
    """Read the params back and compare names, shapes and dtype with the modules that will use them.

    Raises:
      Mismatch: they differ.
    """
    config, params = load_draft(folder)
    expected = {name: (leaf.shape, leaf.dtype) for name, leaf in abstract_params(config, dtype).items()}
    found = {name: (array.shape, array.dtype) for name, array in params.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise Mismatch(f"{folder}: parameter {name!r} is {found.get(name)}, expected {expected.get(name)}")
    return f"shapes verified: {len(found)} params"


def verify_weights(source: Source, folder: Path) -> str:
    """Quantise the weights of ``source`` again and compare with those of ``folder``, bit for bit.

    Raises:
      Mismatch: they differ.
    """
    scales, (_, params) = source.config.scale_names(), load_draft(folder)
    for name, scale in scales.items():
        for one, expected in zip((name, scale), quantized_param(source, name), strict=True):
            if not np.array_equal(params[one].view(np.uint8), expected.view(np.uint8)):
                raise Mismatch(f"{folder}: parameter {one!r} is not that of the source, quantised")
    return f"{quantization_of(source.config)} weights verified: {len(scales)} params are the source's, rounded once"


def verify_logits(source: Source, folder: Path, dtype: str) -> list[str]:
    """Compare the fp32 logits of ``folder`` with transformers' on the source; returns what to tell, a sentence each.

    Raises:
      Mismatch: they are further apart than rounding to ``dtype`` explains. Of a quantised ``folder``: those of the
        source's own weights are further apart than fp32 rounding explains, or those of ``folder`` are not finite.
    """
    quantization, where = quantization_of(source.config), source.folder.given
    sequences = _sequences(source)
    expected = transformers_logits(source.folder.root, sequences)
    found = compare(expected, _logits(folder, sequences))
    if quantization is None:
        lossless = dtype == "float32" or source.exact_dtype == "bfloat16"
        if not (found.exact if lossless else found.mean_kl <= ROUNDED_KL):
            raise Mismatch(f"{where}: logits differ from transformers': {found}")
        return [f"logits verified against transformers: {found}"]
    original = compare(expected, _logits(source.folder.root, sequences))
    if not original.exact:
        raise Mismatch(f"{where}: logits of the original weights differ from transformers': {original}")
    if not np.isfinite(found.max_kl):
        raise Mismatch(f"{where}: logits of the {quantization} weights are not finite")
    return [
        f"logits of the original weights verified against transformers: {original}",
        f"KL(original || {quantization}) mean {found.mean_kl:.2e}, max {found.max_kl:.2e} nats per token, top-1 agreement "
        f"{found.top1:.1%}, over {found.positions} random tokens",
    ]


def compare(reference: list[np.ndarray], ours: list[np.ndarray]) -> Comparison:
    """Logits ``[T, V]`` of some texts against reference logits of the same."""
    pairs = list(zip(reference, ours, strict=True))
    divergence = np.concatenate([_kl(r, o) for r, o in pairs])
    agreement = np.concatenate([r.argmax(-1) == o.argmax(-1) for r, o in pairs])
    error = max(float(np.abs(r - o).max() / np.abs(r).max()) for r, o in pairs)
    return Comparison(
        float(divergence.mean()), float(divergence.max()), error, float(agreement.mean()), len(divergence)
    )


def _sequences(source: Source) -> list[np.ndarray]:
    """Random token ids, a few lengths of them."""
    model = source.config.language_model
    assert model is not None
    rng = np.random.default_rng(0)
    lengths = sorted({min(length, model.max_position) for length in LENGTHS})
    return [rng.integers(model.vocab_size, size=length) for length in lengths]


def _logits(folder: Path, sequences: list[np.ndarray]) -> list[np.ndarray]:
    config, params = load_folder(folder, "float32")
    return jspec_logits(build(config, {name: jnp.asarray(array) for name, array in params.items()}), sequences)


def require_transformers():
    """Raise unless torch and transformers are installed; imports neither."""
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        raise Refusal(f"--verify logits needs {' and '.join(absent)}, which is not installed; pip install it first")


def transformers_logits(folder: str | os.PathLike, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """fp32 CPU logits ``[T, V]`` of each token sequence by transformers; never runs code from the folder.

    Raises:
      Refusal: transformers cannot load the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        ).eval()
    except Exception as error:  # of many kinds
        raise Refusal(
            f"{folder}: transformers cannot load it ({reason_of(error)[:MAX_REASON]}); correct that, or verify shapes only"
        ) from None
    with torch.no_grad():
        return [model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy() for tokens in sequences]


def jspec_logits(model, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Logits ``[T, V]`` of each token sequence by a decoder of ``jspec.models``, one causal pass each."""
    leaves, merge = split(model)
    forward = jax.jit(lambda leaves, tokens: causal_logits(merge(leaves), tokens)[0])
    return [np.asarray(forward(leaves, jnp.asarray(tokens[None], jnp.int32))) for tokens in sequences]


def _kl(reference: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """KL divergence per row of ``[T, V]`` logits, in float64; rounding below zero is clipped."""
    p, q = _log_softmax(reference), _log_softmax(ours)
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
