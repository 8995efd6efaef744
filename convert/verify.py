"""Verifies that a converted folder holds the same model as its source.

The names, shapes and dtypes of the params are compared with those of jspec's modules, and the logits with those that
transformers computes from the source.

A folder with quantised weights holds another model, so its logits differ. For such a folder the source is quantised
again, and the bits have to be equal. The logits of the source's own weights, loaded by the same code, have to pass the
comparison with transformers. How far quantisation moves the distribution, the KL divergence, is reported without a
limit, because what is acceptable depends on the use."""

import dataclasses
import importlib.util
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from convert.folders import load_draft, load_folder
from convert.quantize import quantized_param
from jspec.checkpoints.files.json_files import reason_of
from jspec.checkpoints.files.refusal import Mismatch, Refusal
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.models.causal import causal_logits
from jspec.models.flatten import flatten
from jspec.models.params import abstract_params, build
from jspec.quantization.formats import OF_INPUTS

LENGTHS = (5, 33, 128)  # of the token sequences whose logits are compared
MAX_REASON = 500  # characters

# Limits. Both sides compute in fp32. If the weights were kept exactly, the logits differ by fp32 rounding alone. If they
# were rounded to bfloat16, the distribution moves, and only its mean KL divergence in nats is limited.
EXACT_KL, EXACT_RELATIVE_ERROR = 1e-5, 1e-3
ROUNDED_KL = 0.015


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far two sets of logits are apart.

    Attributes:
      mean_kl, max_kl: mean and maximum over positions of KL(reference || ours), in nats.
      relative_error: the largest absolute difference of two logits, divided by the largest reference logit.
      top1: the share of positions at which both have the same most probable token.
      positions: the number of positions.
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
        """Whether the two differ by no more than fp32 rounding."""
        return self.max_kl <= EXACT_KL and self.relative_error <= EXACT_RELATIVE_ERROR


def verify_shapes(folder: Path, dtype: str) -> str:
    """A note for the user, after the params in ``folder`` were compared with jspec's modules of the same config.

    Args:
      folder: the converted folder.
      dtype: the dtype of its params that are not quantised.

    Raises:
      Mismatch: the name, the shape or the dtype of a param differs.
    """
    config, params = load_draft(folder)
    expected = {name: (leaf.shape, leaf.dtype) for name, leaf in abstract_params(config, dtype).items()}
    stored = {name: (array.shape, array.dtype) for name, array in params.items()}
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            raise Mismatch(f"{folder}: parameter {name!r} is {stored.get(name)}, expected {expected.get(name)}")
    return f"shapes verified: {len(stored)} params"


def verify_weights(source: HuggingFaceModel, folder: Path) -> str:
    """A note for the user, after the weights in ``folder`` were compared with those of ``source``.

    Those of the source are quantised again for this, unless the files hold them in eight bits.

    Raises:
      Mismatch: a weight or a scale differs in any bit.
    """
    quantized, (_, params) = source.config.stored_params(), load_draft(folder)
    for name, stored in quantized.items():
        for param, expected in zip((name, stored.names["scale"]), quantized_param(source, name), strict=True):
            if not np.array_equal(params[param].view(np.uint8), expected.view(np.uint8)):
                raise Mismatch(f"{folder}: parameter {param!r} is not that of the source, quantised")
    beside = ("channel_scale", *OF_INPUTS)
    for param in (name for stored in quantized.values() for part, name in stored.names.items() if part in beside):
        if not np.array_equal(params[param], source.param(param, source.exact_dtype)):
            raise Mismatch(f"{folder}: parameter {param!r} is not that of the source")
    how = "as they are stored" if source.layout.holds_scales else "rounded once"
    return f"{source.config.formats} weights verified: {len(quantized)} params are the source's, {how}"


