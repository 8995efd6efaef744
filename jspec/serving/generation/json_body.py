"""Parses the JSON body of a request, within limits and more strictly than Python's parser."""

import functools
import json
import math
from typing import Any

import numpy as np
from starlette.requests import Request

from jspec._validation import is_text
from jspec.serving.generation.service import Service
from jspec.serving.http.errors import ApiError, shown, wrong
from jspec.serving.http.limits import Limits

BIG = 2**15  # bytes; a larger body is parsed in another thread, so that it does not block the event loop
LARGEST = 2**64  # bound of integers; no field takes larger ones


async def read_object(service: Service, request: Request) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
      ApiError: 408, 413, 415 or 429, or 400 with what is wrong.
      ClientDisconnect: the client disconnected before the body had arrived.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which no web page can send without being allowed to
        raise ApiError(415, f"Content-Type is {shown(kind)}: expected application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, f"Content-Encoding is {shown(coding)}: expected a body that is not compressed")
    limits = service.limits
    async with service.bodies.read(request) as body:
        if len(body) > BIG:
            return await service.prepare(functools.partial(parse_object, body, limits))
        return parse_object(body, limits)


def parse_object(body: bytes, limits: Limits) -> dict[str, Any]:
    """The JSON object in a UTF-8 body.

    Raises:
      ApiError: it is not a JSON object, or has too many values, NaN, Infinity, a name twice in one object, half of a
        surrogate pair, a number too large for a float, or too deep nesting.
    """
    if body.count(b",") >= limits.max_json_values and _separators(body) >= limits.max_json_values:
        raise ApiError(
            400,
            f"the body has too many entries of lists and objects: expected at most {limits.max_json_values} "
            "(--max-json-values)",
        )
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_float
        )
    except ApiError:
        raise
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, f"the body is nested too deeply: expected at most {limits.max_json_depth} levels") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {shown(value)}: expected a JSON object")
    for name, field in value.items():
        _check(name, name, limits)
        _check(name, field, limits)
    return value


def _separators(body: bytes) -> int:
    """How many commas of a body are in no string, and so separate values; without the memory that values would take."""
    letters = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    in_string = np.bitwise_xor.accumulate(letters == ord('"'))
    return int(np.count_nonzero((letters == ord(",")) & ~in_string))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ApiError(400, f"{shown(name)} is given twice in one object", param=name if is_text(name) else None)
    return value


def _refuse_constant(name: str):
    raise ApiError(400, f"the body has {name}, which is no JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ApiError(400, f"the body has the number {shown(text)}: expected at most 1.8e308")
    return value


def _check(field: str, value: Any, limits: Limits):
    """Check depth, integers and strings of everything in the value of a field."""
    param = field if is_text(field) else None
    level, depth = [value], 1
    while level:
        if depth > limits.max_json_depth:
            message = f"{shown(field)} is nested too deeply: expected at most {limits.max_json_depth} levels"
            raise ApiError(400, message, param)
        inner: list[Any] = []
        for item in level:
            if type(item) is int:
                if not -LARGEST < item < LARGEST:
                    raise wrong(field, item, "integers of at most 64 bits")
            elif type(item) is str:
                if not is_text(item):
                    raise ApiError(400, f"{shown(field)} has half of a surrogate pair, which is no character", param)
            elif type(item) is list:
                inner += item
            elif type(item) is dict:
                inner += item
                inner += item.values()
        level, depth = inner, depth + 1
