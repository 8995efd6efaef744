"""Proof that a converted folder is the same model: shapes against jspec's modules, logits against transformers."""

import dataclasses
import importlib.util
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from convert.loading import load_draft, load_folder
from convert.refusal import Mismatch, Refusal
from convert.source import Source
from jspec.models.causal import causal_logits
from jspec.models.params import abstract_params, build
from jspec.models.split import split

LENGTHS = (5, 33, 128)

# Both sides compute in fp32. With weights kept exactly only rounding differs; weights rounded to bfloat16 move the law.
EXACT_KL, EXACT_RELATIVE_ERROR = 1e-5, 1e-3
ROUNDED_KL = 0.015


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far two sets of logits are apart.

    Attributes:
      mean_kl, max_kl: KL(reference || ours) in nats, over positions.
      relative_error: largest absolute difference over the largest reference logit.
    """

    mean_kl: float
    max_kl: float
    relative_error: float

    def __str__(self) -> str:
        return (
            f"KL divergence mean {self.mean_kl:.2e}, max {self.max_kl:.2e} nats; "
            f"max relative logit error {self.relative_error:.2e}"
        )


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


def verify_logits(source: Source, folder: Path, dtype: str) -> str:
    """Compare the fp32 logits of ``folder`` with transformers' on the source.

    Raises:
      Mismatch: they are further apart than rounding explains.
    """
    comparison = compare_logits(source.folder.root, folder)
    if dtype == "float32" or source.exact_dtype == "bfloat16":
        good = comparison.max_kl <= EXACT_KL and comparison.relative_error <= EXACT_RELATIVE_ERROR
    else:
        good = comparison.mean_kl <= ROUNDED_KL
    if not good:
        raise Mismatch(f"{source.folder.given}: logits differ from transformers': {comparison}")
    return f"logits verified against transformers: {comparison}"


def compare_logits(reference: str | os.PathLike, ours: str | os.PathLike) -> Comparison:
    """Logits of the Hugging Face folder ``reference`` by transformers against those of ``ours`` by jspec, in fp32."""
    require_transformers()
    config, params = load_folder(ours, "float32")
    rng = np.random.default_rng(0)
    lengths = sorted({min(length, config.max_position) for length in LENGTHS})
    sequences = [rng.integers(config.vocab_size, size=length) for length in lengths]
    expected = transformers_logits(reference, sequences)
    found = jspec_logits(build(config, {name: jnp.asarray(array) for name, array in params.items()}), sequences)
    divergence = np.concatenate([_kl(e, f) for e, f in zip(expected, found, strict=True)])
    error = max(float(np.abs(e - f).max() / np.abs(e).max()) for e, f in zip(expected, found, strict=True))
    return Comparison(float(divergence.mean()), float(divergence.max()), error)


def require_transformers():
    """Raise unless torch and transformers are installed; imports neither."""
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        raise Refusal(f"--verify logits needs {' and '.join(absent)}, which is not installed; pip install it first")


def transformers_logits(folder: str | os.PathLike, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """fp32 CPU logits ``[T, V]`` of each token sequence by transformers; never runs code from the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    ).eval()
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
