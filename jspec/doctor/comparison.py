"""``compare_with_reference``: a target beside transformers on the same texts, and where the two first differ."""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jspec._validation import is_int, require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.folder import Folder
from jspec.doctor import under_test
from jspec.doctor.diagnosis import PROMPTS, engine_config
from jspec.doctor.figures import (
    LayerDifference,
    Texts,
    Tolerance,
    hidden_difference,
    logit_figures,
    text_difference,
)
from jspec.doctor.reference import DTYPES, Reference, require_packages
from jspec.doctor.texts import TextFigures, figures_of, windows_of
from jspec.hub.folders import local_checkpoints
from jspec.loading.memory_budget import ModelMemory
from jspec.loading.options import Path
from jspec.loading.pair import open_checkpoints
from jspec.models import build
from jspec.text.prompts import Prompt, token_ids

MOST_PROMPTS = 8
LONGEST = 128  # tokens of a prompt: logits of the whole vocabulary are kept for each of them
TOLERANCES = {
    "float32": Tolerance("float32", logits=1e-3, mean_kl=1e-5, margin=0.0),
    # A logit of 16 to 32 is rounded to 1/8, in every layer something like it happens, and greedy choices of nearly equal
    # tokens then differ.
    "bfloat16": Tolerance("bfloat16", logits=None, mean_kl=0.02, margin=0.5),
}

IGNORED = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")  # keys that change no logits
SHOWN = 60  # characters of a value of config.json


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of ``compare_with_reference``.

    Attributes:
      target, reference: the checkpoints that were compared: what the model under test and transformers have read.
      dtype, reference_dtype: in which they have computed.
      tolerance: what counts as equal.
      texts: the figures of each prompt.
      layers: how far apart the hidden states are, from the embeddings on, for the first prompt.
      first_layer: the first of ``layers`` that is beyond rounding; None if none is.
      configs: keys in which the two config.json differ, each with both values.
      on_texts: how well both predict the user's texts, None without such; whether they are equal does not depend on it.

    Example::

        comparison = compare_with_reference("path/to/converted", "path/to/hf")
        print(comparison.equal, comparison.explanation)
    """

    target: Checkpoint
    reference: Folder
    dtype: str
    reference_dtype: str
    tolerance: Tolerance
    texts: tuple[Texts, ...]
    layers: tuple[LayerDifference, ...]
    first_layer: LayerDifference | None
    configs: tuple[str, ...]
    on_texts: TextFigures | None = None

    @property
    def equal(self) -> bool:
        """Whether logits and greedy texts are equal within the tolerance."""
        return all(self.tolerance.holds_for(text) for text in self.texts)

    @property
    def explanation(self) -> str:
        """The result in a few sentences: how far apart, and where it begins."""
        num_layers = self.target.target_config.num_layers
        largest = max(text.max_absolute for text in self.texts)
        kl = float(np.average([text.mean_kl for text in self.texts], weights=[text.positions for text in self.texts]))
        figures = f"logits differ by at most {largest:.2e}, KL {kl:.2e} nats on average"
        if self.equal:
            return f"{figures}; within the tolerance of {self.tolerance}"
        sentences = [f"{figures}; beyond the tolerance of {self.tolerance}"]
        if self.first_layer is not None:
            sentences.append(self.first_layer.sentence(num_layers))
        elif self.layers:
            last = "output head" if self.layers[-1].index == num_layers else "last layer and the output head"
            sentences.append(f"Hidden states of the first prompt agree up to the {last}, which is where to look")
        if self.configs:
            sentences.append(f"config.json differs: {'; '.join(self.configs)}")
        return ". ".join(sentences)


def compare_with_reference(
    target: Path,
    reference: Path,
    prompts: Sequence[Prompt] | None = None,
    *,
    dtype: str | None = None,
    reference_dtype: str = "float32",
    max_tokens: int = 64,
    chat: bool | None = None,
    download: bool | None = None,
    texts: Path | None = None,
) -> Comparison:
    """Compare a target with what transformers computes from the original checkpoint.

    transformers writes a greedy text for each prompt, and both read it whole, so that logits of the same tokens are
    compared. Then jspec's engine writes greedily itself. transformers runs on the CPU, and is gone before jspec loads.

    Args:
      target: the checkpoint under test, in Hugging Face's layout or converted.
      reference: the original checkpoint; it may be the same folder.
      prompts: texts or token ids; at most ``MOST_PROMPTS`` of them, of which the last ``LONGEST`` tokens are used. None
        takes four built-in ones.
      dtype: of jspec's computation; bfloat16 on a GPU and float32 elsewhere if it is None.
      reference_dtype: of transformers' computation.
      max_tokens: how many new tokens each prompt gets at most.
      chat, download: as for ``diagnose``.
      texts: a file of texts that both read as well: parted by blank lines, or .jsonl with a text on each line, under
        ``text`` or ``prompt``. Of it, at most ``MOST_TOKENS`` of ``jspec.doctor.texts`` are read.

    Raises:
      ValueError: an argument or a checkpoint cannot be used, torch or transformers is not installed, or transformers has no
        class for the checkpoint.

    Example::

        comparison = compare_with_reference("path/to/converted", "path/to/hf", ["def main(", "class Queue:"])
        print(comparison.explanation)
    """
    require_packages()
    require(reference_dtype in DTYPES, "reference_dtype", reference_dtype, f"one of {', '.join(DTYPES)}")
    require(dtype is None or dtype in DTYPES, "dtype", dtype, f"None or one of {', '.join(DTYPES)}")
    require(is_int(max_tokens) and max_tokens >= 1, "max_tokens", max_tokens, "an integer of at least 1")
    checkpoint, _ = open_checkpoints(target, None, download=download)
    original = Folder(local_checkpoints([str(reference)], download)[0])
    config, tokenizer = checkpoint.target_config, checkpoint.tokenizer
    dtype = dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    encoded = [ids[-LONGEST:] for ids in token_ids(PROMPTS if prompts is None else prompts, tokenizer, config, chat)]
    encoded = encoded[:MOST_PROMPTS]
    windows = [] if texts is None else windows_of(texts, tokenizer, config, checkpoint.folder.given)

    model = Reference(original.root, reference_dtype)
    max_tokens = min(max_tokens, config.max_position - max(map(len, encoded)))
    expected = [model.write(prompt, max_tokens, config.eos_token_ids) for prompt in encoded]
    whole = [[*prompt, *text] for prompt, text in zip(encoded, expected, strict=True)]
    references = list(model.read(whole))
    originals = [reading.logits for reading in model.read(windows)]
    del model
    gc.collect()

    # In float32, products of matrices are not rounded to TF32 or bfloat16, as GPUs do unless they are told.
    with jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext():
        engine = engine_config(config, encoded, max_tokens, dtype)
        engine = ModelMemory(config, None, 1).with_num_pages(engine, share=0.9)
        ours = build(config.for_length(engine.max_len), checkpoint.language_model(dtype)[1], dtype)
        readings = list(under_test.read(ours, whole))
        written = under_test.write(ours, encoded, engine, max_tokens)
        others = under_test.logits(ours, windows) if windows else []
    figures = [
        Texts(
            prompt_length=len(prompt),
            length=len(text),
            **logit_figures(theirs.logits, own.logits),
            difference=text_difference(text, own_text, len(prompt), theirs.logits, own.logits),
        )
        for prompt, text, own_text, theirs, own in zip(encoded, expected, written, references, readings, strict=True)
    ]
    on_texts = figures_of(windows, originals, others, config.formats or dtype) if windows else None
    tolerance = TOLERANCES["bfloat16" if "bfloat16" in (dtype, reference_dtype) or config.quantization else "float32"]
    layers = tuple(_hidden_differences(references[0].hidden, readings[0].hidden, tolerance.hidden))
    first = next((layer for layer in layers if layer.position is not None), None)
    configs = tuple(config_differences(checkpoint.folder, original))
    measured = tuple(figures), layers, first, configs, on_texts
    return Comparison(checkpoint, original, dtype, reference_dtype, tolerance, *measured)


def _hidden_differences(
    reference: Sequence[np.ndarray], ours: Sequence[np.ndarray], beyond: float
) -> Iterator[LayerDifference]:
    """How far apart the hidden states are, as far as both sides mean the same: a model whose output head has its own width
    may not give the last ones, and models of different depth have nothing to compare."""
    if len(reference) != len(ours):
        return
    for index, (theirs, own) in enumerate(zip(reference, ours, strict=True)):
        if theirs.shape == own.shape:
            yield hidden_difference(index, theirs, own, beyond)


def config_differences(ours: Folder, reference: Folder) -> Iterator[str]:
    """One phrase for each key, ``rope_theta 10000.0 here and 500000.0 in the reference``."""
    here, there = (
        _flat(folder.json("config.json")) if folder.has("config.json") else {} for folder in (ours, reference)
    )
    for key in sorted(here.keys() | there.keys()):
        values = [_shown(side, key) for side in (here, there)]
        if values[0] != values[1] and key.rpartition(".")[2] not in IGNORED:
            yield f"{key} {values[0]} here and {values[1]} in the reference"


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _shown(config: Mapping[str, Any], key: str) -> str:
    text = repr(config[key]) if key in config else "nothing"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."
