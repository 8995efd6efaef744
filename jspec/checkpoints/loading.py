"""Loads a checkpoint folder, from Hugging Face or converted, as a config and params in host memory."""

import dataclasses
import os
import warnings
from pathlib import Path

import numpy as np

from jspec._validation import require
from jspec.checkpoints.converted.manifest import NAME, PARAMS, is_converted, read_manifest, require_whole
from jspec.checkpoints.converted.orbax import METADATA, load_param, read_shapes
from jspec.checkpoints.converted.params import Index, StoredParams
from jspec.checkpoints.converted.quantized import stored_params
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import NUMPY_DTYPES
from jspec.checkpoints.heads import stored
from jspec.checkpoints.heads.options import NO_OPTIONS, HeadOptions
from jspec.checkpoints.heads.speculators import verifier
from jspec.checkpoints.huggingface.config import read_config, read_fields
from jspec.checkpoints.huggingface.source import Source, open_model, open_source
from jspec.config import ModelConfig
from jspec.config.heads import Eagle3Config, HeadConfig, MTPConfig

Params = dict[str, np.ndarray]
GENERATION_CONFIG = "generation_config.json"
MTP = "mtp"  # the folder of multi-token prediction layers in a converted folder, which is a converted folder too


def load_folder(path: str | os.PathLike, dtype: str | None = None) -> tuple[ModelConfig, Params]:
    """The config and the params of a language model, in host memory.

    Args:
      path: a folder with config.json and safetensors, or one that ``convert`` wrote.
      dtype: ``float32`` or ``bfloat16`` (rounded to nearest even). None takes the dtype of the converted folder, or for
        a Hugging Face folder the narrower of the two that holds every tensor exactly; bfloat16 if weights are dequantised.

    Returns:
      the config, and dotted name -> array as ``jspec.models.params.build`` takes them.

    Raises:
      Refusal: one sentence with the file and the reason.

    Example::

        config, params = load_folder("path/to/target", dtype="bfloat16")
        print(config.num_layers, params["embedding.weight"].shape)
    """
    config, params = open_folder(path, dtype)
    return config, dict(params)


def open_folder(path: str | os.PathLike, dtype: str | None = None) -> tuple[ModelConfig, StoredParams]:
    """The same, with params that are read one at a time, whenever one is asked for."""
    _require_dtype(dtype)
    config, params = _load_converted(Folder(path), dtype) if _is_converted(path) else _load(open_model(path), dtype)
    if config.language_model is None:
        raise Refusal(f"{path}: holds a draft head, not a language model; give it as draft=, with its target")
    refuse_reduced(config.language_model, path)
    return config.language_model, params


def refuse_reduced(config: ModelConfig, path: str | os.PathLike):
    """Raise a ``Refusal`` if the language model of a folder has a draft vocabulary, so that it can only draft."""
    if config.reduced:
        raise Refusal(
            f"{path}: has logits for {config.draft_vocab_size} of {config.vocab_size} tokens (draft_vocab_size in {NAME}), "
            "so it can only draft; give it as draft=, and a folder that was converted without a draft vocabulary as target"
        )


def load_draft(
    path: str | os.PathLike,
    dtype: str | None = None,
    aux_convention: str | None = None,
    norm_output: str | None = None,
    mask_token_id: int | None = None,
    mask_first: bool | None = None,
    mtp: bool = False,
) -> tuple[ModelConfig | HeadConfig, Params]:
    """The config and the params of a draft model or a draft head, in host memory.

    Args:
      path: as in ``load_folder``.
      dtype: as in ``load_folder``. Integer params are int32 whatever it is.
      aux_convention: what the layer ids of an EAGLE-3 head mean: ``input_of`` or ``output_of`` these layers. Needed
        when the checkpoint lists ids in a native layout, which does not say.
      norm_output: what its ``norm_output`` means: that the normed output is fed back (``recycled``), or that the output
        head reads it (``before_head``). Needed when a native layout has that key.
      mask_token_id: the token of a P-EAGLE head's mask slots. Needed when config.json does not name it.
      mask_first, mtp: see ``HeadOptions``.

    Returns:
      the config, whose class says which method it is for, and dotted name -> array as ``jspec.models.params.build`` or
      ``build_head`` takes them.

    Raises:
      Refusal: one sentence with the file and the reason.

    Example::

        config, params = load_draft("path/to/eagle3")
        print(config.method, sum(array.size for array in params.values()))
    """
    config, params = open_draft(path, dtype, HeadOptions(aux_convention, norm_output, mask_token_id, mask_first, mtp))
    return config, dict(params)


def open_draft(
    path: str | os.PathLike, dtype: str | None, options: HeadOptions
) -> tuple[ModelConfig | HeadConfig, StoredParams]:
    """The same, with params that are read one at a time, whenever one is asked for."""
    _require_dtype(dtype)
    if _is_converted(path):
        return _load_converted(Folder(path), dtype, options)
    return _load(open_source(path, options=options), dtype)


def read_draft_config(
    path: str | os.PathLike,
    aux_convention: str | None = None,
    norm_output: str | None = None,
    mask_token_id: int | None = None,
    mask_first: bool | None = None,
    mtp: bool = False,
) -> ModelConfig | HeadConfig:
    """The config that ``load_draft`` would return, from JSON files and the headers of the weights alone.

    The arguments are those of ``load_draft``.

    Raises:
      Refusal: one sentence with the file and the reason.
    """
    options = HeadOptions(aux_convention, norm_output, mask_token_id, mask_first, mtp)
    if _is_converted(path):
        return _converted_config(Folder(path), options)
    source = open_source(path, options=options)
    source.require_match()
    return source.config


def mtp_folder(target: Path) -> Path:
    """The folder from which the multi-token prediction layers of ``target`` are loaded, with ``mtp=True``.

    Raises:
      Refusal: ``target`` is a converted folder without such layers.
    """
    if not _is_converted(target):
        return target
    if not is_converted(target / MTP):
        raise Refusal(
            f"{target}: holds no multi-token prediction layers, which draft='mtp' asks for; convert the checkpoint again if "
            "it has some, or give another draft"
        )
    return target / MTP


def read_model_config(path: str | os.PathLike) -> ModelConfig:
    """The config that ``load_folder`` would return, from JSON files alone.

    The weight files are not opened, so a folder whose weights are missing or damaged is not refused here.

    Raises:
      Refusal: one sentence with the file and the reason. A language model with a draft vocabulary is refused.
    """
    folder = Folder(path)
    config = _model_config(folder) if _is_converted(path) else read_config(folder)
    refuse_reduced(config, path)
    return config


def require_intact(path: str | os.PathLike):
    """Raise a ``Refusal`` unless every file of a converted folder has the SHA-256 in its manifest.

    Raises:
      Refusal: a file is damaged, missing or extra; or ``path`` is no converted folder, so it has no manifest.
    """
    if not _is_converted(path):
        raise Refusal(
            f"{path}: has no {NAME} to check its files by; convert it with jspec-convert, or leave out check_files=True"
        )
    require_whole(Folder(path), hash_all=True)


def _is_converted(path: str | os.PathLike) -> bool:
    """Whether ``path`` is a converted folder; a converted folder without its manifest is refused."""
    if not is_converted(path) and os.path.isfile(os.path.join(path, PARAMS, METADATA)):
        raise Refusal(f"{path}/{NAME}: missing, so nothing says what its {PARAMS} are; convert the checkpoint again")
    return is_converted(path)


def read_generation_config(path: str | os.PathLike) -> Fields:
    """The fields of the checkpoint's ``generation_config.json``, unchecked; no fields if there is no such file."""
    folder = Folder(path)
    raw = folder.json(GENERATION_CONFIG) if folder.has(GENERATION_CONFIG) else {}
    return Fields(raw, f"{folder.given}/{GENERATION_CONFIG}")


def verifier_of(path: str | os.PathLike) -> str | None:
    """Name or path of the target that a draft head was made for; None if the checkpoint does not say.

    Only the speculators format says it."""
    return verifier(read_fields(Folder(path)))


def _load(source: Source, dtype: str | None) -> tuple[ModelConfig | HeadConfig, StoredParams]:
    """Config and params of a Hugging Face folder; it warns if weights are dequantised."""
    source.require_match()
    if source.layout.dequantized:
        warnings.warn(f"{source.folder.given}: {source.layout.dequantized}", stacklevel=5)
    chosen = dtype or source.default_dtype

    def read(name: str, index: Index) -> np.ndarray:
        return source.param(name, chosen, index)

    return source.config, StoredParams(source.folder.given, source.shapes, read)


