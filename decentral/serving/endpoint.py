"""The HTTP endpoint `/v1`: completions, chat and the list of models, in the form of OpenAI's API.

    GET  /v1/models
    POST /v1/completions
    POST /v1/chat/completions      with "stream": true, both POST routes answer with server-sent events

    request -> bounded body -> checked fields -> a free slot (`Turns`) -> tokens from the generation thread -> answer

Start reading at `api`. There is no password: anybody who can connect to the port may send requests. A web page of
another site is refused: the browser names that site in the header `Origin`, and a plain HTML form cannot send JSON.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from decentral.comm.net.fair_shares import FairShare
from decentral.commands import shared
from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.ip_networks import CALLER, network_of
from decentral.core.strict_json import JsonObject
from decentral.data.text_codec import TokenizerCodec
from decentral.engine import measure
from decentral.serving import decoding
from decentral.serving.completion import Completion
from decentral.serving.loaded_model import SEED_BITS, LoadedModel
from decentral.serving.openai_requests import (
    MOST_BODY_BYTES,
    ApiError,
    Asked,
    ChatRequest,
    CompletionRequest,
    TextRequest,
    parsed,
)
from decentral.serving.replies import ApiReply, ChatReply, CompletionReply
from decentral.serving.served_model import ServedModel

BODY_S = 20.0
ANSWER_S = 600.0  # an answer that takes longer is cut off, with finish reason "length"
LOOK_AFTER_TOKENS = 8  # after this many tokens of an answer that is not streamed, check if the client is connected

Begin = Callable[[LoadedModel], Completion]
"""Prepares the answer to one request, which the given model will generate."""
ANSWERED_AT_ONCE = 4  # more requests wait, since each answer takes memory for a key-value cache
MOST_WAITING_REQUESTS = 16

T = TypeVar("T")


class Turns:
    """Limits the requests that are answered at the same time, and owns the thread that generates their text.

    The thread generates a token for each of them in turn, so that a short answer does not wait for a long answer. If
    too many requests wait, a new request is refused with status 429, and its client may try again. `FairShare` divides
    both numbers between the networks of the clients, so that no client takes all.
    """

    def __init__(self, at_once: int = ANSWERED_AT_ONCE, waiting: int = MOST_WAITING_REQUESTS) -> None:
        """Allow `at_once` requests to be answered at the same time, and `waiting` more requests to wait."""
        self._present, self._answered = FairShare(at_once + waiting), FairShare(at_once)
        self._freed = asyncio.Condition()
        self._thread = ThreadPoolExecutor(1, "generation", initializer=decoding.use_one_thread)

    @property
    def present(self) -> int:
        """Number of requests that are being answered or wait."""
        return self._present.used

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait until fewer than `at_once` requests are being answered; this request counts until the context ends.

        Args:
            caller: The network of the client.

        Raises:
            ApiError: If too many requests, or too many of this caller, wait already (status 429).
        """
        if not self._present.take(caller):
            own = self._present.by_sender.get(caller, 0)
            said = f"the server already has {self.present} requests, {own} of them from your network; try again later"
            raise ApiError(429, said, "too_many_requests")
        try:
            async with self._freed:
                await self._freed.wait_for(lambda: self._answered.take(caller))
            try:
                yield
            finally:
                self._answered.give_back(caller)
                async with self._freed:
                    self._freed.notify_all()
        finally:
            self._present.give_back(caller)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run a function in the generation thread and return its result. Functions run one after another."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def api(served: ServedModel) -> Starlette:
    """Return the web application that answers requests to `/v1/...` with the model `served`."""
    endpoint = Endpoint(served, Turns())
    routes = [
        Route("/models", endpoint.models),
        Route("/completions", endpoint.completions, methods=["POST"]),
        Route("/chat/completions", endpoint.chat, methods=["POST"]),
    ]
    handlers: Any = {ApiError: _refused, HTTPException: _not_here, ClientDisconnect: _gone, Exception: _our_own}
    return Starlette(routes=routes, exception_handlers=handlers)


