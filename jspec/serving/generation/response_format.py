"""Structured outputs of a request, from its fields ``response_format`` and ``structured_outputs``."""

import json
from typing import Any

from jspec.sampling.structured import StructuredOutputsParams
from jspec.serving.generation.protocol import GenerationRequest
from jspec.serving.http.errors import ApiError, require_that, wrong
from jspec.serving.http.limits import Limits


def structured_outputs_of(request: GenerationRequest, limits: Limits) -> StructuredOutputsParams | None:
    """The structured outputs of a request; None if it has none.

    Raises:
      ApiError: 400; both fields are given, or one of them cannot be used.
    """
    by_name = {"response_format": request.response_format, "structured_outputs": request.structured_outputs}
    for name, value in by_name.items():
        size = 0 if value is None else len(json.dumps(value))
        if size > limits.max_grammar_bytes:
            most = f"expected at most {limits.max_grammar_bytes} (--max-grammar-bytes)"
            raise ApiError(400, f"{name} has {size} characters: {most}", name)
    wanted = _of_response_format(request.response_format)
    if request.structured_outputs:
        require_that(not wanted, "response_format", request.response_format, "nothing beside structured_outputs")
        wanted = request.structured_outputs
    if not wanted:
        return None
    try:
        return StructuredOutputsParams.of({name: value for name, value in wanted.items() if value is not None})
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), form_field(request)) from None


def form_field(request: GenerationRequest) -> str:
    """The field of a request that the form of its text comes from."""
    if request.structured_outputs:
        return "structured_outputs"
    is_free = request.response_format in (None, {"type": "text"})
    return "tools" if is_free and getattr(request, "tools", None) else "response_format"


def _of_response_format(given: dict[str, Any] | None) -> dict[str, Any]:
    """OpenAI's field as fields of ``StructuredOutputsParams``."""
    if given is None or given == {"type": "text"}:
        return {}
    if given == {"type": "json_object"}:
        return {"json_object": True}
    described = given.get("json_schema")
    if given.get("type") == "json_schema" and isinstance(described, dict) and isinstance(described.get("schema"), dict):
        return {"json": described["schema"]}
    kinds = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {..}}}'
    raise wrong("response_format", given, kinds)