def verify_logits(source: HuggingFaceModel, folder: Path, dtype: str) -> list[str]:
    """Notes for the user, after the fp32 logits of ``folder`` were compared with those of transformers on the source.

    Args:
      source: the open Hugging Face folder.
      folder: the converted folder.
      dtype: the dtype of its params that are not quantised.

    Raises:
      Mismatch: the logits are further apart than rounding to ``dtype`` explains. For a quantised ``folder``: the logits
        of the source's own weights are further apart than fp32 rounding explains, or those of ``folder`` are not finite.
    """
    quantization, where = source.config.quantization, source.folder.given
    sequences = _sequences(source)
    expected = transformers_logits(source.folder.root, sequences)
    comparison = compare(expected, _logits(folder, sequences))
    if quantization is None:
        lossless = dtype == "float32" or source.exact_dtype == "bfloat16"
        if not (comparison.exact if lossless else comparison.mean_kl <= ROUNDED_KL):
            raise Mismatch(f"{where}: logits differ from transformers': {comparison}")
        return [f"logits verified against transformers: {comparison}"]
    original = compare(expected, _logits(source.folder.root, sequences))
    if not original.exact:
        raise Mismatch(f"{where}: logits of the original weights differ from transformers': {original}")
    if not np.isfinite(comparison.max_kl):
        raise Mismatch(f"{where}: logits of the {quantization} weights are not finite")
    return [
        f"logits of the original weights verified against transformers: {original}",
        f"KL(original || {quantization}) mean {comparison.mean_kl:.2e}, max {comparison.max_kl:.2e} nats per token, top-1 "
        f"agreement {comparison.top1:.1%}, over {comparison.positions} random tokens",
    ]


def compare(reference: list[np.ndarray], ours: list[np.ndarray]) -> Comparison:
    """How far ``ours`` is from ``reference``; both hold the logits of the same token sequences, each ``[length, V]``."""
    pairs = list(zip(reference, ours, strict=True))
    divergence = np.concatenate([_kl(r, o) for r, o in pairs])
    agreement = np.concatenate([r.argmax(-1) == o.argmax(-1) for r, o in pairs])
    error = max(float(np.abs(r - o).max() / np.abs(r).max()) for r, o in pairs)
    return Comparison(
        float(divergence.mean()), float(divergence.max()), error, float(agreement.mean()), len(divergence)
    )


def _sequences(source: HuggingFaceModel) -> list[np.ndarray]:
    """Random token sequences, int ``[length]``, of ``LENGTHS`` or as many tokens as the model has positions for."""
    model = source.config.language_model
    assert model is not None
    rng = np.random.default_rng(0)
    lengths = sorted({min(length, model.max_position) for length in LENGTHS})
    return [rng.integers(model.vocab_size, size=length) for length in lengths]


def _logits(folder: Path, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """fp32 logits ``[length, V]`` of each token sequence, by jspec from the checkpoint in ``folder``."""
    config, params = load_folder(folder, "float32")
    return jspec_logits(build(config, {name: jnp.asarray(array) for name, array in params.items()}), sequences)


def require_transformers():
    """Raise a ``Refusal`` unless torch and transformers are installed; neither is imported."""
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        raise Refusal(f"--verify logits needs {' and '.join(absent)}, which is not installed; pip install it first")


def transformers_logits(folder: str | os.PathLike, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """fp32 logits ``[length, V]`` of each token sequence, by transformers on the CPU; no code from the folder runs.

    Raises:
      Refusal: transformers cannot load the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        is_text = type(config) in AutoModelForCausalLM._model_mapping
        model = (
            (AutoModelForCausalLM if is_text else AutoModelForImageTextToText)
            .from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
            .eval()
        )
    except Exception as error:  # transformers raises many kinds
        raise Refusal(
            f"{folder}: transformers cannot load it ({reason_of(error)[:MAX_REASON]}); correct that, or verify shapes only"
        ) from None
    with torch.no_grad():
        return [model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy() for tokens in sequences]


def jspec_logits(model, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Logits ``[length, V]`` of each token sequence, by one causal pass of a decoder of ``jspec.models``."""
    leaves, merge = flatten(model)
    forward = jax.jit(lambda leaves, tokens: causal_logits(merge(leaves), tokens)[0])
    return [np.asarray(forward(leaves, jnp.asarray(tokens[None], jnp.int32))) for tokens in sequences]


def _kl(reference: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """KL(reference || ours) in nats at each position, float64 ``[length]``, from logits ``[length, V]``.

    Rounding can make it slightly negative; such values are set to 0."""
    p, q = _log_softmax(reference), _log_softmax(ours)
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
