"""The endpoint `/v1`: completions, chat and models, as programs that speak OpenAI's API expect them.

    GET  /v1/models
    POST /v1/completions
    POST /v1/chat/completions      both also with "stream": true, as server-sent events

    request -> its body, bounded -> its fields, bounded -> a turn -> tokens on the one thread that generates -> answer

Nobody is asked for a password, as with the page: whoever reaches the port may ask. A page of another site may not: its
browser names an origin that is not ours, and no plain form can send JSON.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from decentral.commands import shared
from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.data.text_codec import TokenizerCodec
from decentral.engine import measure
from decentral.serving import decoding
from decentral.serving.completion import Completion
from decentral.serving.loaded_model import SEED_BITS, LoadedModel
from decentral.serving.openai_requests import (
    MOST_BODY_BYTES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    TextRequest,
    parsed,
)
from decentral.serving.replies import ApiReply, ChatReply, CompletionReply
from decentral.serving.served_model import ServedModel
from decentral.serving.turns import ANSWERED_AT_ONCE, Turns

BODY_S = 20.0  # in which a request's body has to be here
ANSWER_S = 600.0  # after which an answer ends where it is
UNREAD_S = 60.0  # that a program may leave an answer unread which has ended
LOOK_AFTER_TOKENS = 8  # whether a program still waits for a whole answer

Begin = Callable[[LoadedModel], Completion]
"""Begins the answer to one request."""


def api(served: ServedModel) -> Starlette:
    """The application that answers below `/v1`."""
    endpoint = Endpoint(served, Turns())
    routes = [
        Route("/models", endpoint.models),
        Route("/completions", endpoint.completions, methods=["POST"]),
        Route("/chat/completions", endpoint.chat, methods=["POST"]),
    ]
    handlers: Any = {ApiError: _refused, HTTPException: _not_here, ClientDisconnect: _gone, Exception: _our_own}
    return Starlette(routes=routes, exception_handlers=handlers)


class Endpoint:
    def __init__(self, served: ServedModel, turns: Turns) -> None:
        self.served, self.turns = served, turns

    async def models(self, request: Request) -> Response:
        here = self.served
        one = {"id": here.name, "object": "model", "created": here.loaded_s, "owned_by": "decentral"}
        return _json({"object": "list", "data": [one] if here.model is not None else []})

    async def completions(self, request: Request) -> Response:
        asked = parsed(CompletionRequest, await _body(request))

        def begin(model: LoadedModel) -> Completion:
            tokens = asked.prompt_tokens if asked.text is None else model.codec.encode(asked.text)
            return self._begin(model, tokens, asked)

        return await self._answer(request, asked, begin, CompletionReply)

    async def chat(self, request: Request) -> Response:
        asked = parsed(ChatRequest, await _body(request))
        template = self.served.template
        if template is None:
            raise ApiError(400, "this model has no chat template; ask /v1/completions", "no_chat_template")

        def begin(model: LoadedModel) -> Completion:
            codec = model.codec  # the template has written all special tokens already
            codec = replace(codec, special=False) if isinstance(codec, TokenizerCodec) else codec
            return self._begin(model, codec.encode(template.render(asked.messages)), asked)

        return await self._answer(request, asked, begin, ChatReply)

    def _begin(self, model: LoadedModel, prompt: list[int], asked: TextRequest) -> Completion:
        """Raises ApiError if the model cannot read the prompt, or there is no memory for it."""
        sampling = asked.sampling(secrets.randbits(SEED_BITS), model.codec.size)
        device = self.served.device
        try:
            room = measure.memory_bytes(device.device)
            decoding.check_memory(model.config, max(1, len(prompt)), sampling.tokens, room, ANSWERED_AT_ONCE)
        except UserError as error:
            raise ApiError(400, shared.one_line(error), "out_of_memory", "max_tokens") from None
        return Completion(model, prompt, sampling, asked.stops, device)

    async def _answer(self, request: Request, asked: TextRequest, begin: Begin, kind: type[ApiReply]) -> Response:
        """Raises ApiError, as long as nothing of the answer was sent."""
        model = self.served.of_name(asked.model)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.turns.turn())
            if await request.is_disconnected():
                raise ClientDisconnect
            completion: Completion = await self.turns.in_thread(lambda: begin(model))
            answer = _Answer(completion, kind(self.served.name, model.source), self.turns)
            if not asked.stream:
                return Response(await answer.whole(request), media_type="application/json")
            return _Streamed(answer.chunks(asked.with_usage), stack.pop_all())
        raise AssertionError("the block returns or raises")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A completion on its way to a program."""

    completion: Completion
    reply: ApiReply
    turns: Turns

    async def whole(self, request: Request) -> str:
        """Raises ApiError where the model fails, and ClientDisconnect where nobody waits any more."""
        text = ""
        async for part in self._parts():
            text += part
            if self.completion.generated % LOOK_AFTER_TOKENS == 0 and await request.is_disconnected():
                raise ClientDisconnect
        return self.reply.whole(text, self.completion.finish or "length", self._usage())

    async def chunks(self, with_usage: bool) -> AsyncGenerator[str]:
        """Server-sent events. What fails after the first one is an event, too."""
        if opening := self.reply.opening():
            yield _event(opening)
        try:
            async for part in self._parts():
                if part:
                    yield _event(self.reply.part(part))
        except ApiError as error:
            yield _event(strict_json.dumps(error.body()))
            return
        yield _event(self.reply.part("", self.completion.finish))
        if with_usage:
            yield _event(self.reply.usage_part(self._usage()))
        yield _event("[DONE]")

    async def _parts(self) -> AsyncGenerator[str]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ANSWER_S
        try:
            while self.completion.finish is None:
                late = loop.time() > deadline
                yield self.completion.cut("length") if late else await self.turns.in_thread(self.completion.step)
        except UserError as error:
            raise ApiError(500, shared.one_line(error), "model_failed") from None

    def _usage(self) -> dict[str, int]:
        read, written = self.completion.prompt_tokens, self.completion.generated
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class _Streamed(StreamingResponse):
    """Server-sent events. The turn ends with them, or when nobody reads them."""

    def __init__(self, chunks: AsyncGenerator[str], turn: AsyncExitStack) -> None:
        super().__init__(chunks, media_type="text/event-stream")
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._turn, asyncio.timeout(ANSWER_S + UNREAD_S):
            await super().__call__(scope, receive, send)


async def _body(request: Request) -> bytes:
    """The request's JSON. Raises ApiError if another site's page asks, or it is too long or too slow."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and urlsplit(origin).netloc != host:
        raise ApiError(403, "pages of other sites may not ask here", "foreign_origin")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send JSON, with content-type application/json", "not_json")
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY_BYTES:
                    raise ApiError(413, f"a request has at most {MOST_BODY_BYTES} bytes", "request_too_large")
    except TimeoutError:
        raise ApiError(408, f"the request was not here within {BODY_S:.0f} s", "request_too_slow") from None
    return body


def _event(data: str) -> str:
    return f"data: {data}\n\n"


def _json(content: JsonObject, status: int = 200) -> Response:
    return Response(strict_json.dumps(content), status, media_type="application/json")


async def _refused(request: Request, error: ApiError) -> Response:
    return _json(error.body(), error.status)


async def _not_here(request: Request, error: HTTPException) -> Response:
    return _json(
        ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").body(), error.status_code
    )


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=499)


async def _our_own(request: Request, error: Exception) -> Response:
    return _json(ApiError(500, "an error of this server's own; its log has it").body(), 500)