class Endpoint:
    """The handlers of requests to `/v1/...`."""

    def __init__(self, served: ServedModel, turns: Turns) -> None:
        """Set the model that answers requests; `turns` limits how many requests are answered at the same time."""
        self.served, self.turns = served, turns
        self._parsing = asyncio.Lock()  # requests are parsed one at a time, so that a core is free for the event loop

    async def models(self, request: Request) -> Response:
        """Return the list of models: the served model, or an empty list before its weights are loaded."""
        here = self.served
        one = {"id": here.name, "object": "model", "created": here.loaded_s, "owned_by": "decentral"}
        return _json({"object": "list", "data": [one] if here.model is not None else []})

    async def completions(self, request: Request) -> Response:
        """Return the continuation of a prompt, whole or as a stream. Raises ApiError if the request is refused."""
        asked = await self._parsed(CompletionRequest, request)

        def begin(model: LoadedModel) -> Completion:
            tokens = asked.prompt_tokens if asked.text is None else model.codec.encode(asked.text)
            return self._begin(model, tokens, asked)

        return await self._answer(request, asked, begin, CompletionReply)

    async def chat(self, request: Request) -> Response:
        """Return the next turn of a conversation, whole or as a stream. Raises ApiError if the request is refused."""
        asked = await self._parsed(ChatRequest, request)
        template = self.served.template
        if template is None:
            raise ApiError(400, "this model has no chat template; send a prompt to /v1/completions", "no_chat_template")

        def begin(model: LoadedModel) -> Completion:
            codec = model.codec  # the chat template has already written the special tokens
            codec = replace(codec, special=False) if isinstance(codec, TokenizerCodec) else codec
            return self._begin(model, codec.encode(template.render(asked.messages)), asked)

        return await self._answer(request, asked, begin, ChatReply)

    async def _parsed(self, kind: type[Asked], request: Request) -> Asked:
        body = await _body(request)
        async with self._parsing:
            return await asyncio.to_thread(parsed, kind, body)

    def _begin(self, model: LoadedModel, prompt: list[int], asked: TextRequest) -> Completion:
        """Return a completion of these tokens. Raises ApiError if the prompt is not valid or memory is too small."""
        sampling = asked.sampling(secrets.randbits(SEED_BITS), model.codec.size)
        device = self.served.device
        try:
            room = measure.memory_bytes(device.device)
            most = max(1, len(prompt)), sampling.tokens
            decoding.check_memory(model.config, most[0], most[1], room, device.dtype, ANSWERED_AT_ONCE)
        except UserError as error:
            raise ApiError(400, shared.one_line(error), "out_of_memory", "max_tokens") from None
        return Completion(model, prompt, sampling, asked.stops, device)

    async def _answer(self, request: Request, asked: TextRequest, begin: Begin, kind: type[ApiReply]) -> Response:
        """Wait for a free slot and return the answer, whole or as a stream.

        Raises:
            ApiError: If the request is refused, or generation fails before a stream has begun.
        """
        model = self.served.of_name(asked.model)
        async with AsyncExitStack() as stack:
            caller = network_of(request.client.host if request.client else "", CALLER)
            await stack.enter_async_context(self.turns.turn(caller))
            if await request.is_disconnected():
                raise ClientDisconnect
            try:
                completion: Completion = await self.turns.in_thread(lambda: begin(model))
            except UserError as error:  # the tokenizer cannot encode the prompt
                raise ApiError(400, shared.one_line(error), "invalid_value", "prompt") from None
            answer = _Answer(completion, kind(self.served.name, model.source), self.turns)
            if not asked.stream:
                return Response(await answer.whole(request), media_type="application/json")
            return _Streamed(answer.chunks(asked.with_usage), stack.pop_all())
        raise AssertionError("expected the block above to return or raise; it did not")


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that is being sent: the generated text, and the writer of the client's JSON."""

    completion: Completion
    reply: ApiReply
    turns: Turns

    async def whole(self, request: Request) -> str:
        """Return the answer's JSON. Raises ApiError if the model fails, ClientDisconnect if the client has gone."""
        text = ""
        async for part in self._parts():
            text += part
            if self.completion.generated % LOOK_AFTER_TOKENS == 0 and await request.is_disconnected():
                raise ClientDisconnect
        return self.reply.whole(text, self.completion.finish or "length", self._usage())

    async def chunks(self, with_usage: bool) -> AsyncGenerator[str]:
        """Yield the server-sent events of the answer. If the model fails, the last event contains the error."""
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
        """Yield the answer's text piece by piece; end the text after ANSWER_S. Raises ApiError if the model fails."""
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
    """A response of server-sent events. It frees the request's slot when it ends or the client stops reading."""

    def __init__(self, chunks: AsyncGenerator[str], turn: AsyncExitStack) -> None:
        super().__init__(chunks, media_type="text/event-stream")
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._turn:
            await super().__call__(scope, receive, send)


async def _body(request: Request) -> bytes:
    """Return the bytes of a request's body.

    Raises:
        ApiError: If another site's page sent the request, it is not declared as JSON, or its body is too long or slow.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and origin.partition("://")[2] != host:
        raise ApiError(403, "a web page of another site may not send requests to this API", "foreign_origin")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send JSON, with content-type application/json", "not_json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY_BYTES:
                    raise ApiError(413, f"a request may have at most {MOST_BODY_BYTES} bytes", "request_too_large")
    except TimeoutError:
        raise ApiError(408, f"the request's body took longer than {BODY_S:.0f} s", "request_too_slow") from None
    return bytes(body)


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
    """Return an empty response for a client that has disconnected."""
    return Response(status_code=499)


async def _our_own(request: Request, error: Exception) -> Response:
    return _json(ApiError(500, "this server failed; its log has the error").body(), 500)
