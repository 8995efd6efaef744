"""The exceptions that reading and converting checkpoints raises."""

from collections.abc import Iterable


class Refusal(ValueError):
    """jspec does not read or write this checkpoint; the message is one sentence with the file and the reason.

    Example::

        try:
            llm = jspec.load("path/to/checkpoint")
        except Refusal as refusal:
            print(refusal)  # names the file, what it has, and what was expected
    """


class Mismatch(ValueError):
    """A converted checkpoint failed its verification; the message is one sentence with the numbers.

    Example::

        from convert import convert

        try:
            convert("path/to/hf", "path/to/converted", verify="logits")
        except Mismatch as mismatch:
            print(mismatch)  # the logits of the written checkpoint are not those of transformers
    """


def refuse_gguf(paths: Iterable[str]):
    """Raise a ``Refusal`` if one of ``paths`` is that of a GGUF file; for places that lack what jspec reads."""
    gguf = next((path for path in paths if path.lower().endswith(".gguf")), None)
    if gguf is not None:
        raise Refusal(
            f"{gguf}: GGUF files, which are llama.cpp's, are not read; give the folder of the original checkpoint, with "
            "config.json and safetensors, and use jspec-convert --quantize int8 or fp8 for weights of eight bits"
        )
