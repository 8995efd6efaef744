"""``ConvertedModel``: the language model or draft head in a folder that ``jspec-convert`` wrote."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jspec.checkpoints.converted.cache import scales_of, scheme_of
from jspec.checkpoints.converted.manifest import AGAIN, CACHE, NAME, PARAMS, damage, read_manifest, require_whole
from jspec.checkpoints.converted.orbax import stored_arrays
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.fp8_numbers import has_nan
from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.layouts import stored
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.quantized.cache_scheme import CacheScheme
from jspec.checkpoints.tensors.params import StoredParams, stored_params
from jspec.config import ModelConfig
from jspec.config.heads import Eagle3Config, HeadConfig, MTPConfig
from jspec.quantization.formats import Format
from jspec.quantization.levels import shared_numbers


class ConvertedModel:
    """The config and the params in a converted folder, each read when it is first needed.

    Args:
      folder: the folder, which has a manifest; it records digests.
      options: what the user said of the draft head.
    """

    def __init__(self, folder: Folder, options: HeadOptions):
        self.folder, self._options = folder, options

    @functools.cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest, checked."""
        return read_manifest(self.folder)

    @functools.cached_property
    def language_model_config(self) -> ModelConfig:
        """The config of the language model.

        Its config.json is a copy of the original one, so whether the weights are quantised, whether shared experts are an
        MLP of their own, and whether it has a draft vocabulary, are read from the manifest."""
        config, manifest = read_config(self.folder), self.manifest
        try:
            kind, others = manifest.get("quantization"), stored.other_formats(manifest)
            config = dataclasses.replace(config, quantization=kind, other_formats=others)
            if manifest.get("shared_width") and config.experts is not None:
                config = dataclasses.replace(config, experts=config.experts.with_shared_apart())
            size = manifest.get("draft_vocab_size")
            return config if size is None else config.with_draft_vocabulary(size)
        except ValueError as error:
            raise Refusal(f"{self.folder.given}/{NAME}: {error}; convert the checkpoint again") from None

    @functools.cached_property
    def config(self) -> ModelConfig | HeadConfig:
        """The config of the language model or the draft head.

        The manifest has settled what the options would say. An option that has no use, or says otherwise, is refused."""
        head, where, options = self.manifest.get("head"), f"{self.folder.given}/{NAME}", self._options
        config = self.language_model_config if head is None else stored.from_json(head, where)
        eagle3, mtp = isinstance(config, Eagle3Config), isinstance(config, MTPConfig)
        mask = config.mask_token_id if isinstance(config, Eagle3Config) else None
        for names, has_use, kind in (
            (("aux_convention",), eagle3, "EAGLE-3 heads"),
            (("norm_output",), eagle3 or mtp, "EAGLE-3 heads and multi-token prediction layers"),
            (("mask_token_id",), mask is not None, "P-EAGLE heads"),
            (("mask_first",), mtp, "multi-token prediction layers"),
        ):
            if not has_use:
                options.refuse_any(self.folder.given, names, kind)
        if isinstance(config, MTPConfig):
            return options.of_mtp(config)  # no checkpoint of such layers says how they are read
        settled = {name: (head or {}).get(name) for name in ("aux_convention", "norm_output")}
        for name, used in {**settled, "mask_token_id": mask}.items():
            given = getattr(options, name)
            if None not in (used, given) and used != given:
                raise Refusal(f"{where}: {name}={given!r}, but the draft head was converted with {used!r}")
        return config

    @property
    def says_of_cache(self) -> bool:
        """Whether the manifest says anything of a quantised cache, if only that there is none; those of earlier versions do
        not."""
        return CACHE in self.manifest

    @property
    def cache_scheme(self) -> CacheScheme | None:
        """What the original checkpoint says of a quantised cache; None if it says nothing of it."""
        return scheme_of(self.manifest, self.folder)

    @property
    def cache_scales(self) -> dict[str, Tensor]:
        """The original's tensors of scales of keys and values, by name."""
        return scales_of(self.manifest, self.folder)

    def require_whole(self, hash_all: bool = False):
        """As ``converted.manifest.require_whole``."""
        require_whole(self.folder, self.manifest, hash_all)

    def params(self, dtype: str | None, check_files: bool) -> StoredParams:
        """The params, read one at a time.

        Args:
          dtype: ``float32`` or ``bfloat16``; None for the one in the manifest.
          check_files: whether the SHA-256 of every file of an array is compared when it is read. Each array is then read as
            a whole, even if a part of it is asked for.
        """
        config, where = self.config, f"{self.folder.given}/{PARAMS}"
        self.require_whole()
        expected = stored_params(config, dtype or self.manifest["dtype"])
        shapes = {name: shape for name, (shape, _) in expected.items()}
        arrays = {stored.renamed_param(name): array for name, array in stored_arrays(self.folder, PARAMS).items()}
        _require_shapes(where, {name: array.shape for name, array in arrays.items()}, shapes)
        params = config.stored_params().values()
        of_quantized = {name: (part, of.form) for of in params for part, name in of.names.items()}

        def read(name: str, index: Index) -> np.ndarray:
            array, (shape, kind) = (
                arrays[name].read(index, self._require_digest if check_files else None),
                expected[name],
            )
            if name in of_quantized:
                part, form = of_quantized[name]
                if array.dtype != kind:
                    raise Refusal(
                        f"{where}: parameter {name!r} is stored as {array.dtype}, expected {kind}; convert the checkpoint "
                        "again"
                    )
                if (wrong := _wrong_numbers(part, array, form, shape[0])) is not None:
                    raise Refusal(f"{where}: parameter {name!r} has {wrong}; convert the checkpoint again")
            if array.dtype.name == "float8_e4m3fn" and has_nan(array):
                raise Refusal(f"{where}: parameter {name!r} holds NaN; convert the checkpoint again")
            return array.astype(kind, copy=False)

        return StoredParams(self.folder.given, shapes, _whole_arrays(read) if check_files else read, check_files)

    def _require_digest(self, name: str, data: memoryview):
        """Raise a ``Refusal`` unless ``data``, the bytes of the file ``name``, have the SHA-256 in the manifest."""
        if self.folder.record(self.folder.below(name), data) != self.manifest["files"].get(name):
            raise Refusal(f"{damage(self.folder, name)}; {AGAIN}")


