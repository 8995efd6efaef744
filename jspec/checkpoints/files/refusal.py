"""The exceptions that reading and converting checkpoints raises."""


class Refusal(ValueError):
    """jspec does not read or write this checkpoint; the message is one sentence with the file and the reason."""


class Mismatch(ValueError):
    """A converted checkpoint failed its verification; the message is one sentence with the numbers."""