def _converted_config(folder: Folder, options: HeadOptions) -> ModelConfig | HeadConfig:
    head, where = read_manifest(folder).get("head"), f"{folder.given}/{NAME}"
    config = _model_config(folder) if head is None else stored.from_json(head, where)
    # The manifest has settled what the options would say. An option that has no use, or says otherwise, is refused.
    eagle3, mtp = isinstance(config, Eagle3Config), isinstance(config, MTPConfig)
    mask = config.mask_token_id if isinstance(config, Eagle3Config) else None
    for names, has_use, kind in (
        (("aux_convention",), eagle3, "EAGLE-3 heads"),
        (("norm_output",), eagle3 or mtp, "EAGLE-3 heads and multi-token prediction layers"),
        (("mask_token_id",), mask is not None, "P-EAGLE heads"),
        (("mask_first",), mtp, "multi-token prediction layers"),
    ):
        if not has_use:
            options.refuse_any(folder.given, names, kind)
    if isinstance(config, MTPConfig):
        return options.of_mtp(config)  # no checkpoint of such layers says how they are read
    settled = {name: (head or {}).get(name) for name in ("aux_convention", "norm_output")}
    for name, used in {**settled, "mask_token_id": mask}.items():
        given = getattr(options, name)
        if None not in (used, given) and used != given:
            raise Refusal(f"{where}: {name}={given!r}, but the draft head was converted with {used!r}")
    return config


def _model_config(folder: Folder) -> ModelConfig:
    """The config of the language model in a converted folder.

    Its config.json is a copy of the original one, so whether the weights are quantised, and whether it has a draft
    vocabulary, are read from the manifest."""
    config, manifest = read_config(folder), read_manifest(folder)
    try:
        config = dataclasses.replace(config, quantization=manifest.get("quantization"))
        size = manifest.get("draft_vocab_size")
        return config if size is None else config.with_draft_vocabulary(size)
    except ValueError as error:
        raise Refusal(f"{folder.given}/{NAME}: {error}; convert the checkpoint again") from None


def _load_converted(
    folder: Folder, dtype: str | None, options: HeadOptions = NO_OPTIONS
) -> tuple[ModelConfig | HeadConfig, StoredParams]:
    config, where = _converted_config(folder, options), f"{folder.given}/{PARAMS}"
    require_whole(folder)
    expected = stored_params(config, dtype or read_manifest(folder)["dtype"])
    shapes, path = {name: shape for name, (shape, _) in expected.items()}, folder.root / PARAMS
    found = read_shapes(path, where)
    _require_shapes(where, found, shapes)
    stored_names = {stored.renamed_param(name): name for name in found}
    quantized = config.scale_names()
    kept = {*quantized, *quantized.values()}

    def read(name: str, index: Index) -> np.ndarray:
        array, kind = load_param(path, stored_names[name], index), expected[name][1]
        if name in kept:
            _require_quantized(where, name, array.dtype, kind)
        if name in quantized.values():
            _require_scales(where, name, array)
        return array.astype(kind, copy=False)

    return config, StoredParams(folder.given, shapes, read)


def _require_shapes(where: str, stored_shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]):
    found = {stored.renamed_param(name): shape for name, shape in stored_shapes.items()}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found or name not in expected:
            state = "missing" if name not in found else "unknown"
            raise Refusal(f"{where}: parameter {name!r} is {state}; convert the checkpoint again")
        if found[name] != expected[name]:
            raise Refusal(
                f"{where}: parameter {name!r} has shape {list(found[name])}, "
                f"but its config asks for {list(expected[name])}; convert the checkpoint again"
            )


def _require_scales(where: str, name: str, array: np.ndarray):
    """Raise a ``Refusal`` unless these can be scales: of eight bits, float32, they are positive; of four bits, any but 0."""
    positive = array.dtype == np.float32
    if not (np.isfinite(array) & (array > 0 if positive else array != 0)).all():
        what = "no positive number" if positive else "0 or no number"
        raise Refusal(f"{where}: parameter {name!r} has a scale that is {what}; convert the checkpoint again")


def _require_quantized(where: str, name: str, found: np.dtype, expected: np.dtype):
    if found != expected:
        raise Refusal(
            f"{where}: parameter {name!r} is stored as {found}, expected {expected}; convert the checkpoint again"
        )


def _require_dtype(dtype: str | None):
    require(dtype is None or dtype in NUMPY_DTYPES, "dtype", dtype, f"None or one of {', '.join(NUMPY_DTYPES)}")
