"""Verifies that a converted folder holds the same model as its source.

The names, shapes and dtypes of the params are compared with those of jspec's modules, and the logits with those that
transformers computes from the source.

A folder with quantised weights holds another model, so its logits differ. For such a folder the source is quantised
again, and the bits have to be equal. The logits of the source's own weights, loaded by the same code, have to pass the
comparison with transformers. How far quantisation moves the distribution, the KL divergence, is reported without a
limit, because what is acceptable depends on the use."""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from convert.folders import load_draft, load_folder
from convert.quantize import quantized_param
from jspec.checkpoints.files.refusal import Mismatch
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.doctor.figures import divergence, log_softmax
from jspec.doctor.reference import Reference
from jspec.doctor.texts import figures_of
from jspec.doctor.under_test import logits
from jspec.models.params import abstract_params, build
from jspec.quantization.formats import OF_INPUTS

LENGTHS = (5, 33, 128)  # of the token sequences whose logits are compared

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


def verify_logits(source: HuggingFaceModel, folder: Path, dtype: str, windows: Sequence[np.ndarray] = ()) -> list[str]:
    """Notes for the user, after the fp32 logits of ``folder`` were compared with those of transformers on the source.

    Args:
      source: the open Hugging Face folder.
      folder: the converted folder.
      dtype: the dtype of its params that are not quantised.
      windows: a user's texts as tokens, for whose figures there is no limit but that they are finite.

    Raises:
      Mismatch: the logits are further apart than rounding to ``dtype`` explains. For a quantised ``folder``: the logits
        of the source's own weights are further apart than fp32 rounding explains, or those of ``folder`` are not finite.
    """
    quantization, where = source.config.quantization, source.folder.given
    sequences, name = _sequences(source), source.config.formats or dtype
    n, read = len(sequences), [*sequences, *windows]
    expected, ours = transformers_logits(source.folder.root, read), _logits(folder, read)
    comparison = compare(expected[:n], itertools.islice(ours, n))
    on_texts = _on_texts(windows, expected[n:], ours, name, where) if windows else []
    del ours, expected[n:]  # which hold weights, and most of the logits
    if quantization is None:
        lossless = dtype == "float32" or source.exact_dtype == "bfloat16"
        if not (comparison.exact if lossless else comparison.mean_kl <= ROUNDED_KL):
            raise Mismatch(f"{where}: logits differ from transformers': {comparison}")
        return [f"logits verified against transformers: {comparison}", *on_texts]
    original = compare(expected, _logits(source.folder.root, sequences))
    if not original.exact:
        raise Mismatch(f"{where}: logits of the original weights differ from transformers': {original}")
    if not np.isfinite(comparison.max_kl):
        raise Mismatch(f"{where}: logits of the {quantization} weights are not finite")
    return [
        f"logits of the original weights verified against transformers: {original}",
        f"KL(original || {quantization}) mean {comparison.mean_kl:.2e}, max {comparison.max_kl:.2e} nats per token, top-1 "
        f"agreement {comparison.top1:.1%}, over {comparison.positions} random tokens",
        *on_texts,
    ]


def _on_texts(
    windows: Sequence[np.ndarray], expected: list[np.ndarray], ours: Iterator[np.ndarray], name: str, where: str
) -> list[str]:
    """Notes on the user's texts; a ``Mismatch`` if logits are not finite there, which is no matter of rounding."""
    found = figures_of(windows, expected, ours, name)
    if not np.isfinite(found.mean_kl):
        raise Mismatch(f"{where}: logits of the {name} weights are not finite on the texts")
    return [
        *found.sentences,
        "random tokens alone decide whether the verification passes, since their limits are those of rounding; what the "
        "texts may lose has no limit, because that depends on the use",
    ]


def compare(reference: Iterable[np.ndarray], ours: Iterable[np.ndarray]) -> Comparison:
    """How far ``ours`` is from ``reference``; both hold the logits of the same token sequences, each ``[length, V]``."""
    pairs = list(zip(reference, ours, strict=True))
    kl = np.concatenate([divergence(log_softmax(r), log_softmax(o)) for r, o in pairs])
    agreement = np.concatenate([r.argmax(-1) == o.argmax(-1) for r, o in pairs])
    error = max(float(np.abs(r - o).max() / np.abs(r).max()) for r, o in pairs)
    return Comparison(float(kl.mean()), float(kl.max()), error, float(agreement.mean()), len(kl))


def _sequences(source: HuggingFaceModel) -> list[np.ndarray]:
    """Random token sequences, int ``[length]``, of ``LENGTHS`` or as many tokens as the model has positions for."""
    model = source.config.language_model
    assert model is not None
    rng = np.random.default_rng(0)
    lengths = sorted({min(length, model.max_position) for length in LENGTHS})
    return [rng.integers(model.vocab_size, size=length) for length in lengths]


def _logits(folder: Path, sequences: list[np.ndarray]) -> Iterator[np.ndarray]:
    """fp32 logits ``[length, V]`` of each token sequence, by jspec from the checkpoint in ``folder``."""
    config, params = load_folder(folder, "float32")
    return logits(build(config, {name: jnp.asarray(array) for name, array in params.items()}), sequences)


def transformers_logits(folder: str | os.PathLike, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """fp32 logits ``[length, V]`` of each token sequence, by transformers on the CPU; a ``Refusal`` if it cannot."""
    return [reading.logits for reading in Reference(folder, "float32").read(sequences)]


def jspec_logits(model, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """fp32 logits ``[length, V]`` of each token sequence, by one causal pass of a decoder of ``jspec.models``."""
    return list(logits(model, sequences))
