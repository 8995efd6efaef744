"""The form of a completion: a JSON schema, a regular expression, a choice or a grammar."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec._validation import is_one_of, require

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that a completion has, exactly one of the first five. Names and meaning are vLLM's.

    Every completion that ends by itself has this form; one that ``max_tokens`` or a stop string cuts off is the beginning of
    such a text. Tokens that cannot go on like that are taken out of every distribution, as ``allowed_token_ids`` takes
    tokens out; the completion may end where the text is complete, and has to where nothing can follow. Where only one text
    can follow, its tokens are those into which the tokenizer splits it.

    Args:
      json: a JSON schema, as a dictionary, as text, or as a pydantic model.
      regex: a regular expression (of Rust's ``regex``) that the whole completion matches.
      choice: texts, one of which the completion is.
      grammar: a context-free grammar in the Lark format of llguidance, with the rule ``start``.
      json_object: True is any JSON object.
      disable_any_whitespace: whether JSON has no blanks but those inside of strings.
      whitespace_pattern: a regular expression for the blanks between two parts of JSON. None is at most a line break and its
        indentation, or two spaces; ``[ \\t\\r\\n]*`` is any number, which is vLLM's default.
      disable_additional_properties: whether objects of a JSON schema have no other properties than it names, where it has
        ``properties`` and says nothing about others. True is the meaning of OpenAI's strict mode; vLLM's default is False.
      preamble: a grammar, as ``grammar`` is, of text that comes before the form: of reasoning, for example.
      alternative: a grammar of text that may come in place of the form, behind the preamble: of tool calls, for example.

    Raises:
      ValueError: none of the five is given, or several, or a value cannot be used.

    Example::

        form = jspec.StructuredOutputsParams(choice=["yes", "no"])
        params = jspec.SamplingParams(structured_outputs=form)
    """

    json: str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = True
    preamble: str | None = None
    alternative: str | None = None

    def __post_init__(self):
        given = [name for name in KINDS if not is_one_of(getattr(self, name), (None, False))]
        names = f"exactly one of {', '.join(KINDS)}"
        require(len(given) == 1, "structured_outputs", given or None, names)
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        for name in ("regex", "grammar", "whitespace_pattern", "preamble", "alternative"):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, str) and value != "")
            require(ok, name, value, "a string that is not empty")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        if self.choice is not None:
            choice = self.choice
            ok = isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) > 0
            require(ok, "choice", choice, "a list of at least one string")
            for text in choice:
                require(isinstance(text, str) and text != "", "choice", text, "strings that are not empty")
            object.__setattr__(self, "choice", tuple(choice))
        blanks = self.disable_any_whitespace or self.whitespace_pattern is not None
        is_json = self.json is not None or self.json_object
        require(is_json or not blanks, "whitespace_pattern", given[0], "json or json_object beside it")

    @staticmethod
    def of(value: Any) -> "StructuredOutputsParams | None":
        """These parameters themselves, those that a mapping gives by name, or None.

        Raises:
          ValueError: it is something else, or has an unknown name.
        """
        if value is None or isinstance(value, StructuredOutputsParams):
            return value
        expected = "StructuredOutputsParams, or a dictionary of its fields"
        require(isinstance(value, Mapping), "structured_outputs", value, expected)
        known = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
        for name in value:
            require(name in known, "structured_outputs", name, f"fields among {', '.join(known)}")
        return StructuredOutputsParams(**value)


def _schema(given: Any) -> str:
    """A JSON schema as text."""
    expected = "a JSON schema: a dictionary, its text, or a pydantic model"
    if hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            require(False, "json", given[:80], f"{expected}; {error}")
    require(isinstance(given, Mapping | bool), "json", given, expected)
    try:
        return json.dumps(given)
    except (TypeError, ValueError, RecursionError) as error:
        require(False, "json", str(given)[:80], f"{expected}; {error}")
        raise
