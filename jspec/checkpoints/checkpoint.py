"""``Checkpoint``: a checkpoint folder, from Hugging Face or converted, that is opened once."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from jspec._validation import require
from jspec.checkpoints.converted.manifest import NAME, PARAMS, is_converted
from jspec.checkpoints.converted.model import ConvertedModel
from jspec.checkpoints.converted.orbax import METADATA
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import NUMPY_DTYPES, Tensor
from jspec.checkpoints.gguf.folder import GGUFFolder, gguf_in
from jspec.checkpoints.huggingface.config import decoder_config, read_fields, stored_quantization
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.huggingface.weights import read_headers
from jspec.checkpoints.layouts import speculators
from jspec.checkpoints.layouts.kinds import is_head, recognise
from jspec.checkpoints.layouts.options import NO_OPTIONS, HeadOptions
from jspec.checkpoints.quantized.cache_scheme import CacheScheme, cache_scheme
from jspec.checkpoints.tensors.params import StoredParams
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.config import ModelConfig
from jspec.config.heads import HeadConfig
from jspec.text.detokenizer import Tokenizer

GENERATION_CONFIG = "generation_config.json"
MTP = "mtp"  # the folder of multi-token prediction layers in a converted folder, which is a converted folder too


class Checkpoint:
    """A checkpoint folder. Each attribute is read when it is first asked for, and once; opening reads nothing.

    Every attribute raises a ``Refusal``, one sentence with the file and the reason, if what it needs cannot be read.

    Args:
      folder: the folder, which records digests if it is a converted one.
      options: what the user said of the draft head.
      allow_pickle: whether the tensors of ``torch.save`` files may be read (``files.pickles``) if a Hugging Face folder
        has no safetensors file.
    """

    is_in_memory = False  # whether the weights are arrays of a caller

    def __init__(self, folder: Folder, options: HeadOptions = NO_OPTIONS, allow_pickle: bool = False):
        self.folder, self.options, self.allow_pickle = folder, options, allow_pickle

    @classmethod
    def open(
        cls, path: str | os.PathLike, options: HeadOptions = NO_OPTIONS, allow_pickle: bool = False
    ) -> "Checkpoint":
        """The checkpoint in the folder ``path``, or in the GGUF file; the other arguments are those of the class.

        Raises:
          Refusal: ``path`` is neither, or a folder with several GGUF files, or one that cannot be read.
        """
        if (gguf := gguf_in(path)) is not None:
            return cls(GGUFFolder(gguf, str(path)), options)
        return cls(Folder(path, digests={} if is_converted(path) else None), options, allow_pickle)

    def with_options(self, options: HeadOptions) -> "Checkpoint":
        """The same checkpoint, if the user says this of it."""
        return Checkpoint(self.folder, options, self.allow_pickle)

    def release(self):
        """Keep no reference to weights, which can be read no more if they are in memory."""

    def mtp(self, options: HeadOptions) -> "Checkpoint":
        """The multi-token prediction layers beside this language model.

        Args:
          options: what the user said of them; ``options.mtp`` is True.

        Raises:
          Refusal: this is a converted folder without such layers.
        """
        if not self.is_converted:
            return self.with_options(options)
        path = Path(self.folder.given, MTP)
        if not is_converted(path):
            raise Refusal(
                f"{self.folder.given}: holds no multi-token prediction layers, which draft='mtp' asks for; convert the "
                "checkpoint again if it has some, or give another draft"
            )
        return Checkpoint(Folder(path, self.folder.digests), options)

    @functools.cached_property
    def is_converted(self) -> bool:
        """Whether ``jspec-convert`` wrote the folder; a converted folder without its manifest is refused."""
        path = self.folder.root
        if not is_converted(path) and (path / PARAMS / METADATA).is_file():
            raise Refusal(
                f"{self.folder.given}/{NAME}: missing, so nothing says what its {PARAMS} are; convert the checkpoint again"
            )
        return is_converted(path)

    @functools.cached_property
    def fields(self) -> Fields:
        """The fields of config.json, as ``read_fields`` returns them."""
        return read_fields(self.folder)

    @functools.cached_property
    def target_name(self) -> str | None:
        """Name or path of the target that a draft head was made for; None unless it is in the speculators format."""
        return speculators.target_name(self.fields)

    @functools.cached_property
    def generation_config(self) -> Fields:
        """The fields of ``generation_config.json``, unchecked; no fields if there is no such file."""
        raw = self.folder.json(GENERATION_CONFIG) if self.folder.has(GENERATION_CONFIG) else {}
        return Fields(raw, f"{self.folder.given}/{GENERATION_CONFIG}")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, as ``load_tokenizer`` returns it; None if the folder has none."""
        return load_tokenizer(self.folder)

    @functools.cached_property
    def kind(self) -> Literal["language_model", "draft_head"]:
        """Whether the folder holds a language model, as a PARD model is one, or a draft head, which needs a target."""
        if self.is_converted:
            return "draft_head" if self.converted.config.language_model is None else "language_model"
        return "draft_head" if is_head(self.fields, self._tensors) else "language_model"

    @functools.cached_property
    def target_config(self) -> ModelConfig:
        """The config of a language model that is to be a target, from JSON files.

        A folder whose weights are missing or damaged is not refused here. A language model with a draft vocabulary is. Of
        quantised weights, the headers of the files say which maps are quantised; other weight files are not opened.
        """
        if self.is_converted:
            config = self.converted.language_model_config
        else:
            config = decoder_config(self.folder, self.fields)
            in_mxfp4 = config.experts is not None and config.experts.stored is not None
            if in_mxfp4 or isinstance(self.folder, GGUFFolder) or stored_quantization(self.fields) is not None:
                config = self._of_files or config
        refuse_reduced(config, self.folder.given)
        return config

    @property
    def _of_files(self) -> ModelConfig | None:
        """The config of the language model in a Hugging Face folder, by its files; None if they are damaged."""
        try:
            return self.hugging_face.config.language_model
        except Refusal:
            return None

    @property
    def cache_scheme(self) -> CacheScheme | None:
        """What the checkpoint says of a quantised cache of keys and values; None if it says nothing of it."""
        return self.converted.cache_scheme if self.is_converted else cache_scheme(self.folder, self.fields)

    @property
    def cache_scales(self) -> Mapping[str, Tensor]:
        """Tensor name -> tensor, of which some may be scales of keys and values."""
        return self.converted.cache_scales if self.is_converted else self.hugging_face.tensors

    @functools.cached_property
    def config(self) -> ModelConfig | HeadConfig:
        """The config of the language model or the draft head, from JSON files and the headers of the weights.

        Its class says which drafting method it is for. The headers of a Hugging Face folder are compared with it."""
        return self.converted.config if self.is_converted else self._matching.config

    def params(self, dtype: str | None = None, check_files: bool = False) -> StoredParams:
        """The params: dotted name -> array in host memory, read whenever it is asked for.

        Args:
          dtype: ``float32`` or ``bfloat16`` (rounded to nearest even). None takes the dtype of the converted folder, or for
            a Hugging Face folder the narrower of the two that holds every tensor exactly; bfloat16 if weights are
            dequantised. Integer params are int32 whatever it is.
          check_files: whether the SHA-256 of every file is compared with the manifest when it is read, for converted
            folders. ``require_intact`` then reads the other files alone.
        """
        known = ", ".join(NUMPY_DTYPES)
        require(dtype is None or dtype in NUMPY_DTYPES, "dtype", dtype, f"None or one of {known}")
        if self.is_converted:
            return self.converted.params(dtype, check_files)
        return self._matching.params(dtype)

    def language_model(self, dtype: str | None = None, check_files: bool = False) -> tuple[ModelConfig, StoredParams]:
        """Config and params of a language model that is to be a target; the arguments are those of ``params``.

        Raises:
          Refusal: the folder holds a draft head, or a language model with a draft vocabulary.
        """
        given = self.folder.given
        if self.kind == "draft_head":
            raise Refusal(f"{given}: holds a draft head, not a language model; give it as draft=, with its target")
        params, config = self.params(dtype, check_files), self.config.language_model
        assert config is not None
        refuse_reduced(config, given)
        return config, params

    def require_intact(self, hash_all: bool = True):
        """Raise a ``Refusal`` unless the folder holds exactly the files that its manifest lists, with their SHA-256.

        Args:
          hash_all: as for ``converted.manifest.require_whole``.

        Raises:
          Refusal: a file is damaged, missing or extra; or this is no converted folder, so it has no manifest.
        """
        if not self.is_converted:
            raise Refusal(
                f"{self.folder.given}: has no {NAME} to check its files by; convert it with jspec-convert, or leave out "
                "check_files=True"
            )
        self.converted.require_whole(hash_all)

    @functools.cached_property
    def converted(self) -> ConvertedModel:
        """What a converted folder holds."""
        return ConvertedModel(self.folder, self.options)

    @functools.cached_property
    def hugging_face(self) -> HuggingFaceModel:
        """What a Hugging Face folder holds. Its tensors were not compared with its config yet."""
        layout = recognise(self.folder, self.fields, self._tensors, self.options)
        layout = dataclasses.replace(layout, notes=(*self.folder.notes, *layout.notes))
        return HuggingFaceModel(self.folder, layout, self.target_name)

    @functools.cached_property
    def _matching(self) -> HuggingFaceModel:
        """The same, after that comparison."""
        self.hugging_face.require_match()
        return self.hugging_face

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        if isinstance(self.folder, GGUFFolder):
            return self.folder.tensors
        return read_headers(self.folder, self.allow_pickle)


def refuse_reduced(config: ModelConfig, path: str | os.PathLike):
    """Raise a ``Refusal`` if the language model of a folder has a draft vocabulary, so that it can only draft."""
    if config.reduced:
        raise Refusal(
            f"{path}: has logits for {config.draft_vocab_size} of {config.vocab_size} tokens (draft_vocab_size in {NAME}), "
            "so it can only draft; give it as draft=, and a folder that was converted without a draft vocabulary as target"
        )
