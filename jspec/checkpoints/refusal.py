"""The exceptions of this package."""


class Refusal(ValueError):
    """A checkpoint that jspec will not read or write; the message is one sentence with the file and the reason."""


class Mismatch(ValueError):
    """A conversion that did not pass its verification; the message is one sentence with the numbers."""
