"""``/tokenize`` and ``/detokenize``: what a text or a chat is in tokens, and what tokens are as text."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jspec.serving.openai.chat import prompt_of
from jspec.serving.openai.errors import ApiError
from jspec.serving.openai.json_body import read_object
from jspec.serving.openai.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, parsed
from jspec.serving.openai.service import Service
from jspec.text.prompts import checked_ids


async def tokenize(service: Service, http: HttpRequest) -> Response:
    """The tokens of ``prompt``, or of what the chat template makes of ``messages``."""
    body = await read_object(service, http)
    asked: Any = parsed(TokenizeChatRequest if "messages" in body else TokenizeRequest, body, service.most_entries)
    service.require_model(asked.model)

    def told() -> dict[str, Any]:
        if isinstance(asked, TokenizeChatRequest):
            found = prompt_of(service, asked)
        else:
            found = service.encoded(asked.prompt, "prompt", asked.add_special_tokens is not False)
        texts = [service.decoded([token]) for token in found] if asked.return_token_strs else None
        return {"count": len(found), "max_model_len": service.max_len, "tokens": found, "token_strs": texts}

    return JSONResponse(await service.prepare(told))


async def detokenize(service: Service, http: HttpRequest) -> Response:
    """The text of ``tokens``, special tokens included."""
    asked = parsed(DetokenizeRequest, await read_object(service, http), service.most_entries)
    service.require_model(asked.model)
    if service.llm.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer", "tokens")
    try:
        tokens = checked_ids(asked.tokens, service.llm.target.config.vocab_size, "tokens")
    except ValueError as error:
        raise ApiError(400, str(error), "tokens") from None
    return JSONResponse({"prompt": await service.prepare(lambda: service.decoded(tokens))})
