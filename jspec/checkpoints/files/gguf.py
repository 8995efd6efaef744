"""Refuses GGUF files, the format of llama.cpp, by their name."""

from collections.abc import Iterable

from jspec.checkpoints.files.refusal import Refusal


def refuse_gguf(paths: Iterable[str]):
    """Raise a ``Refusal`` if one of ``paths`` is that of a GGUF file; for places that lack what jspec reads."""
    gguf = next((path for path in paths if path.lower().endswith(".gguf")), None)
    if gguf is not None:
        raise Refusal(
            f"{gguf}: GGUF files, which are llama.cpp's, are not read; give the folder of the original checkpoint, with "
            "config.json and safetensors, and use jspec-convert --quantize int8 or fp8 for weights of eight bits"
        )
