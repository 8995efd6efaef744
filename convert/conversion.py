"""``convert`` writes a Hugging Face folder as a converted folder, which jspec loads and checks by its manifest."""

import dataclasses
import os
import resource
import sys
import time
from pathlib import Path

from convert.choices import VERIFICATIONS
from convert.draft_vocabulary import DraftVocabulary
from convert.listing import describe
from convert.preparation import mtp_beside, prepared
from convert.staging import require_apart, staged
from convert.verify import verify_logits, verify_shapes, verify_weights
from convert.write import write_folder
from jspec._validation import require
from jspec.checkpoints.checkpoint import MTP, Checkpoint
from jspec.checkpoints.converted.manifest import is_converted
from jspec.checkpoints.files.folder import MemoryFolder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import NUMPY_DTYPES
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.config import QUANTIZATIONS
from jspec.doctor.reference import require_packages
from jspec.doctor.texts import windows_of


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
      out: the folder that was written.
      recognised: one line that says what the checkpoint is.
      dtype: the dtype of the params that are not quantised.
      quantization: the formats of linear maps, ``int8`` or ``fp8 and nvfp4``; None if none is quantised.
      tensors: the number of tensors that were read.
      parameters: the number of weights in all params together.
      seconds: wall time.
      peak_bytes: the largest resident memory of the process so far.
      notes: one sentence on each thing that the user ought to know.

    Example::

        report = convert("path/to/hf", "path/to/converted", quantize="int8")
        print(f"{report.recognised}: {report.tensors} tensors in {report.seconds:.0f} s")
    """

    out: Path
    recognised: str
    dtype: str
    quantization: str | None
    tensors: int
    parameters: int
    seconds: float
    peak_bytes: int
    notes: tuple[str, ...]


def convert(
    src: str | os.PathLike,
    out: str | os.PathLike,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: str | None = None,
    progress: bool = False,
    allow_pickle: bool = False,
    aux_convention: str | None = None,
    norm_output: str | None = None,
    mask_token_id: int | None = None,
    target: str | os.PathLike | None = None,
    quantize: str | None = None,
    mtp: bool | None = None,
    draft_vocabulary: DraftVocabulary | None = None,
    corpus: str | os.PathLike | None = None,
    texts: str | os.PathLike | None = None,
) -> Report:
    """Write the checkpoint ``src``, a language model or a draft head, as Flax params and tokenizer files to ``out``.

    ``out`` appears complete or not at all: it is written under another name beside its place and then renamed.

    Args:
      src: a folder with config.json and safetensors, or with pickles if ``allow_pickle`` is set; or a GGUF file.
      out: the folder to create.
      dtype: ``float32`` or ``bfloat16``. None takes the narrower of the two that holds every tensor exactly, so that
        nothing is rounded without being asked for: float16 weights become float32. Weights that are dequantised
        become bfloat16.
      overwrite: whether to replace an existing converted folder once the conversion has succeeded.
      verify: ``shapes`` reads the written params back and compares names, shapes and dtypes; ``logits`` also compares the
        logits with those of transformers. With ``quantize``, both also quantise the source again and compare the bits,
        and ``logits`` reports how far quantisation moves the distribution.
      progress: whether to show a progress bar if stderr is a terminal.
      allow_pickle: whether to read the tensors of ``torch.save`` files if there is no safetensors file. A separate
        process reads them, which runs nothing that the files name.
      aux_convention: what the layer ids of an EAGLE-3 head mean: ``input_of`` or ``output_of`` these layers. Needed
        when the checkpoint lists ids in a native layout, which does not say.
      norm_output: what the ``norm_output`` of an EAGLE-3 head means: that the normed output is fed back (``recycled``),
        or that the output head reads it (``before_head``). Needed when a native layout has that key.
      mask_token_id: the token of a P-EAGLE head's mask slots. Needed when config.json does not name it.
      target: folder of the model that a draft head is for. A draft head that does not fit it is refused. With
        ``draft_vocabulary``, the rows of its output head are copied for a draft head that has none, and its tokenizer
        encodes ``corpus`` if ``src`` has none.
      quantize: ``int8`` or ``fp8`` to store the linear maps and the output head in eight bits, with a scale for each
        output channel, or ``int4`` for four bits, with a scale for each 128 inputs. ``dtype`` is then the dtype of the
        other params. For language models and draft heads; see ``jspec.models.quantization``.
        Weights that ``src`` holds in eight bits are kept as they are without it, and refused with it. Weights that it holds
        with a scale for each block are dequantised first (``jspec.checkpoints.quantized``).
      mtp: whether to keep the multi-token prediction layers of a language model's checkpoint, in a folder ``mtp`` of
        ``out``, from which ``jspec.load(out, draft="mtp")`` takes them. They are quantised as the model is. None keeps those
        that there are, but not beside a model with a draft vocabulary.
      draft_vocabulary: the tokens that a drafter is to have logits for: how many, the most frequent ones of ``corpus``, or
        a list of their ids or a file of that; see ``convert.draft_vocabulary``. A language model can then draft, and is no
        target any more. With ``mtp=True`` they are those of its multi-token prediction layers alone, which get a copy of
        these rows of its output head, and the language model stays whole.
      corpus: a text file in UTF-8, like the texts that are to be drafted.
      texts: with ``verify="logits"``, a file of texts as for ``jspec.doctor.compare_with_reference``. Notes say how well
        transformers and the written params predict them, which does not decide whether the verification passes.

    Raises:
      ValueError: an argument cannot be used.
      Refusal: one sentence with the file and the reason.
      Mismatch: verification failed; nothing was written.

    Example::

        report = convert("path/to/hf", "path/to/converted", dtype="bfloat16", verify="logits")
        print(report.parameters, report.notes)
    """
    require(dtype is None or dtype in NUMPY_DTYPES, "dtype", dtype, f"None or one of {', '.join(NUMPY_DTYPES)}")
    require(verify is None or verify in VERIFICATIONS, "verify", verify, f"None or one of {', '.join(VERIFICATIONS)}")
    known = ", ".join(QUANTIZATIONS)
    require(quantize is None or quantize in QUANTIZATIONS, "quantize", quantize, f"None or one of {known}")
    expected = "verify='logits' beside it, which compares with transformers"
    require(texts is None or verify == "logits", "texts", str(texts), expected)
    start = time.monotonic()
    if is_converted(src):
        raise Refusal(f"{src}: is a converted folder already; give the Hugging Face folder it was made from")
    options = HeadOptions(aux_convention, norm_output, mask_token_id)
    source = Checkpoint.open(src, options, allow_pickle).hugging_face
    place = require_apart(out, source.folder.root)
    opened = None if target is None else Checkpoint.open(target)
    source = prepared(source, opened, quantize, mtp, draft_vocabulary, corpus)
    if verify == "logits":
        _require_runs_in_transformers(source)
    source.require_match()
    model, windows = source.config.language_model, []
    if texts is not None and model is not None:
        windows = windows_of(Path(texts), load_tokenizer(source.folder), model, source.folder.given)
    further, mtp_notes = mtp_beside(source, allow_pickle, opened, mtp, draft_vocabulary, corpus)
    chosen = dtype or source.default_dtype
    notes = [*source.layout.notes, *mtp_notes, *_dtype_notes(source, dtype, chosen)]
    with staged(place, overwrite, may_replace=is_converted) as partial:
        if further is not None:
            (partial / MTP).mkdir()
            notes += write_folder(further, partial / MTP, chosen, progress)
            if verify is not None:
                notes += [f"{MTP}/: {note}" for note in _verified(further, partial / MTP, chosen)]
        notes += write_folder(source, partial, chosen, progress)
        if verify is not None:
            notes += _verified(source, partial, chosen)
        if verify == "logits":
            notes += verify_logits(source, partial, chosen, windows)
    return Report(
        out=place,
        recognised=describe(source.layout, source.target_name),
        dtype=chosen,
        quantization=source.config.formats or None,
        tensors=len(source.table),
        parameters=source.config.num_parameters,
        seconds=time.monotonic() - start,
        peak_bytes=_peak_bytes(),
        notes=tuple(notes),
    )


def _verified(source: HuggingFaceModel, folder: Path, dtype: str) -> list[str]:
    """Notes after the params in ``folder`` were compared with what ``source`` asks for."""
    notes = [verify_shapes(folder, dtype)]
    return notes if source.config.quantization is None else [*notes, verify_weights(source, folder)]


def _require_runs_in_transformers(source: HuggingFaceModel):
    """Raise a ``Refusal`` unless transformers can compute the logits of ``source`` on this machine."""
    why = {
        f", which has no model for the {source.layout.label}": source.config.language_model is None,
        " on a Hugging Face folder, and this is GGUF": isinstance(source.folder, MemoryFolder),
        ", which rounds activations to eight bits where it reads quantised weights": source.layout.holds_scales,
        ", which computes in fewer bits with weights that are stored quantised": source.layout.dequantized,
        ", which has logits for the whole vocabulary": source.config.reduced,
        ", which would unpickle in this process": source.is_pickled,
    }
    for reason in (reason for reason, holds in why.items() if holds):
        raise Refusal(
            f"{source.folder.given}: --verify logits compares with transformers{reason}; ask for shapes"
            f"{', or use a safetensors copy' * source.is_pickled}"
        )
    require_packages("--verify logits")


def _dtype_notes(source: HuggingFaceModel, asked: str | None, chosen: str) -> list[str]:
    """Notes on the dtype of the params: that they are rounded, or wider than on disk.

    Args:
      source: the open folder.
      asked: the dtype that the user asked for, None for no choice.
      chosen: the dtype of the params.
    """
    rest = "weights" if source.config.quantization is None else "weights that are not quantised"
    if asked is None and source.layout.dequantized and source.config.quantization is None:
        return [f"dequantised {rest} are rounded to bfloat16; --dtype float32 keeps them exactly, in twice the bytes"]
    if asked is None and source.has_float16:
        return [f"float16 {rest} are kept exactly, as float32; --dtype bfloat16 halves their size and rounds them"]
    if chosen == "bfloat16" != source.exact_dtype:
        return [f"{rest} are rounded to bfloat16"]
    return []


def _peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux
