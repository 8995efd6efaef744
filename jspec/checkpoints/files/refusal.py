"""The exceptions that reading and converting checkpoints raises."""


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