def _whole_arrays(read: Callable[[str, Index], np.ndarray]) -> Callable[[str, Index], np.ndarray]:
    """``read``, which reads the array of a name as a whole, and keeps it until another is asked for."""
    read_array = functools.lru_cache(maxsize=1)(lambda name: read(name, ()))
    return lambda name, index: read_array(name)[index]


def _require_shapes(where: str, stored_shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]):
    for name in sorted(expected.keys() | stored_shapes.keys()):
        if name not in stored_shapes or name not in expected:
            state = "missing" if name not in stored_shapes else "unknown"
            raise Refusal(f"{where}: parameter {name!r} is {state}; convert the checkpoint again")
        if stored_shapes[name] != expected[name]:
            raise Refusal(
                f"{where}: parameter {name!r} has shape {list(stored_shapes[name])}, "
                f"but its config asks for {list(expected[name])}; convert the checkpoint again"
            )


# ``Format.scales`` -> which numbers may be scales, and what others are.
_SCALES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "positive": (lambda scales: np.isfinite(scales) & (scales > 0), "no positive number"),
    "nonzero": (lambda scales: np.isfinite(scales) & (scales != 0), "0 or no number"),
    "nonnegative": (lambda scales: scales >= 0, "negative or NaN"),
    "finite": (np.isfinite, "infinite or NaN"),
}


def _wrong_numbers(part: str, array: np.ndarray, form: Format, length: int) -> str | None:
    """What of an array of a quantised weight cannot be so, in words; None if all can, or they are the numbers themselves.

    Args:
      part: which array it is, a key of ``Format.arrays``.
      array: a part of it.
      form: the format of the weight.
      length: of the whole array.
    """
    if part in ("channel_scale", "input_scale") and not (np.isfinite(array) & (array > 0)).all():
        return "a number that is not positive"
    if part == "order" and not ((array >= 0) & (array < length)).all():
        return "an index that is no input"
    if part != "scale":
        return None
    if form.scales not in _SCALES:  # powers of two, up to that of the largest scale
        largest, most = array.max(initial=0), form.largest_power
        return f"the scale {largest}: expected at most {most}" if largest > most else None
    (may_be, others), numbers = _SCALES[form.scales], shared_numbers(array, form) if form.levels else array
    numbers = numbers.astype(np.float32)
    if not may_be(numbers[..., 0] if form.zeros else numbers).all():
        return f"a scale that is {others}"
    return "a zero that is no code" if form.zeros and not np.isin(numbers[..., 1], form.zero_codes).all() else None
