"""``/tokenize`` and ``/detokenize``: from a text or a chat to tokens, and back to text; ``/tokenizer_info``."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jspec.serving.generation.chat_prompt import prompt_of
from jspec.serving.generation.json_body import read_object
from jspec.serving.generation.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, parsed
from jspec.serving.generation.service import Service
from jspec.serving.http.errors import ApiError
from jspec.text.prompts import checked_ids


async def tokenize(service: Service, http: HttpRequest) -> Response:
    """The tokens of ``prompt``, or those that the chat template makes of ``messages``."""
    body = await read_object(service, http)
    request: Any = parsed(TokenizeChatRequest if "messages" in body else TokenizeRequest, body, service.most_entries)
    service.require_model(request.model)

    def tokens_and_count() -> dict[str, Any]:
        if isinstance(request, TokenizeChatRequest):
            tokens = prompt_of(service, request)
        else:
            tokens = service.encoded(request.prompt, "prompt", request.add_special_tokens is not False)
        texts = [service.decoded([token]) for token in tokens] if request.return_token_strs else None
        return {"count": len(tokens), "max_model_len": service.max_len, "tokens": tokens, "token_strs": texts}

    return JSONResponse(await service.prepare(tokens_and_count))


async def detokenize(service: Service, http: HttpRequest) -> Response:
    """The text of ``tokens``, with special tokens."""
    request = parsed(DetokenizeRequest, await read_object(service, http), service.most_entries)
    service.require_model(request.model)
    if service.llm.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer", "tokens")
    try:
        tokens = checked_ids(request.tokens, service.llm.target.config.vocab_size, "tokens")
    except ValueError as error:
        raise ApiError(400, str(error), "tokens") from None
    return JSONResponse({"prompt": await service.prepare(lambda: service.decoded(tokens))})


async def tokenizer_info(service: Service, _: HttpRequest) -> Response:
    """What clients have to know that tokenise by themselves: class, special tokens, chat template and longest text.

    Nothing names a file of this machine.
    """
    tokenizer: Any = service.llm.tokenizer
    if tokenizer is None:
        raise ApiError(404, "the model has no tokenizer")
    special = {f"{name}_token": getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad", "unk")}
    added = {str(id): str(getattr(token, "content", token)) for id, token in tokenizer.added_tokens_decoder.items()}
    template = service.chat_template or getattr(tokenizer, "chat_template", None)
    info = {"tokenizer_class": type(tokenizer).__name__, "model_max_length": service.max_len, **special}
    return JSONResponse({**info, "added_tokens": added, "vocab_size": len(tokenizer), "chat_template": template})
