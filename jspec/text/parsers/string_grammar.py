"""Strings of a JSON schema that stand in a grammar without quotes and escapes."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jspec.text.grammar.schema import FORMATS
from jspec.text.parsers.branches import UnheldError
from jspec.text.parsers.call_grammar import ANY_TEXT

_MONTHS = r"((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_LEAP = r"([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29"
_DATE = rf"([1-9][0-9]{{3}}-{_MONTHS}|{_LEAP})"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.([0-9]{3}|[0-9]{6}))?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HEX = "[0-9a-f]"
_LABEL = "[a-zA-Z0-9]([-a-zA-Z0-9]{0,61}[a-zA-Z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
PATTERNS = {  # of formats
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,9}W|([0-9]{1,9}D(T[0-9]{1,9}(H|M|S))?|T([0-9]{1,9}H)?([0-9]{1,9}M)?[0-9]{1,9}S))",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "email": rf"[-a-zA-Z0-9_+]{{1,32}}(\.[-a-zA-Z0-9_+]{{1,32}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|({_HEX}{{1,4}}:){{1,6}}:{_HEX}{{1,4}}|::({_HEX}{{1,4}})?",
    "uri": r"[a-z][-a-z0-9+.]{0,31}:\/\/[-a-zA-Z0-9._~:\/?&=%@!$*+,;]{1,}",
}

CLASSES = {  # as JSON Schema has them; for llguidance they are Unicode's
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
}


def string_expression(branch: Mapping[str, Any]) -> str:
    """An expression for a terminal: the strings of a branch whose type is ``string``.

    Raises:
      UnheldError: there is no pattern for their format.
    """
    least, most = branch.get("minLength", 0), branch.get("maxLength", "")
    parts = [rf"/(.|\n){{{least},{most}}}/"] if least or most != "" else []
    if "pattern" in branch:
        parts.append(f"/{searched(branch['pattern'])}/")
    if (form := branch.get("format")) in FORMATS:
        if form not in PATTERNS:
            raise UnheldError(form)
        parts.append(f"/({PATTERNS[form]})/")
    return " & ".join(parts) or f"/{ANY_TEXT}/"


def searched(pattern: str) -> str:
    """A regular expression for the texts in which a schema's pattern is found somewhere, as Lark writes it."""
    parts = []
    for part in _alternatives(pattern):
        begun, ended = part.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", part) is not None
        inner = part[begun : len(part) - ended]
        parts.append(f"{'' if begun else ANY_TEXT}({inner}){'' if ended else ANY_TEXT}")
    text = re.sub(r"(\\.)|/", lambda match: CLASSES.get(match[0], match[1] or r"\/"), "|".join(parts), flags=re.DOTALL)
    return f"({text})".replace("\n", r"\n")


def _alternatives(pattern: str) -> Iterator[str]:
    """The parts between the ``|`` that stand in no brackets."""
    begin = depth = 0
    for found in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", pattern, re.DOTALL):
        depth += (found[0] == "(") - (found[0] == ")")
        if found[0] == "|" and depth == 0:
            yield pattern[begin : found.start()]
            begin = found.end()
    yield pattern[begin:]
